"""What moves together when the experts of a layer change places, or the neurons within an expert.

A mixture of experts computes the same in any order of its experts, if the router's rows and biases change
places with them; and an expert computes the same in any order of its neurons: the rows of gate and up, their
biases, and the columns of down (arXiv 2509.11348). Here stands which logical tensors those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from raymerge.architectures import Projection, Role, TensorInfo, canonical_block, describe
from raymerge.checkpoints.layout import TensorSpec
from raymerge.dtypes import DType
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.logical import LogicalTensors, Place


@dataclass(frozen=True, slots=True)
class Piece:
    """One logical tensor of a block."""

    logical: str
    """Its canonical name."""
    stored: str
    """The stored tensor that holds it."""
    dtype: DType
    """Its dtype there."""
    shape: tuple[int, ...]
    """Its logical shape."""

    @property
    def nbytes(self) -> int:
        """Stored bytes of its elements."""
        return self.dtype.nbytes(self.num_elements)

    @property
    def num_elements(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def spec(self) -> TensorSpec:
        """It, as a tensor of a file."""
        return TensorSpec(self.logical, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Part(Piece):
    """A tensor of one feed-forward network."""

    projection: Projection
    """Which of its matrices, ``[out, in]``; ``gate_up`` has the rows of gate above those of up."""
    is_bias: bool
    """Whether it is that matrix's bias."""

    @property
    def num_neurons(self) -> int:
        """The intermediate neurons that it has a row or a column for; 0 for a bias of down."""
        if self.projection == "down":
            return 0 if self.is_bias else self.shape[-1]
        return self.shape[0] // (2 if self.projection == "gate_up" else 1)


@dataclass(frozen=True, slots=True)
class Network:
    """A feed-forward network: an expert, or a shared one."""

    parts: tuple[Part, ...]
    """Its tensors: gate, up and down, or up and down, with or without biases."""

    @property
    def num_neurons(self) -> int:
        """Its intermediate neurons."""
        return max((part.num_neurons for part in self.parts), default=0)

    @property
    def form(self) -> tuple[tuple[Projection, bool, tuple[int, ...]], ...]:
        """What two networks have in common whose neurons can be matched."""
        return tuple(sorted((part.projection, part.is_bias, part.shape) for part in self.parts))

    @property
    def is_whole(self) -> bool:
        """Whether it has the matrices of such a network, and they fit one another."""
        matrices = {part.projection: part.shape for part in self.parts if not part.is_bias}
        if len({(part.projection, part.is_bias) for part in self.parts}) < len(self.parts):
            return False
        if set(matrices) not in ({"gate", "up", "down"}, {"up", "down"}, {"gate_up", "down"}):
            return False
        widths = {part.num_neurons for part in self.parts} - {0}
        sides = {shape[0 if name == "down" else 1] for name, shape in matrices.items() if len(shape) == 2}
        return all(len(shape) == 2 for shape in matrices.values()) and len(widths) == len(sides) == 1

    def part(self, kind: Projection, *, is_bias: bool = False) -> Part | None:
        """Its tensor of one kind."""
        return next((p for p in self.parts if p.projection == kind and p.is_bias is is_bias), None)


@dataclass(frozen=True, slots=True)
class Scores(Piece):
    """A tensor of the router with a share for each expert."""

    axis: int
    """The dimension that counts experts."""

    @property
    def are_rows(self) -> bool:
        """Whether it is the router's matrix: a row for each expert."""
        return len(self.shape) == 2 and self.axis == 0


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """The experts of one layer with their router."""

    path: str
    """Canonical path."""
    layer: int | None
    """Its layer's number; None outside layers."""
    experts: tuple[Network, ...]
    """The routed experts in their order."""
    shared: tuple[Network, ...]
    """Networks that every token goes through, in the order of their names."""
    router: tuple[Scores, ...]
    """What changes places with the experts."""
    stored: tuple[str, ...]
    """Every stored tensor of experts, shared experts and router, in the checkpoint's order."""
    strays: tuple[str, ...]
    """Stored tensors of which is not known how they would move."""

    def pieces(self, *, neurons: bool) -> Iterator[Piece]:
        """Every tensor that moves.

        Args:
            neurons: whether neurons move, those of shared experts included.
        """
        for network in (*self.experts, *(self.shared if neurons else ())):
            yield from network.parts
        yield from self.router


@dataclass(slots=True)
class _Members:
    layer: int | None = None
    experts: dict[int, list[Part]] = field(default_factory=dict)
    shared: dict[str, list[Part]] = field(default_factory=dict)
    router: list[Piece] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)


def aligned_blocks(source: Source, logical: LogicalTensors) -> Mapping[str, AlignedBlock]:
    """The blocks of a source that have experts, by canonical path, in the checkpoint's order."""
    found: dict[str, _Members] = {}
    for name, info in logical.infos.items():
        if info.block is None or info.part is Role.SHARED_EXPERT_GATE:
            continue
        members = found.setdefault(canonical_block(info.block, source.rules), _Members())
        members.layer = info.layer
        members.stored.append(name)
        places = [member for block in logical.blocks(name) or () for member in block.members]
        if not places:
            members.strays.append(name)
        for called, place in places:
            _sort_in(members, called, place, _own_info(info, called, source))
    return {path: _block(path, members) for path, members in found.items() if members.experts}


def _own_info(info: TensorInfo, called: str, source: Source) -> TensorInfo:
    """What is known of one logical tensor: for one out of a fused tensor its name says it."""
    is_fused = info.part is Role.EXPERT and info.expert is None
    return describe(called, source.rules) if is_fused else info


def _sort_in(members: _Members, called: str, place: Place, info: TensorInfo) -> None:
    piece = (called, place.tensor.name, place.tensor.dtype, place.shape)
    if info.part in (Role.ROUTER, Role.ROUTER_BIAS):
        members.router.append(Piece(*piece))
    elif info.projection is None or not called.endswith(("weight", "bias")):
        members.strays.append(place.tensor.name)
    elif info.part is Role.SHARED_EXPERT:
        path = called.rpartition(".")[0].rpartition(".")[0]
        members.shared.setdefault(path, []).append(Part(*piece, info.projection, info.is_bias))
    elif info.expert is None:
        members.strays.append(place.tensor.name)
    else:
        part = Part(*piece, info.projection, info.is_bias)
        members.experts.setdefault(info.expert, []).append(part)


def _block(path: str, members: _Members) -> AlignedBlock:
    experts = [members.experts.get(number, []) for number in range(max(members.experts) + 1)]
    router = [_scores(piece, len(experts)) for piece in members.router]
    # A vector of another length, such as a scale of the router's input, is the same for all experts.
    lost = [
        piece.stored
        for piece, scores in zip(members.router, router, strict=True)
        if scores is None and len(piece.shape) > 1
    ]
    return AlignedBlock(
        path=path,
        layer=members.layer,
        experts=_networks(experts),
        shared=_networks(members.shared[name] for name in sorted(members.shared)),
        router=tuple(scores for scores in router if scores is not None),
        stored=tuple(members.stored),
        strays=(*members.strays, *lost),
    )


def _networks(groups: Iterable[list[Part]]) -> tuple[Network, ...]:
    return tuple(Network(tuple(sorted(parts, key=lambda part: part.logical))) for parts in groups)


def _scores(piece: Piece, num_experts: int) -> Scores | None:
    axis = next((axis for axis, size in enumerate(piece.shape) if size == num_experts), None)
    return None if axis is None else Scores(piece.logical, piece.stored, piece.dtype, piece.shape, axis)
