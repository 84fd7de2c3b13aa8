"""Consoles and tables: what is written is what was said, whatever it holds and wherever it goes."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.cli.render.screen import make_console, make_table, put_json

WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


class GoneReader(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def _printed(*renderables: object, width: int = 80) -> str:
    stream = io.StringIO()
    console = make_console(stream)
    console.width = width
    for renderable in renderables:
        console.print(renderable)
    return stream.getvalue()


def test_a_reader_that_went_away_is_an_error_of_its_own() -> None:
    with pytest.raises(BrokenPipeError, match="went away"):
        make_console(GoneReader()).print("text")


@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40)
def test_a_table_never_exceeds_the_width_and_loses_nothing(rows: list[tuple[str, str]]) -> None:
    text = _printed(make_table(("", ""), rows), width=20)
    assert max(map(len, text.splitlines())) <= 20
    shown = sorted(each for each in text if not each.isspace())
    assert shown == sorted(each for row in rows for cell in row for each in cell)


def test_json_is_ascii_on_one_line() -> None:
    stream = io.StringIO()
    put_json(stream, {"name": "modèle\n\x1b", "size": 1})
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().isascii()
    assert json.loads(stream.getvalue()) == {"name": "modèle\n\x1b", "size": 1}
