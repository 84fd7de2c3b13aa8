"""SCE: select the elements in which the deltas differ most, calculate a coefficient for each source from what
is selected, erase minority signs (arXiv 2408.07990)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, Takes, Tile
from raymerge.methods.reduce import add_products, chunks
from raymerge.methods.selection import HISTOGRAM_BYTES, MagnitudeSelection
from raymerge.methods.task_arithmetic import agreeing_sum, on_base, sum_of_terms
from raymerge.methods.trim import mark_largest_, tie_key


@dataclass(slots=True)
class _Statistics:
    """What is known of one tensor's deltas over the tiles seen so far."""

    selection: MagnitudeSelection | None
    """Of the deviations; None when every element is selected."""
    squares: list[float]
    """For each source, the sum of the squares of its selected elements."""
    num_differing: int = 0
    """Elements in which the deltas are not all the same."""

    def coefficients(self) -> tuple[float, ...]:
        """Each source's share in all the squares; equal shares when nothing is selected."""
        total = math.fsum(self.squares)
        count = len(self.squares)
        return tuple(square / total if total else 1.0 / count for square in self.squares)


class SceKernel:
    """Selects the fraction ``select_topk`` of the elements in which the deltas differ, those of largest
    variance over the sources; all elements, equal ones too, where it is 1.

    What orders the elements is the standard deviation, whose order is the variance's and whose range is that
    of the deltas. Elements that tie at the threshold are chosen by a hash of their index, as in ties. Where
    nothing is selected the result is the base. There is no absolute threshold: deltas may be of any size.
    """

    def passes(self, settings: Settings) -> int:
        """Two for the selection, unless everything is selected, and one for the coefficients."""
        return self._selecting(settings) + 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Statistics:
        """Sums of nothing; the selection's rank depends on what its first pass counts."""
        selection = MagnitudeSelection(None, device) if self._selecting(settings) else None
        return _Statistics(selection, [0.0] * len(settings.sources))

    def observe(self, state: _Statistics, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Count the deviations of the tile, or add up squares."""
        if state.selection is None or pass_index == MagnitudeSelection.passes:
            self._add_squares(state, tile)
            return
        deviations = _deviations(tile)
        if pass_index == 0:
            state.num_differing += int(torch.count_nonzero(deviations))
        state.selection.observe(deviations, pass_index)

    def conclude(self, state: _Statistics, settings: Settings, pass_index: int) -> bool:
        """End a pass of the selection; the sums are ready as they are."""
        if state.selection is None or pass_index == MagnitudeSelection.passes:
            return False
        if pass_index == 0:
            state.selection.choose_rank(math.floor(state.num_differing * settings.number("select_topk")))
        state.selection.conclude(pass_index)
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Statistics) -> torch.Tensor:
        """Base plus the mean of the selected deltas that agree with the sign of their sum, each counted by
        its source's coefficient."""
        coefficients = state.coefficients()
        selected = _selected(tile, state.selection)

        def vote(index: int, out: torch.Tensor) -> None:
            _write_selected(tile.sources[index], selected, out)

        def term(index: int, out: torch.Tensor) -> None:
            _write_selected(tile.sources[index], selected, out).mul_(coefficients[index])

        merged = agreeing_sum(sum_of_terms(tile, vote), term, coefficients, normalize=True)
        return on_base(merged, tile)

    def _selecting(self, settings: Settings) -> int:
        """Passes of the selection."""
        return MagnitudeSelection.passes if settings.number("select_topk") < 1 else 0

    def _add_squares(self, state: _Statistics, tile: Tile) -> None:
        selected = _selected(tile, state.selection)
        chosen = torch.empty_like(tile.sources[0])
        for index, delta in enumerate(tile.sources):
            _write_selected(delta, selected, chosen)
            state.squares[index] = add_products(state.squares[index], chosen, chosen)


def _deviations(tile: Tile) -> torch.Tensor:
    """Standard deviation of each element over the sources, float32 ``[n]``; 0 just where all are equal."""
    deviations = torch.empty_like(tile.sources[0])
    count = len(tile.sources)
    for chunk in chunks(deviations.numel(), deviations.device):
        mean = torch.zeros_like(deviations[chunk], dtype=torch.float64)
        for delta in tile.sources:
            mean.add_(delta[chunk])
        mean.div_(count)
        variance = torch.zeros_like(mean)
        for delta in tile.sources:
            distance = delta[chunk] - mean
            variance.add_(distance.mul_(distance))
        deviations[chunk] = variance.div_(count).sqrt_()
    return deviations


def _selected(tile: Tile, selection: MagnitudeSelection | None) -> torch.Tensor | None:
    """1 where an element is selected and 0 elsewhere, float32 ``[n]``; None where all are."""
    if selection is None:
        return None
    selected = _deviations(tile)
    mark_largest_(selected, selection, key=tie_key("sce", 0), start=tile.start)
    return selected


def _write_selected(delta: torch.Tensor, selected: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write a delta without what is not selected into ``out``."""
    if selected is None:
        return out.copy_(delta)
    # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
    return torch.mul(delta, selected, out=out)


SCE = Method(
    name="sce",
    summary="The base plus the elements in which the deltas differ most, averaged by their energy where "
    "signs agree with the majority.",
    paper="2408.07990",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=SceKernel(),
    parameters=(
        Parameter(
            "select_topk",
            "float",
            "global",
            "fraction of the differing elements that is selected",
            default=1.0,
            minimum=0.0,
            maximum=1.0,
        ),
        Parameter(
            "int8_mask", "bool", "global", "mergekit's way to save memory", default=False, effective=False
        ),
    ),
    scratch=4.5,
    state_bytes=HISTOGRAM_BYTES,
)
