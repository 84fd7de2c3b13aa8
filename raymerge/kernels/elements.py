"""Stored elements, bfloat16 or float32, to float32 and back.

Loops that call these are compiled for each element type. bfloat16 comes as uint16 patterns, widened on the
way into the arithmetic: float32 copies of the inputs would take as long again as the rest."""

# ruff: noqa: ARG001, ARG005 - all forms of a function have the same arguments

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from raymerge.kernels.jit import by_type, compiled, inlined

CHUNK = 16_384
"""Elements of a chunk: a piece of the sums (``raymerge.methods.reduce``); several fill half a cache."""


@inlined
def widened(word: np.uint16) -> np.float32:
    """bfloat16 to float32. Shifts of 32 bits are of 64 bits until made 32 again."""
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)


@inlined
def rounded(value: np.float32) -> np.uint16:
    """The nearest bfloat16, ties to even. Any NaN becomes a quiet one."""
    pattern = np.float32(value).view(np.uint32)
    nearest = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (pattern & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if is_nan else np.uint16(nearest)


@compiled
def widen(words: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    """bfloat16 to float32; both ``[n]``."""
    for i in range(words.size):
        values[i] = widened(words[i])


@compiled
def narrow(values: NDArray[np.float32], words: NDArray[np.uint16]) -> None:
    """float32 to bfloat16; both ``[n]``."""
    for i in range(values.size):
        words[i] = rounded(values[i])


def value_of(element: Any) -> np.float32:
    raise NotImplementedError


@by_type(value_of)
def _value_of(element: Any) -> Any:
    return (lambda element: widened(element)) if element == types.uint16 else (lambda element: element)


def delta_of(element: Any, base: np.float32) -> np.float32:
    """A stored bfloat16 less the base; float32 elements are deltas already."""
    raise NotImplementedError


@by_type(delta_of)
def _delta_of(element: Any, base: Any) -> Any:
    if element == types.uint16:
        return lambda element, base: widened(element) - base
    return lambda element, base: element


def values_of(elements: Any, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Stored elements ``[n]`` as float32: themselves, or converted into ``scratch``."""
    raise NotImplementedError


@by_type(values_of)
def _values_of(elements: Any, scratch: Any) -> Any:
    def widened_into(elements: Any, scratch: Any) -> Any:
        for i in range(elements.size):
            scratch[i] = widened(elements[i])
        return scratch[: elements.size]

    return widened_into if elements.dtype == types.uint16 else (lambda elements, scratch: elements)


def begin_run(out: Any, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Where to compute a run of a result ``[n]`` in float32, until ``end_run``: in place or in
    ``scratch``."""
    raise NotImplementedError


@by_type(begin_run)
def _begin_run(out: Any, scratch: Any) -> Any:
    if out.dtype == types.uint16:
        return lambda out, scratch: scratch[: out.size]
    return lambda out, scratch: out


def end_run(run: NDArray[np.float32], out: Any) -> None:
    raise NotImplementedError


@by_type(end_run)
def _end_run(run: Any, out: Any) -> Any:
    if out.dtype == types.uint16:
        return lambda run, out: narrow(run, out)
    return lambda run, out: None


def element_of(value: np.float32, like: Any) -> Any:
    """A result as an element of the type of another: rounded where that is a stored one."""
    raise NotImplementedError


@by_type(element_of)
def _element_of(value: Any, like: Any) -> Any:
    return (lambda value, like: rounded(value)) if like == types.uint16 else (lambda value, like: value)


@compiled
def load_deltas(
    words: NDArray[np.uint16], places: NDArray[np.int64], begin: int, size: int, rows: NDArray[np.float32]
) -> None:
    """Write ``size`` elements of every input, at the offsets ``places`` plus ``begin`` in ``words``, into
    ``rows`` ``[inputs, CHUNK]``: the base, then the others less the base."""
    first = places[0] + begin
    base = rows[0, :size]
    widen(words[first : first + size], base)
    for index in range(1, places.size):
        first = places[index] + begin
        _widen_less(words[first : first + size], base, rows[index, :size])


@compiled
def _widen_less(words: NDArray[np.uint16], base: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    for i in range(values.size):
        values[i] = widened(words[i]) - base[i]


@compiled
def has_full(words: NDArray[np.uint64], exponents: np.uint64, ones: np.uint64, tops: np.uint64) -> bool:
    """Whether some pattern is not finite, tested in words of several lanes: ``exponents`` has the exponent
    bits of every lane, all set in NaN and infinity, ``ones`` the lowest bit and ``tops`` the highest bit."""
    length = 4096
    for begin in range(0, words.size, length):
        run = words[begin : min(begin + length, words.size)]
        full = np.uint64(0)
        for i in range(run.size):
            # 0 in a lane whose exponent is full: there, and above one only, 1 less borrows the top bit.
            lacking = (run[i] & exponents) ^ exponents
            full |= (lacking - ones) & ~lacking & tops
        if full:
            return True
    return False
