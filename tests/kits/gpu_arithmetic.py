"""Arithmetic of a GPU, on a processor: how CUDA divides by numbers, and cuBLAS multiplies in TF32."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def divide_by_reciprocals(patch: pytest.MonkeyPatch) -> None:

    def patched(name: str, multiply: str) -> None:
        whole = getattr(torch.Tensor, name)

        def divide(self: torch.Tensor, other: Any, **options: Any) -> torch.Tensor:
            if isinstance(other, torch.Tensor) or options or not self.is_floating_point():
                divided: torch.Tensor = whole(self, other, **options)
                return divided
            # Of halves it is taken in float32.
            wide = torch.float64 if self.dtype is torch.float64 else torch.float32
            reciprocal = torch.tensor(1.0, dtype=wide) / torch.tensor(other, dtype=wide)
            multiplied: torch.Tensor = getattr(self, multiply)(reciprocal.item())
            return multiplied

        patch.setattr(torch.Tensor, name, divide)

    for name in ("div", "__truediv__", "true_divide", "divide"):
        patched(name, "mul")
    for name in ("div_", "__itruediv__", "true_divide_", "divide_"):
        patched(name, "mul_")


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
