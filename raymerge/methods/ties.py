"""TIES: trim each delta to its largest elements, elect a sign, add what agrees (arXiv 2306.01708)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from raymerge.methods.method import Access, BaseUse, Method, Settings, Takes, Tile
from raymerge.methods.selection import HISTOGRAM_BYTES, MagnitudeSelection
from raymerge.methods.task_arithmetic import delta_parameters, merge_deltas
from raymerge.methods.trim import mark_largest_, tie_key

_Selections: TypeAlias = tuple[MagnitudeSelection | None, ...]


class TiesKernel:
    """Keeps of each delta the ``k = floor(density * N)`` elements of largest magnitude.

    Deltas of 16-bit checkpoints take few distinct values, and about one element in 150 ties with the k-th.
    The elements above it stay; of those equal to it as large a share stays as makes k, chosen by a hash of
    the element's index. So each element decides for itself, and the choice favours no part of the tensor: an
    order by index would keep the first rows of a tensor whose deltas are all alike, and an unstable sort
    leaves it to chance.

    ``k = 0`` keeps nothing (but infinity and NaN, which must reach the result), density 1 everything.
    """

    def passes(self, settings: Settings) -> int:
        """Two, for the thresholds; none when every delta is kept whole."""
        thinned = any(density < 1 for density in settings.per_source("density"))
        return MagnitudeSelection.passes if thinned else 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Selections:
        """One selection for each source, None for those kept whole."""
        rescale = settings.flag("rescale")
        return tuple(
            MagnitudeSelection(math.floor(density * num_elements), device, with_sums=rescale)
            if density < 1
            else None
            for density in settings.per_source("density")
        )

    def observe(self, state: _Selections, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Count the magnitudes of the tile."""
        for selection, delta in zip(state, tile.sources, strict=True):
            if selection is not None:
                selection.observe(delta, pass_index)

    def conclude(self, state: _Selections, settings: Settings, pass_index: int) -> bool:
        """End the pass of every selection."""
        for selection in state:
            if selection is not None:
                selection.conclude(pass_index)
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Selections | None) -> torch.Tensor:
        """Base plus lambda times the elected sum of the trimmed deltas."""
        weights = settings.per_source("weight")
        selections = state or (None,) * len(weights)

        def term(index: int, out: torch.Tensor) -> None:
            delta, selection = tile.sources[index], selections[index]
            if selection is None:
                torch.mul(delta, weights[index], out=out)
                return
            torch.abs(delta, out=out)
            mark_largest_(out, selection, key=tie_key("ties", index), start=tile.start)
            # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
            out.mul_(delta).mul_(weights[index] * _gain(selection))

        return merge_deltas(tile, settings, term, elect=True)


def _gain(selection: MagnitudeSelection) -> float:
    """Factor that gives the trimmed delta the L1 norm of the whole; 1 when sums are absent or 0."""
    return selection.sum_all / selection.sum_kept if selection.sum_kept else 1.0


TIES = Method(
    name="ties",
    summary="The base plus the largest elements of each delta, where their signs agree with the majority.",
    paper="2306.01708",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=TiesKernel(),
    parameters=delta_parameters(normalize=True, rescale=False),
    scratch=5.5,
    state_bytes=HISTOGRAM_BYTES,
)
