"""Keeping the largest of a tensor's elements, each element deciding for itself, and merging what is kept."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops, reference
from raymerge.methods.kernel import BLOCK, Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.random import keep_mask, key_words, limit_of, random_key
from raymerge.methods.reduce import chunks
from raymerge.methods.selection import MagnitudeSelection, Sample
from raymerge.methods.task_arithmetic import compiled_sum, merge_deltas, rows_of

# Not the recipe's seed: the methods that trim are not random, they only need a fair choice among equals.
_TIE_SEED = 0
# Of a sum of magnitudes; what a subtraction leaves below it is rounding.
_ROUNDING = 2.0**-40


def tie_key(method: str, source: int) -> int:
    """The key by which a method chooses among equal elements of one source."""
    return random_key(_TIE_SEED, method, source)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Which elements are among the largest.

    A share of those at the threshold is kept to meet the rank, chosen by a hash of their index. Under one key
    the elements of a smaller rank are among those of a larger one."""

    above: float
    """Larger magnitudes are kept; never NaN, which compares with nothing."""
    tied: float = math.nan
    """A share of the elements of this magnitude is kept; NaN for none."""
    share: float = 0.0
    key: int = 0
    """64-bit key of that choice."""


EVERYTHING = Threshold(-1.0)
NOTHING = Threshold(math.inf)


def threshold_of(selection: MagnitudeSelection, key: int) -> Threshold:
    """The threshold found over the whole tensor; all tied elements where their share is 1 or their magnitude
    0 (to no effect). Where it is NaN no number is among the largest."""
    threshold = selection.threshold
    if math.isnan(threshold):
        return NOTHING
    if selection.tied_share >= 1 or threshold == 0:
        return Threshold(float(np.nextafter(np.float32(threshold), np.float32(-1.0))))
    return Threshold(threshold, threshold, selection.tied_share, key)


def mark_largest_(magnitudes: torch.Tensor, cut: Threshold, *, start: int) -> None:
    """Overwrite magnitudes (float32 ``[n]``, not negative) by 1 where they are among the largest and by 0
    elsewhere, NaN included; ``start`` is the first element's index within the tensor."""
    if math.isnan(cut.tied):
        magnitudes.gt_(cut.above)
        return
    for chunk in chunks(magnitudes.numel(), magnitudes.device):
        marked = magnitudes[chunk]
        # Of all elements, as whoever asks which ones tie has to wait for the answer.
        chosen = keep_mask(cut.key, start + chunk.start, marked.numel(), cut.share, marked.device)
        chosen.logical_and_(marked == cut.tied)
        marked.gt_(cut.above).add_(chosen)


@dataclass(frozen=True, slots=True)
class Trim:
    kept: Threshold
    outliers: Threshold = NOTHING
    gain: float = 1.0


WHOLE = Trim(EVERYTHING)


def trimmed_merge(settings: Settings, trims: Sequence[Trim], *, elect: bool) -> SelectedMerge:
    """``merge_deltas`` of the trimmed deltas of one tensor, on the CPU."""
    levels = compiled_thresholds([(trim.kept, trim.outliers) for trim in trims])
    return SelectedMerge(
        loops.elect.Selection(loops.elect.BY_MAGNITUDE, levels, loops.elect.NO_CHANCES),
        compiled_sum(settings, [trim.gain for trim in trims], elect=elect),
    )


def merge_trimmed_in_torch(
    tile: Tile, settings: Settings, trims: Sequence[Trim], *, elect: bool
) -> torch.Tensor:
    weights = settings.per_source("weight")

    def term(index: int, out: torch.Tensor) -> None:
        delta, trim = tile.sources[index], trims[index]
        mark_kept(delta, trim, out, start=tile.start)
        # A product with the mask, not a choice by it: NaN must reach the result even where dropped.
        out.mul_(delta).mul_(weights[index] * trim.gain)

    return merge_deltas(tile, settings, term, elect=elect)


def mark_kept(delta: torch.Tensor, trim: Trim, out: torch.Tensor, *, start: int) -> None:
    """Write 1 into ``out`` where an element of the delta is kept and 0 elsewhere."""
    torch.abs(delta, out=out)
    mark_largest_(out, trim.kept, start=start)
    if trim.outliers is NOTHING:
        return
    for chunk in chunks(delta.numel(), delta.device):
        outliers = delta[chunk].abs()
        mark_largest_(outliers, trim.outliers, start=start + chunk.start)
        out[chunk].sub_(outliers)


def inputs_of(stored: Stored) -> loops.elect.Inputs:
    return loops.elect.Inputs(stored.words, stored.places, stored.start)


def few_inputs_of(stored: Stored) -> loops.elect.FewInputs | None:
    if len(stored.places) > 1 + loops.elect.MOST:
        return None
    return loops.elect.FewInputs(stored.words, tuple(stored.places.astype(np.uint64)), stored.start)


class SelectedMerge:
    """``merge_deltas`` of selected elements of one tensor, on the CPU, in one loop."""

    def __init__(self, selection: loops.elect.Selection, how: loops.elect.Sum) -> None:
        self._selection = selection
        self._how = how
        self._numbers: loops.elect.Numbers | None = None

    def apply(self, tile: Tile) -> torch.Tensor:
        base = tile.require_base()
        out = torch.empty_like(base)
        deltas = rows_of(tile.sources)
        loops.elect.merge_selected(base.numpy(), deltas, self._selection, tile.start, self._how, out.numpy())
        return out

    def apply_stored(self, stored: Stored, out: Words) -> None:
        few, by_deviation = few_inputs_of(stored), self._selection.by == loops.elect.BY_DEVIATION
        # One delta alone lies apart from nothing.
        if few is None or (by_deviation and len(stored.places) == 2):
            loops.elect.merge_selected_stored(inputs_of(stored), self._selection, self._how, out)
            return
        numbers = self._few_numbers()
        if by_deviation:
            loops.deviations.merge_by_deviation_few(few, self._selection, self._how, numbers, out)
        elif stored.marks is None:
            loops.elect.merge_few(few, self._selection, numbers, out)
        else:
            loops.elect.merge_marked(few, stored.marks, numbers, out)

    def marked(self, stored: Stored) -> Stored:
        """With what is kept by magnitude, for all that weigh it otherwise; as it is where inputs are many."""
        few = few_inputs_of(stored)
        if few is None:
            return stored
        marks = np.empty(stored.count, np.uint16)
        loops.elect.mark_few(few, self._selection, self._few_numbers(), marks)
        return replace(stored, marks=marks)

    def _few_numbers(self) -> loops.elect.Numbers:
        if self._numbers is None:
            self._numbers = loops.elect.numbers_of(self._how, self._selection)
        return self._numbers


def compiled_thresholds(pairs: Sequence[tuple[Threshold, Threshold]]) -> loops.elect.Thresholds:
    """Pairs of kept elements and dropped outliers, for the compiled loops."""
    above = np.array([(lower.above, outliers.above) for lower, outliers in pairs], np.float32)
    tied = np.array([(lower.tied, outliers.tied) for lower, outliers in pairs], np.float32)
    # Until they are looked at one by one, the loops keep no element at the level of either cut.
    above[:, 1] = np.where(np.isnan(tied[:, 1]), above[:, 1], np.nextafter(tied[:, 1], np.float32(-1.0)))
    limits = np.array([[limit_of(cut.share) for cut in pair] for pair in pairs], np.int64)
    words = np.array([[key_words(cut.key) for cut in pair] for pair in pairs], np.uint64)
    return loops.elect.Thresholds(
        above.reshape(-1), tied.reshape(-1), limits.reshape(-1), words.reshape(-1, 2)
    )


@dataclass(slots=True)
class TrimState:
    num_elements: int
    ranks: tuple[tuple[int, int] | None, ...]
    """For each source, how many elements are not among the smallest, and how many are outliers; None if kept
    whole."""
    found: tuple[tuple[MagnitudeSelection, MagnitudeSelection] | None, ...]
    trims: tuple[Trim, ...] = ()
    """Set after all passes."""
    merge: SelectedMerge | None = None
    """Made for the first tile."""


class TrimmingKernel(StoredKernel):
    """A kernel that merges some of the largest elements of each delta."""

    name: str
    elect: bool
    num_thresholds: int
    """2 with outliers, else 1."""

    marks_at_once = 4 * BLOCK
    """Bytes enough for them are in what is counted for pieces, of which there are none."""

    def observed(self, settings: Settings) -> Hashable:
        """Thresholds are those of the deltas, whatever these count for."""
        return super().observed(settings.without("weight", "lambda", "normalize"))

    @abstractmethod
    def ranks(self, settings: Settings, source: int, num_elements: int) -> tuple[int, int]:
        """How many elements of a source's delta are not among the smallest, and how many are outliers."""

    def passes(self, settings: Settings) -> int:
        return int(any(density < 1 for density in settings.per_source("density")))

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> TrimState:
        rescale = settings.flag("rescale")
        ranks = tuple(
            self.ranks(settings, source, num_elements) if density < 1 else None
            for source, density in enumerate(settings.per_source("density"))
        )

        def selection(rank: int) -> MagnitudeSelection:
            return MagnitudeSelection(rank, with_sums=rescale)

        selections = tuple(
            None if pair is None else (selection(pair[0]), selection(pair[1])) for pair in ranks
        )
        return TrimState(num_elements, ranks, selections)

    def observe(self, state: TrimState, tile: Tile, settings: Settings, pass_index: int) -> None:
        for pair, delta in zip(state.found, tile.sources, strict=True):
            for selection in pair or ():
                selection.observe(delta)

    def observe_stored(self, state: TrimState, stored: Stored, settings: Settings, pass_index: int) -> None:
        for source, pair in enumerate(state.found):
            if pair is not None:
                MagnitudeSelection.observe_delta(pair[: self.num_thresholds], stored, source)

    def conclude(self, state: TrimState, settings: Settings, pass_index: int) -> bool:
        selections = [each for pair in state.found for each in pair or ()]
        MagnitudeSelection.fetch(selections)
        unfinished = [each.conclude() for each in selections]
        if any(unfinished):
            return True
        state.trims = tuple(self._trim(pair, source) for source, pair in enumerate(state.found))
        return False

    def _trim(self, pair: tuple[MagnitudeSelection, MagnitudeSelection] | None, source: int) -> Trim:
        if pair is None:
            return WHOLE
        # The same choice among equals at both ends: where they tie across both the right share still stays.
        lower, outliers = (threshold_of(selection, tie_key(self.name, source)) for selection in pair)
        return Trim(lower, outliers, _gain(*pair))

    def apply(self, tile: Tile, settings: Settings, state: TrimState | None) -> torch.Tensor:
        if tile.sources.is_cpu:
            return self._merge(settings, state).apply(tile)
        trims = (WHOLE,) * len(settings.sources) if state is None else state.trims
        return merge_trimmed_in_torch(tile, settings, trims, elect=self.elect)

    def apply_stored(self, stored: Stored, settings: Settings, state: TrimState | None, out: Words) -> None:
        self._merge(settings, state).apply_stored(stored, out)

    def marked(self, stored: Stored, settings: Settings, state: TrimState | None) -> Stored:
        return self._merge(settings, state).marked(stored)

    def _merge(self, settings: Settings, state: TrimState | None) -> SelectedMerge:
        if state is None:
            return trimmed_merge(settings, (WHOLE,) * len(settings.sources), elect=self.elect)
        if state.merge is None:
            state.merge = trimmed_merge(settings, state.trims, elect=self.elect)
        return state.merge


def take_sample(state: TrimState, sample: Tile, settings: Settings) -> None:
    for pair, ranks, delta in zip(state.found, state.ranks, sample.sources.cpu(), strict=True):
        if pair is not None and ranks is not None:
            magnitudes = Sample(delta)
            for selection, rank in zip(pair, ranks, strict=True):
                selection.expect(magnitudes, rank / state.num_elements)


def _gain(upper: MagnitudeSelection, outliers: MagnitudeSelection) -> float:
    """Factor that gives the kept elements the L1 norm of the whole delta; 1 when nothing is kept."""
    whole, remaining = upper.sum_all, upper.sum_kept - outliers.sum_kept
    return whole / remaining if remaining > whole * _ROUNDING else 1.0


class TrimmedReference:
    """ties, breadcrumbs and breadcrumbs_ties: some of the largest elements of each delta stay."""

    def __init__(self, tensor: reference.LogicalTensor, *, name: str, elects: bool) -> None:
        self._how = reference.family_sum(tensor.settings, elects=elects)
        ranks = [_ranks_kept(tensor, name, source) for source in range(tensor.num_sources)]
        self._cuts: list[tuple[reference.RankThreshold, reference.RankThreshold] | None] = [None] * len(ranks)
        if any(own is not None for own in ranks):
            thresholds = reference.magnitudes_of_ranks(
                lambda: (np.abs(block.sources) for block in tensor.blocks()), [own or () for own in ranks]
            )
            for source, cuts in enumerate(thresholds):
                key = random_key(0, name, source)
                limits = [reference.RankThreshold(cut.threshold, cut.limit, key) for cut in cuts]
                self._cuts[source] = (limits[0], limits[1]) if limits else None
        self._gains = [1.0] * len(ranks)
        if tensor.settings.flag("rescale"):
            self._gains = self._made_up(tensor)

    def __call__(self, block: reference.Block) -> reference.Expected:
        factors, others = np.zeros((2, *block.sources.shape))
        for source, cuts in enumerate(self._cuts):
            factors[source] = factor = self._kept(block, source) * self._gains[source]
            others[source] = factor
            if cuts is None or block.doubts is None:
                continue
            # Among inputs that differ, a whole tensor's order differs near every cut.
            size, near = np.abs(block.sources[source]), 2 * block.doubts[source]
            is_near = np.zeros(size.shape, dtype=bool)
            for cut in cuts:
                is_near |= np.abs(size - cut.threshold) <= near + reference.DOUBT * min(cut.threshold, 1e30)
            others[source] = np.where(is_near, np.where(factor > 0, 0.0, self._gains[source]), factor)
        return reference.merge_terms(block, reference.Sparsified(factors, others), self._how)

    def _kept(self, block: reference.Block, source: int) -> reference.Floats:
        cuts = self._cuts[source]
        size = np.abs(block.sources[source])
        if cuts is None:
            return np.ones(size.shape)
        lower, outliers = (cut.keeps(size, block.indices) for cut in cuts)
        return (lower & ~outliers).astype(np.float64)

    def _made_up(self, tensor: reference.LogicalTensor) -> list[float]:
        """``_gain`` of each source."""
        whole, remaining = np.zeros((2, tensor.num_sources))
        for block in tensor.blocks():
            sizes = np.abs(block.sources)
            whole += sizes.sum(1)
            for source, cuts in enumerate(self._cuts):
                # By shares of what ties, since each of them counts by its chance.
                of_each = 1.0 if cuts is None else _weights(cuts[0], sizes[source])
                of_each = of_each if cuts is None else of_each - _weights(cuts[1], sizes[source])
                remaining[source] += float((sizes[source] * of_each).sum())
        both = zip(whole.tolist(), remaining.tolist(), self._cuts, strict=True)
        return [w / k if cuts is not None and k > w * 2.0**-40 else 1.0 for w, k, cuts in both]


def _ranks_kept(tensor: reference.LogicalTensor, name: str, source: int) -> tuple[int, int] | None:
    """As ``TrimState.ranks`` has them for one source."""
    settings, total = tensor.settings, tensor.num_elements
    density = settings.per_source("density")[source]
    if density >= 1:
        return None
    num_kept = math.floor(density * total)
    if name == "ties":
        return max(num_kept, int(density > 0)), 0
    outliers = math.floor(settings.per_source("gamma")[source] * total)
    upper = min(num_kept + outliers, total)
    return upper, upper - num_kept


def _weights(cut: reference.RankThreshold, magnitudes: reference.Floats) -> reference.Floats:
    """1 above a cut, and the share that counts at it."""
    return np.where(magnitudes == cut.threshold, cut.limit / reference.NUMBERS, magnitudes > cut.threshold)
