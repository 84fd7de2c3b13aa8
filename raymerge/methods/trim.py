"""Keeping the largest of a tensor's elements, each element deciding for itself."""

from __future__ import annotations

import torch

from raymerge.methods.random import keep_some, random_key
from raymerge.methods.reduce import chunks
from raymerge.methods.selection import MagnitudeSelection

# Not the recipe's seed: the methods that trim are not random, they only need a fair choice among equals.
_TIE_SEED = 0


def tie_key(method: str, source: int) -> int:
    """The key by which a method chooses among equal elements of one source."""
    return random_key(_TIE_SEED, method, source)


def mark_largest_(magnitudes: torch.Tensor, selection: MagnitudeSelection, *, key: int, start: int) -> None:
    """Overwrite the magnitudes by 1 where they are among those selected and by 0 elsewhere.

    Of the elements that equal the threshold as large a share is marked as makes up the rank, chosen by a
    hash of their index. Under one key the marks of a smaller rank are among those of a larger one.

    Args:
        magnitudes: float32 ``[n]``, not negative; a NaN is not marked.
        selection: what was found over the whole tensor.
        key: 64-bit key of the choice among equals.
        start: index of the first element within the tensor.
    """
    if selection.tied_share >= 1 or selection.threshold == 0:
        magnitudes.ge_(selection.threshold)
        return
    for chunk in chunks(magnitudes.numel(), magnitudes.device):
        marked = magnitudes[chunk]
        tied = torch.nonzero(marked == selection.threshold).flatten()
        marked.gt_(selection.threshold)
        marked[tied] = keep_some(key, tied + (start + chunk.start), selection.tied_share).to(marked.dtype)
