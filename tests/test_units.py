"""Sizes and durations, as people write and read them."""

from __future__ import annotations

import pytest

from raymerge.units import format_duration, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("17B", 17), ("5GB", 5 * 10**9), ("4GiB", 4 << 30), ("1.5MiB", 3 << 19), (1 << 20, 1 << 20)],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "4 GigaByte", "4GiB extra", "1e9", "0x10", -5, True, "9" * 400 + ".5GB", "9" * 30],
)
def test_what_is_no_size_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (688_574_839_360, "688.57 GB"),
        (2 * 10**15, "2000.00 TB"),
    ],
)
def test_sizes_are_written_in_decimal_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.34, "0.3 s"), (9.94, "9.9 s"), (61, "1:01"), (3599.6, "1:00:00"), (3725, "1:02:05")],
)
def test_durations_are_written_as_clocks_show_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
