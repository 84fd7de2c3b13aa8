"""Stored bytes as elements of logical tensors."""

from __future__ import annotations

from raymerge.checkpoints.views import View
from raymerge.deferred import torch
from raymerge.dtypes import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a stored dtype. Raises ValueError: torch has none; such tensors are only ever
    copied."""
    if dtype.torch_name is None:
        raise ValueError(f"{dtype.value} has no torch dtype; it can only be copied")
    resolved: torch.dtype = getattr(torch, dtype.torch_name)
    return resolved


def strided(flat: torch.Tensor, view: View) -> torch.Tensor:
    """The elements of a view in a flat tensor, in logical shape; shares its memory."""
    return torch.as_strided(flat, view.shape, view.strides, flat.storage_offset() + view.offset)
