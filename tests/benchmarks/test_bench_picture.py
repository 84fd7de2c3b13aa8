"""The picture of the benchmark says what its table says."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from benchmarks import programme as run
from benchmarks.groups import Results
from benchmarks.measure import Sample
from benchmarks.picture import DOCUMENT, PICTURE, picture, table_of
from benchmarks.tables import marks, replaced, section

SVG = "{http://www.w3.org/2000/svg}"


def _document(**merges: tuple[float, float, float]) -> str:
    results = Results()
    for merge, seconds in merges.items():
        for program, each in zip((run.INLINE, run.PEER, run.LIMIT), seconds, strict=True):
            results.add(merge, program, 0, Sample(each, each / 2, 1.0, 1, 1))
    return replaced(
        "{}\n{}\n".format(*marks("make bench")), section("parents of <1GB>", "make bench", results, [])
    )


def test_the_picture_of_the_documentation_is_that_of_its_table() -> None:
    drawn = picture(table_of(DOCUMENT.read_text(encoding="utf-8")))
    assert PICTURE.read_text(encoding="utf-8") == drawn, "draw it again: python tests/benchmarks/picture.py"


def test_bars_are_as_long_as_merges_took_and_their_numbers_stand_beside_them() -> None:
    root = ElementTree.fromstring(
        picture(table_of(_document(linear=(4.0, 1_000.0, 2.0), ties=(8.0, 500.0, 1.0))))
    )
    bars = [(each.get("class"), float(each.get("width", ""))) for each in root.iter(f"{SVG}rect")][3:]
    assert [name for name, _ in bars] == ["ours", "peer", "limit"] * 2
    longest = max(width for _, width in bars)
    for (_, width), seconds in zip(bars, (4.0, 1000.0, 2.0, 8.0, 500.0, 1.0), strict=True):
        assert width == pytest.approx(max(1.0, seconds / 1000 * longest), abs=0.1)
    said = [each.text for each in root.iter(f"{SVG}text")]
    assert {"4.0", "1000.0", "2.0", "8.0", "500.0", "1.0", "linear", "ties"} <= set(said)
    assert said[-1] == "make bench: parents of <1GB>"


def test_it_can_be_read_aloud_and_in_the_dark_and_asks_no_server() -> None:
    drawn = picture(table_of(_document(linear=(4.0, 9.0, 2.0))))
    root = ElementTree.fromstring(drawn)
    assert "linear: raymerge 4.0 s, mergekit" in (root.findtext(f"{SVG}desc") or "")
    assert "prefers-color-scheme: dark" in drawn
    assert drawn.count("http") == 1


def test_what_was_not_measured_with_all_programs_is_left_out() -> None:
    text = _document(linear=(4.0, 9.0, 2.0), slerp=(1.0, 2.0, 3.0)).replace(
        f"| slerp  | {run.PEER}", "| slerp  | x"
    )
    assert "slerp" not in picture(table_of(text))
