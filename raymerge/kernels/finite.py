"""Whether floating-point patterns are all finite, looked at as whole words of several of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled

_RUN = 4096


@compiled
def has_full(words: NDArray[np.uint64], exponents: np.uint64, ones: np.uint64, tops: np.uint64) -> bool:
    """Whether some lane of some word has all bits of its exponent set.

    Args:
        words: patterns, several to a word where they are shorter.
        exponents: the exponent's bits of every lane.
        ones: the lowest bit of every lane.
        tops: the highest bit of every lane.
    """
    for begin in range(0, words.size, _RUN):
        run = words[begin : min(begin + _RUN, words.size)]
        found = np.uint64(0)
        for i in range(run.size):
            # 0 in a lane whose exponent is full: there, and above one only, 1 less borrows the top bit.
            lacking = (run[i] & exponents) ^ exponents
            found |= (lacking - ones) & ~lacking & tops
        if found:
            return True
    return False
