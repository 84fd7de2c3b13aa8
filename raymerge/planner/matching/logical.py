"""Where logical tensors lie in stored ones.

A statistic (norm, angle, top-k) is defined on one logical matrix: one projection of one expert. It may be
stored alone, or as a part of a fused tensor, transposed or interleaved. It is found by its canonical name, so
that results do not depend on file layout and parents of different layouts merge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm, prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from raymerge.architectures.roles import (
    CanonicalNames,
    FusedLayout,
    NameReader,
    TensorInfo,
    concatenated_layout,
    fused_layout,
    logical_names,
    other_names,
)
from raymerge.architectures.rules import LayoutKind, Role, Rules, first_int
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Format, QuantisedWeight, QuantSpec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, USUAL_BLOCK
from raymerge.checkpoints.views import Block as Run
from raymerge.checkpoints.views import View, blocks, concatenated_views, fused_views
from raymerge.errors import Findings
from raymerge.merge_plan.expressions import Scales
from raymerge.planner.inputs.sources import Source

_WEIGHT = ".weight"


ElementOrder: TypeAlias = tuple[LayoutKind, tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]


class Place(NamedTuple):
    """One logical tensor inside a contiguous block of a stored tensor. Counts are in elements.

    A tuple, as ``StoredTensor``: planning makes one for each tensor of each source."""

    tensor: StoredTensor
    start: int
    num_elements: int
    shape: tuple[int, ...]
    view: View | None
    """Layout within the block; None: the block is the logical tensor, row-major."""
    scales: Scales | None = None
    half_split_heads: int = 0
    """Heads whose rows lie in two halves each; 0: in the order of the canonical tensor; -1: in halves,
    but the config does not tell of how many heads."""

    def has_rows_of(self, other: Place) -> bool:
        """Whether rows of both are in one order, or in the canonical one and another."""
        heads = {self.half_split_heads, other.half_split_heads}
        return len(heads) == 1 or min(heads) == 0


class Block(NamedTuple):
    """The smallest contiguous run of a stored tensor that holds complete logical tensors."""

    start: int
    num_elements: int
    members: tuple[tuple[str, Place], ...]


class LogicalTensors:
    def __init__(self, source: Source, others: Iterable[LogicalTensors] = ()) -> None:
        """``others``: of sources that may have the same names, which need not be described again."""
        self._source = source
        self._reader = NameReader(source.rules, stacks=source.stacks)
        like = next((each for each in others if each._describes(source)), None)
        described = {} if like else {n: self._reader.describe(n) for n in source.checkpoint.tensors}
        self.infos: Mapping[str, TensorInfo] = like.infos if like else described
        self._stored: Mapping[str, StoredTensor] = source.checkpoint.stored
        self._packed: Mapping[str, QuantisedWeight] = source.checkpoint.packed
        self._canonical = CanonicalNames(source.rules)
        self._names: dict[str, str] = like._names if like and not source.rules.half_split else {}
        named = self.infos.items()
        stacked = ((name, info.part is Role.EXPERT) for name, info in named if info.expert is None)
        tensors = source.checkpoint.tensors
        self.stacked = frozenset(
            name
            for name, are_experts in stacked
            if are_experts or len(tensors[name].shape) == 3 or _is_concatenated(name, source.rules)
        )
        # Of fused tensors, which are asked for once for each of their experts.
        self._layouts: dict[str, FusedLayout | None] = {}
        self._blocks: dict[tuple[str, Format | None], tuple[Block, ...] | None] = {}
        self._members: dict[str, Mapping[str, Place]] = {}
        self._likes: dict[tuple[Format, bool], QuantisedWeight | None] = {}
        self._latest: Place | None = None

    def _describes(self, source: Source) -> bool:
        own = self._source
        is_alike = (own.rules, own.stacks) == (source.rules, source.stacks)
        return is_alike and own.checkpoint.tensors.keys() == source.checkpoint.tensors.keys()

    def part(self, name: str) -> Role:
        return self.infos[name].part

    def stored(self, name: str) -> StoredTensor | None:
        return self._source.checkpoint.tensors.get(name)

    def is_alone(self, name: str) -> bool:
        return self._layout(name) is None

    def kind(self, name: str) -> LayoutKind | None:
        layout = self._layout(name)
        return None if layout is None else layout.kind

    def logical_name(self, name: str) -> str:
        if name not in self._names:
            canonical = self._canonical.of(name, self.infos[name])
            halves = self._source.rules.half_split
            if halves and self._half_split_heads(self._source.checkpoint.tensors[name]) < 0:
                canonical = name
            # Of equal texts one is kept.
            self._names[name] = name if canonical == name else canonical
        return self._names[name]

    def member_names(self, name: str) -> tuple[str, ...]:
        """Canonical names of the logical tensors of a stored one, also where their order in it is unknown."""
        layout = self._layout(name)
        if layout is None or not layout.projections:
            return (self.logical_name(name),)
        return logical_names(layout)

    def other_names(self, name: str) -> tuple[tuple[str, ...], ...]:
        layout, info, rules = self._layout(name), self.infos[name], self._source.rules
        is_known = layout is not None and layout.kind != "unknown"
        members = logical_names(layout) if layout is not None and is_known else (self.logical_name(name),)
        return tuple(other_names(name, logical, info, rules) for logical in members)

    def info(self, name: str) -> TensorInfo:
        return self.infos.get(name) or self._reader.describe(name)

    def blocks(self, name: str) -> tuple[Block, ...] | None:
        return self.blocks_in(name, self._format(name))

    def blocks_in(self, name: str, form: Format | None) -> tuple[Block, ...] | None:
        """The blocks of a tensor stored in a format; None for plain numbers.

        A block of codes begins and ends where a scale row does: where a matrix has one scale, no block is
        less than a matrix."""
        layout = self._layout(name)
        if layout is None:
            return self._blocks_in(name, form, None)
        if (name, form) not in self._blocks:
            self._blocks[name, form] = self._blocks_in(name, form, layout)
        return self._blocks[name, form]

    def members(self, name: str) -> Mapping[str, Place] | None:
        own = self.blocks(name)
        if own is None:
            return None
        if self.is_alone(name):
            return dict(own[0].members)
        if name not in self._members:
            self._members[name] = dict(member for block in own for member in block.members)
        return self._members[name]

    def element_order(self, name: str, form: Format | None) -> ElementOrder | None:
        """The element order of a fused tensor stored in a format: of two tensors with equal ones, elements at
        equal positions belong together. None for one that is not fused, or of unknown layout."""
        layout = self._layout(name)
        if layout is None or layout.kind == "unknown":
            return None
        kind = _TURNED[layout.kind] if self.is_turned(name, form) else layout.kind
        return kind, layout.projections, layout.num_experts, layout.heights, self.shape_in(name, form)

    def _blocks_in(
        self, name: str, form: Format | None, layout: FusedLayout | None
    ) -> tuple[Block, ...] | None:
        tensor, shape = self._source.checkpoint.tensors[name], self.shape_in(name, form)
        if shape != tensor.shape:
            tensor = tensor._replace(shape=shape)
        if layout is None:
            place = self.whole(tensor)
            if form is not self._format(name) and place.view is not None:
                place = place._replace(num_elements=prod(shape), view=None)
            return (Block(0, place.num_elements, ((self.logical_name(name), place),)),)
        if self.is_turned(name, form):
            layout = replace(layout, kind=_TURNED[layout.kind])
        if layout.kind == "unknown":
            return None
        names, (views, runs) = logical_names(layout), _laid_out(layout, tensor.shape)
        height = self._scale_row_height(name, form, tensor.shape[-1])
        return tuple(
            Block(run, count, tuple((names[i], self._place(tensor, run, count, views[i])) for i in members))
            for run, count, members in _joined(runs, prod(tensor.shape[-2:]), height)
        )

    def shape_in(self, name: str, form: Format | None) -> tuple[int, ...]:
        shape = self._source.checkpoint.tensors[name].shape
        if name not in self.stacked:
            return shape
        own = self._format(name)
        differs = form is not own and self.is_turned(name, form) != self.is_turned(name, own)
        return _swapped(shape) if differs else shape

    @property
    def expert_format(self) -> str:
        return self._source.rules.expert_format

    def is_left_plain(self, name: str) -> bool:
        """Whether publishers do not quantise a tensor, though they do so with others of its role."""
        return bool(self._source.rules.plain.search(name))

    @property
    def model_type(self) -> str:
        return self._source.model_type

    def whole(self, tensor: StoredTensor) -> Place:
        # What leads an output is looked at again as one of its inputs.
        if self._latest is None or self._latest.tensor is not tensor:
            self._latest = self._whole(tensor)
        return self._latest

    def _whole(self, tensor: StoredTensor) -> Place:
        packed, shape = self._packed.get(tensor.name), tensor.shape
        heads = self._half_split_heads(tensor) if self._source.rules.half_split else 0
        if packed is None:
            return Place(tensor, 0, prod(shape), shape, None, None, heads)
        quant_spec, view = packed.quant_spec, None
        if quant_spec.padding:
            view = View(0, shape, (quant_spec.columns, 1))
        scales = self._scales(tensor, 0, quant_spec.num_elements)
        return Place(tensor, 0, quant_spec.num_elements, shape, view, scales, heads)

    def heads_fields(self, name: str) -> tuple[str, ...]:
        """The config's fields for the number of heads, where a tensor of this name has the rows of each in
        two halves; empty where it has not."""
        return next((fields for pattern, fields in self._source.rules.half_split if pattern.search(name)), ())

    def _half_split_heads(self, tensor: StoredTensor) -> int:
        """As in a place."""
        if not (fields := self.heads_fields(tensor.name)):
            return 0
        heads = first_int(self._source.checkpoint.config, fields) or 0
        return heads if heads > 0 and tensor.shape[0] % (2 * heads) == 0 else -1

    def quant_spec(self, name: str) -> QuantSpec | None:
        packed = self._packed.get(name)
        return None if packed is None else packed.quant_spec

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """Those that tensors are stored in."""
        return tuple(dict.fromkeys(each.quant_spec.format for each in self._packed.values()))

    def packed_like(self, name: str, form: Format) -> QuantisedWeight | None:
        """The first tensor in a format, preferring modules' weights if this is one; None for none."""
        key = form, name.endswith(_WEIGHT)
        if key not in self._likes:
            packed = self._packed.values()
            alike = (each for each in packed if (each.quant_spec.format, each.name.endswith(_WEIGHT)) == key)
            self._likes[key] = next(alike, None)
        return self._likes[key]

    def find(self, logical: str) -> Place | None:
        return self._places.get(logical)

    def names(self) -> Collection[str]:
        return self._places.keys()

    def _format(self, name: str) -> Format | None:
        quant_spec = self.quant_spec(name)
        return None if quant_spec is None else quant_spec.format

    def _scale_row_height(self, name: str, form: Format | None, columns: int) -> int:
        """Elements at whose multiples a matrix can be cut, as stored and in a format; 0 for none."""
        if form is not None and form.tensor_scale != "none":
            return 0
        quant_spec = self.quant_spec(name)
        own = 1 if quant_spec is None else quant_spec.cut_height * columns
        if form != FP8_BLOCK or form is self._format(name):
            return own
        like = self.packed_like(name, form)
        return lcm(own, columns * (USUAL_BLOCK[0] if like is None else like.quant_spec.cut_height))

    def _layout(self, name: str) -> FusedLayout | None:
        if name not in self.stacked:
            return None
        if name not in self._layouts:
            self._layouts[name] = self._fused_layout(name)
        return self._layouts[name]

    def _fused_layout(self, name: str) -> FusedLayout | None:
        rules, config = self._source.rules, self._source.checkpoint.config
        shape = self._source.checkpoint.tensors[name].shape
        own = self._format(name)
        if own is not None and own.has_block_axis and len(shape) > 2:
            layout = fused_layout(name, _swapped(shape), config, rules)
            if layout is not None and layout.kind in _TURNED:
                return layout
        return concatenated_layout(name, shape, config, rules) or fused_layout(name, shape, config, rules)

    def is_turned(self, name: str, form: Format | None) -> bool:
        """Whether a format has matrices [rows, columns] that the family has [columns, rows] in bfloat16.

        Formats whose blocks are an axis do: these run along the dimension that is summed over."""
        if form is None or not form.has_block_axis or len(self._source.checkpoint.tensors[name].shape) < 3:
            return False
        layout = self._layout(name)
        return layout is not None and layout.kind in _TURNED

    def _place(self, tensor: StoredTensor, start: int, count: int, view: View) -> Place:
        inside = View(view.offset - start, view.shape, view.strides)
        is_whole = inside.is_flat and inside.num_elements == count
        scales = self._scales(tensor, start, count)
        return Place(tensor, start, count, view.shape, None if is_whole else inside, scales)

    def _scales(self, tensor: StoredTensor, start: int, count: int) -> Scales | None:
        """The scales of a run of codes; it must begin and end at a matrix's scale rows."""
        stored, packed = self._stored, self._packed.get(tensor.name)
        if packed is None:
            return None
        of_tensor = None if packed.tensor_scale is None else stored[packed.tensor_scale]
        scales = scales_of_run(packed.quant_spec, stored[packed.scales], start, count, of_tensor=of_tensor)
        if packed.zero_points is None:
            return scales
        zeros = stored[packed.zero_points]
        offset, _ = scales._replace(zeros_offset=zeros.offset).zeros_of(start, count)
        return scales._replace(zeros_key=zeros.key, zeros_offset=offset)

    @cached_property
    def _places(self) -> Mapping[str, Place]:
        return {
            member: place
            for name in self._source.checkpoint.tensors
            for block in self.blocks(name) or ()
            for member, place in block.members
        }


def open_logical(sources: Sequence[Source], findings: Findings) -> tuple[LogicalTensors, ...]:
    """The logical tensors of each source; findings report those that are stored twice."""
    opened: list[LogicalTensors] = []
    for source in sources:
        opened.append(LogicalTensors(source, opened))
        _report_twice(source, opened[-1], findings)
    return tuple(opened)


def _report_twice(source: Source, tensors: LogicalTensors, findings: Findings) -> None:
    experts = [name for name, info in tensors.infos.items() if info.part is Role.EXPERT]
    members = [(member, name) for name in experts for member in tensors.member_names(name)]
    if len(dict(members)) == len(members):
        return
    holders: dict[str, str] = {}
    for member, name in members:
        other = holders.setdefault(member, name)
        if other != name:
            findings.tensor(
                source.name,
                "{count} matrices of experts are stored twice, and nothing says which counts",
                "Use a checkpoint that stores each expert once: by itself, or in a stack.",
                example=f"{member} in {' and in '.join(sorted((other, name)))}",
            )


def whole_place(tensor: StoredTensor) -> Place:
    return Place(tensor, 0, tensor.num_elements, tensor.shape, None)


_TURNED: Mapping[LayoutKind, LayoutKind] = MappingProxyType(
    {"in_out": "out_in", "in_out_interleaved": "out_in_interleaved"}
)


def _is_concatenated(name: str, rules: Rules) -> bool:
    return any(each.pattern.search(name) for each in rules.concatenated)


def _laid_out(layout: FusedLayout, shape: tuple[int, ...]) -> tuple[Sequence[View], Sequence[Run]]:
    """Where each logical tensor lies, and the runs that hold whole ones."""
    if layout.heights:
        return concatenated_views(shape, layout.heights)
    assert layout.kind != "unknown"
    sizes = layout.kind, shape, len(layout.projections), layout.num_experts
    return fused_views(*sizes), blocks(*sizes)


def _joined(runs: Sequence[Run], matrix: int, scale_row: int) -> Iterator[Run]:
    """The runs, joined where one would end within a scale row; counts are in elements.

    A scale row of 0 is a whole matrix."""
    held: list[Run] = []
    for run in runs:
        held.append(run)
        within = (run.start + run.num_elements) % matrix
        if not within or (scale_row and not within % scale_row):
            count = sum(each.num_elements for each in held)
            yield Run(held[0].start, count, tuple(index for each in held for index in each.members))
            held = []


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def scales_of_run(
    quant_spec: QuantSpec,
    stored: StoredTensor,
    start: int,
    count: int,
    *,
    of_tensor: StoredTensor | None = None,
) -> Scales:
    """The scales of a run of ``count`` elements of a packed tensor; it begins and ends where a scale row
    does.

    ``of_tensor`` holds the one scale of each matrix, or of all, where there is one; the result names it if
    the run has one alone.

    Raises ValueError: it begins or ends elsewhere."""
    encoding, columns = quant_spec.encoding, quant_spec.columns
    offset, nbytes = stored.offset, quant_spec.whole_scales_nbytes
    if count != quant_spec.num_elements:
        first, last = (_scale_rows_before(quant_spec, each) for each in (start, start + count))
        per_scale_row = encoding.scales_nbytes(columns)
        offset, nbytes = offset + first * per_scale_row, (last - first) * per_scale_row
    scales = Scales(encoding, columns, stored.key, offset, nbytes)
    if of_tensor is None:
        return scales
    size = quant_spec.rows * columns
    matrix = 0 if quant_spec.format.scales_stack else start // size
    is_of_several = start + count > (matrix + 1) * size and not quant_spec.format.scales_stack
    if is_of_several:
        return scales
    place = of_tensor.offset + of_tensor.dtype.nbytes(matrix)
    return scales._replace(tensor_key=of_tensor.key, tensor_offset=place)


def _scale_rows_before(quant_spec: QuantSpec, element: int) -> int:
    if not element:
        return 0
    if element == quant_spec.num_elements:
        return quant_spec.num_matrices * quant_spec.grid[0]
    row, within = divmod(element, quant_spec.columns)
    matrix, row = divmod(row, quant_spec.rows)
    if within or row % quant_spec.cut_height:
        raise ValueError(
            f"element {element} of {list(quant_spec.shape)} does not begin a scale row of "
            f"{quant_spec.cut_height} rows"
        )
    return matrix * quant_spec.grid[0] + row // quant_spec.scale_row_height
