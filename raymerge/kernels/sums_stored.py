"""Inner products of bfloat16 as it is stored, a whole tile in one call.

Products are folded by the parts of ``sums``, in the same order, so that bits are the same. Words become
float64 as they are loaded, a run at a time: copies of whole pieces in float32 would cost up to a third more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raymerge.kernels.combine import value_of
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.sums import (
    AT_ONCE,
    LANES,
    PIECE,
    RUN,
    RUNS,
    fold_pairs,
    fold_piece,
    fold_run,
    num_vectors,
)

Words = npt.NDArray[np.uint16]
Places = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@compiled
def add_stored_pair(totals: Doubles, words: Words, places: Places, count: int) -> None:
    """Add the inner products of the first input and the second to ``[3]``, as ``sums.add_pair``.

    Args:
        totals: written to.
        words: memory that holds both inputs.
        places: where in it each begins.
        count: elements of each.
    """
    lefts, rights, lanes = np.empty(RUN), np.empty(RUN), np.empty((RUNS, 3 * LANES))
    for begin in range(0, count, PIECE):
        size = min(PIECE, count - begin)
        for at in range(0, size, RUN):
            width = min(RUN, size - at)
            first, second = places[0] + begin + at, places[1] + begin + at
            _load(lefts, words[first : first + width], words[:0])
            _load(rights, words[second : second + width], words[:0])
            sums = lanes[at // RUN]
            fold_run(sums[:LANES], lefts, lefts)
            fold_run(sums[LANES : 2 * LANES], lefts, rights)
            fold_run(sums[2 * LANES :], rights, rights)
        fold_piece(lanes, size)
        for pair in range(3):
            totals[pair] += lanes[0, pair * LANES]


@compiled
def add_stored_grams(totals: Doubles, words: Words, places: Places, count: int, num_origins: int) -> None:
    """Add the inner products of all pairs of inputs, or of their differences to the first one.

    Args:
        totals: ``[pairs]``, written to; as ``sums.add_grams`` has them for a stretch.
        words: memory that holds all inputs.
        places: where in it each begins.
        count: elements of each.
        num_origins: 1 where differences to the first input are taken, else 0.
    """
    num_pairs, of_vectors = totals.size, places[num_origins:]
    runs, lanes = np.empty((of_vectors.size, RUN)), np.empty((RUNS, LANES * min(AT_ONCE, num_pairs)))
    for begin in range(0, count, PIECE):
        size = min(PIECE, count - begin)
        for first in range(0, num_pairs, AT_ONCE):
            last = min(first + AT_ONCE, num_pairs)
            used = of_vectors[: num_vectors(last)]
            for at in range(0, size, RUN):
                width, start = min(RUN, size - at), begin + at
                origin = words[places[0] + start : places[0] + start + width * num_origins]
                for index in range(used.size):
                    place = used[index] + start
                    _load(runs[index], words[place : place + width], origin)
                fold_pairs(lanes[at // RUN], runs, first, last)
            fold_piece(lanes, size)
            for pair in range(first, last):
                totals[pair] += lanes[0, (pair - first) * LANES]


@inlined
def _load(run: Doubles, words: Words, origin: Words) -> None:
    """Values (less an origin that is not empty, in float32) as float64, filled up with zeros."""
    if origin.size:
        for index in range(words.size):
            run[index] = value_of(words[index]) - value_of(origin[index])
    else:
        for index in range(words.size):
            run[index] = value_of(words[index])
    for index in range(words.size, run.size):
        run[index] = 0.0
