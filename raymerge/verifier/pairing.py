"""Which tensors of two checkpoints are compared with each other, whatever files and layouts they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raymerge.architectures import load_rules, stacks
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.numbers import as_numbers
from raymerge.checkpoints.source import Checkpoint
from raymerge.merge_plan.expressions import Read
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.input_resolver import ResolvedInput
from raymerge.planner.matching.logical import LogicalTensors, Place
from raymerge.recipes import ModelReference


@dataclass(frozen=True, slots=True)
class Numbers:
    """One logical tensor in both checkpoints."""

    a: Read
    """Its place in the first."""
    b: Read
    """Its place in the second."""
    num_elements: int
    """Its elements."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor that both have, or only one of them."""

    name: str
    """Its name; of experts in two layouts, that of one matrix of one expert."""
    role: str
    """What it does in the model."""
    stored_a: str
    """Dtype and shape in the first; "" where it has none."""
    stored_b: str
    """The same in the second."""
    bytes: tuple[tuple[StoredTensor, StoredTensor], ...] = ()
    """Stored tensors that are compared byte by byte; empty where they are stored in two ways."""
    numbers: tuple[Numbers, ...] = ()
    """What is compared by numbers; empty where that cannot be told, or one has none."""


class Side:
    """One of two checkpoints that are compared."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """
        Args:
            checkpoint: as it is stored.

        Raises:
            CheckpointError: codes and scales, or they and the config, do not go together.
        """
        self.checkpoint = as_numbers(checkpoint, quantised_tensors(checkpoint))
        kind = str(checkpoint.config.get("model_type") or "")
        self.logical = LogicalTensors(
            Source(
                index=0,
                reference=ModelReference(checkpoint.root),
                checkpoint=self.checkpoint,
                adapter=None,
                rules=load_rules(kind or None),
                stacks=stacks(self.checkpoint.tensors, checkpoint.config),
                pair=None,
                stored_head_is_embedding=False,
            )
        )

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name, codes and their scales as one."""
        return self.checkpoint.tensors

    def parts(self, name: str) -> tuple[StoredTensor, ...]:
        """The stored tensors that one consists of."""
        return tuple(self.checkpoint.stored[part] for part in self.checkpoint.parts(name))

    def told(self, name: str) -> str:
        """How a tensor is stored, in words."""
        packing, tensor = self.logical.packing(name), self.tensors[name]
        return f"{tensor.dtype.value if packing is None else packing.format.word} {list(tensor.shape)}"

    def role(self, name: str) -> str:
        """What a tensor does in the model."""
        return self.logical.infos[name].role.value

    def members(self, name: str) -> Mapping[str, Place]:
        """The logical tensors in a stored one; none where it is fused in a way that cannot be told."""
        return {
            logical: place for block in self.logical.blocks(name) or () for logical, place in block.members
        }


def pairs_of(a: Side, b: Side) -> Iterator[Pair]:
    """Every tensor of both, once: those of one name, those that layouts call otherwise, and the rest."""
    left_a, left_b = [], [name for name in b.tensors if name not in a.tensors]
    for name in a.tensors:
        if name not in b.tensors:
            left_a.append(name)
        else:
            yield _named_alike(a, b, name)
    yield from _named_otherwise(a, b, left_a, left_b)


def _named_alike(a: Side, b: Side, name: str) -> Pair:
    stored = a.parts(name), b.parts(name)
    told = [[(each.dtype, each.shape) for each in parts] for parts in stored]
    is_same_form = told[0] == told[1] and a.logical.packing(name) == b.logical.packing(name)
    return Pair(
        name,
        a.role(name),
        a.told(name),
        b.told(name),
        bytes=tuple(zip(*stored, strict=True)) if is_same_form else (),
        numbers=_numbers(a, b, name),
    )


def _numbers(a: Side, b: Side, name: str) -> tuple[Numbers, ...]:
    """How a tensor of both is compared by numbers; nothing where its parts cannot be told."""
    first, second = a.tensors[name], b.tensors[name]
    if first.dtype.is_mergeable and second.dtype.is_mergeable and first.shape == second.shape:
        return (_between(a.logical.whole(first), b.logical.whole(second)),)
    return _matched(a.members(name), b.members(name))


def _matched(a: Mapping[str, Place], b: Mapping[str, Place]) -> tuple[Numbers, ...]:
    """Logical tensors of both, if they are the same ones and all are numbers."""
    if a.keys() != b.keys() or not all(_is_comparable(place, b[name]) for name, place in a.items()):
        return ()
    return tuple(_between(place, b[name]) for name, place in a.items())


def _is_comparable(a: Place, b: Place) -> bool:
    return a.shape == b.shape and all(
        each.tensor.dtype.is_mergeable or each.scales is not None for each in (a, b)
    )


def _between(a: Place, b: Place) -> Numbers:
    size = 1
    for length in a.shape:
        size *= length
    return Numbers(ResolvedInput(0, a).read(0), ResolvedInput(0, b).read(0), size)


def _named_otherwise(a: Side, b: Side, left_a: list[str], left_b: list[str]) -> Iterator[Pair]:
    """Tensors of names that only one has: matrices of experts in another layout, or nothing alike."""
    places_a, places_b = _places(a, left_a), _places(b, left_b)
    common = [
        name
        for name, (_, place) in places_a.items()
        if name in places_b and _is_comparable(place, places_b[name][1])
    ]
    for name in common:
        (stored_a, place_a), (stored_b, place_b) = places_a[name], places_b[name]
        yield Pair(
            name,
            a.role(stored_a),
            _told_in(a, stored_a, name),
            _told_in(b, stored_b, name),
            numbers=(_between(place_a, place_b),),
        )
    yield from (Pair(name, role, told, "") for name, role, told in _alone(a, left_a, places_a, common))
    yield from (Pair(name, role, "", told) for name, role, told in _alone(b, left_b, places_b, common))


def _alone(
    side: Side, left: list[str], places: Mapping[str, tuple[str, Place]], common: list[str]
) -> Iterator[tuple[str, str, str]]:
    """Name, role and form of what has no partner: whole tensors, or matrices of one of which others have."""
    matched = set(common)
    shared = {places[name][0] for name in common}
    yield from ((name, side.role(name), side.told(name)) for name in left if name not in shared)
    for name, (stored, _) in places.items():
        if stored in shared and name not in matched:
            yield name, side.role(stored), _told_in(side, stored, name)


def _told_in(side: Side, stored: str, name: str) -> str:
    """How a matrix is stored, with the name of the tensor that it is a part of."""
    return side.told(stored) if stored == name else f"{side.told(stored)} in {stored}"


def _places(side: Side, names: list[str]) -> dict[str, tuple[str, Place]]:
    """The logical tensors in stored ones, with the name of that."""
    return {logical: (name, place) for name in names for logical, place in side.members(name).items()}
