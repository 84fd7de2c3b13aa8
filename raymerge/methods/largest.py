"""The largest of the sources, element by element: for scales of activations, which no recipe names."""

from __future__ import annotations

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Block, Expected, LogicalTensor, elementwise

_SMALLEST = "smallest"


class LargestKernel(Kernel):
    """``max T_i``, or ``min T_i`` of divisors."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        sources: torch.Tensor = tile.sources
        return sources.amin(0) if settings.flag(_SMALLEST) else sources.amax(0)


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    values = block.sources.min(0) if tensor.settings.flag("smallest") else block.sources.max(0)
    return Expected(values, block.input_doubt * np.ones_like(values))


LARGEST = Method(
    name="largest",
    summary="The largest of the sources, element by element.",
    access=Access.ELEMENT,
    kernel=LargestKernel(),
    reference=elementwise(_reference),
    parameters=(Parameter.switch(_SMALLEST, "take the smallest instead", default=False),),
    scratch=0.0,
)
