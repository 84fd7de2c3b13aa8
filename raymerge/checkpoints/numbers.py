"""A checkpoint in which codes with their scales are one tensor of numbers each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.packed import Packed, PackedTensors
from raymerge.checkpoints.packing import Format, Packing
from raymerge.checkpoints.source import Checkpoint, natural_key
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError

_WEIGHT = ".weight"
_COPIED: Mapping[Format, str] = {
    Format.FP8_TENSOR: "FP8 with one scale a tensor",
    Format.NVFP4: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class Packs:
    """What of a checkpoint is codes with scales."""

    stored: Mapping[str, StoredTensor]
    """Every tensor as it lies in its file, by name."""
    packed: Mapping[str, Packed]
    """What is codes with scales, by the name that it has as numbers."""
    members: Mapping[str, str]
    """That name by the name of each stored tensor that belongs to it."""
    unknown: Mapping[str, str]
    """Stored tensors that are quantised in some other way: what to call the format, by name."""


def code_dtype(packing: Packing) -> DType:
    """What one code is: an element of codes takes as many bits, whatever dtype their tensor is stored in."""
    return DType.F8_E4M3 if packing.code_bits == 8 else DType.F4


def as_numbers(checkpoint: Checkpoint, found: PackedTensors) -> Checkpoint:
    """The checkpoint with each packed tensor as one: of its shape in numbers, at the place of its codes.

    Args:
        checkpoint: as it is stored.
        found: what of it is codes with scales.

    Raises:
        CheckpointError: codes and scales, or they and the config, do not go together; with every problem.
    """
    if found.faults:
        raise CheckpointError(found.faults)
    found = _without_tensor_scales(found)
    stored = checkpoint.tensors
    tensors = {name: tensor for name, tensor in stored.items() if name not in found.members}
    for name, packed in found.tensors.items():
        codes, packing = stored[packed.codes], packed.packing
        dtype = code_dtype(packing)
        tensors[name] = StoredTensor(name, dtype, packing.shape, codes.key, codes.offset, codes.nbytes)
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    return replace(
        checkpoint, tensors=ordered, packs=Packs(stored, found.tensors, found.members, found.unknown)
    )


def _without_tensor_scales(found: PackedTensors) -> PackedTensors:
    """What was found, but for tensors with one scale for all of a matrix: those are only copied.

    Such a scale must be known before the first code is made, which takes a pass of its own.
    """
    copied = {n: p for n, p in found.tensors.items() if p.packing.tensor_scale_dtype is not None}
    parts = {part: _COPIED[packed.packing.format] for packed in copied.values() for part in packed.stored}
    return replace(
        found,
        tensors={name: packed for name, packed in found.tensors.items() if name not in copied},
        members={part: name for part, name in found.members.items() if part not in parts},
        unknown={**found.unknown, **parts},
    )


def part_name(name: str, part: str, other: str) -> str:
    """What a part of one packed tensor is called in another one.

    Args:
        name: the packed tensor that it is a part of.
        part: its name there.
        other: the other packed tensor.
    """
    return other.removesuffix(_WEIGHT) + part[len(name.removesuffix(_WEIGHT)) :]


def fresh_names(name: str, form: Format) -> tuple[str, str]:
    """What publishers call the codes and scales of a tensor that was plain, by its name."""
    if form is Format.FP8_BLOCK:
        return name, f"{name}_scale_inv"
    raise ValueError(f"plain tensors are not stored as {form.value}")
