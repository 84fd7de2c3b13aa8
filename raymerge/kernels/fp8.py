"""float8 e4m3 codes with scales of blocks, to float32 and back: one code to a byte.

Arithmetic on patterns, in vectors: a table of 256 numbers takes more than twice as long, and torch's
own conversion twenty times. Grids and blocks are as in ``blocks``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.blocks import divisor
from raymerge.kernels.jit import compiled, inlined, summing


@inlined
def element(code: np.uint8) -> np.float32:
    """What a code is without its scale."""
    wide = np.uint32(code)
    magnitude = np.uint32(wide & np.uint32(0x7F))
    mantissa_in_place = np.uint32(magnitude << np.uint32(20))
    normal = np.uint32(mantissa_in_place + np.uint32(120 << 23))
    # Below the least normal number, less the leading one that float32 has and e4m3 there has not.
    with_one = np.uint32(mantissa_in_place | np.uint32(121 << 23))
    small = np.float32(with_one.view(np.float32) - np.float32(2.0**-6)).view(np.uint32)
    pattern = np.uint32(small if magnitude < np.uint32(8) else normal)
    pattern = np.uint32(0x7FC00000) if magnitude == np.uint32(0x7F) else pattern
    return np.uint32(pattern | ((wide & np.uint32(0x80)) << np.uint32(24))).view(np.float32)


@inlined
def nearest(quotient: np.float32) -> np.uint8:
    """The code of the nearest element, ties to even, at most 448; NaN, 0x7F, for what is not finite."""
    pattern = np.float32(quotient).view(np.uint32)
    magnitude = np.uint32(pattern & np.uint32(0x7FFFFFFF))
    within = np.uint32(min(magnitude, np.uint32(0x43E00000)))
    # A number so large that its last bit is that of the code: adding it rounds, and leaves a count of codes.
    exponent = np.uint32(max(np.uint32(within & np.uint32(0x7F800000)), np.uint32(121 << 23)))
    large = np.uint32(exponent + np.uint32(20 << 23))
    count = np.uint32(np.float32(within.view(np.float32) + large.view(np.float32)).view(np.uint32) - large)
    code = np.uint32(count + ((exponent >> np.uint32(20)) - np.uint32(121 << 3)))
    signed = np.uint32(code | ((pattern >> np.uint32(24)) & np.uint32(0x80)))
    return np.uint8(0x7F) if magnitude >= np.uint32(0x7F800000) else np.uint8(signed)


@compiled
def decode(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> None:
    """Elements times the steps of their blocks.

    Args:
        codes: [rows, columns].
        steps: [bands, blocks].
        height: rows of a block.
        width: its columns.
        values: [rows, columns], written.
    """
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width : (block + 1) * width]
            into = values[row, block * width : (block + 1) * width]
            for i in range(into.size):
                into[i] = element(run[i]) * step


@compiled
def encode(
    values: NDArray[np.float32], steps: NDArray[np.float32], height: int, width: int, codes: NDArray[np.uint8]
) -> None:
    """The nearest codes of values over the steps of their blocks; the reverse of ``decode``."""
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = divisor(steps[row // height, block])
            run = values[row, block * width : (block + 1) * width]
            into = codes[row, block * width : (block + 1) * width]
            for i in range(into.size):
                into[i] = nearest(run[i] / step)


@compiled
def fits(
    values: NDArray[np.float32], steps: NDArray[np.float32], height: int, width: int, found: NDArray[np.bool_]
) -> None:
    """Which blocks are the same when encoded and decoded; ``found`` [bands, blocks], true at first."""
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            if not found[row // height, block]:
                continue
            step = steps[row // height, block]
            by = divisor(step)
            run = values[row, block * width : (block + 1) * width]
            differs = False
            for i in range(run.size):
                differs |= element(nearest(run[i] / by)) * step != run[i]
            found[row // height, block] = not differs


@summing
def squares(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> tuple[float, float]:
    """What encoding changed: the squares of decoded codes less values, and of values, both summed.

    Args:
        codes: [rows, columns].
        steps: [bands, blocks].
        height: rows of a block.
        width: its columns.
        values: [rows, columns], what was encoded.
    """
    errors = squares = 0.0
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width : (block + 1) * width]
            true = values[row, block * width : (block + 1) * width]
            for i in range(run.size):
                error, value = np.float64(element(run[i]) * step - true[i]), np.float64(true[i])
                errors += error * error
                squares += value * value
    return errors, squares
