"""Draw docs/images/run.svg, what a terminal shows of a merge; run in the root of the repository.

It needs ``pip install -e '.[docs]'``.
"""

from __future__ import annotations

import itertools
import os
import pty
import re
import shutil
import sys
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 112, 60
OUTPUT = "quickstart-out"
COMMAND = ("raymerge", "submit", "configs/quickstart/recipe.yml", "-o", OUTPUT, "--workers", "2", "--replace")
PICTURE = Path(__file__).with_name("run.svg")


def screen_of(command: tuple[str, ...]) -> pyte.Screen:
    """The terminal after a command has run in it."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
        program = str(Path(sys.executable).with_name(command[0]))
        os.execve(program, [program, *command[1:]], os.environ | size)
    try:
        while piece := os.read(terminal, 1 << 16):
            stream.feed(piece)
    except OSError:
        pass  # The terminal is closed with the command.
    os.waitpid(child, 0)
    return screen


def text_of(screen: pyte.Screen) -> Text:
    """Its lines, with their colours, but for empty ones at the end."""
    lines = [_line(screen, number) for number in range(LINES)]
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def _line(screen: pyte.Screen, number: int) -> Text:
    text = Text()
    cells = (screen.buffer[number][column] for column in range(COLUMNS))
    for style, run in itertools.groupby(cells, key=_style):
        text.append("".join(cell.data for cell in run), style)
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> Style:
    is_hex = re.fullmatch("[0-9a-f]{6}", cell.fg) is not None
    colour = f"#{cell.fg}" if is_hex else cell.fg.replace("brown", "yellow")
    return Style(color=None if colour == "default" else colour, bold=cell.bold)


def main() -> None:
    """Run the merge and write the picture."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text("$ " + " ".join(COMMAND), style="bold"))
    console.print(text_of(screen_of(COMMAND)))
    console.save_svg(str(PICTURE), title="raymerge")


if __name__ == "__main__":
    main()
