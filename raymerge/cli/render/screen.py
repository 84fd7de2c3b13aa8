"""Text for terminals and pipes: no markup, no control characters, tables that fit."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_UNLIMITED = 1 << 16


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich itself would end the process with 1 here."""
        raise BrokenPipeError("the reader of the output went away")


def make_console(stream: IO[str]) -> Console:
    """A console without markup, emoji or guessed colours: users and files supply the text."""
    return _Console(file=stream, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """The text with control characters escaped: a hostile name could steer the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def named(names: Sequence[str], count: int) -> str:
    """The first of ``count`` names, and the number of the others."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def heading(title: str, *, note: str = "") -> Text:
    return Text.assemble((printable(title), "bold"), f"  {printable(note)}" if note else "")


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Table:
    """A table without lines; columns with the indices ``numbers`` are right-aligned and never wrapped."""
    table = Table(box=None, show_header=any(titles), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(titles):
        is_number = index in numbers
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def show_table(
    console: Console, titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> None:
    console.print()
    console.print(make_table(titles, rows, numbers=numbers))


def lines_of(renderable: RenderableType) -> str:
    """Its lines as they are without a limit to their width."""
    console = Console(width=_UNLIMITED, color_system=None, markup=False, file=io.StringIO())
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def put_json(stream: IO[str], value: Mapping[str, Any] | Sequence[Any]) -> None:
    stream.write(json.dumps(value, ensure_ascii=True) + "\n")
    stream.flush()


class Output:
    def __init__(self, stream: IO[str], *, as_json: bool = False) -> None:
        self.stream, self.as_json = stream, as_json
        self.console = make_console(stream)

    def json(self, value: Mapping[str, Any] | Sequence[Any]) -> None:
        put_json(self.stream, value)


@contextlib.contextmanager
def own_stdout(*, as_json: bool = False) -> Iterator[Output]:
    """Standard output for our own lines; other prints meanwhile go to standard error."""
    ours = Output(sys.stdout, as_json=as_json)
    with contextlib.redirect_stdout(sys.stderr):
        yield ours
