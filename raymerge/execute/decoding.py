"""Stored bytes as float32 tensors, and float32 tensors as stored bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.jobs import RowJob
from raymerge.planner.elements import strided, torch_dtype
from raymerge.planner.expressions import Read


def decode(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as a new float32 ``[n]`` tensor on the device, in logical order.

    Args:
        raw: uint8 bytes of the input, on the host.
        source: their dtype and view.
        device: where the arithmetic runs.
    """
    stored = raw.view(torch_dtype(source.dtype)).to(device)
    if source.view is not None:
        stored = strided(stored, source.view).contiguous().flatten()
    return stored.to(torch.float32, copy=True)


def encode(result: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float32 results rounded once to the output's dtype, as bytes on the host: uint8 ``[nbytes]``."""
    return result.to(torch_dtype(dtype)).contiguous().cpu().view(torch.uint8)


def scatter(results: Sequence[torch.Tensor], row: RowJob) -> torch.Tensor:
    """The results of a row's parts, each at its place in the row: float32 ``[num_elements]``."""
    if len(results) == 1 and row.parts[0].view is None:
        return results[0]
    whole = torch.empty(row.num_elements, dtype=torch.float32, device=results[0].device)
    for result, part in zip(results, row.parts, strict=True):
        view = part.view or View(0, part.shape, ())
        target = strided(whole, view) if view.strides else whole.view(part.shape)
        target.copy_(result.view(part.shape))
    return whole
