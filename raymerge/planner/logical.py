"""Where logical tensors lie in stored ones.

A statistic (norm, angle, top-k) is defined on one logical matrix: one projection of one expert. The same
matrix is stored alone, or as a part of a fused tensor, possibly transposed or interleaved. This module finds
it by its canonical name, so that a result does not depend on file layout and parents of different layouts
merge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from raymerge.architectures import (
    FusedLayout,
    Role,
    TensorInfo,
    describe,
    fused_layout,
    logical_name,
    logical_names,
)
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.views import View, blocks, fused_views
from raymerge.planner.sources import Source

_NOTHING: Mapping[str, TensorInfo] = MappingProxyType({})


class Place(NamedTuple):
    """One logical tensor inside a contiguous block of a stored tensor. Counts are in elements.

    A tuple, as ``StoredTensor``: planning makes one for each tensor of each source.
    """

    tensor: StoredTensor
    """The stored tensor."""
    start: int
    """First element of the block within the stored tensor."""
    num_elements: int
    """Elements of the block."""
    shape: tuple[int, ...]
    """Logical shape."""
    view: View | None
    """Where its elements lie within the block; None: the block is the logical tensor, row-major."""


@dataclass(frozen=True, slots=True)
class Block:
    """The smallest contiguous run of a stored tensor that holds complete logical tensors."""

    start: int
    """First element within the stored tensor."""
    num_elements: int
    """Its elements."""
    members: tuple[tuple[str, Place], ...]
    """Logical names and their places."""


class LogicalTensors:
    """The logical tensors of one source."""

    def __init__(self, source: Source, known: Mapping[str, TensorInfo] = _NOTHING) -> None:
        """
        Args:
            source: whose tensors.
            known: what names mean in another source of the same rules and stacks.
        """
        self._source = source
        self.infos: Mapping[str, TensorInfo] = {
            name: known.get(name) or describe(name, source.rules, stacks=source.stacks)
            for name in source.checkpoint.tensors
        }
        self._places: Mapping[str, Place] | None = None

    def part(self, name: str) -> Role:
        """What a stored tensor does within its layer."""
        return self.infos[name].part

    def stored(self, name: str) -> StoredTensor | None:
        """The stored tensor of that very name."""
        return self._source.checkpoint.tensors.get(name)

    def is_alone(self, name: str) -> bool:
        """Whether a stored tensor is one logical tensor, and not fused of several."""
        return self._layout(name) is None

    def blocks(self, name: str) -> tuple[Block, ...] | None:
        """The blocks of a stored tensor in order; None when it is fused in a way that cannot be told."""
        tensor = self._source.checkpoint.tensors[name]
        layout = self._layout(name)
        if layout is None:
            place = whole_place(tensor)
            logical = logical_name(name, self._source.rules, info=self.infos[name])
            return (Block(0, place.num_elements, ((logical, place),)),)
        if layout.kind == "unknown":
            return None
        views = fused_views(layout.kind, tensor.shape, len(layout.projections), layout.num_experts)
        names = logical_names(layout)
        return tuple(
            Block(start, count, tuple((names[i], _place(tensor, start, count, views[i])) for i in members))
            for start, count, members in blocks(
                layout.kind, tensor.shape, len(layout.projections), layout.num_experts
            )
        )

    def find(self, logical: str) -> Place | None:
        """The place of a logical tensor, whatever stored tensor holds it."""
        return self._all().get(logical)

    def names(self) -> Collection[str]:
        """The logical tensors' names."""
        return self._all().keys()

    def _layout(self, name: str) -> FusedLayout | None:
        """How a stored tensor holds matrices of many experts; None where it is one logical tensor."""
        info = self.infos[name]
        if info.part is not Role.EXPERT or info.expert is not None:
            return None
        shape = self._source.checkpoint.tensors[name].shape
        return fused_layout(name, shape, self._source.checkpoint.config, self._source.rules)

    def _all(self) -> Mapping[str, Place]:
        if self._places is None:
            self._places = {
                member: place
                for name in self._source.checkpoint.tensors
                for block in self.blocks(name) or ()
                for member, place in block.members
            }
        return self._places


def open_logical(sources: Sequence[Source]) -> tuple[LogicalTensors, ...]:
    """The logical tensors of each source; what a name means is found out once for sources that are alike."""
    opened: list[tuple[Source, LogicalTensors]] = []
    for source in sources:
        alike = (
            tensors.infos
            for other, tensors in opened
            if (other.rules, other.stacks) == (source.rules, source.stacks)
        )
        opened.append((source, LogicalTensors(source, next(alike, _NOTHING))))
    return tuple(tensors for _, tensors in opened)


def whole_place(tensor: StoredTensor) -> Place:
    """A stored tensor that is one logical tensor."""
    return Place(tensor, 0, tensor.num_elements, tensor.shape, None)


def _place(tensor: StoredTensor, start: int, count: int, view: View) -> Place:
    inside = View(view.offset - start, view.shape, view.strides)
    return Place(tensor, start, count, view.shape, None if inside.is_flat and inside.offset == 0 else inside)
