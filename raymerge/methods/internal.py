"""What plans compute and no recipe asks for: the largest of scales, and other numbers for experts."""

from __future__ import annotations

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter, Takes
from raymerge.methods.reference import Block, Expected, LogicalTensor, elementwise

_SMALLEST = "smallest"


class LargestKernel(Kernel):
    """``max T_i``, or ``min T_i`` of divisors."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        sources: torch.Tensor = tile.sources
        return sources.amin(0) if settings.flag(_SMALLEST) else sources.amax(0)


def _largest(tensor: LogicalTensor, block: Block) -> Expected:
    values = block.sources.min(0) if tensor.settings.flag("smallest") else block.sources.max(0)
    return Expected(values, block.input_doubt * np.ones_like(values))


LARGEST = Method(
    name="largest",
    summary="The largest of the sources, element by element.",
    access=Access.ELEMENT,
    kernel=LargestKernel(),
    reference=elementwise(_largest),
    parameters=(Parameter.switch(_SMALLEST, "take the smallest instead", default=False),),
    scratch=0.0,
)


class RenumberKernel(Kernel):
    """``numbers[T]``; every element of T is a whole number below their count."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        source = tile.sources[0]
        numbers = torch.tensor(settings.numbers, dtype=torch.float32, device=source.device)
        return numbers[source.long()]


def _renumbered(tensor: LogicalTensor, block: Block) -> Expected:
    values = np.array(tensor.settings.numbers, dtype=np.float64)[block.sources[0].astype(np.int64)]
    return Expected(values, np.zeros_like(values))


RENUMBER = Method(
    name="renumber",
    summary="Whole numbers, each as another one.",
    access=Access.ELEMENT,
    takes=Takes.INTEGERS,
    kernel=RenumberKernel(),
    reference=elementwise(_renumbered),
    max_sources=1,
    scratch=3.0,
)
