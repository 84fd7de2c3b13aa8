"""What all loops over blocks of a matrix share (``raymerge.checkpoints.packing``).

Matrices are [rows, columns]; a block is ``height`` rows by ``width`` columns, ragged at the right and the
lower edge, and grids are [bands, blocks of a band]. Each row of a block is a slice of its own: only so does
the compiler make vectors of what is done to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.jit import compiled, inlined

LANES = 64
"""Running sums that are kept side by side: one alone would be added to in single file."""


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


@compiled
def add_squares(
    others: NDArray[np.float32],
    values: NDArray[np.float32],
    errors: NDArray[np.float64],
    squares: NDArray[np.float64],
) -> None:
    """Add up squared differences and squared values.

    Args:
        others: [n].
        values: [n].
        errors: [LANES], to which the squares of ``others`` less ``values`` are added.
        squares: [LANES], to which the squares of ``values`` are added.
    """
    whole = values.size // LANES * LANES
    for begin in range(0, whole, LANES):
        other, value = others[begin : begin + LANES], values[begin : begin + LANES]
        for lane in range(LANES):
            error, wide = np.float64(other[lane] - value[lane]), np.float64(value[lane])
            errors[lane] += error * error
            squares[lane] += wide * wide
    for i in range(whole, values.size):
        error, wide = np.float64(others[i] - values[i]), np.float64(values[i])
        errors[0] += error * error
        squares[0] += wide * wide
