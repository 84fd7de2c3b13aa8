"""What a checkpoint holds: tensors by role, dtypes, layers, experts, ties, quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from raymerge.architectures.roles import NameReader, Stack, TensorInfo, fused_layout, stacks, tied_pair
from raymerge.architectures.rules import Role, Rules, class_names, quantisation_tables, rules_of
from raymerge.checkpoints.files import LeftOut
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Encoding, QuantisedWeight
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


def quantised_groups(checkpoint: Checkpoint) -> tuple[tuple[QuantisedGroup, ...], tuple[str, ...]]:
    """Quantised tensors, the largest group first, and sentences about contradictions with the config."""
    quantised = quantised_tensors(checkpoint)
    read: dict[Encoding, list[QuantisedWeight]] = {}
    for weight in quantised.tensors.values():
        read.setdefault(weight.quant_spec.encoding, []).append(weight)
    unknown: dict[str, list[str]] = {}
    for name, form in quantised.unknown.items():
        unknown.setdefault(form, []).append(name)

    def nbytes(names: Sequence[str]) -> int:
        return sum(checkpoint.tensors[name].nbytes for name in names)

    rest = unknown.items()
    groups = [QuantisedGroup(form, None, "", False, len(own), nbytes(own), None) for form, own in rest]
    for encoding, weights in read.items():
        stored = [name for each in weights for name in each.stored]
        bits = nbytes(stored) * _BITS / sum(prod(each.quant_spec.logical_shape) for each in weights)
        kind = encoding.format.word, encoding.block, encoding.scale_dtype.value, encoding.power_of_two
        groups.append(QuantisedGroup(*kind, len(stored), nbytes(stored), round(bits, 4)))
    groups.sort(key=lambda group: (-group.nbytes, group.name))
    return tuple(groups), tuple(f"{fault.what} {fault.remedy}" for fault in quantised.faults)


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
    """``tie_word_embeddings`` of the config; None where it is silent."""
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
    all_stacks = stacks(checkpoint.model_tensors, config)
    reader = NameReader(rules, stacks=all_stacks)
    infos = {name: reader.describe(name) for name in checkpoint.tensors}
    tensors = checkpoint.tensors.values()
    roles = _groups((infos[tensor.name].role.value, tensor) for tensor in tensors)
    dtypes = _groups((tensor.dtype.value, tensor) for tensor in tensors)
    shared = {(info.stack, info.layer) for info in infos.values() if info.part is Role.SHARED_EXPERT}
    # Those outside layers count as one where there are no others.
    mtp = {(info.stack, info.layer) for info in infos.values() if info.role is Role.MTP}
    num_mtp = sum(layer is not None for _, layer in mtp) or len(mtp)
    quantised, faults = quantised_groups(checkpoint)
    tables = (each for each in quantisation_tables(config) if isinstance(each, Mapping))
    declared = (str(t.get("quant_method") or t.get("format") or "of unnamed kind") for t in tables)
    pair, tie = tied_pair(checkpoint.model_tensors, config), None
    if pair is not None:
        tie = Tie(pair.head, pair.embedding, pair.declared, pair.head in checkpoint.tensors)
    return Inspection(
        name=checkpoint.name,
        model_type=str(config.get("model_type") or ""),
        architectures=class_names(config),
        tensors=len(checkpoint.tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        roles=tuple(sorted(roles, key=lambda group: [*Role].index(Role(group.name)))),
        dtypes=tuple(sorted(dtypes, key=lambda group: (-group.nbytes, group.name))),
        stacks=all_stacks,
        experts=_expert_layouts(checkpoint, infos, rules),
        shared_expert_layers=len(shared),
        mtp_layers=num_mtp,
        tie=tie,
        quantised=quantised,
        declared_quantisation=next(declared, None),
        files=tuple(File(file.key, file.nbytes) for file in checkpoint.files),
        companions=checkpoint.companions,
        left_out=checkpoint.left_out,
        notes=(*checkpoint.notes, *faults),
    )


def _groups(named: Iterable[tuple[str, StoredTensor]]) -> list[Group]:
    sizes: dict[str, list[int]] = {}
    for name, tensor in named:
        sizes.setdefault(name, []).append(tensor.nbytes)
    return [Group(name, len(own), sum(own)) for name, own in sizes.items()]


def _expert_layouts(
    checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], rules: Rules
) -> tuple[ExpertLayout, ...]:
    seen: dict[str, tuple[dict[tuple[str, int | None], int], list[int]]] = {}
    for name, tensor in checkpoint.tensors.items():
        info = infos[name]
        if info.part is Role.EXPERT:
            layout = fused_layout(tensor.name, tensor.shape, checkpoint.config, rules)
            kind, count = "codes of fused experts", tensor.shape[0] if tensor.shape else 1
            if info.expert is not None:
                kind, count = "per_expert", info.expert + 1
            elif layout is not None:
                kind, count = layout.kind, layout.num_experts
            experts, sizes = seen.setdefault(kind, ({}, []))
            experts[info.stack, info.layer] = max(experts.get((info.stack, info.layer), 0), count)
            sizes.append(tensor.nbytes)
    return tuple(
        ExpertLayout(kind, tuple(sorted(set(experts.values()))), len(experts), len(sizes), sum(sizes))
        for kind, (experts, sizes) in seen.items()
    )
