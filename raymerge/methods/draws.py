"""Random numbers without a generator: each is a function of a key and its index, as the masks are.

They are made of the hash behind the masks of ``keep_mask``: one key must not serve a mask and numbers, or
normal and uniform numbers, that are to be independent.
"""

from __future__ import annotations

import torch

from raymerge.methods.random import hashed, key_words
from raymerge.methods.reduce import PIECE, chunk_length, chunks

# Elements; more than the widest vector instruction takes, in both directions of a loop's unrolling.
_ALIGNMENT = 64


def uniform(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """The elements ``[start, start + count)`` of a sequence of uniform numbers from 0 up to, not with, 1.

    Whole multiples of 2**-24, made by exact operations alone.

    Returns:
        float32 ``[count]`` on ``device``; the same on every device and for every way to cut the range.
    """
    numbers = torch.empty(count, dtype=torch.float32, device=device)
    if device.type == "cpu":
        from raymerge.kernels.draws import fill_uniform

        fill_uniform(*key_words(key), start, numbers.numpy())
        return numbers
    return _uniform_by_torch(key, start, numbers)


def _uniform_by_torch(key: int, start: int, out: torch.Tensor) -> torch.Tensor:
    """The same by operations that every device has."""
    for chunk in chunks(out.numel(), out.device):
        words = _hashes(key, start + chunk.start, start + chunk.stop, out.device)
        out[chunk].copy_(words.bitwise_right_shift_(40).add_(1 << 23)).mul_(2.0**-24)
    return out


def normal(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """The elements ``[start, start + count)`` of a sequence of normal numbers, of mean 0 and deviation 1.

    The inverse of the normal distribution function at 52-bit uniform numbers that lie halfway between their
    neighbours, hence never at 0 or 1: no number is beyond 8.21 in size. Computed in float64, rounded once.

    Returns:
        float32 ``[count]`` on ``device``; the same for every way to cut the range. Byte equality holds within
        one kind of device and one version of torch: the function is the library's, and only close to equal
        elsewhere.
    """
    numbers = torch.empty(count, dtype=torch.float32, device=device)
    # On a processor one thread computes a run, and every run starts at the same alignment, so that neither
    # tiles nor threads choose between a library's vector and scalar functions.
    length = PIECE if device.type == "cpu" else chunk_length(count, device)
    stop = start + count
    for begin in range(start - start % _ALIGNMENT, stop, length):
        end = min(begin + length, -(-stop // _ALIGNMENT) * _ALIGNMENT)
        low, high = max(begin, start), min(end, stop)
        numbers[low - start : high - start] = _normal_run(key, begin, end, device)[low - begin : high - begin]
    return numbers


def _normal_run(key: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """float64 ``[end - begin]``."""
    if device.type == "cpu":
        from raymerge.kernels.draws import fill_points

        points = torch.empty(end - begin, dtype=torch.float64)
        fill_points(*key_words(key), begin, points.numpy())
    else:
        points = _points_by_torch(key, begin, end, device)
    torch.special.ndtri(points, out=points)
    return points


def _points_by_torch(key: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers by operations that every device has, all exact: odd multiples of 2**-53."""
    words = _hashes(key, begin, end, device).bitwise_right_shift_(12)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-52).add_(0.5)


def _hashes(key: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """int64 ``[end - begin]``, uniform over all of its values in the high bits."""
    return hashed(key, torch.arange(begin, end, dtype=torch.int64, device=device))
