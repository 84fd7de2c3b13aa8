"""Counting the bit patterns of magnitudes, for ``raymerge.methods.selection``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.jit import compiled, inlined

RUN = 1024
"""Elements that are in work at once, in arrays that the first-level cache holds."""

# Numbers of 32 bits throughout: 16 of them are compared at once.
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
# Times a number whose only 1 is the lowest bit of a byte, this has the byte's number at the top.
_PLACES, _TOP, _ONE = np.uint64(0x0001_0203_0405_0607), np.uint64(56), np.uint64(1)


@compiled
def count(
    patterns: NDArray[np.uint32], low: np.uint32, high: np.uint32, shift: np.uint32, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """Count the magnitudes from ``low`` on and below ``high``, each in bin ``(magnitude - low) >> shift``.

    Few of them are expected to lie there, so finding those is a step of its own, many at once.

    Args:
        patterns: bits of float32 numbers ``[n]``, the sign among them.
        low: first pattern of the bracket.
        high: first pattern above it.
        shift: binary logarithm of how many patterns share a bin.
        counts: int64, one for each bin, added to.

    Returns:
        how many are not below ``high``, and all distances of those inside from ``low``, or-ed.
    """
    width, above, bits = np.uint32(high - low), 0, 0
    flags, found = np.zeros(RUN, np.uint8), np.empty(RUN, np.int64)
    for begin in range(0, patterns.size, RUN):
        run = patterns[begin : begin + RUN]
        flags[run.size :] = 0
        over = np.uint32(0)
        for i in range(run.size):
            magnitude = run[i] & _MAGNITUDE
            flags[i] = np.uint32(magnitude - low) < width
            over = np.uint32(over + np.uint32(magnitude >= high))
        above += int(over)
        for place in found[: places(flags, found)]:
            distance = np.uint32((run[place] & _MAGNITUDE) - low)
            counts[distance >> shift] += 1
            bits |= int(distance)
    return above, bits


@compiled
def count_all(patterns: NDArray[np.uint32], shift: np.uint32, counts: NDArray[np.int64]) -> int:
    """Count every magnitude in the bin ``magnitude >> shift``, and return all of them or-ed."""
    bits = 0
    for pattern in patterns:
        magnitude = np.uint32(pattern & _MAGNITUDE)
        counts[magnitude >> shift] += 1
        bits |= int(magnitude)
    return bits


@inlined
def places(flags: NDArray[np.uint8], found: NDArray[np.int64]) -> int:
    """Write the places of the flags that are 1 into ``found``, in order, and return how many there are.

    Eight at a time, and without a branch, those are put aside that are not all 0; most are, and what is left
    has one place as a rule.

    Args:
        flags: 0 or 1, ``[RUN]``.
        found: ``[RUN]``, overwritten.
    """
    eights, candidates = flags.view(np.uint64), np.empty(RUN // 8, np.int64)
    num_candidates = 0
    for i in range(eights.size):
        candidates[num_candidates] = i
        num_candidates += eights[i] != 0
    num_found = 0
    for i in candidates[:num_candidates]:
        eight = eights[i]
        while eight:
            lowest = eight & (~eight + _ONE)
            found[num_found] = 8 * i + np.int64((lowest * _PLACES) >> _TOP)
            num_found += 1
            eight ^= lowest
    return num_found


@compiled
def bin_of_rank(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin that holds the ``rank``-th largest, and how many lie in higher bins; -1 where counts end."""
    above = 0
    for end in range(counts.size, 0, -RUN):
        begin = max(0, end - RUN)
        run = counts[begin:end].sum()
        if above + run >= rank:
            for i in range(end - 1, begin - 1, -1):
                above += counts[i]
                if above >= rank:
                    return i, above - counts[i]
        above += run
    return -1, above


@compiled
def count_runs(patterns: NDArray[np.uint32], low: np.uint32, counts: NDArray[np.int64]) -> None:
    """Write how many magnitudes of each run are not below ``low``; as many equal runs as there are counts."""
    length = patterns.size // counts.size
    for run in range(counts.size):
        over = np.uint32(0)
        for pattern in patterns[run * length : (run + 1) * length]:
            over = np.uint32(over + np.uint32(np.uint32(pattern & _MAGNITUDE) >= low))
        counts[run] = over


@compiled
def spread(deltas: NDArray[np.float32], stride: int, num_sources: int, out: NDArray[np.float32]) -> int:
    """Write how far the deltas of each element lie apart, the root of the sum of their squared distances from
    their mean, and return of how many elements it is not 0.

    Args:
        deltas: row ``s`` from ``s * stride`` on.
        stride: elements from one row to the next.
        num_sources: rows.
        out: ``[n]``.
    """
    totals, squares, differing = np.empty(RUN), np.empty(RUN), 0
    share = 1.0 / num_sources
    for begin in range(0, out.size, RUN):
        size = min(RUN, out.size - begin)
        totals[:] = 0.0
        squares[:] = 0.0
        for source in range(num_sources):
            row = deltas[source * stride + begin : source * stride + begin + size]
            for i in range(size):
                totals[i] += row[i]
        for source in range(num_sources):
            row = deltas[source * stride + begin : source * stride + begin + size]
            for i in range(size):
                distance = num_sources * np.float64(row[i]) - totals[i]
                squares[i] += distance * distance
        nonzero = 0
        for i in range(size):
            deviation = np.float32(np.sqrt(squares[i]) * share)
            out[begin + i] = deviation
            nonzero += deviation != 0
        differing += nonzero
    return differing
