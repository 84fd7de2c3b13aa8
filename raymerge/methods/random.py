"""Counter-based random masks and numbers: each is a function of a key and an element's index.

No state and no order of drawing, hence the same for every tiling, worker count, retry and device. A pair of
neighbours shares one 64-bit hash: an element's number, from 0 to 2**32 - 1, is the lower half at an even
index and the upper half at an odd one. It is kept if its number is below density * 2**32, rounded up: a
density above 0 keeps one element in 2**32 at least, and one within 2**-32 of 1 keeps all.

One key must not serve a mask and numbers, or normal and uniform numbers: they share the hash."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.reduce import PIECE, chunk_length, chunks

# The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
# OOPSLA 2014) over a Weyl sequence, with a second half of the key between its two rounds. Without
# that, all keys would walk one common sequence from different points, and masks could overlap shifted.
_WORD = 1 << 64
_WEYL = 0x9E37_79B9_7F4A_7C15
_ROUNDS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
_LAST_SHIFT = 31
_NUMBERS = 1 << 32
# Lowers both halves of a word by 2**31, as signed numbers of 32 bits.
_LOWERED = 0x8000_0000_8000_0000


def random_key(seed: int, tensor: str, source: int) -> int:
    """A 64-bit key (unsigned) for the mask of one source of one output tensor."""
    text = f"{seed}/{source}/{tensor}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"raymerge mask").digest()
    return int.from_bytes(digest, "little")


def key_words(key: int) -> tuple[np.uint64, np.uint64]:
    """The two words that ``raymerge.kernels.hashes`` takes."""
    return np.uint64(key % _WORD), np.uint64(_second_word(key))


def limit_of(density: float) -> int:
    """An element is kept if its number is below this, from 0 to 2**32."""
    return min(_NUMBERS, max(0, math.ceil(density * _NUMBERS)))


def limits_of(densities: torch.Tensor) -> torch.Tensor:
    """``limit_of`` each of the densities, float64 ``[n]``; overwrites them."""
    return densities.mul_(float(_NUMBERS)).ceil_().clamp_(0.0, float(_NUMBERS))


def chance_of(density: float) -> float:
    """The exact probability of being kept: the density, rounded up to a multiple of 2**-32."""
    return limit_of(density) / _NUMBERS


def keep_mask(key: int, start: int, count: int, density: float, device: torch.device) -> torch.Tensor:
    """Which of the elements ``[start, start + count)`` are kept: bool ``[count]``, however the range is
    cut."""
    limit = limit_of(density)
    if limit in (0, _NUMBERS):
        return torch.full((count,), limit > 0, dtype=torch.bool, device=device)
    numbers = torch.empty(count, dtype=torch.int32, device=device)
    return write_numbers(key, start, out=numbers).le(limit - 1 - _NUMBERS // 2)


def keep_factors(key: int, start: int, density: float, factor: float, *, out: torch.Tensor) -> torch.Tensor:
    """Write ``factor`` (not negative) into float32 ``out`` where ``keep_mask`` keeps an element and 0
    elsewhere."""
    if out.device.type == "cpu":
        loops.hashes.fill_factors(*key_words(key), start, limit_of(density), np.float32(factor), out.numpy())
        return out
    return out.copy_(keep_mask(key, start, out.numel(), density, out.device)).mul_(factor)


def write_numbers(key: int, start: int, *, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of the elements from ``start`` on, each less 2**31, into int32 ``out``."""
    if out.device.type == "cpu":
        loops.hashes.fill_numbers(*key_words(key), start, out.numpy())
        return out
    return _write_numbers(key, start, out)


def _write_numbers(key: int, start: int, out: torch.Tensor) -> torch.Tensor:
    for chunk in chunks(out.numel(), out.device):
        first, stop = start + chunk.start, start + chunk.stop
        pairs = torch.arange(first >> 1, (stop + 1) >> 1, dtype=torch.int64, device=out.device)
        words = _finished(hashed(key, pairs)).bitwise_xor_(_signed(_LOWERED))
        # The lower half of a word comes first in memory.
        out[chunk].copy_(words.view(torch.int32)[first & 1 :][: stop - first])
    return out


def hashed(key: int, words: torch.Tensor) -> torch.Tensor:
    """The indices in ``words`` (int64 ``[n]``) hashed in place, uniform over all 64-bit values.

    Good in the high bits: the finaliser's last xor, which serves the low ones, is left out."""
    shifted = torch.empty_like(words)
    words.mul_(_signed(_WEYL))
    for word, (shift, factor) in zip((key, _second_word(key)), _ROUNDS, strict=True):
        words.add_(_signed(word))
        torch.bitwise_right_shift(words, shift, out=shifted)
        # The shift of a signed integer copies the sign: cut it off.
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return words


def _finished(words: torch.Tensor) -> torch.Tensor:
    """The xor that ``hashed`` leaves out, in place."""
    shifted = words.bitwise_right_shift(_LAST_SHIFT).bitwise_and_((1 << (64 - _LAST_SHIFT)) - 1)
    return words.bitwise_xor_(shifted)


def _second_word(key: int) -> int:
    """Another 64 bits from the key, so that keys with related first words become unrelated."""
    digest = hashlib.blake2b(
        (key % _WORD).to_bytes(8, "little"), digest_size=8, person=b"raymerge word"
    ).digest()
    return int.from_bytes(digest, "little")


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


# Elements; more than the widest vector instruction takes, in both directions of a loop's unrolling.
_ALIGNMENT = 64


def uniform(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers ``[start, start + count)`` from 0 up to, not with, 1: multiples of 2**-24 by exact
    operations, float32 ``[count]``. The same on every device and however the range is cut."""
    numbers = torch.empty(count, dtype=torch.float32, device=device)
    for chunk in chunks(count, device):
        words = _hashes(key, start + chunk.start, start + chunk.stop, device)
        numbers[chunk].copy_(words.bitwise_right_shift_(40).add_(1 << 23)).mul_(2.0**-24)
    return numbers


def normal(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Normal numbers ``[start, start + count)`` of mean 0 and deviation 1, float32 ``[count]``.

    The inverse of the normal distribution function at 52-bit uniform numbers halfway between their
    neighbours, hence never at 0 or 1: no number is beyond 8.21. Computed in float64, rounded once. The same
    however the range is cut; byte equality holds within one kind of device and version of torch, whose
    function this is."""
    numbers = torch.empty(count, dtype=torch.float32, device=device)
    # On a processor one thread computes a run, and every run starts at the same alignment, so that neither
    # tiles nor threads choose between a library's vector and scalar functions.
    length = PIECE if device.type == "cpu" else chunk_length(count, device)
    stop = start + count
    for begin in range(start - start % _ALIGNMENT, stop, length):
        end = min(begin + length, -(-stop // _ALIGNMENT) * _ALIGNMENT)
        low, high = max(begin, start), min(end, stop)
        points = _points(key, begin, end, device)
        torch.special.ndtri(points, out=points)
        numbers[low - start : high - start] = points[low - begin : high - begin]
    return numbers


def _points(key: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Odd multiples of 2**-53, by exact operations."""
    words = _hashes(key, begin, end, device).bitwise_right_shift_(12)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-52).add_(0.5)


def _hashes(key: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """int64 ``[end - begin]``, uniform over all of its values in the high bits."""
    return hashed(key, torch.arange(begin, end, dtype=torch.int64, device=device))
