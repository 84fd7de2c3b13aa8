"""Draw docs/images/speed.svg of the table in docs/measurements.md; run in the root of the repository.

``make bench BENCH=--write`` draws it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks import programme as run
from benchmarks.tables import BENCH, marks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, PICTURE = ROOT / "docs" / "measurements.md", ROOT / "docs" / "images" / "speed.svg"
_MERGES = ("linear", "slerp", "ties", "dare_ties", "passthrough", "moe")
_SERIES = (
    ("ours", "raymerge", (run.INLINE,)),
    ("peer", run.PEER, (run.PEER,)),
    ("limit", "what the storage allows", (run.COPY, run.LIMIT)),
)
"""Class of the bar, its name, and the programs of which the first that is there is meant."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 820, 110, 70, 84, 13, 14

_STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.name { text-anchor: end }
.small { font-size: 11.5px; fill: #59636e }
.ours { fill: #4f46e5 } .peer { fill: #aab2bd } .limit { fill: #10a37f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .ours { fill: #8b85ff } .peer { fill: #5b6470 } .limit { fill: #2dc79f }
}"""


@dataclass(frozen=True, slots=True)
class Table:
    place: str
    """What was measured on what."""
    seconds: Mapping[tuple[str, str], float]
    """Of the whole process, by merge and program."""


def table_of(document: str) -> Table:
    """The first table of every measured merge in a document that ``make bench`` has written to."""
    begin, end = marks(BENCH)
    text = document.partition(begin)[2].partition(end)[0]
    head = next(line for line in text.splitlines() if line.strip())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    first = next(number for number, row in enumerate(rows) if row[:3] == ["merge", "program", "whole, s"])
    seconds: dict[tuple[str, str], float] = {}
    for row in rows[first + 2 :]:
        if len(row) < len(rows[first]):
            break
        seconds[row[0], row[1]] = float(row[2].replace(",", ""))
    return Table(head.partition("; ")[2].rstrip("."), seconds)


def picture(table: Table) -> str:
    """The picture as SVG, for light and dark pages; its bars are seconds of whole processes."""
    merges = [(merge, bars) for merge in _MERGES if len(bars := [*_bars(table, merge)]) == len(_SERIES)]
    most = max(seconds for _, bars in merges for _, seconds in bars)
    step = len(_SERIES) * (_BAR + 1) + _GAP
    height = _TOP + step * len(merges) + 22
    parts = [*_head(), *_legend()]
    for number, (merge, bars) in enumerate(merges):
        parts += _merge(merge, bars, top=_TOP + number * step, scale=(_WIDTH - _LEFT - _RIGHT) / most)
    parts.append(f'<text class="small" x="16" y="{height - 10}">make bench: {escape(table.place)}</text>')
    says = "; ".join(_sentence(merge, bars) for merge, bars in merges)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="title says">',
        '<title id="title">How long merges take</title>',
        f'<desc id="says">{escape(says)}.</desc>',
        f"<style>\n{_STYLE}\n</style>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bars(table: Table, merge: str) -> Iterator[tuple[str, float]]:
    for series, _, programs in _SERIES:
        found = [table.seconds[merge, each] for each in programs if (merge, each) in table.seconds]
        if found:
            yield series, found[0]


def _head() -> Iterator[str]:
    title = "Seconds from the command to the merged model, start-up included"
    below = "Shorter is better. The storage: the same bytes read and written durably, and nothing computed."
    yield f'<text class="title" x="16" y="26">{title}</text>'
    yield f'<text class="small" x="16" y="44">{below}</text>'


def _legend() -> Iterator[str]:
    x = _LEFT
    for series, name, _ in _SERIES:
        yield f'<rect class="{series}" x="{x}" y="56" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="67">{escape(name)}</text>'
        x += 48 + 7 * len(name)


def _merge(merge: str, bars: Sequence[tuple[str, float]], *, top: int, scale: float) -> Iterator[str]:
    middle = top + len(bars) * (_BAR + 1) / 2 + 4
    yield f'<text class="name" x="{_LEFT - 10}" y="{middle:g}">{escape(merge)}</text>'
    for number, (series, seconds) in enumerate(bars):
        y, width = top + number * (_BAR + 1), max(1.0, seconds * scale)
        yield f'<rect class="{series}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
        yield f'<text class="small" x="{_LEFT + width + 6:.1f}" y="{y + 10.5:g}">{seconds:.1f}</text>'


def _sentence(merge: str, bars: Sequence[tuple[str, float]]) -> str:
    names = {series: name for series, name, _ in _SERIES}
    return f"{merge}: " + ", ".join(f"{names[series]} {seconds:.1f} s" for series, seconds in bars)


def main() -> None:
    PICTURE.write_text(picture(table_of(DOCUMENT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
