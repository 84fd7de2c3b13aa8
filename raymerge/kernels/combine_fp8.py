"""Linear combinations of float8 e4m3 codes with scales of blocks, encoded again: a whole tile in one call.

Bits are those of ``fp8.decode``, ``combine.combination``, ``blocks.largest``, ``fp8.fits`` and
``fp8.encode``, one after the other, with scales as the codec makes them. What is decoded
stays in the cache of one core: a few blocks at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.bf16 import rounded, widened
from raymerge.kernels.blocks import divisor
from raymerge.kernels.fp8 import element, nearest
from raymerge.kernels.jit import compiled, inlined, summing

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

STRIP = 1024
"""Columns that are decoded together, or those of a block if they are more."""
_ZERO = np.float32(0.0)
_LARGEST = np.float32(448.0)
_LEAST = np.float32(2.0**-126)
_INFINITE = np.uint32(0x7F800000)


@compiled
def combine_and_encode(
    out: Codes,
    out_steps: Floats,
    codes: Codes,
    places: NDArray[np.int64],
    steps: Floats,
    block: tuple[int, int],
    coefficients: NDArray[np.float64],
    anchor: int,
    excess: float,
    held: int,
    scales: tuple[bool, bool],
) -> tuple[bool, float, float]:
    """Write ``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` as codes with scales.

    Args:
        out: [rows, columns], written: codes.
        out_steps: [bands, blocks], written: the scales of its blocks.
        codes: memory that holds the codes of all inputs, each [rows, columns].
        places: where in it each input begins.
        steps: [inputs, bands, blocks].
        block: its rows and columns.
        coefficients: [inputs]; that of the anchor does not count.
        anchor: a.
        excess: e; 0 for nothing of that kind.
        held: the input whose scales are kept where they serve as well; -1 for none.
        scales: whether they are powers of two, and whether they are stored in bfloat16 rather than float32.

    Returns:
        False if it holds NaN or infinity, and then nothing else counts; the squares of what encoding changed,
        and of the combination, both summed.
    """
    (rows, columns), (height, width) = out.shape, block
    strip = width * max(1, STRIP // width)
    values = np.empty((min(height, rows), min(strip, columns)), np.float32)
    decoded = np.empty((2, values.shape[1]), np.float32)
    errors, squares, by_excess = 0.0, 0.0, np.float32(excess)
    for band in range(out_steps.shape[0]):
        top, bottom = band * height, min(rows, (band + 1) * height)
        for begin in range(0, columns, strip):
            count = min(strip, columns - begin)
            of_inputs, size = steps[:, band], (bottom - top, count)
            for row in range(top, bottom):
                run, at = values[row - top, :count], (row * columns + begin, begin)
                _combine(run, decoded, codes, places, at, of_inputs, width, coefficients, anchor, by_excess)
            is_finite, more, most = _encode_strip(
                out, out_steps[band], (top, begin), values, size, of_inputs, width, held, scales
            )
            if not is_finite:
                return False, 0.0, 0.0
            errors, squares = errors + more, squares + most
    return True, errors, squares


@inlined
def _combine(
    run: Floats,
    decoded: Floats,
    codes: Codes,
    places: NDArray[np.int64],
    at: tuple[int, int],
    steps: Floats,
    width: int,
    coefficients: NDArray[np.float64],
    anchor: int,
    excess: np.float32,
) -> None:
    """Write the combination of a strip of a row.

    It begins at an element and a column, which are ``at``; ``steps`` [inputs, blocks].
    """
    start, other = decoded[0, : run.size], decoded[1, : run.size]
    first, begin = places[anchor] + at[0], at[1]
    _decode(codes[first : first + run.size], steps[anchor], begin, width, start)
    _begin(run, start, excess)
    for vector in range(places.size):
        if vector != anchor:
            first = places[vector] + at[0]
            _decode(codes[first : first + run.size], steps[vector], begin, width, other)
            _subtract_change(run, start, other, np.float32(coefficients[vector]))


@inlined
def _decode(codes: Codes, steps: Floats, begin: int, width: int, values: Floats) -> None:
    """Whole blocks of a row from column ``begin`` on, the last of which may be ragged."""
    for left in range(0, values.size, width):
        step = steps[(begin + left) // width]
        some, into = codes[left : left + width], values[left : left + width]
        for index in range(into.size):
            into[index] = element(some[index]) * step


@inlined
def _begin(run: Floats, start: Floats, excess: np.float32) -> None:
    for index in range(run.size):
        run[index] = start[index]
    if excess != _ZERO:
        for index in range(run.size):
            run[index] -= (_ZERO - start[index]) * excess + _ZERO


@inlined
def _subtract_change(run: Floats, start: Floats, other: Floats, factor: np.float32) -> None:
    for index in range(run.size):
        run[index] -= (start[index] - other[index]) * factor + _ZERO


@inlined
def _encode_strip(
    out: Codes,
    out_steps: Floats,
    place: tuple[int, int],
    values: Floats,
    size: tuple[int, int],
    steps: Floats,
    width: int,
    held: int,
    scales: tuple[bool, bool],
) -> tuple[bool, float, float]:
    """Write codes and scales of the blocks of a strip; ``steps`` [inputs, blocks].

    Its size is given apart: rows of a part of an array are not known to be without gaps.
    """
    errors = squares = 0.0
    (top, begin), (num_rows, count) = place, size
    for left in range(0, count, width):
        right, number = min(count, left + width), (begin + left) // width
        most = _largest(values, num_rows, left, right)
        if most >= _INFINITE:
            return False, 0.0, 0.0
        step = _fresh(np.uint32(most).view(np.float32), scales[0], scales[1])
        if held >= 0:
            had = steps[held, number]
            step = had if _fits(values, num_rows, left, right, had) else step
        out_steps[number] = step
        _encode(out, top, begin, values, num_rows, left, right, divisor(step))
        more = _squares(out, top, begin, values, num_rows, left, right, step)
        errors, squares = errors + more[0], squares + more[1]
    return True, errors, squares


@inlined
def _encode(
    out: Codes, top: int, begin: int, values: Floats, num_rows: int, left: int, right: int, by: np.float32
) -> None:
    """Write the codes of a block."""
    for row in range(num_rows):
        into, run = out[top + row, begin + left : begin + right], values[row, left:right]
        for index in range(into.size):
            into[index] = nearest(run[index] / by)


@inlined
def _largest(values: Floats, num_rows: int, left: int, right: int) -> np.uint32:
    """The largest magnitude of a block, as a pattern: in the order of values, NaN last."""
    most = np.uint32(0)
    for row in range(num_rows):
        run = values[row, left:right]
        for index in range(run.size):
            most = max(most, np.uint32(np.float32(run[index]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return most


@inlined
def _fresh(largest: np.float32, is_power: bool, is_bf16: bool) -> np.float32:
    """The scale for a block of such numbers, as it can be stored."""
    if largest == _ZERO:
        return np.float32(1.0)
    wanted = np.float32(largest / _LARGEST)
    if is_power:
        pattern = np.float32(wanted).view(np.uint32)
        exponent = np.uint32(pattern >> np.uint32(23)) + np.uint32((pattern & np.uint32(0x7FFFFF)) != 0)
        wanted = np.uint32(np.uint32(exponent) << np.uint32(23)).view(np.float32)
    wanted = np.float32(max(wanted, _LEAST))
    return widened(rounded(wanted)) if is_bf16 else wanted


@inlined
def _fits(values: Floats, num_rows: int, left: int, right: int, step: np.float32) -> bool:
    """Whether all numbers of a block are the same when encoded with that step and decoded."""
    by = divisor(step)
    for row in range(num_rows):
        run = values[row, left:right]
        differs = False
        for index in range(run.size):
            differs |= element(nearest(run[index] / by)) * step != run[index]
        if differs:
            return False
    return True


@summing
def _squares(
    out: Codes, top: int, begin: int, values: Floats, num_rows: int, left: int, right: int, step: np.float32
) -> tuple[float, float]:
    errors = squares = 0.0
    for row in range(num_rows):
        codes, run = out[top + row, begin + left : begin + right], values[row, left:right]
        for index in range(run.size):
            error, value = np.float64(element(codes[index]) * step - run[index]), np.float64(run[index])
            errors += error * error
            squares += value * value
    return errors, squares
