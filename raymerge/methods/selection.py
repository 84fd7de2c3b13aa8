"""The elements of largest magnitude of a whole tensor, found exactly from passes over its tiles."""

from __future__ import annotations

import struct

import torch

from raymerge.methods.reduce import add_values

_LONGEST_COUNT = 1 << 20
_MAGNITUDE_BITS = 0x7FFF_FFFF
_LOW_BITS = 15
_LOW_MASK = (1 << _LOW_BITS) - 1
_BINS = 1 << 16

HISTOGRAM_BYTES = _BINS * 8
"""Memory that a selection holds on to while it counts."""


class MagnitudeSelection:
    """The ``rank``-th largest magnitude of a float32 tensor, exactly, from two passes over its tiles.

    The bit pattern of a float32 without its sign orders like its magnitude. The first pass counts the
    upper 16 bits of all patterns and finds the bin of the wanted rank; the second counts the lower 15
    bits within that bin. Counts are integers, so that neither tiling nor threads can change the result.
    NaN and infinity are the largest magnitudes. With rank 0 the threshold is infinite.

    With ``with_sums`` the second pass also adds up all magnitudes and the ``rank`` largest. A rank that
    the first pass itself must find out is None until ``choose_rank``.
    """

    passes = 2

    def __init__(self, rank: int | None, device: torch.device, *, with_sums: bool = False) -> None:
        self._rank = rank
        self._counts = torch.zeros(0 if rank == 0 else _BINS, dtype=torch.int64, device=device)
        self._upper = 0
        self._with_sums = with_sums
        self.threshold = float("inf")
        """The rank-th largest magnitude; valid after the second pass."""
        self.tied_share = 1.0
        """Share of the elements at the threshold that belong to the ``rank`` largest; valid like it."""
        self.sum_all = 0.0
        """Sum of all magnitudes; valid after the second pass when sums were asked for."""
        self.sum_kept = 0.0
        """Sum of the ``rank`` largest magnitudes; valid like ``sum_all``."""

    def choose_rank(self, rank: int) -> None:
        """Set the rank; before the first pass is concluded, and once."""
        self._rank = rank

    def observe(self, values: torch.Tensor, pass_index: int) -> None:
        """Take in one tile, float32 ``[n]``."""
        if self._rank == 0:
            return
        for begin in range(0, values.numel(), _LONGEST_COUNT):
            patterns = values[begin : begin + _LONGEST_COUNT].view(torch.int32) & _MAGNITUDE_BITS
            self._count(patterns, pass_index)
        if pass_index == 1 and self._with_sums:
            self._add(values.abs())

    def _count(self, patterns: torch.Tensor, pass_index: int) -> None:
        """Count the patterns, which are overwritten."""
        if pass_index == 0:
            patterns.bitwise_right_shift_(_LOW_BITS)
        else:
            # Patterns of other bins go to the upper half of the counts, spread by their low bits as
            # well: one common bin would make every thread of a GPU wait for the same address.
            outside = (patterns >> _LOW_BITS) != self._upper
            patterns.bitwise_and_(_LOW_MASK).add_(outside, alpha=1 << _LOW_BITS)
        self._counts.add_(torch.bincount(patterns, minlength=_BINS))

    def _add(self, magnitudes: torch.Tensor) -> None:
        """Add to the sums; ``magnitudes`` is overwritten."""
        self.sum_all = add_values(self.sum_all, magnitudes)
        largest_of_bin = _float_of((self._upper << _LOW_BITS) | _LOW_MASK)
        self.sum_kept = add_values(self.sum_kept, torch.threshold_(magnitudes, largest_of_bin, 0.0))

    def conclude(self, pass_index: int) -> None:
        """End a pass."""
        if not self._rank:
            return
        counts = self._counts.cpu()
        if pass_index == 0:
            self._upper, above = _bin_of_rank(counts, self._rank)
            self._rank -= above
            self._counts.zero_()
            return
        counts = counts[: 1 << _LOW_BITS]
        lower, above = _bin_of_rank(counts, self._rank)
        self.threshold = _float_of((self._upper << _LOW_BITS) | lower)
        self.tied_share = (self._rank - above) / int(counts[lower])
        if self._with_sums:
            self._add_bin(counts, lower, tied=self._rank - above)

    def _add_bin(self, counts: torch.Tensor, lower: int, *, tied: int) -> None:
        """Add the kept magnitudes of the threshold's own bin: their counts give their sum."""
        patterns = torch.arange(lower, 1 << _LOW_BITS, dtype=torch.int32) + (self._upper << _LOW_BITS)
        magnitudes = patterns.view(torch.float32).double()
        kept = counts[lower:].clone()
        kept[0] = tied
        self.sum_kept = add_values(self.sum_kept, magnitudes * kept)


def _bin_of_rank(counts: torch.Tensor, rank: int) -> tuple[int, int]:
    """The bin holding the ``rank``-th largest, and how many lie in higher bins."""
    from_top = counts.flip(0).cumsum_(0)
    position = int(torch.searchsorted(from_top, rank))
    above = int(from_top[position - 1]) if position else 0
    return counts.numel() - 1 - position, above


def _float_of(pattern: int) -> float:
    """The float32 of a bit pattern."""
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])
