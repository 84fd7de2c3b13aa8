"""The base plus a sum of thinned, weighted deltas, in one loop over cache-sized runs.

For ``raymerge.methods.task_arithmetic`` and ``raymerge.methods.trim``, which say what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.hashes import keep
from raymerge.compiled.jit import compiled, inlined
from raymerge.compiled.selection import RUN, places, spread


class Rows(NamedTuple):
    """Vectors of one length in one array, each contiguous."""

    flat: NDArray[np.float32]
    """Row ``s`` lies from ``s * stride`` on."""
    stride: int
    """Elements from one row to the next."""


class Sum(NamedTuple):
    """What is done with the terms of all sources, float32 throughout."""

    coefficients: NDArray[np.float32]
    """What each thinned delta is multiplied by to make its term, ``[N]``."""
    shares: NDArray[np.float32]
    """What each term that agrees is multiplied by once more, ``[N]``."""
    weights: NDArray[np.float32]
    """What each term that agrees adds to the divisor, ``[N]``."""
    factor: np.float32
    """Factor on the sum."""
    elects: bool
    """Whether terms must agree with the sign of their sum."""
    divides: bool
    """Whether the sum is divided by the weights that went in."""


class Cuts(NamedTuple):
    """Which elements are among the largest; two cuts for each source, of which the second takes away."""

    above: NDArray[np.float32]
    """Elements of larger magnitude are, ``[2N]``; of a second cut with a level, the number just below it."""
    tied: NDArray[np.float32]
    """Of those of this magnitude some are, ``[2N]``; NaN for none."""
    limits: NDArray[np.int64]
    """How many, as ``hashes.keep`` takes it, ``[2N]``."""
    words: NDArray[np.uint64]
    """The two words of the key that chooses them, ``[2N, 2]``."""


class _Room(NamedTuple):
    """Arrays of one run, made once in a call."""

    terms: NDArray[np.float32]
    """Of each source, ``[N, RUN]``."""
    votes: NDArray[np.float32]
    """Sum of the terms, ``[RUN]``."""
    merged: NDArray[np.float32]
    """Sum of the terms that agree with it, ``[RUN]``."""
    divisor: NDArray[np.float32]
    """Sum of their weights, ``[RUN]``."""
    flags: NDArray[np.uint8]
    """Where an element lies at the level of a cut, ``[RUN]``."""
    found: NDArray[np.int64]
    """Places of the flags, ``[RUN]``."""


@compiled
def make_room(num_sources: int) -> _Room:
    """Room for so many sources; the flags behind a short run are never set."""
    votes, merged, divisor = np.empty(RUN, np.float32), np.empty(RUN, np.float32), np.empty(RUN, np.float32)
    flags, found = np.zeros(RUN, np.uint8), np.empty(RUN, np.int64)
    return _Room(np.empty((num_sources, RUN), np.float32), votes, merged, divisor, flags, found)


@compiled
def merge_trimmed(
    base: NDArray[np.float32], deltas: Rows, cuts: Cuts, start: int, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write the merge of deltas that are cut by their own magnitudes; ``start`` is the first one's index."""
    num_sources = how.coefficients.size
    room = make_room(num_sources)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        room.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            _trim(delta, cuts, source, start + begin, how.coefficients[source], room)
        merge(base[begin:end], how, room, out[begin:end])


@compiled
def merge_factors(
    base: NDArray[np.float32], deltas: Rows, factors: Rows, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write the merge of deltas that are multiplied by factors element by element."""
    num_sources = how.coefficients.size
    room = make_room(num_sources)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        room.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            factor = factors.flat[source * factors.stride + begin : source * factors.stride + end]
            weigh(delta, factor, how.coefficients[source], room.terms[source], room.votes)
        merge(base[begin:end], how, room, out[begin:end])


@compiled
def merge_selected(
    base: NDArray[np.float32], deltas: Rows, cuts: Cuts, start: int, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write the merge of deltas that are all cut where they lie too close together, by the first cut."""
    num_sources = how.coefficients.size
    room, marks = make_room(num_sources), np.empty(RUN, np.float32)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        spread(deltas.flat[begin:], deltas.stride, num_sources, room.merged[: end - begin])
        _mark(room.merged[: end - begin], cuts, 0, start + begin, marks, room)
        room.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            weigh(delta, marks, how.coefficients[source], room.terms[source], room.votes)
        merge(base[begin:end], how, room, out[begin:end])


@compiled
def write_selected(deltas: Rows, cuts: Cuts, start: int, out: NDArray[np.float32]) -> None:
    """Write the deltas ``[N, n]`` with 0 where ``merge_selected`` leaves them out."""
    num_sources, num_elements = out.shape
    room, marks = make_room(1), np.empty(RUN, np.float32)
    for begin in range(0, num_elements, RUN):
        end = min(begin + RUN, num_elements)
        spread(deltas.flat[begin:], deltas.stride, num_sources, room.merged[: end - begin])
        _mark(room.merged[: end - begin], cuts, 0, start + begin, marks, room)
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            for i in range(delta.size):
                out[source, begin + i] = marks[i] * delta[i]


@inlined
def _trim(
    delta: NDArray[np.float32], cuts: Cuts, source: int, start: int, coefficient: np.float32, room: _Room
) -> None:
    """Write the source's terms, 0 where an element is not kept, and add them to the votes.

    A product, not a choice: NaN must reach the result even where it is dropped. Elements at the level of a
    cut come last, since few of them have to be looked at one by one: until then they are not kept.
    """
    above, tied = cuts.above[2 * source], cuts.tied[2 * source]
    over, level = cuts.above[2 * source + 1], cuts.tied[2 * source + 1]
    terms, votes, one, zero = room.terms[source], room.votes, np.float32(1.0), np.float32(0.0)
    for i in range(delta.size):
        size = np.abs(delta[i])
        kept = one if (size > above) & (size <= over) else zero
        term = kept * delta[i] * coefficient
        terms[i] = term
        votes[i] += term
        room.flags[i] = (size == tied) | (size == level)
    if np.isnan(tied) and np.isnan(level):
        return
    room.flags[delta.size :] = 0
    for place in room.found[: places(room.flags, room.found)]:
        kept = _kept(np.abs(delta[place]), cuts, source, start + place)
        term = kept * delta[place] * coefficient
        terms[place] = term
        votes[place] += term


@inlined
def _mark(
    values: NDArray[np.float32], cuts: Cuts, source: int, start: int, marks: NDArray[np.float32], room: _Room
) -> None:
    """Write 1 where the source's first cut keeps an element and the second does not take it away, else 0."""
    above, tied = cuts.above[2 * source], cuts.tied[2 * source]
    over, level = cuts.above[2 * source + 1], cuts.tied[2 * source + 1]
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(values.size):
        size = np.abs(values[i])
        marks[i] = one if (size > above) & (size <= over) else zero
        room.flags[i] = (size == tied) | (size == level)
    if np.isnan(tied) and np.isnan(level):
        return
    room.flags[values.size :] = 0
    for place in room.found[: places(room.flags, room.found)]:
        marks[place] = _kept(np.abs(values[place]), cuts, source, start + place)


@inlined
def _kept(size: np.float32, cuts: Cuts, source: int, index: int) -> np.float32:
    """1 where the source's first cut keeps an element of that size and the second leaves it, else 0."""
    first, second = 2 * source, 2 * source + 1
    kept = _chosen(cuts, first, index) if size == cuts.tied[first] else size > cuts.above[first]
    lost = _chosen(cuts, second, index) if size == cuts.tied[second] else size > cuts.above[second]
    return np.float32(kept) - np.float32(lost)


@inlined
def _chosen(cuts: Cuts, cut: int, index: int) -> bool:
    """Whether an element at the level of a cut is among the largest."""
    return keep(cuts.words[cut, 0], cuts.words[cut, 1], index, cuts.limits[cut])


@inlined
def weigh(
    delta: NDArray[np.float32],
    factors: NDArray[np.float32],
    coefficient: np.float32,
    terms: NDArray[np.float32],
    votes: NDArray[np.float32],
) -> None:
    """Write the terms ``factor * delta * coefficient`` and add them to the votes.

    A product, not a choice: NaN must reach the result even where it is dropped.
    """
    for i in range(delta.size):
        term = factors[i] * delta[i] * coefficient
        terms[i] = term
        votes[i] += term


@inlined
def merge(base: NDArray[np.float32], how: Sum, room: _Room, out: NDArray[np.float32]) -> None:
    """Write the base plus the factor times the (elected) sum of the terms."""
    merged, divisor, zero, one = room.votes, room.divisor, np.float32(0.0), np.float32(1.0)
    if how.elects:
        _elect(out.size, how, room)
        merged = room.merged
    if how.elects and how.divides:
        for i in range(out.size):
            merged[i] = merged[i] / (divisor[i] if divisor[i] != zero else one)
    for i in range(out.size):
        # Where nothing is added the base's very bits stay; a plain sum would make 0.0 of its -0.0.
        out[i] = base[i] - (-(merged[i] * how.factor) + zero)


@inlined
def _elect(size: int, how: Sum, room: _Room) -> None:
    """Add up the terms that have the sign of the votes, and the weights of those that are not 0."""
    votes, merged, divisor, zero = room.votes, room.merged, room.divisor, np.float32(0.0)
    merged[:] = zero
    divisor[:] = zero
    for source in range(how.coefficients.size):
        term, share, weight = room.terms[source], how.shares[source], how.weights[source]
        for i in range(size):
            # NaN makes NaN of the votes, and passes as not negative, like them.
            agreeing = (term[i] if (term[i] < zero) == (votes[i] < zero) else zero) * share
            merged[i] += agreeing
            divisor[i] += weight if agreeing != zero else zero
