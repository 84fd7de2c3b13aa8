"""The elements of largest magnitude of a whole tensor, found exactly from passes over its tiles."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.kernel import Stored
from raymerge.methods.method import SAMPLE_RUNS
from raymerge.methods.reduce import PIECE, PieceSums, bring_to_host

_LONGEST_COUNT = 1 << 20
_MAGNITUDE_BITS = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_OUTSIDE = 1 << 12
_ALL, _KEPT = range(2)
_END = 1 << 31
_MOST_BINS = 1 << 19
# Of which the magnitudes are in memory at once, as they are added up.
_SUMMED_BINS = 1 << 14
# So many are few; and of the bits that a sample leaves unused, how many are not trusted to be so everywhere.
_FEW_BINS, _SURE_BITS = 1 << 15, 3
# Of the first count where nothing is known, and of the count of a sample.
_COARSE_SHIFT = 15
# Standard errors from the estimate to the ends of a bracket, and elements of the sample beyond them.
_ERRORS, _RESERVE = 3.0, 8.0

HISTOGRAM_BYTES = _MOST_BINS * 8
"""Largest memory of a selection while it counts."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """Float32 magnitude patterns that are counted one by one, or several to a bin."""

    low: int
    high: int
    """The first pattern above."""
    shift: int
    """Binary logarithm of the patterns per bin."""

    @property
    def num_bins(self) -> int:
        return -((self.low - self.high) >> self.shift)


_WHOLE = Bracket(0, _END, _COARSE_SHIFT)
_NOWHERE = Bracket(_END, _END, 0)


class Sample:
    """Magnitudes of a sample of a tensor, which predict the magnitude at a rank."""

    def __init__(self, values: torch.Tensor) -> None:
        """float32 ``[n]`` on the CPU, SAMPLE_RUNS runs."""
        array = values.numpy()
        self._patterns = array.view(np.uint32)
        self._counts = np.zeros(_END >> _COARSE_SHIFT, np.int64)
        bits = loops.selection.count_all(array, array, np.uint32(_COARSE_SHIFT), self._counts)
        self._unused = _COARSE_SHIFT if bits == 0 else min(_COARSE_SHIFT, (bits & -bits).bit_length() - 1)

    def bracket(self, share: float) -> Bracket:
        """Where to look for the magnitude that a share (0 to 1) of all elements reach.

        The share's standard error comes from how much the runs of the sample differ, since neighbours in a
        tensor are alike. Where one pattern to a bin takes too many bins, they are wider; harmless while the
        patterns leave those low bits unused, as differences of 16-bit numbers do."""
        size = self._patterns.size
        middle = self._bin_of(max(1.0, share * size))
        margin = _ERRORS * self._standard_error(share, middle) * size + _RESERVE
        top = self._bin_of(share * size - margin) + 1
        bottom = max(0, self._bin_of(share * size + margin))
        low, high = bottom << _COARSE_SHIFT, top << _COARSE_SHIFT
        return _affordable(low, high, middle << _COARSE_SHIFT, self._unused)

    def _bin_of(self, rank: float) -> int:
        return (
            loops.selection.bin_of_rank(self._counts, math.ceil(rank))[0]
            if rank >= 1
            else self._counts.size - 1
        )

    def _standard_error(self, share: float, middle: int) -> float:
        """Standard error of the share of elements that reach bin ``middle``."""
        reaching = (self._patterns & _MAGNITUDE_BITS) >= max(0, middle) << _COARSE_SHIFT
        runs = reaching.reshape(SAMPLE_RUNS, -1).mean(axis=1)
        among_runs = float(runs.std()) / math.sqrt(SAMPLE_RUNS)
        return max(among_runs, math.sqrt(share * (1.0 - share) / self._patterns.size))


class MagnitudeSelection:
    """The ``rank``-th largest magnitude of a float32 tensor, exactly, usually from one pass over its tiles.

    The bit pattern of a float32 without its sign orders like its magnitude. A pass counts the patterns above
    a bracket, and each within it. The bracket comes from a sample; if it misses the rank, or its bins are too
    coarse, the next pass counts within what is left, and at most one more within a single bin of that. A
    sample, tiling or threads change neither threshold nor share, since counts are integers.

    But sums come in two parts, above the last bracket and within it, so the last bit of ``sum_kept`` may
    depend on the sample. The caller decides by the tensor alone, not by its tiles, whether there is a sample
    and which elements are in it.

    NaN and infinity are the largest magnitudes. With rank 0 the threshold is infinite. ``with_sums`` adds up
    all magnitudes and the ``rank`` largest. Rank None must be set by ``choose_rank``."""

    def __init__(self, rank: int | None, *, with_sums: bool = False) -> None:
        self._rank = rank
        self._with_sums = with_sums
        self._num_passes = 0
        self._bracket: Bracket | None = None if rank == 0 else _WHOLE
        self._counts: torch.Tensor | None = None
        self._on_gpu: TorchCounts | None = None
        self._above = 0
        self._sums = PieceSums(2)
        """Of all magnitudes, and of the largest."""
        self.threshold = math.inf
        """Valid, like all that follow, after the last pass."""
        self.tied_share = 1.0
        """Share of the elements at the threshold that belong to the ``rank`` largest."""

    @property
    def sum_all(self) -> float:
        return float(self._sums.totals[_ALL])

    @property
    def sum_kept(self) -> float:
        return float(self._sums.totals[_KEPT])

    def choose_rank(self, rank: int) -> None:
        """Once, before the first pass is concluded."""
        self._rank = rank

    def expect(self, sample: Sample, share: float) -> None:
        """Choose where to count, before the first pass, if the rank is about a ``share`` of the elements."""
        if self._bracket is not None:
            self.look_within(sample.bracket(share))

    def look_within(self, bracket: Bracket | None) -> None:
        """Restart counting there in the next pass; None for no more passes."""
        self._bracket, self._counts, self._on_gpu = bracket, None, None
        self._above = 0

    def observe(self, values: torch.Tensor) -> None:
        bracket = self._bracket
        if bracket is None:
            return
        if values.is_cpu:
            self._above += _count_compiled(values, bracket, self._scratch(bracket))
        else:
            self._on_gpu = self._on_gpu or TorchCounts(bracket, values.device)
            self._on_gpu.add(values)
        if self._with_sums:
            self._add(values.abs(), bracket)

    @classmethod
    def observe_delta(cls, selections: Sequence[MagnitudeSelection], stored: Stored, source: int) -> None:
        """``observe`` one source's delta, for one or two selections."""
        base, own, places = stored.input(0), stored.input(1 + source), stored.places[[0, 1 + source]]
        # As many as there are selections, also of those that have ended: the loop is compiled for a number.
        brackets = [_NOWHERE if each._bracket is None else each._bracket for each in selections]
        for index, (each, bracket) in enumerate(zip(selections, brackets, strict=True)):
            if bracket == _WHOLE:
                every, shift = each._scratch(bracket).numpy(), np.uint32(bracket.shift)
                loops.selection.count_all(own, base, shift, every)
                brackets[index] = _NOWHERE
        if any(bracket != _NOWHERE for bracket in brackets):
            counts = tuple(each._scratch(at).numpy() for each, at in zip(selections, brackets, strict=True))
            above = np.zeros(len(selections), np.int64)
            loops.selection.count(own, base, tuple(map(_bins, brackets)), counts, above)
            for each, more in zip(selections, above.tolist(), strict=True):
                each._above += more
        cls._add_delta([each for each in selections if each._with_sums], stored, places)

    def observe_deviations(self, stored: Stored) -> int:
        """``observe`` the deviation of each element's deltas; returns in how many elements they differ."""
        bracket = self._bracket
        if bracket is None:
            return 0
        room = self._scratch(bracket).numpy()
        above, num_differing = loops.deviations.count_deviations(
            stored.words, stored.places, stored.count, _bins(bracket), room
        )
        self._above += above
        return num_differing

    def _scratch(self, bracket: Bracket) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros(bracket.num_bins, dtype=torch.int64)
        return self._counts

    def _add(self, magnitudes: torch.Tensor, bracket: Bracket) -> None:
        if self._num_passes == 0:
            self._sums.add_values(_ALL, magnitudes)
        self._sums.add_values(_KEPT, torch.threshold_(magnitudes, _largest(bracket), 0.0))

    @classmethod
    def _add_delta(
        cls, selections: Sequence[MagnitudeSelection], stored: Stored, places: NDArray[np.int64]
    ) -> None:
        """As ``observe_delta``; ``places`` are those of base and source."""
        counting = [(each, each._bracket) for each in selections if each._bracket is not None]
        if not counting:
            return
        # All magnitudes are added in the first pass alone, and once for all selections.
        first, is_first = counting[0][0], counting[0][0]._num_passes == 0
        ends = [_largest(bracket) for _, bracket in counting] + [-1.0] * is_first
        totals = np.array([each.sum_kept for each, _ in counting] + [first.sum_all] * is_first)
        loops.deviations.add_delta(stored.words, places, stored.count, np.array(ends, np.float32), totals)
        for (each, _), total in zip(counting, totals.tolist(), strict=False):
            each._sums.totals[_KEPT] = total
            if is_first:
                each._sums.totals[_ALL] = totals[-1]

    @classmethod
    def fetch(cls, selections: Sequence[MagnitudeSelection], *others: list[torch.Tensor]) -> None:
        """Bring to the host what a pass has left on a GPU, and what ``others`` have there, in one go."""
        counts = [[] if each._on_gpu is None else [each._on_gpu.result()] for each in selections]
        bring_to_host(*others, *counts, *(each._sums.pending for each in selections))
        for each, brought in zip(selections, counts, strict=True):
            if brought:
                each._above, each._counts, each._on_gpu = int(brought[0][0]), brought[0][1:], None

    def conclude(self) -> bool:
        self.fetch([self])
        self._num_passes += 1
        bracket, counts = self._bracket, self._counts
        if bracket is None or counts is None or not self._rank:
            self.look_within(None)
            return False
        self.look_within(self._left(bracket, counts.numpy(), self._rank))
        if self._bracket is not None:
            self._sums.totals[_KEPT] = 0.0
        return self._bracket is not None

    def _left(self, bracket: Bracket, counts: NDArray[np.int64], rank: int) -> Bracket | None:
        """Where the threshold must still be looked for; None when it is found."""
        if rank <= self._above:
            return _finest(bracket.high, _END)
        place, higher = loops.selection.bin_of_rank(counts, rank - self._above)
        if place < 0:
            return _finest(0, bracket.low)
        low = bracket.low + (place << bracket.shift)
        # Sums are made of all that is kept, so there the bins above tell what they count as well.
        if np.any(counts[place : None if self._with_sums else place + 1] & loops.selection.MIXED):
            return _finest(low, min(low + (1 << bracket.shift), bracket.high))
        tied = rank - self._above - higher
        self.threshold = _float_of(low)
        self.tied_share = tied / int(counts[place])
        if self._with_sums:
            self._add_counted(counts, bracket, place, tied)
        return None

    def _add_counted(self, counts: NDArray[np.int64], bracket: Bracket, place: int, tied: int) -> None:
        """Add the kept magnitudes within the bracket, by their counts."""
        counts[place] = tied
        rest = torch.empty(0, dtype=torch.float64)
        for begin in range(place, counts.size, _SUMMED_BINS):
            run = counts[begin : begin + _SUMMED_BINS]
            bins = np.flatnonzero(run)
            patterns = torch.from_numpy((((begin + bins) << bracket.shift) + bracket.low).astype(np.int32))
            sums = patterns.view(torch.float32).double().mul_(torch.from_numpy(run[bins]))
            rest = torch.cat([rest, sums])
            # Whole pieces, so that where a run of bins ends is not seen in the sum.
            whole = rest.numel() // PIECE * PIECE
            self._sums.add_values(_KEPT, rest[:whole])
            rest = rest[whole:]
        self._sums.add_values(_KEPT, rest)


def _finest(low: int, high: int) -> Bracket:
    """The bracket with bins as fine as their largest number allows."""
    shift = 0
    while (high - low - 1) >> shift >= _MOST_BINS:
        shift += 1
    return Bracket(low, high, shift)


def _count_compiled(values: torch.Tensor, bracket: Bracket, counts: torch.Tensor) -> int:
    array, above = values.numpy(), np.zeros(1, np.int64)
    if bracket == _WHOLE:
        loops.selection.count_all(array, array, np.uint32(bracket.shift), counts.numpy())
    else:
        loops.selection.count(array, array, (_bins(bracket),), (counts.numpy(),), above)
    return int(above[0])


def _bins(bracket: Bracket) -> loops.selection.Bins:
    return loops.selection.Bins(np.uint32(bracket.low), np.uint32(bracket.high), np.uint32(bracket.shift))


def _largest(bracket: Bracket) -> float:
    return _float_of(min(bracket.high - 1, _INFINITY))


class TorchCounts:
    """Counts of a bracket's bins, made without waiting for a GPU."""

    def __init__(self, bracket: Bracket, device: torch.device) -> None:
        self._bracket = bracket
        size = bracket.num_bins + 2 * _OUTSIDE
        self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._mixed = torch.zeros(size, dtype=torch.bool, device=device)

    def add(self, values: torch.Tensor) -> None:
        """Count the magnitudes of float32 ``[n]``."""
        low, shift, num_bins = self._bracket.low, self._bracket.shift, self._bracket.num_bins
        one, last = torch.ones(1, dtype=torch.int64, device=values.device), self._bracket.high - low - 1
        for begin in range(0, values.numel(), _LONGEST_COUNT):
            distances = (values[begin : begin + _LONGEST_COUNT].view(torch.int32) & _MAGNITUDE_BITS).sub_(low)
            # To be spread out, since additions to one place go one after the other.
            outside = torch.arange(distances.numel(), device=values.device) % _OUTSIDE + num_bins
            bins = torch.where(distances < 0, outside + _OUTSIDE, distances >> shift)
            bins = torch.where(distances > last, outside, bins)
            self._counts.scatter_add_(0, bins, one.expand_as(bins))
            if shift:
                is_mixed = (distances & ((1 << shift) - 1)) != 0
                self._mixed.scatter_(0, torch.where(is_mixed, bins, outside), True)

    def result(self) -> torch.Tensor:
        """How many lie above the bracket, and the count of each bin: int64 ``[1 + bins]``."""
        num_bins = self._bracket.num_bins
        above = self._counts[num_bins : num_bins + _OUTSIDE].sum()
        mixed = self._mixed[:num_bins].long().mul_(loops.selection.MIXED)
        return torch.cat([above.view(1), mixed.bitwise_or_(self._counts[:num_bins])])


def _affordable(low: int, high: int, middle: int, unused: int) -> Bracket:
    """The bracket from ``low`` to ``high``, or its inner part.

    Where bins would last for a quarter of it (three quarters of a standard error to each side), missing the
    threshold costs two more passes in nearly every second tensor; wider bins would cost one more in each.
    Where unused bits allow it there are few bins: fresh memory takes longer than counting a small tensor."""
    most = _MOST_BINS << unused
    if most < high - low <= 4 * most:
        low = max(low, min(middle - most // 2, high - most))
        high = low + most
    bracket = _finest(low, high)
    while bracket.shift < unused - _SURE_BITS and bracket.num_bins > _FEW_BINS:
        bracket = Bracket(low, high, bracket.shift + 1)
    return bracket


def _float_of(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])
