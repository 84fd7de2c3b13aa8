"""Figures of a report as inline SVG: maps, lines over depth, images of experts.

Their colours are classes of the page. All text goes through ``Markup.format``, which escapes it: names of
tensors and models come from strangers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEPS = 9
"""Colours of a scale: classes ``s0`` to ``s8`` for sizes, ``d0`` to ``d8`` for signed values."""
_WIDTH = 860
_LEFT, _RIGHT = 134, 150
_ROW, _WIDEST = 19, 30
_FONT = 7.0
"""Width of a character."""


@dataclass(frozen=True, slots=True)
class Scale:
    low: float
    high: float
    is_log: bool = False
    is_diverging: bool = False

    @staticmethod
    def of_sizes(values: Floats, *, is_log: bool = False) -> Scale:
        """From the smallest to the largest; one of logarithms shows three decades, without zeros."""
        known = values[np.isfinite(values) & (values > 0 if is_log else True)]
        if not known.size:
            return Scale(0.1, 1, is_log)
        low, high = float(known.min()), float(known.max())
        if is_log:
            return Scale(max(low, high / 1000) if low < high else high / 2, high, is_log)
        return Scale(min(low, 0.0), high if high > 0 else 1.0)

    def step(self, value: float) -> str:
        """The class of a colour; ``none`` where nothing is known."""
        if not math.isfinite(value):
            return "none"
        position = math.log if self.is_log else float
        low, high, place = position(self.low), position(self.high), position(max(value, self.low))
        part = (place - low) / (high - low) if high > low else 1.0
        return f"{'d' if self.is_diverging else 's'}{min(STEPS - 1, max(0, int(part * STEPS)))}"

    def bounds(self) -> list[float]:
        """Where each colour begins, and where the last one ends."""
        if self.is_log:
            return [self.low * (self.high / self.low) ** (i / STEPS) for i in range(STEPS + 1)]
        return [self.low + (self.high - self.low) * i / STEPS for i in range(STEPS + 1)]


def number(value: float) -> str:
    """Three digits; a dash where nothing is known."""
    if not math.isfinite(value):
        return "\u2013"
    return f"{value:.3g}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.2e}"


def legend(scale: Scale, name: str) -> Markup:
    letter, bounds, wide = "d" if scale.is_diverging else "s", scale.bounds(), 34
    boxes = [
        Markup('<path class="{}{}" d="M{} 0h{}v10h-{}z"/>').format(letter, i, 24 + i * wide, wide, wide)
        for i in range(STEPS)
    ]
    marks = [_text(24 + i * wide, 24, f"{bounds[i]:.2g}", "middle") for i in range(0, STEPS + 1, 3)]
    words = f"Colours: {name} from {bounds[0]:.2g} to {bounds[-1]:.2g}"
    return Markup('<svg class="legend" role="img" aria-label="{}" viewBox="0 0 352 28">{}</svg>').format(
        words, Markup("").join([*boxes, *marks])
    )


def heat_map(
    values: Floats, rows: Sequence[str], columns: Sequence[int], scale: Scale, *, title: str
) -> Markup:
    """``[rows, columns]``, with layers as columns and a tooltip in each cell."""
    width = min(_WIDEST, (_WIDTH - _LEFT) / max(1, len(columns)))
    cells = [
        Markup('<path class="{}" d="M{:g} {}h{:g}v{}h-{:g}z"><title>{}</title></path>').format(
            scale.step(value), round(_LEFT + x * width, 1), y * _ROW, round(width - 1, 1), _ROW - 1,
            round(width - 1, 1), f"layer {columns[x]}, {rows[y]}: {number(value)}",
        )
        for (y, x), value in np.ndenumerate(values)
        if math.isfinite(value)
    ]  # fmt: skip
    names = [_text(_LEFT - 8, y * _ROW + 14, name, "end") for y, name in enumerate(rows)]
    bottom = len(rows) * _ROW + 14
    ticks = _ticks(columns, lambda x: _LEFT + (x + 0.5) * width, bottom, spacing=width)
    fact = f"{title}. {_extremes(values, rows, [f'layer {each}' for each in columns])}"
    return _svg(
        (_LEFT + len(columns) * width + 4, bottom + 6),
        fact,
        [*cells, *names, *ticks, _text(_LEFT - 8, bottom, "layer", "end")],
    )


def image(values: Floats, rows: Sequence[int], scale: Scale, *, title: str, num_columns: int) -> Markup:
    """``[layers, experts or bins of them]``: a path a colour, and a tooltip a row."""
    height = max(3, min(12, 420 // max(1, len(rows))))
    wide = (_WIDTH - _LEFT) / max(1, values.shape[1])
    by_colour: dict[str, list[str]] = {}
    for y, row in enumerate(values):
        x = 0
        for colour, run in groupby(map(scale.step, row)):
            length = len(list(run))
            by_colour.setdefault(colour, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    paths = [
        Markup('<path class="{}" d="{}"/>').format(colour, "".join(runs))
        for colour, runs in by_colour.items()
    ]
    tips = [
        Markup('<path class="tip" d="M0 {}h{}v1h-{}z"><title>{}</title></path>').format(
            y, values.shape[1], values.shape[1], f"layer {rows[y]}: {_row_fact(row, num_columns)}"
        )
        for y, row in enumerate(values)
    ]
    frame = Markup('<g transform="translate({} 0) scale({:.4f} {})" shape-rendering="crispEdges">{}</g>')
    body = frame.format(_LEFT, wide, height, Markup("").join([*paths, *tips]))
    bottom = len(rows) * height
    names = [
        _text(_LEFT - 8, y * height + height / 2 + 4, str(rows[y]), "end")
        for y in _spaced(len(rows), spacing=height, least=16)
    ]
    experts = list(range(num_columns))
    ticks = _ticks(experts, lambda x: _LEFT + (x + 0.5) * (_WIDTH - _LEFT) / num_columns, bottom + 14,
                   spacing=(_WIDTH - _LEFT) / num_columns)  # fmt: skip
    note = _text(_LEFT - 8, bottom + 14, "layer / expert", "end")
    fact = f"{title}. {_extremes(values, [f'layer {each}' for each in rows], None)}"
    return _svg((_WIDTH, bottom + 20), fact, [body, *names, *ticks, note])


def _row_fact(row: Floats, num_columns: int) -> str:
    known = np.where(np.isfinite(row), row, -np.inf)
    if not np.isfinite(known).any():
        return number(math.nan)
    place = int(known.argmax() * num_columns / len(row))
    return (
        f"largest {number(float(known.max()))} near expert {place}, median {number(float(np.nanmedian(row)))}"
    )


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    values: Floats
    colour: str
    """A class of the page: ``p1`` and so on."""


def lines(series: Sequence[Line], layers: Sequence[int], *, title: str, is_log: bool = False) -> Markup:
    """Values over depth, with a point and a tooltip for each."""
    height, top, right = 230, 10, _WIDTH - _RIGHT
    values = np.concatenate([each.values for each in series])
    low, high, marks = _axis(values, is_log=is_log)
    position = math.log10 if is_log else float

    def y(value: float) -> float:
        part = (position(max(value, low)) - position(low)) / (position(high) - position(low))
        return round(top + height * (1 - part), 1)

    def x(index: float) -> float:
        return round(_LEFT - 40 + (right - _LEFT + 40) * (index + 0.5) / len(layers), 1)

    body = [
        Markup('<path class="grid" d="M{} {}H{}"/>{}').format(
            _LEFT - 40, y(mark), right, _text(_LEFT - 48, y(mark) + 4, number(mark), "end")
        )
        for mark in marks
    ]
    for each in series:
        body += _one_line(each, layers, x, y, is_log=is_log)
    ends = [y(_last(each.values, low)) for each in series]
    for place, each in zip(_apart(ends), series, strict=True):
        body.append(
            Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
                each.colour, right + 10, round(place + 4, 1), _cut(each.name, _RIGHT - 10)
            )
        )
    spacing = (right - _LEFT + 40) / len(layers)
    body += _ticks(layers, x, top + height + 20, spacing=spacing)
    body.append(_text(_LEFT - 48, top + height + 20, "layer", "end"))
    fact = _extremes(np.array([each.values for each in series]), [each.name for each in series],
                     [f"layer {each}" for each in layers])  # fmt: skip
    return _svg((_WIDTH, top + height + 30), f"{title}. {fact}", body)


def _one_line(
    line: Line,
    layers: Sequence[int],
    x: Callable[[float], float],
    y: Callable[[float], float],
    *,
    is_log: bool,
) -> Iterator[Markup]:
    known = np.isfinite(line.values) & (line.values > 0 if is_log else True)
    points = [(x(i), y(float(line.values[i])), i) for i in np.flatnonzero(known).tolist()]
    moves = "".join(f"{'L' if i and known[i - 1] else 'M'}{place} {value}" for place, value, i in points)
    yield Markup('<path class="line {}" d="{}"/>').format(line.colour, moves)
    for place, value, i in points:
        tip = f"{line.name}, layer {layers[i]}: {number(float(line.values[i]))}"
        yield Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.5"><title>{}</title></circle>').format(
            line.colour, place, value, tip
        )


_MARKS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (4, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)), (50, (1, 2, 5)), (1e4, (1, 3)), (math.inf, (1,)),
)  # fmt: skip
"""Marks of a decade, for axes from some number to less than so many times it."""


def _axis(values: Floats, *, is_log: bool) -> tuple[float, float, list[float]]:
    """Bounds and marks of an axis."""
    known = values[np.isfinite(values) & (values > 0 if is_log else True)]
    if not known.size:
        return 0.1, 1.0, [0.1, 1.0]
    low, high = float(known.min()), float(known.max())
    if is_log:
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        steps = next(each for most, each in _MARKS if high / low < most)
        marks = [step * 10.0**power for power in decades for step in steps]
        first = max((each for each in marks if each <= low), default=marks[0])
        last = min((each for each in marks if each >= high * 0.999), default=10 * marks[-1])
        return first, last if last > first else 10 * first, [each for each in marks if first <= each <= last]
    low = min(low, 0.0)
    rough = (max(high, low + 1e-9) - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(each * unit for each in (1, 2, 5, 10) if each * unit >= rough)
    first = math.floor(low / step)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return first * step, last * step, [each * step for each in range(first, last + 1)]


def _last(values: Floats, otherwise: float) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else otherwise


def _apart(heights: Sequence[float], least: float = 15) -> list[float]:
    """Places near these heights for labels that do not cover each other."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    places = [0.0] * len(heights)
    lowest = -math.inf
    for i in order:
        places[i] = lowest = max(heights[i], lowest + least)
    return places


def _spaced(count: int, *, spacing: float, least: float) -> range:
    """Which of so many ticks have room for a label."""
    return range(
        0, count, next(each for each in (1, 2, 4, 5, 8, 10, 16, 32, 64, 10**9) if each * spacing >= least)
    )


def _ticks(labels: Sequence[int], x: Callable[[float], float], y: float, *, spacing: float) -> list[Markup]:
    return [_text(x(i), y, str(labels[i]), "middle") for i in _spaced(len(labels), spacing=spacing, least=26)]


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(
        anchor, round(x, 1), round(y, 1), text
    )


def _cut(name: str, width: float) -> str:
    most = int(width / _FONT)
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"


def _svg(size: tuple[float, float], fact: str, parts: Iterable[Markup]) -> Markup:
    """It shrinks with the page down to a size that can be read, and scrolls then."""
    width, height = size
    style = f"width:{1.13 * width:.0f}px;min-width:{0.7 * width:.0f}px"
    return Markup('<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}" style="{}">{}</svg>').format(
        fact, round(width, 1), round(height, 1), style, Markup("").join(parts)
    )


def _extremes(values: Floats, rows: Sequence[str], columns: Sequence[str] | None) -> str:
    """The main fact of a figure, for who cannot see it."""
    if not np.isfinite(values).any():
        return "Nothing is known."
    named = []
    for place in (np.nanargmin(values), np.nanargmax(values)):
        y, x = divmod(int(place), values.shape[1])
        where = f"{columns[x]}, {rows[y]}" if columns is not None else rows[y]
        named.append(f"{number(float(values[y, x]))} ({where})")
    return f"From {named[0]} to {named[1]}."
