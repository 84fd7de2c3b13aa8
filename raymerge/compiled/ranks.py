"""Rows thinned by the rank of each element's magnitude, for DELLA.

Ranks need a sort, and this one takes a few nanoseconds an element: a map from magnitude to bucket that fits
most rows spreads them to about one for every two buckets, and insertion puts right what shares a bucket.
Where the map does not fit, and that costs more than it should, the row is sorted digit by digit instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.jit import compiled

# Magnitudes are ordered as the bits of their float32, without the sign. All NaN are equal, above infinity.
_MAGNITUDE, _NAN = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0001)
# A place to sort holds a magnitude above its index, so that no two are equal.
_INDEX, _32 = np.uint64(0xFFFF_FFFF), np.uint64(32)
_DIGIT_BITS, _DIGIT = 8, np.uint64(0xFF)
_LANES = 32
# As many buckets as a float32 below 1 tells apart.
_MOST_BUCKETS = 1 << 24
_LARGEST_MEAN = 1e30
# Twice over all that a row whose elements are spread evenly takes, many times over.
_MOVES_PER_ELEMENT = 2


@compiled
def thin_rows(delta: NDArray[np.float32], ranks: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write a factor by each element's rank in its row where the element is kept, and 0 elsewhere.

    Ranks are from 0 for the smallest magnitude; of equal ones the first is smaller, and NaN is the largest.

    Args:
        delta: ``[n]``, whole rows, each of fewer than 2**32 elements.
        ranks: ``[row length]``; in the upper half the largest number with which the element of that rank is
            kept, in the lower one the bits of its factor.
        out: ``[n]``; as int32, the elements' numbers. Overwritten.
    """
    length, numbers = ranks.size, out.view(np.int32)
    places, spare = np.empty(length, np.uint64), np.empty(length, np.uint64)
    counts = np.empty(min(2 * length, _MOST_BUCKETS) + 1, np.uint32)
    for first in range(0, out.size, length):
        row, own = delta[first : first + length], numbers[first : first + length]
        if not _sort_by_buckets(row, places, spare.view(np.uint32)[:length], counts):
            _sort_by_digits(row, places, spare)
        for rank in range(length):
            index, entry = np.int64(places[rank] & _INDEX), ranks[rank]
            # One read of both, before the comparison, leaves no branch to guess wrongly half of the time.
            own[index] = np.int32(entry) if np.int64(own[index]) <= entry >> 32 else np.int32(0)


@compiled
def _sort_by_buckets(
    row: NDArray[np.float32],
    places: NDArray[np.uint64],
    buckets: NDArray[np.uint32],
    counts: NDArray[np.uint32],
) -> bool:
    """Fill ``places`` in order of magnitude; False, and no order, where that takes too many steps."""
    mean = _mean_magnitude(row)
    if not 0 < mean < _LARGEST_MEAN:
        return False
    # 1 - mean / (magnitude + mean) rises from 0 to 1, also as rounded, and is about even in most rows.
    scale = np.float32(counts.size - 1)
    for index in range(row.size):
        share = np.float32(1) - mean / (np.abs(row[index]) + mean)
        buckets[index] = np.int32(share * scale)
    _count(buckets, counts)
    for index in range(row.size):
        bucket = buckets[index]
        places[counts[bucket]] = _place(row, index)
        counts[bucket] += np.uint32(1)
    return _insert(places, _MOVES_PER_ELEMENT * row.size)


@compiled
def _mean_magnitude(row: NDArray[np.float32]) -> np.float32:
    """The mean, but for rounding; in lanes, so that several elements are added at once."""
    lanes = np.zeros(_LANES, np.float32)
    whole = row.size - row.size % _LANES
    for first in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] += np.abs(row[first + lane])
    total = np.float32(0)
    for lane in range(_LANES):
        total += lanes[lane]
    for index in range(whole, row.size):
        total += np.abs(row[index])
    return np.float32(total / np.float32(row.size))


@compiled
def _count(buckets: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Write where each bucket's elements begin when all lie in order of buckets."""
    counts[:] = 0
    for index in range(buckets.size):
        counts[buckets[index]] += np.uint32(1)
    _sum_up(counts)


@compiled
def _sum_up(counts: NDArray[np.uint32]) -> None:
    """Overwrite each count by the sum of those before it."""
    total = np.uint32(0)
    for bucket in range(counts.size):
        count = counts[bucket]
        counts[bucket] = total
        total += count


@compiled
def _place(row: NDArray[np.float32], index: int) -> np.uint64:
    """An element's magnitude and index as one number."""
    magnitude = min(row.view(np.uint32)[index] & _MAGNITUDE, _NAN)
    return (np.uint64(magnitude) << _32) | np.uint64(index)


@compiled
def _insert(places: NDArray[np.uint64], most_moves: int) -> bool:
    """Sort what is nearly in order by insertion; give up, after more moves than that, with False.

    Neighbours that must change places do so without a branch, which chance would make a bad guess: the
    largest so far is carried along. Only what must go further down is moved step by step.
    """
    carried, moves = places[0], 0
    for index in range(1, places.size):
        place = places[index]
        low, carried = min(carried, place), max(carried, place)
        places[index - 1] = low
        if index > 1 and places[index - 2] > low:
            gap = _make_room(places, index - 1, low)
            places[gap] = low
            moves += index - 1 - gap
            if moves > most_moves:
                return False
    places[-1] = carried
    return True


@compiled
def _make_room(places: NDArray[np.uint64], gap: int, place: np.uint64) -> int:
    """Move what is larger than ``place`` up by one, from below ``gap`` on; where the gap then is."""
    while gap > 0 and places[gap - 1] > place:
        places[gap] = places[gap - 1]
        gap -= 1
    return gap


@compiled
def _sort_by_digits(row: NDArray[np.float32], places: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """Fill ``places`` in order of magnitude; in time that no row makes longer than a few passes over it."""
    for index in range(row.size):
        places[index] = _place(row, index)
    counts = np.empty(1 << _DIGIT_BITS, np.uint32)
    # An even number of rounds ends where it began.
    for shift in (32, 40, 48, 56):
        counts[:] = 0
        for index in range(row.size):
            counts[(places[index] >> np.uint64(shift)) & _DIGIT] += np.uint32(1)
        _sum_up(counts)
        for index in range(row.size):
            digit = (places[index] >> np.uint64(shift)) & _DIGIT
            spare[counts[digit]] = places[index]
            counts[digit] += np.uint32(1)
        places, spare = spare, places
