"""Reductions over whole tensors that give the same bits for every tiling, thread count and device.

A library sum adds in an order that depends on the number of threads, on the length and on the device.
Here the order is part of the definition: each piece of 16,384 elements is folded in halves by plain
float64 additions, and the pieces' sums are added one after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from raymerge.methods.method import BLOCK

PIECE = BLOCK // 4
"""Elements folded into one float64; it divides BLOCK, so that tiles never cut a piece."""

# A processor is fastest on what its cache holds, a GPU on what hides the launch of its operations.
_LONGEST_CPU_CHUNK = 1 << 17
_LONGEST_GPU_CHUNK = 1 << 22
_LONGEST_COUNT = 1 << 20
_MAGNITUDE_BITS = 0x7FFF_FFFF
_LOW_BITS = 15
_LOW_MASK = (1 << _LOW_BITS) - 1
_BINS = 1 << 16

HISTOGRAM_BYTES = _BINS * 8
"""Memory that a selection holds on to while it counts."""


def chunks(num_elements: int, device: torch.device) -> Iterator[slice]:
    """Runs of whole pieces covering ``[0, num_elements)``; their length changes no result."""
    length = chunk_length(num_elements, device)
    for begin in range(0, num_elements, length):
        yield slice(begin, min(begin + length, num_elements))


def chunk_length(num_elements: int, device: torch.device) -> int:
    """Elements that are in work at once, whole pieces.

    Two 8-byte temporaries of them take no more than one float32 tile of ``max(num_elements, BLOCK)``.
    """
    longest = _LONGEST_CPU_CHUNK if device.type == "cpu" else _LONGEST_GPU_CHUNK
    return max(PIECE, min(longest, num_elements // 4 // PIECE * PIECE))


def add_products(total: float, left: torch.Tensor, right: torch.Tensor) -> float:
    """``total`` plus the sum of ``left * right`` (float32 ``[n]`` each), in float64 and in piece order."""
    for chunk in chunks(left.numel(), left.device):
        products = _padded(left[chunk])
        if left is right:
            products.mul_(products)
        else:
            products[: chunk.stop - chunk.start].mul_(right[chunk])
        total = _add_pieces(total, products)
    return total


def add_values(total: float, values: torch.Tensor) -> float:
    """``total`` plus the sum of ``values`` (floating point ``[n]``), in float64 and in piece order."""
    for chunk in chunks(values.numel(), values.device):
        total = _add_pieces(total, _padded(values[chunk]))
    return total


def _padded(values: torch.Tensor) -> torch.Tensor:
    """float64 copy, filled up with zeros to whole pieces."""
    num_pieces = -(-values.numel() // PIECE)
    padded = torch.zeros(num_pieces * PIECE, dtype=torch.float64, device=values.device)
    padded[: values.numel()].copy_(values)
    return padded


def _add_pieces(total: float, values: torch.Tensor) -> float:
    """Fold each piece of ``values`` in place and add the folded sums to ``total`` in order."""
    for partial in folded(values.view(-1, PIECE), dim=1).tolist():
        total += partial
    return total


def folded(values: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Sums along a dimension that is not empty, folded in halves, so that all depends on its length alone.

    ``values`` is overwritten; of an odd number the one in the middle waits for the next round.
    """
    width = values.shape[dim]
    while width > 1:
        half = (width + 1) // 2
        values.narrow(dim, 0, width - half).add_(values.narrow(dim, half, width - half))
        width = half
    return values.select(dim, 0)


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
