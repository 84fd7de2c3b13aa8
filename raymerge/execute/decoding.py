"""Stored bytes as float32 tensors, and float32 tensors as stored bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymerge.checkpoints.quantisation.codec import load_scales
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.gathers import RawCodes
from raymerge.execute.ops import RowJob
from raymerge.merge_plan.elements import strided, torch_dtype
from raymerge.merge_plan.expressions import Read, Scales


def typed(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as the elements that they are: ``[n]`` on the device, in logical order.

    Args:
        raw: uint8 bytes of the input; the result shares their memory where it can.
        source: their dtype and view.
        device: where the arithmetic runs.
    """
    if not is_aligned(raw, source.dtype):
        raw = raw.clone()
    stored = raw.view(torch_dtype(source.dtype)).to(device)
    return stored if source.view is None else strided(stored, source.view).contiguous().flatten()


def is_aligned(raw: torch.Tensor, dtype: DType) -> bool:
    """Whether uint8 bytes can be taken for elements of a dtype where they are."""
    size = torch_dtype(dtype).itemsize
    return not raw.storage_offset() % size and not raw.data_ptr() % size


def decode(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as a new float32 ``[n]`` tensor on the device, in logical order; see ``typed``."""
    return typed(raw, source, device).to(torch.float32, copy=True)


def numbers(raw: RawCodes, source: Read, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes with scales as float32 ``[n]`` on their device, in logical order.

    Args:
        raw: whole bands of rows.
        source: what they mean, and their view.
        out: float32 ``[n]``, for the result of a source without a view; None for memory of its own.
    """
    scales = source.scales
    if scales is None:
        raise TypeError("an input of numbers was read as codes")
    rows = raw.codes.numel() * 8 // source.dtype.bits // scales.columns
    packing = scales.encoding.packing((rows, scales.columns))
    into, whole = None if out is None else out.view(packing.shape), tensor_scale(raw, scales)
    codec = codec_of(packing.format)
    found = codec.decode(packing, raw.codes, raw.scales, tensor_scale=whole, out=into).flatten()
    return found if source.view is None else strided(found, source.view).contiguous().flatten()


def tensor_scale(raw: RawCodes, scales: Scales) -> torch.Tensor | None:
    """The one scale that codes share, float32 ``[]``; None where there is none."""
    dtype = scales.encoding.tensor_scale_dtype
    return None if dtype is None else load_scales(dtype, raw.tensor_scale).squeeze(0)


def rounded(result: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float32 results rounded once to the output's dtype, as bytes where they are: uint8 ``[nbytes]``."""
    return result.to(torch_dtype(dtype)).contiguous().view(torch.uint8)


def encode(result: torch.Tensor, dtype: DType, target: torch.Tensor) -> None:
    """Round float32 results once to the output's dtype, in place.

    Args:
        result: float32 ``[n]``.
        dtype: the output's.
        target: uint8 ``[nbytes]`` on the same device, which they are written to.
    """
    if is_aligned(target, dtype):
        target.view(torch_dtype(dtype)).copy_(result)
    else:
        target.copy_(rounded(result, dtype))


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
