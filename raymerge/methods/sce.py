"""SCE: select the elements in which the deltas differ most, calculate a coefficient for each source from what
is selected, erase minority signs (arXiv 2408.07990)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops, reference, trim
from raymerge.methods.combine import on_base
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import INT8_MASK, Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.random import random_key
from raymerge.methods.reduce import PieceSums, chunks
from raymerge.methods.selection import HISTOGRAM_BYTES, MagnitudeSelection, Sample
from raymerge.methods.task_arithmetic import agreeing_sum, rows_of, sum_of_terms


@dataclass(slots=True)
class _Statistics:
    selection: MagnitudeSelection | None
    """Of the deviations, until concluded; None when every element is selected."""
    squares: PieceSums
    num_differing: torch.Tensor
    """int64 []."""
    cut: trim.Threshold = trim.EVERYTHING
    by_deviation: loops.elect.Selection | None = None
    """``cut`` for the compiled loops, made on first use."""

    def for_loops(self) -> loops.elect.Selection:
        if self.by_deviation is None:
            self.by_deviation = selection_by_deviation(self.cut)
        return self.by_deviation

    def coefficients(self) -> tuple[float, ...]:
        squares = self.squares.totals.tolist()
        total, count = math.fsum(squares), len(squares)
        return tuple(square / total if total else 1.0 / count for square in squares)


class SceKernel(StoredKernel):
    """Selects the fraction ``select_topk`` of the elements in which the deltas differ, those of largest
    variance over the sources; all elements, equal ones too, where it is 1.

    Elements are ordered by the root of the sum of squared distances from their mean, which has the variance's
    order and the deltas' range. Elements that tie at the threshold are chosen by a hash of their index, as in
    ties. Where nothing is selected the result is the base. No threshold is absolute: deltas may be of any
    size."""

    def passes(self, settings: Settings) -> int:
        return 2 if settings.number("select_topk") < 1 else 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Statistics:
        selects = settings.number("select_topk") < 1
        selection = MagnitudeSelection(None) if selects else None
        num_differing = torch.zeros((), dtype=torch.int64, device=device)
        return _Statistics(selection, PieceSums(len(settings.sources)), num_differing)

    def observe(self, state: _Statistics, tile: Tile, settings: Settings, pass_index: int) -> None:
        if state.selection is None:
            for index, delta in enumerate(_selected_deltas(tile, state)):
                state.squares.add_squares(index, delta)
            return
        deviations, num_differing = deviations_of(tile)
        if pass_index == 0:
            state.num_differing += num_differing
        state.selection.observe(deviations)

    def observe_stored(self, state: _Statistics, stored: Stored, settings: Settings, pass_index: int) -> None:
        if state.selection is None:
            _add_squares(state, stored)
            return
        num_differing = state.selection.observe_deviations(stored)
        if pass_index == 0:
            state.num_differing += num_differing

    def conclude(self, state: _Statistics, settings: Settings, pass_index: int) -> bool:
        if state.selection is None:
            return False
        if pass_index == 0:
            counts = [state.num_differing]
            MagnitudeSelection.fetch([state.selection], counts)
            state.selection.choose_rank(math.floor(int(counts[0]) * settings.number("select_topk")))
        if not state.selection.conclude():
            state.cut, state.selection = trim.threshold_of(state.selection, trim.tie_key("sce", 0)), None
        return True

    def apply(self, tile: Tile, settings: Settings, state: _Statistics) -> torch.Tensor:
        """Base plus the mean of the selected deltas that agree with the sign of their sum, weighted by
        source."""
        if tile.sources.device.type == "cpu":
            return trim.SelectedMerge(state.for_loops(), sum_of(state.coefficients())).apply(tile)
        return merge_selected_in_torch(tile, state.coefficients(), state.cut)

    def apply_stored(self, stored: Stored, settings: Settings, state: _Statistics, out: Words) -> None:
        trim.SelectedMerge(state.for_loops(), sum_of(state.coefficients())).apply_stored(stored, out)


def take_sample(state: _Statistics, sample: Tile, settings: Settings) -> None:
    if state.selection is not None:
        deviations = deviations_of(sample)[0].cpu()
        num_differing = int(torch.count_nonzero(deviations))
        share = settings.number("select_topk") * num_differing / max(1, deviations.numel())
        state.selection.expect(Sample(deviations), share)


def deviations_of(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Deviation of the deltas of each element, float32 ``[n]``, 0 just where all are equal; and in how many
    elements they differ."""
    if tile.sources.device.type != "cpu":
        deviations = deviations_in_torch(tile)
        return deviations, torch.count_nonzero(deviations)
    deviations = torch.empty_like(tile.sources[0])
    deltas = rows_of(tile.sources)
    return deviations, loops.selection.write_deviations(
        deltas.flat, deltas.stride, len(tile.sources), deviations.numpy()
    )


def deviations_in_torch(tile: Tile) -> torch.Tensor:
    deviations = torch.empty_like(tile.sources[0])
    count = len(tile.sources)
    for chunk in chunks(deviations.numel(), deviations.device):
        # Sums rather than means, which are exact for equal deltas, whatever their number.
        total = torch.zeros_like(deviations[chunk], dtype=torch.float64)
        for delta in tile.sources:
            total.add_(delta[chunk])
        squares = torch.zeros_like(total)
        for delta in tile.sources:
            distance = delta[chunk].double().mul_(count).sub_(total)
            squares.add_(distance.mul_(distance))
        deviations[chunk] = squares.sqrt_().mul_(1.0 / count)
    return deviations


def _selected_deltas(tile: Tile, state: _Statistics) -> torch.Tensor:
    if state.cut is trim.EVERYTHING:
        return tile.sources
    if tile.sources.device.type == "cpu":
        return selected_deltas(tile, state.for_loops().levels)
    return selected_deltas_in_torch(tile, state.cut)


def _add_squares(state: _Statistics, stored: Stored) -> None:
    squares, levels = state.squares.totals, state.for_loops().levels
    few = trim.few_inputs_of(stored) if len(stored.places) > 2 else None
    selects = state.cut is not trim.EVERYTHING
    if few is None:
        loops.elect.add_squares_stored(trim.inputs_of(stored), stored.count, levels, selects, squares)
    else:
        loops.deviations.add_squares_few(few, stored.count, levels, selects, squares)


def selected_deltas(tile: Tile, levels: loops.elect.Thresholds) -> torch.Tensor:
    out = torch.empty_like(tile.sources)
    loops.elect.write_selected(rows_of(tile.sources), levels, tile.start, out.numpy())
    return out


def selected_deltas_in_torch(tile: Tile, cut: trim.Threshold) -> torch.Tensor:
    """The deltas where they are selected and 0 elsewhere, float32 ``[N, n]``; a product, so NaN stays."""
    return tile.sources * _selected(tile, cut)


def selection_by_deviation(cut: trim.Threshold) -> loops.elect.Selection:
    return loops.elect.Selection(
        loops.elect.BY_DEVIATION, trim.compiled_thresholds([(cut, trim.NOTHING)]), loops.elect.NO_CHANCES
    )


def sum_of(coefficients: tuple[float, ...]) -> loops.elect.Sum:
    """The mean by the sources' coefficients, for the compiled loops."""
    shares, ones = np.array(coefficients, np.float32), np.ones(len(coefficients), np.float32)
    return loops.elect.Sum(ones, shares, shares, np.float32(1.0), elects=True, divides=True)


def merge_selected_in_torch(tile: Tile, coefficients: tuple[float, ...], cut: trim.Threshold) -> torch.Tensor:
    selected = _selected(tile, cut)

    def vote(index: int, out: torch.Tensor) -> None:
        # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
        torch.mul(tile.sources[index], selected, out=out)

    def term(index: int, out: torch.Tensor) -> None:
        torch.mul(tile.sources[index], selected, out=out).mul_(coefficients[index])

    merged = agreeing_sum(sum_of_terms(tile, vote), term, coefficients, normalize=True)
    return on_base(merged, tile)


def _selected(tile: Tile, cut: trim.Threshold) -> torch.Tensor:
    """1 where an element is selected and 0 elsewhere, float32 ``[n]``."""
    selected = deviations_in_torch(tile)
    trim.mark_largest_(selected, cut, start=tile.start)
    return selected


_NEAR = 2.0**-21
# Of a threshold: what two ways to compute the same number may differ by, rounded to float32.


class _Reference:
    """The elements of largest variance over the sources, averaged by energy where signs agree."""

    def __init__(self, tensor: reference.LogicalTensor) -> None:
        self._tensor = tensor
        share = tensor.settings.number("select_topk")
        self._cut: reference.RankThreshold | None = None
        if share < 1:
            differing = sum(int(np.count_nonzero(_deviations(block))) for block in tensor.blocks())
            ((cut,),) = reference.magnitudes_of_ranks(
                lambda: (_deviations(block)[None] for block in tensor.blocks()),
                [[math.floor(differing * share)]],
            )
            self._cut = reference.RankThreshold(cut.threshold, cut.limit, random_key(0, "sce", 0))
        squares = np.zeros(tensor.num_sources)
        open_squares = np.zeros(tensor.num_sources)
        for block in tensor.blocks():
            selected, other = self._selected(block)
            squares += (selected * block.sources**2).sum(1)
            open_squares += ((selected != other) * block.sources**2).sum(1)
        total = math.fsum(squares)
        self._shares = squares / total if total else np.full(len(squares), 1.0 / len(squares))
        # What may be selected otherwise moves shares by no more than its part of the squares.
        self._doubt = float(open_squares.sum() / total) if total else 0.0

    def __call__(self, block: reference.Block) -> reference.Expected:
        selected, other = self._selected(block)
        ones = np.ones(len(self._shares))
        how = reference.TermSum(self._shares, self._shares, ones, 1.0, elects=True, divides=True)
        size = block.sources.shape
        both = reference.Sparsified(np.broadcast_to(selected, size) * 1.0, np.broadcast_to(other, size) * 1.0)
        expected = reference.merge_terms(block, both, how)
        least = float(self._shares[self._shares > 0].min(initial=1.0))
        expected.doubt += min(1.0, self._doubt / least) * np.abs(block.sources).max(0)
        return expected

    def _selected(self, block: reference.Block) -> tuple[reference.Floats, reference.Floats]:
        """1 where an element is selected, and the same with uncertain elements flipped."""
        if self._cut is None:
            ones = np.ones(block.sources.shape[1])
            return ones, ones
        spread, threshold = _deviations(block), self._cut.threshold
        selected = self._cut.keeps(spread, block.indices)
        if not math.isfinite(threshold):
            return selected.astype(np.float64), selected.astype(np.float64)
        doubts = 0.0 if block.doubts is None else 2 * block.doubts.max(0)
        is_open = np.abs(spread - threshold) <= _NEAR * threshold + doubts
        return selected.astype(np.float64), np.where(is_open, ~selected, selected).astype(np.float64)


def _deviations(block: reference.Block) -> reference.Floats:
    """The root of the summed squared distances from the mean, as float32 numbers; 0 where all are equal."""
    count = len(block.sources)
    total = block.sources.sum(0)
    squares = ((block.sources * count - total) ** 2).sum(0)
    return np.asarray((np.sqrt(squares) / count).astype(np.float32), dtype=np.float64)


SCE = Method(
    name="sce",
    summary="The base plus the elements in which the deltas differ most, averaged by their energy where "
    "signs agree with the majority.",
    paper="2408.07990",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=SceKernel(),
    reference=reference.Reference(_Reference),
    parameters=(
        Parameter.fraction(
            "select_topk", "fraction of the differing elements that is selected", 1.0, scope="global"
        ),
        INT8_MASK,
    ),
    scratch=4.5,
    scratch_per_source=1.0,
    state_bytes=HISTOGRAM_BYTES,
    sampler=take_sample,
)
