"""Where logical tensors lie in stored ones.

A statistic (norm, angle, top-k) is defined on one logical matrix: one projection of one expert. The same
matrix is stored alone, or as a part of a fused tensor, possibly transposed or interleaved. This module finds
it by its canonical name, so that a result does not depend on file layout and parents of different layouts
merge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from raymerge.architectures import (
    FusedLayout,
    LayoutKind,
    Role,
    TensorInfo,
    describe,
    fused_layout,
    logical_name,
    logical_names,
)
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.packing import Format, Packing, encoding_of
from raymerge.checkpoints.views import View, blocks, fused_views
from raymerge.planner.expressions import Scales
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
    scales: Scales | None = None
    """What makes numbers of the block where it is codes."""


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

    def blocks(self, name: str, *, as_plain: bool = False) -> tuple[Block, ...] | None:
        """The blocks of a stored tensor in order; None when it is fused in a way that cannot be told.

        Args:
            name: the tensor.
            as_plain: as they would lie in a tensor of the family's usual layout, were it not packed.
        """
        tensor = self._source.checkpoint.tensors[name]
        layout = self._layout(name, as_plain=as_plain)
        if as_plain:
            tensor = tensor._replace(shape=self.plain_shape(name))
        if layout is None:
            place = self.whole(tensor)
            logical = logical_name(name, self._source.rules, info=self.infos[name])
            return (Block(0, place.num_elements, ((logical, place),)),)
        if layout.kind == "unknown":
            return None
        views = fused_views(layout.kind, tensor.shape, len(layout.projections), layout.num_experts)
        names = logical_names(layout)
        return tuple(
            Block(
                start, count, tuple((names[i], self._place(tensor, start, count, views[i])) for i in members)
            )
            for start, count, members in blocks(
                layout.kind, tensor.shape, len(layout.projections), layout.num_experts
            )
        )

    def plain_shape(self, name: str) -> tuple[int, ...]:
        """The shape that a tensor has in the family's usual layout where it is not packed."""
        shape = self._source.checkpoint.tensors[name].shape
        return (*shape[:-2], shape[-1], shape[-2]) if self._is_turned(name) else shape

    def whole(self, tensor: StoredTensor) -> Place:
        """One of the tensors as one logical tensor."""
        scales = self._scales(tensor, 0, tensor.num_elements)
        return Place(tensor, 0, tensor.num_elements, tensor.shape, None, scales)

    def packing(self, name: str) -> Packing | None:
        """How a tensor is stored where it is codes with scales."""
        packs = self._source.checkpoint.packs
        packed = None if packs is None else packs.packed.get(name)
        return None if packed is None else packed.packing

    def find(self, logical: str) -> Place | None:
        """The place of a logical tensor, whatever stored tensor holds it."""
        return self._all().get(logical)

    def names(self) -> Collection[str]:
        """The logical tensors' names."""
        return self._all().keys()

    def _layout(self, name: str, *, as_plain: bool = False) -> FusedLayout | None:
        """How a stored tensor holds matrices of many experts; None where it is one logical tensor."""
        info = self.infos[name]
        if info.part is not Role.EXPERT or info.expert is not None:
            return None
        rules, config = self._source.rules, self._source.checkpoint.config
        layout = fused_layout(name, self.plain_shape(name), config, rules)
        if layout is None or as_plain or not self._is_turned(name):
            return layout
        return replace(layout, kind=_TURNED.get(layout.kind, layout.kind))

    def _is_turned(self, name: str) -> bool:
        """Whether matrices are stored [rows, columns] that the family has [columns, rows] in bfloat16.

        Of the published formats MXFP4 alone does that: its groups run along what is summed over.
        """
        packing = self.packing(name)
        if packing is None or packing.format is not Format.MXFP4 or len(packing.shape) < 3:
            return False
        shape = packing.shape
        plain = (*shape[:-2], shape[-1], shape[-2])
        layout = fused_layout(name, plain, self._source.checkpoint.config, self._source.rules)
        return layout is not None and layout.kind in _TURNED

    def _place(self, tensor: StoredTensor, start: int, count: int, view: View) -> Place:
        inside = View(view.offset - start, view.shape, view.strides)
        is_whole = inside.is_flat and inside.offset == 0
        scales = self._scales(tensor, start, count)
        return Place(tensor, start, count, view.shape, None if is_whole else inside, scales)

    def _scales(self, tensor: StoredTensor, start: int, count: int) -> Scales | None:
        """What makes numbers of a run of codes; the run must begin at a band of a matrix and end at one."""
        packs = self._source.checkpoint.packs
        packed = None if packs is None else packs.packed.get(tensor.name)
        if packs is None or packed is None:
            return None
        stored = packs.stored[packed.scales]
        return scales_of_run(packed.packing, stored, start, count)

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


_TURNED: Mapping[LayoutKind, LayoutKind] = MappingProxyType(
    {"in_out": "out_in", "in_out_interleaved": "out_in_interleaved"}
)


def scales_of_run(packing: Packing, stored: StoredTensor, start: int, count: int) -> Scales:
    """The scales of a run of elements of a packed tensor.

    Args:
        packing: how it is stored.
        stored: its tensor of scales.
        start: first element of the run, at the beginning of a band.
        count: elements of the run, which ends at the end of a band.

    Raises:
        ValueError: it begins or ends elsewhere.
    """
    encoding = encoding_of(packing)
    first, last = (_bands_before(packing, each) for each in (start, start + count))
    per_band = encoding.scales_nbytes(packing.columns)
    columns = packing.columns
    return Scales(encoding, columns, stored.key, stored.offset + first * per_band, (last - first) * per_band)


def _bands_before(packing: Packing, element: int) -> int:
    """Bands of a packed tensor that lie before an element, which begins one or ends the tensor."""
    row, within = divmod(element, packing.columns)
    matrix, row = divmod(row, packing.rows)
    if within or row % packing.band:
        raise ValueError(
            f"element {element} of {list(packing.shape)} does not begin a band of {packing.band} rows"
        )
    return matrix * packing.grid[0] + row // packing.band
