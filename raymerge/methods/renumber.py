"""Numbers as others: for tables that name experts by number, where experts get new numbers."""

from __future__ import annotations

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method
from raymerge.methods.reference import Block, Expected, LogicalTensor, elementwise


class RenumberKernel(Kernel):
    """``numbers[T]``; every element of T is a whole number below their count."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        source = tile.sources[0]
        numbers = torch.tensor(settings.numbers, dtype=torch.float32, device=source.device)
        return numbers[source.long()]


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    values = np.array(tensor.settings.numbers, dtype=np.float64)[block.sources[0].astype(np.int64)]
    return Expected(values, np.zeros_like(values))


RENUMBER = Method(
    name="renumber",
    summary="Whole numbers, each as another one.",
    access=Access.ELEMENT,
    kernel=RenumberKernel(),
    reference=elementwise(_reference),
    max_sources=1,
    scratch=3.0,
)
