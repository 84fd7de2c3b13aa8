"""Arithmetic of a GPU, on a processor: how cuBLAS multiplies in TF32."""

from __future__ import annotations

import pytest
import torch


def multiply_in_tf32(patch: pytest.MonkeyPatch, *, is_forced: bool = False) -> None:
    whole = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype is torch.float32 and (is_forced or torch.backends.cuda.matmul.allow_tf32):
            return whole(_tf32(left), _tf32(right))
        return whole(left, right)

    patch.setattr(torch, "mm", mm)


def _tf32(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
