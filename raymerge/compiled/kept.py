"""The base plus a sum of randomly thinned, weighted deltas, in one loop over cache-sized runs, for DARE."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.elect import Rows, Sum, make_room, merge, weigh
from raymerge.compiled.hashes import fill_factors
from raymerge.compiled.jit import compiled
from raymerge.compiled.selection import RUN


class Chances(NamedTuple):
    """Which elements of each delta are kept, and what makes up for the others."""

    words: NDArray[np.uint64]
    """The two words of the key, ``[N, 2]``."""
    limits: NDArray[np.int64]
    """As ``hashes.keep`` takes it, ``[N]``."""
    factors: NDArray[np.float32]
    """What the kept elements are multiplied by, ``[N]``."""


@compiled
def merge_kept(
    base: NDArray[np.float32], deltas: Rows, chances: Chances, start: int, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write what ``elect.merge_factors`` does with the factors of ``hashes.fill_factors``, which need no room
    here; ``start`` is the first element's index."""
    num_sources = how.coefficients.size
    room = make_room(num_sources)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        room.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            first, second = chances.words[source]
            limit, factor = chances.limits[source], chances.factors[source]
            # What is merged is written later: its room is free for the factors.
            factors = room.merged[: end - begin]
            fill_factors(first, second, start + begin, limit, factor, factors)
            weigh(delta, factors, how.coefficients[source], room.terms[source], room.votes)
        merge(base[begin:end], how, room, out[begin:end])
