"""Tables, figures with captions and lines to open, as HTML; everything that is put in is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from markupsafe import Markup

from raymerge.cli.render.figures import Floats, Scale, legend, number

Cell: TypeAlias = str | Markup
_OPEN = 3
"""Panels that are seen at once."""


def as_figure(title: str, drawn: Markup) -> Markup:
    return Markup('<figure><figcaption>{}</figcaption><div class="scroll">{}</div></figure>').format(
        title, drawn
    )


def as_details(summary: str, body: Markup) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(summary, body)


def as_panels(panels: Sequence[Markup], scale: Scale, name: str) -> Markup:
    """The first few, and the others behind a line to open; all have one scale."""
    first, rest = (
        Markup('<div class="panels">{}</div>').format(Markup("").join(each))
        for each in (panels[:_OPEN], panels[_OPEN:])
    )
    more = as_details(f"{len(panels) - _OPEN} more", rest) if len(panels) > _OPEN else Markup("")
    return legend(scale, name) + first + more


def as_matrix(title: str, names: Sequence[str], values: Floats, scale: Scale) -> Markup:
    """``[n, n]`` of numbered names against each other."""
    heads = [Markup('<th scope="col" class="number">{}</th>').format(k + 1) for k in range(len(names))]
    rows = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name, Markup("").join(_matrix_cell(values, scale, j, k) for k in range(len(names)))
        )
        for j, name in enumerate(names)
    ]
    table = Markup(
        '<div class="scroll"><h3>{}</h3><table class="matrix"><thead><tr><td></td>{}</tr></thead>'
        "<tbody>{}</tbody></table></div>"
    )
    return table.format(title, Markup("").join(heads), Markup("").join(rows))


def _matrix_cell(values: Floats, scale: Scale, j: int, k: int) -> Markup:
    value = float(values[j, k])
    if j == k or not np.isfinite(value):
        return Markup("<td>{}</td>").format("\u00b7" if j == k else number(value))
    return Markup('<td class="{}">{}</td>').format(
        scale.step(value), f"{value:.4f}" if abs(value) > 0.9 else f"{value:.3f}"
    )


def as_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    numbers: Iterable[int] = (),
    has_row_headers: bool = False,
) -> Markup:
    """Columns ``numbers`` are right-aligned; the first cell of a row can be its header."""
    styles = ["number" if i in set(numbers) else "" for i in range(len(headers))]
    head = [
        Markup('<th scope="col"{}>{}</th>').format(_class(style), each)
        for style, each in zip(styles, headers, strict=True)
    ]
    body = [
        Markup("<tr>{}</tr>").format(
            Markup("").join(_cell(each, styles[i], has_row_headers and i == 0) for i, each in enumerate(row))
        )
        for row in rows
    ]
    table = '<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    return Markup(table).format(Markup("").join(head), Markup("").join(body))


def _cell(value: Cell, style: str, is_header: bool) -> Markup:
    pattern = '<th scope="row">{}</th>' if is_header else f"<td{_class(style)}>{{}}</td>"
    return Markup(pattern).format(value)


def _class(name: str) -> Markup:
    return Markup(' class="{}"').format(name) if name else Markup("")


def bar(part: float) -> Markup:
    """A bar that is this part of the longest."""
    return Markup('<i class="bar" style="width:{}px"></i>').format(f"{220 * min(1.0, max(0.0, part)):.0f}")
