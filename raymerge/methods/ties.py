"""TIES: trim each delta to its largest elements, elect a sign, add what agrees (arXiv 2306.01708)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from raymerge.methods.method import Access, BaseUse, Method, Settings, Takes, Tile
from raymerge.methods.reduce import HISTOGRAM_BYTES, MagnitudeSelection
from raymerge.methods.task_arithmetic import delta_parameters, merge_deltas

_ZERO_SUM = 1e-7

_Selections: TypeAlias = tuple[MagnitudeSelection | None, ...]


class TiesKernel:
    """Keeps of each delta the elements not below the k-th largest magnitude, ``k = floor(density * N)``.

    All elements that tie with the k-th are kept, so that a little more than k may be. Deltas of 16-bit
    checkpoints take few distinct values and about one element in 150 ties; to keep exactly k, something
    would have to choose among equals: an unstable sort leaves it to chance, an order by index needs to
    know how many ties came in earlier tiles. By magnitude alone each element decides for itself.

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

    def conclude(self, state: _Selections, settings: Settings, pass_index: int) -> None:
        """End the pass of every selection."""
        for selection in state:
            if selection is not None:
                selection.conclude(pass_index)

    def apply(self, tile: Tile, settings: Settings, state: _Selections | None) -> torch.Tensor:
        """Base plus lambda times the elected sum of the trimmed deltas."""
        weights = settings.per_source("weight")
        selections = state or (None,) * len(weights)

        def term(index: int, out: torch.Tensor) -> None:
            delta, selection = tile.sources[index], selections[index]
            if selection is None:
                torch.mul(delta, weights[index], out=out)
                return
            # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
            torch.abs(delta, out=out).ge_(selection.threshold).mul_(delta)
            out.mul_(weights[index] * _gain(selection))

        return merge_deltas(tile, settings, term, elect=True)


def _gain(selection: MagnitudeSelection) -> float:
    """Factor that gives the trimmed delta the L1 norm of the whole; 1 when sums are absent or near 0."""
    if selection.sum_all < _ZERO_SUM or selection.sum_kept < _ZERO_SUM:
        return 1.0
    return selection.sum_all / selection.sum_kept


TIES = Method(
    name="ties",
    summary="The base plus the largest elements of each delta, where their signs agree with the majority.",
    paper="2306.01708",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=TiesKernel(),
    parameters=delta_parameters(normalize=True, rescale=False),
    scratch=3.5,
    state_bytes=HISTOGRAM_BYTES,
)
