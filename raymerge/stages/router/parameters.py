"""Which logical tensors of a checkpoint a parameter of transformers' model is made of.

A parameter is one tensor of the checkpoint by the same name, or many experts' matrices stacked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

import torch

from raymerge.architectures import fused_layout, logical_name, logical_names
from raymerge.checkpoints.views import View, fused_views
from raymerge.merge_plan.elements_part import strided
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.weights import Weights


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or a buffer that is saved, and what fills it."""

    name: str
    """Its name within the part of the model that it is loaded into."""
    shape: tuple[int, ...]
    """Its shape."""
    parts: tuple[tuple[str, View | None], ...]
    """Logical tensors and where each lies within the parameter; None for one that is all of it."""

    @property
    def nbytes(self) -> int:
        """Its bytes in float32."""
        return prod(self.shape) * torch.float32.itemsize

    @property
    def loading_nbytes(self) -> int:
        """Bytes that are needed beside it while it is loaded."""
        longest = max(prod(view.shape) if view else prod(self.shape) for _, view in self.parts)
        # The stored numbers, and what an adapter adds; of a stack one matrix in float32 as well.
        return longest * torch.float32.itemsize * 2

    def load(self, weights: Weights, device: torch.device) -> torch.Tensor:
        """Its numbers: float32, of its shape.

        Raises:
            CheckpointError: they cannot be read.
        """
        if self.parts[0][1] is None:
            return weights.load(self.parts[0][0], device=device)
        found = torch.empty(self.shape, device=device)
        for logical, view in self.parts:
            assert view is not None
            strided(found.view(-1), view).copy_(weights.load(logical))
        return found

    def read_bytes(self, weights: Weights) -> int:
        """Stored bytes that loading reads."""
        return sum(weights.nbytes(logical) for logical, _ in self.parts)


class ParameterFinder:
    """Finds parameters of a model of transformers in a checkpoint of it."""

    def __init__(self, base: Source, weights: Weights, prefix: str) -> None:
        """
        Args:
            base: the checkpoint.
            weights: its tensors.
            prefix: beginning of names that a checkpoint of the bare model lacks, such as ``model.``.
        """
        self._base = base
        self._weights = weights
        self._names: Collection[str] = weights.names()
        self._prefix = prefix

    def find(self, path: str, name: str, tensor: torch.Tensor) -> Parameter | None:
        """The parameter ``name`` of the module at ``path``; None where the checkpoint has nothing for it."""
        shape = tuple(tensor.shape)
        for full in self._spellings(f"{path}{name}"):
            logical = logical_name(full, self._base.rules)
            if logical in self._names and self._weights.shape(logical) == shape:
                return Parameter(name, shape, ((logical, None),))
            stack = tuple(self._stack(full, shape))
            if stack and all(
                each in self._names and self._weights.shape(each) == view.shape for each, view in stack
            ):
                return Parameter(name, shape, stack)
        return None

    def embedding(self, name: str) -> str | None:
        """Logical name of the matrix that is the embedding ``name``, whatever its number of rows."""
        found = (logical_name(full, self._base.rules) for full in self._spellings(name))
        return next((logical for logical in found if logical in self._names), None)

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix and name.startswith(self._prefix):
            yield name.removeprefix(self._prefix)

    def _stack(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        layout = fused_layout(name, shape, self._base.checkpoint.config, self._base.rules)
        if layout is not None and layout.kind != "unknown":
            views = fused_views(layout.kind, shape, len(layout.projections), layout.num_experts)
            yield from zip(logical_names(layout), views, strict=True)


def state_of(
    parameters: Collection[Parameter], weights: Weights, device: torch.device
) -> dict[str, torch.Tensor]:
    """The parameters of one part of the model by their names in it, loaded."""
    return {each.name: each.load(weights, device) for each in parameters}
