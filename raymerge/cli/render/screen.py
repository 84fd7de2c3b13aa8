"""How text gets onto a terminal or into a pipe: no markup, no control characters, tables that fit."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class _Console(Console):
    """A console that leaves it to the caller what a reader that went away means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: rich itself would end the process with 1 here."""
        raise BrokenPipeError("the reader of the output went away")


def make_console(stream: IO[str]) -> Console:
    """A console that shows what users and files say as it is: no markup, no emoji, no guessed colours."""
    return _Console(file=stream, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """The text with control characters spelled out: a hostile file's names could steer the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def counted(number: int, word: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def named(names: Sequence[str], count: int) -> str:
    """The first of ``count`` names, and how many more there are."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def heading(title: str, *, note: str = "") -> Text:
    """A line above a section."""
    return Text.assemble((printable(title), "bold"), f"  {printable(note)}" if note else "")


def make_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Table:
    """A table without lines.

    Args:
        numbers: indices of the columns that are aligned on the right and never broken.
    """
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
    """Print a table below an empty line."""
    console.print()
    console.print(make_table(titles, rows, numbers=numbers))


def put_json(stream: IO[str], value: Mapping[str, Any]) -> None:
    """One line of JSON, at once."""
    stream.write(json.dumps(value, ensure_ascii=True) + "\n")
    stream.flush()


@contextlib.contextmanager
def own_stdout() -> Iterator[IO[str]]:
    """Standard output for our own lines alone; what libraries print meanwhile goes to standard error."""
    ours = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield ours
