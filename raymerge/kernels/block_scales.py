"""Codes with scales of blocks, to float32 and back: float8 e4m3, float4 e2m1, int4 (-8 to 7).

Arithmetic on bit patterns, vectorised: a table of 256 numbers takes more than twice as long, torch's
conversion of e4m3 twenty times. Codes of 4 bits are two to a byte, the first in the lower half.

Matrices are [rows, columns]; a block is ``height`` rows by ``width`` columns, ragged at the right and the
lower edge, and grids are [scale rows, blocks of a scale row]. Where codes are two to a byte, blocks and
matrix have an even number of columns. Each row of a block is a slice of its own, which the compiler needs to
vectorise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.combine import copy, subtract_change, subtract_excess
from raymerge.kernels.elements import rounded, widened
from raymerge.kernels.jit import compiled, inlined, summing

Codes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]


class Loops(NamedTuple):
    """Loops for one kind of code, for matrices without gaps.

    Codes are [rows, columns] or, of 4 bits, [rows, columns / 2]; steps, which codes are multiplied by,
    [scale rows, blocks]; values float32 [rows, columns]."""

    decode: Callable[[Codes, Floats, int, int, Floats], None]
    """(codes, steps, height, width, values): write elements times the steps of their blocks."""
    encode: Callable[[Floats, Floats, int, int, Codes], None]
    """(values, steps, height, width, codes): write the nearest codes; the reverse of ``decode``."""
    fits: Callable[[Floats, Floats, int, int, NDArray[np.bool_]], None]
    """(values, steps, height, width, found): which blocks survive encoding and decoding unchanged; ``found``
    [scale rows, blocks], true at first."""
    squares: Callable[[Codes, Floats, int, int, Floats], tuple[float, float]]
    """(codes, steps, height, width, values): sums of squares of the encoding error and of the values."""


@inlined
def e4m3_element(byte: np.uint32) -> np.float32:
    """A code's value without its scale."""
    magnitude = np.uint32(byte & np.uint32(0x7F))
    mantissa_in_place = np.uint32(magnitude << np.uint32(20))
    normal = np.uint32(mantissa_in_place + np.uint32(120 << 23))
    # Below the least normal number, less the leading one that float32 has and e4m3 there has not.
    with_one = np.uint32(mantissa_in_place | np.uint32(121 << 23))
    small = np.float32(with_one.view(np.float32) - np.float32(2.0**-6)).view(np.uint32)
    pattern = np.uint32(small if magnitude < np.uint32(8) else normal)
    pattern = np.uint32(0x7FC00000) if magnitude == np.uint32(0x7F) else pattern
    return np.uint32(pattern | ((byte & np.uint32(0x80)) << np.uint32(24))).view(np.float32)


@inlined
def e4m3_nearest(quotient: np.float32) -> np.uint8:
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


@inlined
def e2m1_element(byte: np.uint32) -> np.float32:
    """The value of the code in the lower half without its scale."""
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
    # As in ``e4m3_nearest``.
    exponent = np.uint32(max(np.uint32(within & np.uint32(0x7F800000)), np.uint32(127 << 23)))
    large = np.uint32(exponent + np.uint32(22 << 23))
    count = np.uint32(np.float32(within.view(np.float32) + large.view(np.float32)).view(np.uint32) - large)
    code = np.uint32(count + ((exponent >> np.uint32(22)) - np.uint32(127 << 1)))
    return np.uint8(code | ((pattern >> np.uint32(28)) & np.uint32(8)))


@inlined
def int4_element(byte: np.uint32) -> np.float32:
    """The value of the code in the lower half without its scale; the code 8 is 0."""
    return np.float32(np.int32(byte & np.uint32(15)) - np.int32(8))


@inlined
def int4_nearest(quotient: np.float32) -> np.uint8:
    """The code of the nearest whole number, ties to even, from -8 to 7."""
    within = np.float32(min(max(np.float32(quotient), np.float32(-8.0)), np.float32(7.0)))
    # The last bit of such a number is 1: adding it rounds. That the offset is even, and ties stay even.
    return np.uint8(np.float32(within + np.float32(1.5 * 2.0**23 + 8.0)).view(np.uint32) & np.uint32(15))


@inlined
def divisor(step: np.float32) -> np.float32:
    """The step, or 1 for 0, which some quantisers give to a block of zeros."""
    return np.float32(1.0) if step == np.float32(0.0) else step


def _one_to_a_byte(element: Any, nearest: Any) -> tuple[Any, Any]:
    """Loops that decode and encode a row of a block."""

    @inlined
    def decode_run(run: Codes, step: np.float32, into: Floats) -> None:
        for i in range(into.size):
            into[i] = element(np.uint32(run[i])) * step

    @inlined
    def encode_run(run: Floats, by: np.float32, into: Codes) -> None:
        for i in range(into.size):
            into[i] = nearest(run[i] / by)

    return decode_run, encode_run


def _two_to_a_byte(element: Any, nearest: Any) -> tuple[Any, Any]:
    @inlined
    def decode_run(run: Codes, step: np.float32, into: Floats) -> None:
        for i in range(run.size):
            byte = np.uint32(run[i])
            into[2 * i] = element(byte) * step
            into[2 * i + 1] = element(np.uint32(byte >> np.uint32(4))) * step

    @inlined
    def encode_run(run: Floats, by: np.float32, into: Codes) -> None:
        for i in range(into.size):
            second = nearest(run[2 * i + 1] / by)
            into[i] = nearest(run[2 * i] / by) | (second << np.uint8(4))

    return decode_run, encode_run


def _loops(element: Any, nearest: Any, to_a_byte: int) -> Loops:
    pair = _one_to_a_byte if to_a_byte == 1 else _two_to_a_byte
    decode_run, encode_run = pair(element, nearest)

    @compiled
    def decode(codes: Codes, steps: Floats, height: int, width: int, values: Floats) -> None:
        for row in range(values.shape[0]):
            for block in range(steps.shape[1]):
                run = codes[row, block * width // to_a_byte : (block + 1) * width // to_a_byte]
                into = values[row, block * width : (block + 1) * width]
                decode_run(run, steps[row // height, block], into)

    @compiled
    def encode(values: Floats, steps: Floats, height: int, width: int, codes: Codes) -> None:
        for row in range(values.shape[0]):
            for block in range(steps.shape[1]):
                run = values[row, block * width : (block + 1) * width]
                into = codes[row, block * width // to_a_byte : (block + 1) * width // to_a_byte]
                encode_run(run, divisor(steps[row // height, block]), into)

    @compiled
    def fits(values: Floats, steps: Floats, height: int, width: int, fitting: NDArray[np.bool_]) -> None:
        for row in range(values.shape[0]):
            for block in range(steps.shape[1]):
                if not fitting[row // height, block]:
                    continue
                step = steps[row // height, block]
                by, run, differs = divisor(step), values[row, block * width : (block + 1) * width], False
                for i in range(run.size):
                    differs |= element(np.uint32(nearest(run[i] / by))) * step != run[i]
                fitting[row // height, block] = not differs

    @summing
    def squares(codes: Codes, steps: Floats, height: int, width: int, values: Floats) -> tuple[float, float]:
        errors = squares = 0.0
        decoded = np.empty(width, np.float32)
        for row in range(values.shape[0]):
            for block in range(steps.shape[1]):
                run = codes[row, block * width // to_a_byte : (block + 1) * width // to_a_byte]
                true = values[row, block * width : (block + 1) * width]
                decode_run(run, steps[row // height, block], decoded[: true.size])
                for i in range(true.size):
                    error, value = np.float64(decoded[i] - true[i]), np.float64(true[i])
                    errors += error * error
                    squares += value * value
        return errors, squares

    return Loops(decode, encode, fits, squares)


E4M3 = _loops(e4m3_element, e4m3_nearest, 1)
E2M1 = _loops(e2m1_element, e2m1_nearest, 2)
INT4 = _loops(int4_element, int4_nearest, 2)


@compiled
def largest(patterns: NDArray[np.uint32], height: int, width: int, peaks: NDArray[np.uint32]) -> None:
    """The largest magnitude of every block, as float32 patterns in [scale rows, blocks], zeros at first.
    Patterns without signs order like values, then infinity, then NaN."""
    for row in range(patterns.shape[0]):
        for block in range(peaks.shape[1]):
            run = patterns[row, block * width : (block + 1) * width]
            most = peaks[row // height, block]
            for i in range(run.size):
                most = max(most, run[i] & np.uint32(0x7FFFFFFF))
            peaks[row // height, block] = most


@compiled
def int4_grids(
    values: Floats, largest: Floats, width: int, near: np.float32, grids: NDArray[np.float32]
) -> None:
    """The largest steps of which all numbers of a block are near multiples, from -8 to 7: ``grids`` [rows,
    blocks], zeros at first, and left so where there is none.

    A block is one row of ``width`` columns, an even number; ``largest`` [rows, blocks] has its largest
    magnitude; ``near`` is the largest relative difference from the multiple."""
    for row in range(values.shape[0]):
        for block in range(grids.shape[1]):
            most = largest[row, block]
            run = values[row, block * width : (block + 1) * width]
            if _is_near(run, np.float32(most / np.float32(8.0)), near):
                grids[row, block] = most / np.float32(8.0)
            elif _is_near(run, np.float32(most / np.float32(7.0)), near):
                grids[row, block] = _exact_step(run, np.float32(most / np.float32(7.0)))


@inlined
def _multiple(quotient: np.float32) -> np.float32:
    return int4_element(np.uint32(int4_nearest(quotient)))


@inlined
def _is_near(run: Floats, step: np.float32, near: np.float32) -> bool:
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
def _exact_step(run: Floats, step: np.float32) -> np.float32:
    # Patterns of magnitudes are in the order of their values.
    most = np.uint32(0)
    for i in range(run.size):
        number = np.float32(abs(_multiple(np.float32(run[i] / step))))
        is_power = (number == np.float32(1.0)) | (number == np.float32(2.0)) | (number == np.float32(4.0))
        exact = np.float32(abs(run[i]) / number) if is_power else np.float32(0.0)
        most = max(most, np.float32(exact).view(np.uint32))
    return np.uint32(most).view(np.float32) if most else step


STRIP = 1024
"""Columns that are combined together, or those of a larger block."""
_LARGEST, _LEAST = np.float32(448.0), np.float32(2.0**-126)
_INFINITE = np.uint32(0x7F800000)
_decode_e4m3, _encode_e4m3, _fits_e4m3, _squares_e4m3 = E4M3


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
    """Write ``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` of e4m3 codes as such codes, with scales of blocks.

    Bits are those of decoding, ``combine.combination`` and encoding, one after the other, with scales as the
    codec makes them. What is decoded stays in the cache of one core: a few blocks at a time.

    Args:
        out: [rows, columns], written: codes; their scales are written to ``out_steps`` [scale rows, blocks].
        codes: memory that holds the codes of all inputs, each [rows, columns], from its place on.
        places: [inputs].
        steps: [inputs, scale rows, blocks].
        block: its rows and columns.
        coefficients: [inputs]; that of the anchor a does not count, nor does an excess e of 0.
        held: the input whose scales are kept where they serve as well; -1 for none.
        scales: whether they are powers of two, and whether they are stored in bfloat16 rather than float32.

    Returns:
        Whether all is finite, else nothing counts; sums of squares of what encoding changed, and of all."""
    (rows, columns), (height, width) = out.shape, block
    strip = min(columns, width * max(1, STRIP // width))
    scratch, made = (
        np.empty(min(height, rows) * strip, np.float32),
        np.empty(min(height, rows) * strip, np.uint8),
    )
    decoded, errors, squares = np.empty((2, strip), np.float32), 0.0, 0.0
    for scale_row in range(out_steps.shape[0]):
        top, bottom = scale_row * height, min(rows, (scale_row + 1) * height)
        for begin in range(0, columns, strip):
            end, first = min(columns, begin + strip), begin // width
            shape = bottom - top, end - begin
            # Without gaps, whatever the strip: so the loops over blocks are compiled for it.
            values = scratch[: shape[0] * shape[1]].reshape(shape)
            encoded = made[: shape[0] * shape[1]].reshape(shape)
            own = steps[:, scale_row, first : first + -(-shape[1] // width)].copy()
            for row in range(shape[0]):
                at = (top + row) * columns + begin
                _combine(values[row], decoded, codes, places, at, own, width, coefficients, anchor, excess)
            new = out_steps[scale_row : scale_row + 1, first : first + own.shape[1]]
            if not _write_steps(values, own, block, held, scales, new):
                return False, 0.0, 0.0
            grid = new.copy()
            _encode_e4m3(values, grid, height, width, encoded)
            out[top:bottom, begin:end] = encoded
            changed, total = _squares_e4m3(encoded, grid, height, width, values)
            errors, squares = errors + changed, squares + total
    return True, errors, squares


@inlined
def _combine(
    run: Floats,
    decoded: Floats,
    codes: Codes,
    places: NDArray[np.int64],
    at: int,
    steps: Floats,
    width: int,
    coefficients: NDArray[np.float64],
    anchor: int,
    excess: float,
) -> None:
    """Write the combination of a row of a strip, whose first element is at ``at`` in each input; ``steps`` is
    [inputs, blocks], ``decoded`` [2, strip]."""
    start, other = decoded[0, : run.size], decoded[1, : run.size]
    first = places[anchor] + at
    _decode_run(codes[first : first + run.size], steps[anchor], width, start)
    copy(run, start)
    if excess != 0.0:
        subtract_excess(run, start, start[:0], np.float32(excess))
    for vector in range(places.size):
        if vector != anchor:
            first = places[vector] + at
            _decode_run(codes[first : first + run.size], steps[vector], width, other)
            subtract_change(run, start, other, np.float32(coefficients[vector]))


@inlined
def _decode_run(codes: Codes, steps: Floats, width: int, values: Floats) -> None:
    """Whole blocks of a row, the last of which may be ragged."""
    for block in range(steps.size):
        step = steps[block]
        some, into = codes[block * width : (block + 1) * width], values[block * width : (block + 1) * width]
        for i in range(into.size):
            into[i] = e4m3_element(np.uint32(some[i])) * step


@inlined
def _write_steps(
    values: Floats, steps: Floats, block: tuple[int, int], held: int, scales: tuple[bool, bool], out: Floats
) -> bool:
    """Write the scales of the blocks of a strip ``[1, blocks]``; False if it has NaN or infinity."""
    peaks = np.zeros((1, out.shape[1]), np.uint32)
    largest(values.view(np.uint32), block[0], block[1], peaks)
    serves = np.full((1, out.shape[1]), held >= 0)
    if held >= 0:
        _fits_e4m3(values, steps[held : held + 1], block[0], block[1], serves)
    for number in range(out.shape[1]):
        if peaks[0, number] >= _INFINITE:
            return False
        fresh = _fresh(np.uint32(peaks[0, number]).view(np.float32), scales[0], scales[1])
        out[0, number] = steps[held, number] if serves[0, number] else fresh
    return True


@inlined
def _fresh(largest: np.float32, is_power: bool, is_bf16: bool) -> np.float32:
    """The scale of a block with this largest magnitude, as it can be stored."""
    if largest == np.float32(0.0):
        return np.float32(1.0)
    scale = np.float32(largest / _LARGEST)
    if is_power:
        pattern = np.float32(scale).view(np.uint32)
        exponent = np.uint32(pattern >> np.uint32(23)) + np.uint32((pattern & np.uint32(0x7FFFFF)) != 0)
        scale = np.uint32(np.uint32(exponent) << np.uint32(23)).view(np.float32)
    scale = np.float32(max(scale, _LEAST))
    return widened(rounded(scale)) if is_bf16 else scale
