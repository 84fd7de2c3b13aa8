"""Documents in YAML: readers, keys with their places, and texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raymerge.documents.fields import (
    DocumentKind,
    Fault,
    FaultError,
    attempt,
    between,
    choice_of,
    closest,
    did_you_mean,
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
from raymerge.documents.positions import (
    MAX_TEXT_BYTES,
    check_text,
    read_document,
    read_file,
    secrets_in,
    split_documents,
)
from raymerge.errors import PlanError

Reader = Callable[[object], Any]
share = choice_of("keep", "share")


@pytest.mark.parametrize(
    ("reader", "value", "result"),
    [
        *((read_number, value, number) for value, number in ((1, 1.0), (True, 1.0), (False, 0.0))),
        *((read_number, value, number) for value, number in (("1e-5", 1e-5), (" 2 ", 2.0), ("-3", -3.0))),
        *((read_fraction, value, float(value)) for value in (0, 1, "0.5")),
        *((read_integer, value, 4) for value in (4, 4.0, "4")),
        *((read_integer, value, number) for value, number in ((-1, -1), ("1e3", 1000))),
        (read_integer, 2**64 - 1, 2**64 - 1),
        (between(0, 3), 0, 0),
        (between(0, 3), 3, 3),
        (read_switch, True, True),
    ],
)
def test_what_is_read(reader: Reader, value: object, result: object) -> None:
    read = reader(value)
    assert (read, type(read)) == (result, type(result))


@pytest.mark.parametrize(
    ("reader", "value", "words"),
    [
        *((read_number, value, f"{show(value)} is") for value in ("abc", "", None, [], {}, [1])),
        *((read_number, value, "expected a number") for value in ("0x10", "1,5")),
        *((read_number, value, "not a finite number") for value in (float("nan"), "-inf", "1e999", 10**400)),
        *((read_number, value, "Write it without quotes.") for value in ("true", "False", "yes", "off")),
        *(
            (read_positive, value, f"{show(value)} is not above 0.")
            for value in (0, -0.0, -1e-9, "-3", False)
        ),
        *((read_fraction, value, f"{show(value)} is not a fraction.") for value in (-1e-9, 1.01, "2")),
        *((read_integer, value, "not a whole number") for value in (4.5, "x", True, None, [1], float("inf"))),
        (between(0, 3), 4, "4 is out of range. Write a whole number from 0 to 3."),
        *((read_switch, value, "expected true or false") for value in (1, 0, "true", None)),
        (read_text, "a\0b", "U+0000"),
        (share, "shar", "Did you mean 'share'? Write one of: keep, share."),
    ],
)
def test_what_is_refused(reader: Reader, value: object, words: str) -> None:
    with pytest.raises(FaultError) as caught:
        reader(value)
    (fault,) = caught.value.faults
    assert words in str(caught.value)
    assert fault.what.endswith(".")
    assert fault.remedy.endswith((".", "'"))


@pytest.mark.parametrize(
    ("value", "name", "text"), [(None, "empty", "null"), (True, "a yes-or-no value", "true")]
)
def test_values_are_shown_as_yaml_spells_them_and_have_plain_names(
    value: object, name: str, text: str
) -> None:
    assert (kind(value), show(value)) == (name, text)
    assert len(show("x" * 10_000)) == 60


def test_faults_of_all_items_come_together_below_their_path() -> None:
    assert read_each(read_number, [1, "2"]) == (1.0, 2.0)
    faults: list[Fault] = []
    assert attempt(lambda value: read_each(read_number, value), ["a", 1, None], ("b",), faults) is None
    assert attempt(read_number, 2, ("c",), faults) == 2.0
    assert [fault.path for fault in faults] == [("b", 0), ("b", 2)]


KEYS = ("merge_method", "models", "slices", "modules", "dtype", "out_dtype", "density", "weight")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dtpye", "dtype"),
        ("Merge-Method", "merge_method"),
        ("--out-dtype", "out_dtype"),
        ("wieght", "weight"),
        *((word, None) for word in ("", "zzz", "t", "chat")),
    ],
)
def test_a_misspelled_word_is_recognised(word: str, meant: str | None) -> None:
    assert closest(word, KEYS) == meant
    assert did_you_mean(word, iter(KEYS)) == (f"Did you mean '{meant}'?" if meant else "")


LETTER = DocumentKind(
    noun="letter", opening="dear: ...", error=PlanError, about_secrets="Letters are read by all."
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a" * (MAX_TEXT_BYTES + 1), "the letter has more than"),
        (b"a\n\xff", ":2:1: the byte 0xff is not UTF-8. Save the letter as UTF-8."),
    ],
)
def test_a_file_that_is_no_such_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "l.yml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_file(str(path), LETTER)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "l:1:1: the letter is empty. Start with 'dear: ...'."),
        ("- a", "l:1:1: a letter is a map of keys to values. Start with 'dear: ...'."),
    ],
)
def test_what_is_no_map_is_refused_in_words_of_its_kind(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_document(split_documents(text, "l", LETTER)[0], "l", LETTER)
    assert said in str(caught.value)


def test_secrets_are_found_in_text_and_values_and_not_repeated() -> None:
    secret = "hf_" + "a" * 34
    with pytest.raises(PlanError) as caught:
        check_text(f"dear: you\n# {secret}\n", "l", LETTER)
    assert str(caught.value) == "l:2:3: a token of the Hugging Face Hub stands here. Letters are read by all."
    (fault,) = secrets_in({"a": ["b", secret]}, LETTER)
    assert (fault.path, fault.remedy) == (("a", 1), "Letters are read by all.")
    assert secret not in fault.what
