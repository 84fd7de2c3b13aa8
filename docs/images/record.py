"""Draw docs/images/run.svg, what a terminal shows of a merge; run in the root of the repository.

The parents are those of ``make bench``, 1 GB each, made in build/picture. It needs
``pip install -e '.[dev,docs]'``.
"""

from __future__ import annotations

import itertools
import os
import pty
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from benchmarks.parents import SIZES, make_parents  # noqa: E402

COLUMNS, LINES = 100, 60
PLACE, PICTURE = ROOT / "build" / "picture", Path(__file__).with_name("run.svg")
COMMAND = ("raymerge", "submit", "ties.yml", "-o", "merged", "--workers", "2")
RECIPE = """\
merge_method: ties
base_model: base
models:
  - {model: code, parameters: {weight: 1.0, density: 0.5}}
  - {model: chat, parameters: {weight: 1.0, density: 0.5}}
  - {model: french, parameters: {weight: 0.5, density: 0.5}}
dtype: bfloat16
"""
_HALF = re.compile(r" (\d+)%$")
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def make_place() -> None:
    """The recipe with its models, by names that a user would give."""
    tokenizer = ROOT / "configs" / "quickstart" / "models" / "base"
    parents = make_parents(PLACE / "parents", SIZES["1GB"], tokenizer)
    for name, parent in zip(("base", "code", "chat", "french"), parents, strict=True):
        (PLACE / name).unlink(missing_ok=True)
        (PLACE / name).symlink_to(parent)
    (PLACE / "ties.yml").write_text(RECIPE, encoding="utf-8")
    shutil.rmtree(PLACE / "merged", ignore_errors=True)


def screens_of(command: tuple[str, ...]) -> Iterator[pyte.Screen]:
    """The terminal in which a command runs, after every piece that it prints."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(PLACE)
        size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
        programs = Path(sys.executable).parent
        path = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
        os.execve(programs / command[0], [*command], os.environ | size | path)
    try:
        while piece := os.read(terminal, 1 << 16):
            stream.feed(piece)
            yield screen
    except OSError:
        pass  # The terminal is closed with the command.
    os.waitpid(child, 0)


def frames() -> tuple[Text, Text]:
    """The screen when half of the merge is done, and at the end."""
    half, end = Text(), Text()
    for screen in screens_of(COMMAND):
        end = text_of(screen)
        done = [int(match[1]) for line in screen.display if (match := _HALF.search(line.rstrip()))]
        if not half and done and done[0] >= 50 and "left" in end.plain:
            half = end
    return half, end


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
    """Run the merge and write the picture, which fetches no font."""
    make_place()
    half, end = frames()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text("$ " + " ".join(COMMAND), style="bold"))
    console.print(half)
    console.print(Text("\n... and at the end:\n", style="italic dim"))
    # What stays on the screen above the live part is there already.
    kept = half.plain.count("\n", 0, half.plain.index("━")) if "━" in half.plain else 0
    console.print(Text("\n").join(end.split("\n")[kept:]))
    svg = _FONTS.sub("", console.export_svg(title="raymerge"))
    PICTURE.write_text(svg.replace("Fira Code,", "ui-monospace, Menlo, Consolas,"), encoding="utf-8")


if __name__ == "__main__":
    main()
