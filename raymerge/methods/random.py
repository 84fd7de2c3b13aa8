"""Random masks without a generator: each element's bit is a function of a key and its index.

No state and no order of drawing, hence the same mask for every tiling, worker count, retry and device,
and for one tensor whatever happens to the others. All operations are on 64-bit integers.
"""

from __future__ import annotations

import hashlib

import torch

from raymerge.methods.reduce import chunks

# The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
# OOPSLA 2014) over a Weyl sequence, with a second half of the key between its two rounds. Without
# that, all keys would walk one common sequence from different points, and masks could overlap shifted.
_WORD = 1 << 64
_WEYL = 0x9E37_79B9_7F4A_7C15
# The largest float64 that is an int64.
_LARGEST_LIMIT = float(_WORD // 2 - 1024)
_ROUNDS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))


def random_key(seed: int, tensor: str, source: int) -> int:
    """A 64-bit key (unsigned) for the mask of one source of one output tensor."""
    text = f"{seed}/{source}/{tensor}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"raymerge mask").digest()
    return int.from_bytes(digest, "little")


def keep_mask(key: int, start: int, count: int, density: float, device: torch.device) -> torch.Tensor:
    """Which of the elements ``[start, start + count)`` are kept, each with probability ``density``.

    Returns:
        bool ``[count]`` on ``device``; the same for every way to cut the range.
    """
    if density <= 0 or density >= 1:
        return torch.full((count,), density >= 1, dtype=torch.bool, device=device)
    limit = round(density * _WORD) - _WORD // 2
    mask = torch.empty(count, dtype=torch.bool, device=device)
    for chunk in chunks(count, device):
        words = torch.arange(start + chunk.start, start + chunk.stop, dtype=torch.int64, device=device)
        torch.lt(hashed(key, words), limit, out=mask[chunk])
    return mask


def keep_some(key: int, indices: torch.Tensor, density: float) -> torch.Tensor:
    """What ``keep_mask`` says of single elements.

    Args:
        key: 64-bit key.
        indices: int64 ``[n]``, indices of the elements; overwritten.
        density: probability of being kept.

    Returns:
        bool ``[n]`` on the indices' device.
    """
    if density <= 0 or density >= 1:
        return torch.full(indices.shape, density >= 1, dtype=torch.bool, device=indices.device)
    return torch.lt(hashed(key, indices), round(density * _WORD) - _WORD // 2)


def keep_by(key: int, start: int, chances: torch.Tensor) -> torch.Tensor:
    """Which of the elements ``[start, start + n)`` are kept, each with a probability of its own.

    The numbers are those of ``keep_mask``: equal probabilities give its mask, but for what float64 rounds.

    Args:
        key: 64-bit key.
        start: index of the first element.
        chances: float64 ``[n]``, from 0 to 1; 1 drops one element in 2**54.

    Returns:
        bool ``[n]`` on the device of ``chances``.
    """
    indices = torch.arange(start, start + chances.numel(), dtype=torch.int64, device=chances.device)
    limits = (chances - 0.5).mul_(float(_WORD)).clamp_max_(_LARGEST_LIMIT).to(torch.int64)
    return torch.lt(hashed(key, indices), limits)


def hashed(key: int, words: torch.Tensor) -> torch.Tensor:
    """The indices in ``words`` (int64 ``[n]``) hashed in place, uniform over all 64-bit values.

    The finaliser's last xor would change low bits only, and a comparison looks at high ones: left out.
    """
    shifted = torch.empty_like(words)
    words.mul_(_signed(_WEYL))
    for word, (shift, factor) in zip((key, _second_word(key)), _ROUNDS, strict=True):
        words.add_(_signed(word))
        torch.bitwise_right_shift(words, shift, out=shifted)
        # The shift of a signed integer copies the sign: cut it off.
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return words


def _second_word(key: int) -> int:
    """Another 64 bits from the key, so that two keys with related first words do not stay related."""
    digest = hashlib.blake2b(
        (key % _WORD).to_bytes(8, "little"), digest_size=8, person=b"raymerge word"
    ).digest()
    return int.from_bytes(digest, "little")


def _signed(word: int) -> int:
    """The 64-bit word as the int64 of the same bits."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
