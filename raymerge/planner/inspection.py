"""What a checkpoint holds: tensors by role, dtypes, layers, experts, ties, quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from raymerge.architectures import (
    NameReader,
    Role,
    Rules,
    Stack,
    TensorInfo,
    fused_layout,
    rules_of,
    stacks,
    tied_pair,
)
from raymerge.architectures.rules import class_names, quantisation_tables
from raymerge.checkpoints.files import LeftOut
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Encoding, encoding_of
from raymerge.checkpoints.source import Checkpoint
from raymerge.planner.inputs.quantised import quantised_tensors

_BITS = 8


@dataclass(frozen=True, slots=True)
class QuantisedGroup:
    name: str
    """Name in ``out_format``; of a format that is not read, what it is called."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; 0 for all of a matrix, None where that is not read."""
    scales: str
    power_of_two: bool
    tensors: int
    nbytes: int
    bits_per_weight: float | None
    """Scales included; None where that is not read."""


@dataclass(slots=True)
class _Sum:
    tensors: int = 0
    nbytes: int = 0
    weights: int = 0


def quantised_groups(checkpoint: Checkpoint) -> tuple[tuple[QuantisedGroup, ...], tuple[str, ...]]:
    found = quantised_tensors(checkpoint)
    read: dict[Encoding, _Sum] = {}
    for packed in found.tensors.values():
        mine = read.setdefault(encoding_of(packed.packing), _Sum())
        mine.tensors += len(packed.stored)
        mine.nbytes += sum(checkpoint.tensors[name].nbytes for name in packed.stored)
        mine.weights += prod(packed.packing.shape)
    unknown: dict[str, _Sum] = {}
    for name, form in found.unknown.items():
        other = unknown.setdefault(form, _Sum())
        other.tensors += 1
        other.nbytes += checkpoint.tensors[name].nbytes
    groups = sorted(_quantised_groups(read, unknown), key=lambda group: (-group.nbytes, group.name))
    return tuple(groups), tuple(f"{fault.what} {fault.remedy}" for fault in found.faults)


def _quantised_groups(read: dict[Encoding, _Sum], unknown: dict[str, _Sum]) -> Iterator[QuantisedGroup]:
    for encoding, own in read.items():
        yield QuantisedGroup(
            name=encoding.format.word,
            block=encoding.block,
            scales=encoding.scale_dtype.value,
            power_of_two=encoding.power_of_two,
            tensors=own.tensors,
            nbytes=own.nbytes,
            bits_per_weight=round(own.nbytes * _BITS / own.weights, 4),
        )
    for form, own in unknown.items():
        yield QuantisedGroup(form, None, "", False, own.tensors, own.nbytes, None)


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    kind: str
    """``per_expert``, or the kind of fused tensor (``out_in``, ``in_out``, ...)."""
    num_experts: tuple[int, ...]
    """Experts of a layer; several numbers where layers differ."""
    layers: int
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tie:
    head: str
    embedding: str
    declared: bool | None
    stored: bool


@dataclass(frozen=True, slots=True)
class File:
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    name: str
    model_type: str
    architectures: tuple[str, ...]
    tensors: int
    nbytes: int
    roles: tuple[Group, ...]
    dtypes: tuple[Group, ...]
    stacks: tuple[Stack, ...]
    experts: tuple[ExpertLayout, ...]
    shared_expert_layers: int
    mtp_layers: int
    tie: Tie | None
    quantised: tuple[QuantisedGroup, ...]
    declared_quantisation: str | None
    files: tuple[File, ...]
    companions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    """Files that a merge neither reads nor copies, with the rule; weights without one it refuses."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    config = checkpoint.config
    rules = rules_of(config)
    found = stacks(checkpoint.tensors, config)
    reader = NameReader(rules, stacks=found)
    infos = {name: reader.describe(name) for name in checkpoint.tensors}
    tensors = checkpoint.tensors.values()
    quantised, faults = quantised_groups(checkpoint)
    return Inspection(
        name=checkpoint.name,
        model_type=str(config.get("model_type") or ""),
        architectures=class_names(config),
        tensors=len(checkpoint.tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        roles=_in_role_order(_groups((infos[tensor.name].role.value, tensor) for tensor in tensors)),
        dtypes=_largest_first(_groups((tensor.dtype.value, tensor) for tensor in tensors)),
        stacks=found,
        experts=_expert_layouts(checkpoint, infos, rules),
        shared_expert_layers=len(_layers(infos.values(), Role.SHARED_EXPERT)),
        mtp_layers=_mtp_layers(infos.values()),
        tie=_tie(checkpoint),
        quantised=quantised,
        declared_quantisation=_declared_quantisation(config),
        files=tuple(File(file.key, file.nbytes) for file in checkpoint.files),
        companions=checkpoint.companions,
        left_out=checkpoint.left_out,
        notes=(*checkpoint.notes, *faults),
    )


def _groups(named: Iterable[tuple[str, StoredTensor]]) -> list[Group]:
    counts: dict[str, list[int]] = {}
    for name, tensor in named:
        count = counts.setdefault(name, [0, 0])
        count[0] += 1
        count[1] += tensor.nbytes
    return [Group(name, tensors, nbytes) for name, (tensors, nbytes) in counts.items()]


def _in_role_order(groups: Iterable[Group]) -> tuple[Group, ...]:
    order = [role.value for role in Role]
    return tuple(sorted(groups, key=lambda group: order.index(group.name)))


def _largest_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.name)))


def _layers(infos: Iterable[TensorInfo], part: Role) -> set[tuple[str, int | None]]:
    return {(info.stack, info.layer) for info in infos if info.part is part}


def _mtp_layers(infos: Iterable[TensorInfo]) -> int:
    """Numbered layers among the MTP tensors; those outside layers count as one where there are no others."""
    found = {(info.stack, info.layer) for info in infos if info.role is Role.MTP}
    numbered = [layer for _, layer in found if layer is not None]
    return len(numbered) or len(found)


@dataclass(slots=True)
class _Seen:
    experts: dict[tuple[str, int | None], int]
    tensors: int = 0
    nbytes: int = 0


def _expert_layouts(
    checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], rules: Rules
) -> tuple[ExpertLayout, ...]:
    seen: dict[str, _Seen] = {}
    for name, tensor in checkpoint.tensors.items():
        info = infos[name]
        if info.part is not Role.EXPERT:
            continue
        kind, count = _stored_as(tensor, info, checkpoint, rules)
        mine = seen.setdefault(kind, _Seen({}))
        layer = (info.stack, info.layer)
        mine.experts[layer] = max(mine.experts.get(layer, 0), count)
        mine.tensors += 1
        mine.nbytes += tensor.nbytes
    return tuple(
        ExpertLayout(kind, tuple(sorted(set(s.experts.values()))), len(s.experts), s.tensors, s.nbytes)
        for kind, s in seen.items()
    )


def _stored_as(
    tensor: StoredTensor, info: TensorInfo, checkpoint: Checkpoint, rules: Rules
) -> tuple[str, int]:
    if info.expert is not None:
        return "per_expert", info.expert + 1
    layout = fused_layout(tensor.name, tensor.shape, checkpoint.config, rules)
    if layout is not None:
        return layout.kind, layout.num_experts
    return "codes of fused experts", tensor.shape[0] if tensor.shape else 1


def _tie(checkpoint: Checkpoint) -> Tie | None:
    pair = tied_pair(checkpoint.tensors, checkpoint.config)
    if pair is None:
        return None
    return Tie(pair.head, pair.embedding, pair.declared, pair.head in checkpoint.tensors)


def _declared_quantisation(config: Mapping[str, Any]) -> str | None:
    tables = (table for table in quantisation_tables(config) if isinstance(table, Mapping))
    named = (str(each.get("quant_method") or each.get("format") or "of unnamed kind") for each in tables)
    return next(named, None)
