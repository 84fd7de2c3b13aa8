"""What all loops over blocks of a matrix share (``raymerge.checkpoints.quantisation.encoding``).

Matrices are [rows, columns]; a block is ``height`` rows by ``width`` columns, ragged at the right and the
lower edge, and grids are [bands, blocks of a band]. Each row of a block is a slice of its own: only so does
the compiler make vectors of what is done to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled, inlined


@inlined
def divisor(step: np.float32) -> np.float32:
    """A step to divide by: 1 for the scale 0, which some quantisers give to a block of zeros."""
    return np.float32(1.0) if step == np.float32(0.0) else step


@compiled
def largest(patterns: NDArray[np.uint32], height: int, width: int, found: NDArray[np.uint32]) -> None:
    """The largest magnitude of every block.

    Args:
        patterns: float32 [rows, columns], as patterns: without signs they are in the order of their values,
            with infinity and then NaN at the end.
        height: rows of a block.
        width: its columns.
        found: [bands, blocks], zeros at first.
    """
    for row in range(patterns.shape[0]):
        for block in range(found.shape[1]):
            run = patterns[row, block * width : (block + 1) * width]
            most = found[row // height, block]
            for i in range(run.size):
                most = max(most, run[i] & np.uint32(0x7FFFFFFF))
            found[row // height, block] = most
