"""Codes of 4 bits with scales of blocks, to float32 and back: two to a byte, the first in the lower half.

``e2m1`` are float4 numbers, ``int4`` the whole numbers from -8 to 7. Grids and blocks are as in ``blocks``;
blocks have an even number of columns, and so has the matrix. The loops differ in the element alone: one that
is handed to a loop as a function is called for each of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.blocks import divisor
from raymerge.kernels.jit import compiled, inlined, summing


@inlined
def e2m1_element(byte: np.uint32) -> np.float32:
    """What the code in the lower half is without its scale."""
    magnitude = np.uint32(byte & np.uint32(7))
    normal = np.uint32((magnitude << np.uint32(22)) + np.uint32(126 << 23))
    # A half and nothing are the only ones that have no leading one.
    small = np.uint32(126 << 23) if magnitude == np.uint32(1) else np.uint32(0)
    pattern = np.uint32(normal if magnitude > np.uint32(1) else small)
    return np.uint32(pattern | ((byte & np.uint32(8)) << np.uint32(28))).view(np.float32)


@inlined
def e2m1_nearest(quotient: np.float32) -> np.uint8:
    """The code of the nearest element, ties to even, at most 6."""
    pattern = np.float32(quotient).view(np.uint32)
    within = np.uint32(min(np.uint32(pattern & np.uint32(0x7FFFFFFF)), np.uint32(0x40C00000)))
    # A number so large that its last bit is that of the code: adding it rounds, and leaves a count of codes.
    exponent = np.uint32(max(np.uint32(within & np.uint32(0x7F800000)), np.uint32(127 << 23)))
    large = np.uint32(exponent + np.uint32(22 << 23))
    count = np.uint32(np.float32(within.view(np.float32) + large.view(np.float32)).view(np.uint32) - large)
    code = np.uint32(count + ((exponent >> np.uint32(22)) - np.uint32(127 << 1)))
    return np.uint8(code | ((pattern >> np.uint32(28)) & np.uint32(8)))


@inlined
def int4_element(byte: np.uint32) -> np.float32:
    """The same; the code 8 is 0."""
    return np.float32(np.int32(byte & np.uint32(15)) - np.int32(8))


@inlined
def int4_nearest(quotient: np.float32) -> np.uint8:
    """The code of the nearest whole number, ties to even, from -8 to 7."""
    within = np.float32(min(max(np.float32(quotient), np.float32(-8.0)), np.float32(7.0)))
    # The last bit of such a number is 1: adding it rounds. That the offset is even, and ties stay even.
    return np.uint8(np.float32(within + np.float32(1.5 * 2.0**23 + 8.0)).view(np.uint32) & np.uint32(15))


@compiled
def e2m1_decode(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> None:
    """Elements times the steps of their blocks.

    Args:
        codes: [rows, columns / 2].
        steps: [bands, blocks].
        height: rows of a block.
        width: its columns.
        values: [rows, columns], written.
    """
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width // 2 : (block + 1) * width // 2]
            into = values[row, block * width : (block + 1) * width]
            for i in range(run.size):
                byte = np.uint32(run[i])
                into[2 * i] = e2m1_element(byte) * step
                into[2 * i + 1] = e2m1_element(np.uint32(byte >> np.uint32(4))) * step


@compiled
def e2m1_encode(
    values: NDArray[np.float32], steps: NDArray[np.float32], height: int, width: int, codes: NDArray[np.uint8]
) -> None:
    """The nearest codes of values over the steps of their blocks; the reverse of ``e2m1_decode``."""
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = divisor(steps[row // height, block])
            run = values[row, block * width : (block + 1) * width]
            into = codes[row, block * width // 2 : (block + 1) * width // 2]
            for i in range(into.size):
                second = e2m1_nearest(run[2 * i + 1] / step)
                into[i] = e2m1_nearest(run[2 * i] / step) | (second << np.uint8(4))


@compiled
def e2m1_fits(
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
                differs |= e2m1_element(np.uint32(e2m1_nearest(run[i] / by))) * step != run[i]
            found[row // height, block] = not differs


@summing
def e2m1_squares(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> tuple[float, float]:
    """What encoding changed: see ``fp8.squares``."""
    errors = squares = 0.0
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width // 2 : (block + 1) * width // 2]
            true = values[row, block * width : (block + 1) * width]
            for i in range(run.size):
                byte, one, two = np.uint32(run[i]), true[2 * i], true[2 * i + 1]
                first = np.float64(e2m1_element(byte) * step - one)
                second = np.float64(e2m1_element(np.uint32(byte >> np.uint32(4))) * step - two)
                errors += first * first + second * second
                squares += np.float64(one) * np.float64(one) + np.float64(two) * np.float64(two)
    return errors, squares


@compiled
def int4_decode(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> None:
    """Elements times the steps of their blocks.

    Args:
        codes: [rows, columns / 2].
        steps: [bands, blocks].
        height: rows of a block.
        width: its columns.
        values: [rows, columns], written.
    """
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width // 2 : (block + 1) * width // 2]
            into = values[row, block * width : (block + 1) * width]
            for i in range(run.size):
                byte = np.uint32(run[i])
                into[2 * i] = int4_element(byte) * step
                into[2 * i + 1] = int4_element(np.uint32(byte >> np.uint32(4))) * step


@compiled
def int4_encode(
    values: NDArray[np.float32], steps: NDArray[np.float32], height: int, width: int, codes: NDArray[np.uint8]
) -> None:
    """The nearest codes of values over the steps of their blocks; the reverse of ``int4_decode``."""
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = divisor(steps[row // height, block])
            run = values[row, block * width : (block + 1) * width]
            into = codes[row, block * width // 2 : (block + 1) * width // 2]
            for i in range(into.size):
                second = int4_nearest(run[2 * i + 1] / step)
                into[i] = int4_nearest(run[2 * i] / step) | (second << np.uint8(4))


@compiled
def int4_fits(
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
                differs |= int4_element(np.uint32(int4_nearest(run[i] / by))) * step != run[i]
            found[row // height, block] = not differs


@summing
def int4_squares(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], height: int, width: int, values: NDArray[np.float32]
) -> tuple[float, float]:
    """What encoding changed: see ``fp8.squares``."""
    errors = squares = 0.0
    for row in range(values.shape[0]):
        for block in range(steps.shape[1]):
            step = steps[row // height, block]
            run = codes[row, block * width // 2 : (block + 1) * width // 2]
            true = values[row, block * width : (block + 1) * width]
            for i in range(run.size):
                byte, one, two = np.uint32(run[i]), true[2 * i], true[2 * i + 1]
                first = np.float64(int4_element(byte) * step - one)
                second = np.float64(int4_element(np.uint32(byte >> np.uint32(4))) * step - two)
                errors += first * first + second * second
                squares += np.float64(one) * np.float64(one) + np.float64(two) * np.float64(two)
    return errors, squares


@compiled
def int4_grids(
    values: NDArray[np.float32],
    largest: NDArray[np.float32],
    width: int,
    near: np.float32,
    found: NDArray[np.float32],
) -> None:
    """The steps of which all numbers of a block are near multiples, from -8 to 7 and as large as can be.

    Args:
        values: [rows, columns]; a block is one row of ``width`` columns.
        largest: [rows, blocks], the largest magnitude of every block.
        width: columns of a block, an even number.
        near: the largest difference from the multiple, as a part of it.
        found: [rows, blocks], zeros at first, and left so where there is no such step.
    """
    for row in range(values.shape[0]):
        for block in range(found.shape[1]):
            most = largest[row, block]
            run = values[row, block * width : (block + 1) * width]
            if _is_near(run, np.float32(most / np.float32(8.0)), near):
                found[row, block] = most / np.float32(8.0)
            elif _is_near(run, np.float32(most / np.float32(7.0)), near):
                found[row, block] = _exact_step(run, np.float32(most / np.float32(7.0)))


@inlined
def _multiple(quotient: np.float32) -> np.float32:
    return int4_element(np.uint32(int4_nearest(quotient)))


@inlined
def _is_near(run: NDArray[np.float32], step: np.float32, near: np.float32) -> bool:
    # The first two tell as a rule; all others are looked at together.
    if _differs(run[0], step, near) or _differs(run[1], step, near):
        return False
    differs = False
    for i in range(run.size):
        differs |= _differs(run[i], step, near)
    return not differs


@inlined
def _differs(value: np.float32, step: np.float32, near: np.float32) -> bool:
    quotient = np.float32(value / step)
    number = _multiple(quotient)
    # Also where 0 is divided by 0.
    return not abs(np.float32(quotient - number)) <= np.float32(abs(number) * near)


@inlined
def _exact_step(run: NDArray[np.float32], step: np.float32) -> np.float32:
    # Patterns of magnitudes are in the order of their values.
    most = np.uint32(0)
    for i in range(run.size):
        number = np.float32(abs(_multiple(np.float32(run[i] / step))))
        is_power = (number == np.float32(1.0)) | (number == np.float32(2.0)) | (number == np.float32(4.0))
        told = np.float32(abs(run[i]) / number) if is_power else np.float32(0.0)
        most = max(most, np.float32(told).view(np.uint32))
    return np.uint32(most).view(np.float32) if most else step
