"""Reductions over whole tensors that give the same bits for every tiling, thread count and device.

A library sum adds in an order that depends on the number of threads, on the length and on the device.
Here the order is part of the definition: each piece of 16,384 elements is folded in halves by plain
float64 additions, and the pieces' sums are added one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymerge.methods.method import BLOCK

PIECE = BLOCK // 4
"""Elements folded into one float64; it divides BLOCK, so that tiles never cut a piece."""

# A processor is fastest on what its cache holds, a GPU on what hides the launch of its operations.
_LONGEST_CPU_CHUNK = 1 << 17
_LONGEST_GPU_CHUNK = 1 << 22


def chunks(num_elements: int, device: torch.device) -> Iterator[slice]:
    """Runs of whole pieces covering ``[0, num_elements)``; their length changes no result."""
    length = chunk_length(num_elements, device)
    for begin in range(0, num_elements, length):
        yield slice(begin, min(begin + length, num_elements))


def chunk_length(num_elements: int, device: torch.device) -> int:
    """Elements that are in work at once, whole pieces.

    Two 8-byte temporaries of them take no more than one float32 tile of ``max(num_elements, BLOCK)``.
    """
    longest = _LONGEST_CPU_CHUNK if device.type == "cpu" else _LONGEST_GPU_CHUNK
    return max(PIECE, min(longest, num_elements // 4 // PIECE * PIECE))


def add_products(total: float, left: torch.Tensor, right: torch.Tensor) -> float:
    """``total`` plus the sum of ``left * right`` (float32 ``[n]`` each), in float64 and in piece order."""
    for chunk in chunks(left.numel(), left.device):
        products = _padded(left[chunk])
        if left is right:
            products.mul_(products)
        else:
            products[: chunk.stop - chunk.start].mul_(right[chunk])
        total = _add_pieces(total, products)
    return total


def add_values(total: float, values: torch.Tensor) -> float:
    """``total`` plus the sum of ``values`` (floating point ``[n]``), in float64 and in piece order."""
    for chunk in chunks(values.numel(), values.device):
        total = _add_pieces(total, _padded(values[chunk]))
    return total


def _padded(values: torch.Tensor) -> torch.Tensor:
    """float64 copy, filled up with zeros to whole pieces."""
    num_pieces = -(-values.numel() // PIECE)
    padded = torch.zeros(num_pieces * PIECE, dtype=torch.float64, device=values.device)
    padded[: values.numel()].copy_(values)
    return padded


def _add_pieces(total: float, values: torch.Tensor) -> float:
    """Fold each piece of ``values`` in place and add the folded sums to ``total`` in order."""
    for partial in folded(values.view(-1, PIECE), dim=1).tolist():
        total += partial
    return total


def folded(values: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Sums along a dimension that is not empty, folded in halves, so that all depends on its length alone.

    ``values`` is overwritten; of an odd number the one in the middle waits for the next round.
    """
    width = values.shape[dim]
    while width > 1:
        half = (width + 1) // 2
        values.narrow(dim, 0, width - half).add_(values.narrow(dim, half, width - half))
        width = half
    return values.select(dim, 0)
