"""The largest of the sources, element by element: for scales of activations, which no recipe names."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import numpy as np
import torch

from raymerge.methods.method import (
    Access,
    BaseUse,
    Block,
    Expected,
    LogicalTensor,
    Method,
    Parameter,
    Settings,
    SinglePass,
    Takes,
    Tile,
    elementwise,
)

_SMALLEST = "smallest"


class LargestKernel(SinglePass):
    """``max T_i``, or ``min T_i`` of divisors."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """NaN where a source has it."""
        sources: torch.Tensor = tile.sources
        return sources.amin(0) if settings.flag(_SMALLEST) else sources.amax(0)


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    """The largest source, or the smallest."""
    values = block.sources.min(0) if tensor.settings.flag("smallest") else block.sources.max(0)
    return Expected(values, block.input_doubt * np.ones_like(values))


LARGEST = Method(
    name="largest",
    summary="The largest of the sources, element by element.",
    paper="-",
    access=Access.ELEMENT,
    base=BaseUse.UNUSED,
    takes=Takes.WEIGHTS,
    kernel=LargestKernel(),
    reference=elementwise(_reference),
    parameters=(Parameter(_SMALLEST, "bool", "global", "take the smallest instead", default=False),),
    scratch=0.0,
)
