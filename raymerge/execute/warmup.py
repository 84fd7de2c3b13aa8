"""Has everything ready that a plan's methods compute with, before the first segment."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raymerge.methods import (
    BLOCK,
    ROW_GROUP,
    SAMPLE_LENGTH,
    SAMPLE_RUNS,
    Access,
    Method,
    Settings,
    Takes,
    Tile,
    find_method,
    gather,
    sample_of,
)
from raymerge.planner.expressions import Expression

_SHAPE = (ROW_GROUP, (SAMPLE_RUNS * SAMPLE_LENGTH + BLOCK) // ROW_GROUP)
"""Long enough for a sample, and whole groups of rows."""


def warm_up(expressions: Iterable[Expression], device: torch.device) -> None:
    """Compute a little with each method, on zeros.

    Loops are compiled, or loaded, when they are first called: that takes time and memory that no segment
    should be charged with, and of which the idle worker's measure is to know.
    """
    seen: set[tuple[str, int]] = set()
    for expression in expressions:
        method = find_method(expression.method)
        settings = expression.bind(keys=(), shape=_SHAPE)
        key = (expression.method, len(settings.sources))
        if expression.is_copy or method is None or key in seen:
            continue
        seen.add(key)
        if method.access_with(settings) is not Access.MATRIX:
            keys = tuple(range(1, len(settings.sources) + 1)) if method.random else ()
            _compute(method, expression.bind(keys=keys, shape=_SHAPE), device, has_base=expression.has_base)


def _compute(method: Method, settings: Settings, device: torch.device, *, has_base: bool) -> None:
    count = _SHAPE[0] * _SHAPE[1]
    sources = torch.zeros(len(settings.sources), count, device=device)
    # Two kinds of numbers, for what does not look twice at tensors that are equal.
    sources[:, ::3] = 1.0 if method.takes is Takes.WEIGHTS else 0.0
    tile = Tile(torch.zeros(count, device=device) if has_base else None, sources, 0)
    state = gather(method, settings, count, device, tiles=lambda: (tile,), sample=lambda: sample_of(tile))
    method.kernel.apply(tile, settings, state)
