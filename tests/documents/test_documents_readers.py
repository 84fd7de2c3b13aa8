"""Plain values: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    between,
    choice_of,
    kind,
    read_each,
    read_fraction,
    read_integer,
    read_number,
    read_positive,
    read_switch,
    read_text,
    show,
)


def refusal(reader: object, value: object) -> Fault:
    with pytest.raises(FaultError) as caught:
        reader(value)  # type: ignore[operator]
    (fault,) = caught.value.faults
    assert fault.what.endswith(".")
    assert fault.remedy.endswith((".", "'"))
    return fault


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (False, 0.0), ("1e-5", 1e-5), (" 2 ", 2.0), ("-3", -3.0)],
)
def test_numbers_switches_and_digits_in_a_text_are_numbers(value: object, number: float) -> None:
    read = read_number(value)
    assert read == number
    assert type(read) is float


@pytest.mark.parametrize("value", ["abc", "", None, [], {}, [1], "0x10", "1,5"])
def test_what_is_no_number_is_refused_with_its_value(value: object) -> None:
    fault = refusal(read_number, value)
    assert show(value) in fault.what
    assert "expected a number" in fault.what


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", "-inf", "1e999", 10**400])
def test_numbers_are_finite(value: object) -> None:
    assert "not a finite number" in refusal(read_number, value).what


@pytest.mark.parametrize("value", ["true", "False", "yes", "off"])
def test_a_quoted_switch_is_told_to_lose_its_quotes(value: str) -> None:
    assert refusal(read_number, value).remedy == "Write it without quotes."


@pytest.mark.parametrize("value", [0, -0.0, -1e-9, "-3", False])
def test_a_positive_number_is_above_0(value: object) -> None:
    assert read_positive("1e-9") == 1e-9
    fault = refusal(read_positive, value)
    assert fault.what == f"{show(value)} is not above 0."


@pytest.mark.parametrize("value", [-1e-9, 1.01, "2"])
def test_a_fraction_is_from_0_to_1(value: object) -> None:
    assert [read_fraction(end) for end in (0, 1, "0.5")] == [0.0, 1.0, 0.5]
    assert refusal(read_fraction, value).what == f"{show(value)} is not a fraction."


@settings(deadline=None, max_examples=100)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_being_written_as_a_text(number: float) -> None:
    assert read_number(repr(number)) == number


@pytest.mark.parametrize(("value", "number"), [(4, 4), (4.0, 4), ("4", 4), (-1, -1), ("1e3", 1000)])
def test_whole_numbers(value: object, number: int) -> None:
    read = read_integer(value)
    assert read == number
    assert type(read) is int


@pytest.mark.parametrize("value", [4.5, "x", True, None, [1], float("inf")])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    assert "not a whole number" in refusal(read_integer, value).what


def test_a_large_whole_number_keeps_every_digit() -> None:
    assert read_integer(2**64 - 1) == 2**64 - 1


@pytest.mark.parametrize(("low", "high", "value"), [(0, 3, 4), (0, 3, -1), (1, None, 0)])
def test_limits_are_told(low: int, high: int | None, value: int) -> None:
    fault = refusal(between(low, high), value)
    assert f"{value} is out of range" in fault.what
    assert str(low) in fault.remedy


def test_limits_are_included() -> None:
    assert between(0, 3)(0) == 0
    assert between(0, 3)(3) == 3
    assert between(1)(10**9) == 10**9


def test_switches() -> None:
    assert read_switch(True) is True
    assert read_switch(False) is False
    for value in (1, 0, "true", None):
        assert "expected true or false" in refusal(read_switch, value).what


def test_texts() -> None:
    assert read_text("models/a") == "models/a"
    assert read_text("") == ""
    assert refusal(read_text, 123).remedy == "Put it in quotes."
    assert "U+0000" in refusal(read_text, "a\0b").what


def test_choices() -> None:
    read = choice_of("keep", "share")
    assert read("share") == "share"
    fault = refusal(read, "shar")
    assert fault.remedy == "Did you mean 'share'? Write one of: keep, share."
    assert refusal(read, 3).remedy == "Write one of: keep, share."


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "empty"),
        (True, "a yes-or-no value"),
        (1, "a number"),
        (0.5, "a number"),
        ("x", "a text"),
        ({}, "a map"),
        ([], "a list"),
        ((), "a list"),
        (b"x", "a bytes"),
    ],
)
def test_kinds_have_plain_names(value: object, name: str) -> None:
    assert kind(value) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (False, "false"), (3, "3"), ("x", "'x'"), ([1], "[1]")],
)
def test_values_are_shown_as_yaml_spells_them(value: object, text: str) -> None:
    assert show(value) == text


def test_a_long_value_is_shown_short() -> None:
    assert len(show("x" * 10_000)) == 60
    assert show("x" * 10_000).endswith("...")


def test_read_each_raises_the_faults_of_all_items_together() -> None:
    assert read_each(read_number, [1, "2"]) == (1.0, 2.0)
    with pytest.raises(FaultError) as caught:
        read_each(read_number, ["a", 1, None])
    assert [fault.path for fault in caught.value.faults] == [(0,), (2,)]


def test_attempt_puts_faults_below_the_path() -> None:
    faults: list[Fault] = []
    assert attempt(read_number, "x", ("a", 1), faults) is None
    assert attempt(read_number, 2, ("b",), faults) == 2.0
    assert [fault.path for fault in faults] == [("a", 1)]


def test_an_error_reads_as_its_faults() -> None:
    error = FaultError([Fault((), "one.", "Mend it."), Fault((), "two.", "Mend that.")])
    assert str(error) == "one. Mend it. two. Mend that."
