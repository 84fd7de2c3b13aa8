"""A checkpoint in which codes with their scales are one tensor of numbers each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.detect import PackedTensors
from raymerge.checkpoints.quantisation.encoding import Format, Packing, Packs
from raymerge.checkpoints.source import Checkpoint, natural_key
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError

_WEIGHT = ".weight"


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
    stored = checkpoint.tensors
    if not found.members:
        return replace(checkpoint, packs=Packs(stored, found.tensors, found.members, found.unknown))
    tensors = {name: tensor for name, tensor in stored.items() if name not in found.members}
    for name, packed in found.tensors.items():
        codes, packing = stored[packed.codes], packed.packing
        dtype = code_dtype(packing)
        tensors[name] = StoredTensor(name, dtype, packing.shape, codes.key, codes.offset, codes.nbytes)
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    return replace(
        checkpoint, tensors=ordered, packs=Packs(stored, found.tensors, found.members, found.unknown)
    )


def part_name(name: str, part: str, other: str) -> str:
    """What a part of one packed tensor is called in another one.

    Args:
        name: the packed tensor that it is a part of.
        part: its name there.
        other: the other packed tensor.
    """
    return other.removesuffix(_WEIGHT) + part[len(name.removesuffix(_WEIGHT)) :]


class PartNames(NamedTuple):
    """What the stored tensors of a packed one are called; "" for what it has none of."""

    codes: str
    """Its codes."""
    scales: str = ""
    """The scales of their blocks."""
    tensor_scale: str = ""
    """The one scale of all codes."""
    shape: str = ""
    """Its shape."""


_FRESH: Mapping[Format, Mapping[str, str]] = {
    Format.FP8_BLOCK: {"codes": "", "scales": "_scale_inv"},
    Format.FP8_CHANNEL: {"codes": "", "scales": "_scale"},
    Format.FP8_TENSOR: {"codes": "", "tensor_scale": "_scale"},
    Format.MXFP4: {"codes": "_blocks", "scales": "_scales"},
    Format.MXFP4_ROWS: {"codes": "_packed", "scales": "_scale"},
    Format.INT4: {"codes": "_packed", "scales": "_scale", "shape": "_shape"},
    Format.NVFP4: {"codes": "_packed", "scales": "_scale", "tensor_scale": "_global_scale"},
}
"""What follows the name of a tensor in those of its parts."""


def fresh_names(name: str, form: Format) -> PartNames:
    """What publishers call the parts of a tensor of this name that was stored in another way before."""
    return PartNames(**{part: f"{name}{ending}" for part, ending in _FRESH[form].items()})
