"""Rows sparsified by the rank of each element's magnitude, for DELLA.

Differences of 16-bit numbers have few magnitudes, a few hundred in a row of thousands, so counting gives
their ranks. Other rows need a sort: a map from magnitude to bucket that fits most rows leaves about one
element for every two buckets, and insertion sort finishes. Where that costs too many moves, radix sort."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.selection import RUN, Finder, make_finder, places

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

# A level holds the magnitudes that differ in no more than these bits, and counting knows the levels of the 16
# octaves below the largest magnitude. Each has two buckets: the first for the one magnitude that has none of
# those bits, the second for the others, which are few and need an order of their own.
_LOST, _LOST_BITS = np.uint32(16), np.uint32(0xFFFF)
_TOP_LEVEL = np.uint32(2047)
# Bucket b lies at (b % _STEPS) * _SPANS + b // _STEPS, so that spans of them are added up side by side.
_STEPS, _SPANS, _STEP_BITS, _SPAN_BITS = 16, 256, np.uint32(4), np.uint32(8)
# That bit of where it lies tells a second bucket.
_OTHER = np.uint16(_SPANS)
# Rows whose places 16 bits tell, and that are worth the counts of all buckets.
_SHORTEST, _LONGEST = 1024, 1 << 16
_MOST_OTHERS = 8


class Counted(NamedTuple):
    """Buffers for counted rows, most of them shared with the sort."""

    buckets: NDArray[np.uint16]
    """Each element's bucket."""
    counts: NDArray[np.uint16]
    """Elements in each bucket, then in all before its next one."""
    others: NDArray[np.uint32]
    """Indices of elements that share a level with other magnitudes."""
    ranks: NDArray[np.uint32]
    """Their ranks among themselves."""
    numbers: NDArray[np.int32]
    places: NDArray[np.uint64]
    """Those elements by rank, 0 for none."""
    finder: Finder


@compiled
def sparsify_rows(delta: NDArray[np.float32], ranks: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the factor of each element's rank in its row where the element is kept, and 0 elsewhere.

    Ranks are from 0 for the smallest magnitude; ties by index, and NaN is the largest. ``delta`` ``[n]`` is
    whole rows, each of fewer than 2**32 elements. ``ranks`` ``[row length]`` has in the upper half the
    largest number with which the element of that rank is kept, in the lower one the bits of its factor.
    ``out`` ``[n]`` has, as int32, the elements' numbers, which are overwritten."""
    length, numbers = ranks.size, out.view(np.int32)
    order, spare = np.zeros(length, np.uint64), np.empty(length, np.uint64)
    counts = np.empty(min(2 * length, _MOST_BUCKETS) + 1, np.uint32)
    counted, is_counted = _make_counted(order, spare, counts), _SHORTEST <= length < _LONGEST
    for first in range(0, out.size, length):
        row, own = delta[first : first + length], numbers[first : first + length]
        # A row that has many magnitudes is seldom followed by one that has few.
        is_counted = is_counted and _sparsify_by_counts(row, ranks, own, counted)
        if is_counted:
            continue
        if not _sort_by_buckets(row, order, spare.view(np.uint32)[:length], counts):
            _sort_by_digits(row, order, spare)
        for rank in range(length):
            index = np.int64(order[rank] & _INDEX)
            own[index] = _factor_of(own[index], ranks[rank])


@inlined
def _factor_of(number: np.int32, entry: np.int64) -> np.int32:
    """An element's factor by its number and its rank's entry. All is read before the comparison, which so
    compiles without an unpredictable branch."""
    return np.int32(entry) if np.int64(number) <= entry >> 32 else np.int32(0)


@inlined
def _make_counted(
    order: NDArray[np.uint64], spare: NDArray[np.uint64], counts: NDArray[np.uint32]
) -> Counted:
    """Once a row is sorted, no further one is counted; ``order`` is all 0."""
    length, most = order.size, order.size // _MOST_OTHERS
    return Counted(
        buckets=counts.view(np.uint16)[:length],
        counts=np.empty((1 + _STEPS) * _SPANS, np.uint16),
        others=counts[length : length + most],
        ranks=counts[length + most : length + 2 * most],
        numbers=spare.view(np.int32)[:length],
        places=order,
        finder=make_finder(),
    )


@compiled
def _sparsify_by_counts(
    row: NDArray[np.float32], ranks: NDArray[np.int64], own: NDArray[np.int32], scratch: Counted
) -> bool:
    """Overwrite the numbers of a row by factors; False, and nothing done, where it has many magnitudes."""
    buckets, counts = scratch.buckets, scratch.counts
    if _write_buckets(row, buckets) * _MOST_OTHERS > row.size:
        return False
    counts[:] = 0
    following = counts[_SPANS:]
    for bucket in buckets:
        following[bucket] += np.uint16(1)
    num_others, crowd = _list_others(buckets, scratch.others, scratch.finder), 0
    for index in scratch.others[:num_others]:
        crowd += following[buckets[index]]
    if crowd > _MOVES_PER_ELEMENT * row.size:
        return False
    _add_up(counts)
    _order_others(row, own, scratch, num_others)
    for index in range(row.size):
        bucket = buckets[index]
        rank = counts[bucket]
        counts[bucket] = rank + np.uint16(1)
        own[index] = _factor_of(own[index], ranks[rank])
    for rank in scratch.ranks[:num_others]:
        index = np.int64(scratch.places[rank] & _INDEX)
        own[index] = _factor_of(scratch.numbers[index], ranks[rank])
        scratch.places[rank] = 0
    return True


@compiled
def _write_buckets(row: NDArray[np.float32], buckets: NDArray[np.uint16]) -> int:
    """Write each element's bucket; returns how many share their level."""
    patterns, top, others = row.view(np.uint32), np.uint32(0), np.uint32(0)
    for index in range(patterns.size):
        magnitude = np.uint32(patterns[index] & _MAGNITUDE)
        top = max(top, magnitude)
    top = np.uint32(min(top, _NAN) >> _LOST)
    low = np.uint32((max(top, _TOP_LEVEL) - _TOP_LEVEL) << _LOST)
    for index in range(patterns.size):
        magnitude = min(np.uint32(patterns[index] & _MAGNITUDE), _NAN)
        # What is below all levels, but 0, counts as one of several magnitudes of the lowest.
        below = np.uint32(1) if magnitude != np.uint32(0) else np.uint32(0)
        distance = np.uint32(magnitude - low) if magnitude > low else below
        other = np.uint32(1) if distance & _LOST_BITS else np.uint32(0)
        others = np.uint32(others + other)
        bucket = np.uint32(np.uint32(distance >> _LOST << np.uint32(1)) | other)
        step = np.uint32(np.uint32(bucket & np.uint32(_STEPS - 1)) << _SPAN_BITS)
        buckets[index] = np.uint16(step | np.uint32(bucket >> _STEP_BITS))
    return int(others)


@inlined
def _list_others(buckets: NDArray[np.uint16], others: NDArray[np.uint32], finder: Finder) -> int:
    """Write the indices of elements in the second bucket of a level, in no order; returns how many."""
    num_others = 0
    for begin in range(0, buckets.size, RUN):
        run = buckets[begin : begin + RUN]
        for index in range(run.size):
            finder.flags[index] = (run[index] & _OTHER) != np.uint16(0)
        finder.flags[run.size :] = 0
        for place in finder.found[: places(finder)]:
            others[num_others] = begin + place
            num_others += 1
    return num_others


@inlined
def _add_up(counts: NDArray[np.uint16]) -> None:
    """Turn bucket counts, each one place further on, into the number of elements before each bucket."""
    for begin in range(_SPANS, counts.size - _SPANS, _SPANS):
        counted, following = counts[begin : begin + _SPANS], counts[begin + _SPANS : begin + 2 * _SPANS]
        for span in range(_SPANS):
            following[span] += counted[span]
    spans, before = counts[counts.size - _SPANS :], 0
    for span in range(_SPANS):
        count = spans[span]
        spans[span] = before
        before += count
    for begin in range(0, counts.size - _SPANS, _SPANS):
        counted = counts[begin : begin + _SPANS]
        for span in range(_SPANS):
            counted[span] += spans[span]


@inlined
def _order_others(
    row: NDArray[np.float32], own: NDArray[np.int32], scratch: Counted, num_others: int
) -> None:
    """Find the ranks of elements that share a bucket with other magnitudes, and save their numbers."""
    counts, places = scratch.counts, scratch.places
    for number in range(num_others):
        index = scratch.others[number]
        bucket, place = scratch.buckets[index], _place(row, index)
        rank = counts[bucket]
        counts[bucket] = rank + np.uint16(1)
        places[_open_gap(places, rank, place)] = place
        scratch.ranks[number], scratch.numbers[index] = rank, own[index]
    for index in scratch.others[:num_others]:
        counts[scratch.buckets[index]] -= np.uint16(1)


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
    """The mean but for rounding, in lanes to be vectorised."""
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
    """Write where each bucket's elements begin in bucket order."""
    counts[:] = 0
    for index in range(buckets.size):
        counts[buckets[index]] += np.uint32(1)
    _sum_up(counts)


@compiled
def _sum_up(counts: NDArray[np.uint32]) -> None:
    total = np.uint32(0)
    for bucket in range(counts.size):
        count = counts[bucket]
        counts[bucket] = total
        total += count


@inlined
def _place(row: NDArray[np.float32], index: int) -> np.uint64:
    """An element's magnitude and index as one number."""
    magnitude = min(row.view(np.uint32)[index] & _MAGNITUDE, _NAN)
    return (np.uint64(magnitude) << _32) | np.uint64(index)


@compiled
def _insert(places: NDArray[np.uint64], most_moves: int) -> bool:
    """Insertion sort of what is nearly sorted; False after more moves than ``most_moves``. Neighbours are
    swapped without a branch, which would be unpredictable: the largest so far is carried along."""
    carried, moves = places[0], 0
    for index in range(1, places.size):
        place = places[index]
        low, carried = min(carried, place), max(carried, place)
        places[index - 1] = low
        if index > 1 and places[index - 2] > low:
            gap = _open_gap(places, index - 1, low)
            places[gap] = low
            moves += index - 1 - gap
            if moves > most_moves:
                return False
    places[-1] = carried
    return True


@inlined
def _open_gap(places: NDArray[np.uint64], gap: int, place: np.uint64) -> int:
    """Move what is larger than ``place`` up by one, from below ``gap`` on; returns the new gap."""
    while gap > 0 and places[gap - 1] > place:
        places[gap] = places[gap - 1]
        gap -= 1
    return gap


@compiled
def _sort_by_digits(row: NDArray[np.float32], places: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """Fill ``places`` in order of magnitude, in a few passes whatever the row."""
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
