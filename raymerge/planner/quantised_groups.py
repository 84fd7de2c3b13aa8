"""What of a checkpoint is quantised, in numbers: a line for each way of storing codes with scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from raymerge.checkpoints.quantisation.encoding import Encoding, encoding_of
from raymerge.checkpoints.source import Checkpoint
from raymerge.planner.inputs.quantised import quantised_tensors

_BITS = 8


@dataclass(frozen=True, slots=True)
class QuantisedGroup:
    """Tensors that are quantised in one way."""

    name: str
    """The format, by its name in ``out_format``; of one that is not read, what it is called."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; 0 for as many as a matrix has, None where that is not read."""
    scales: str
    """Dtype of the scales; "" where that is not read."""
    power_of_two: bool
    """Whether all scales are powers of two."""
    tensors: int
    """Stored tensors, scales included."""
    nbytes: int
    """Their bytes."""
    bits_per_weight: float | None
    """Bits that a number takes with its share of the scales; None where that is not read."""


@dataclass(slots=True)
class _Sum:
    tensors: int = 0
    nbytes: int = 0
    weights: int = 0


def quantised_groups(checkpoint: Checkpoint) -> tuple[tuple[QuantisedGroup, ...], tuple[str, ...]]:
    """What is quantised, the largest first, and sentences about codes, scales and config that disagree."""
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
    groups = sorted(_groups(read, unknown), key=lambda group: (-group.nbytes, group.name))
    return tuple(groups), tuple(f"{fault.what} {fault.remedy}" for fault in found.faults)


def _groups(read: dict[Encoding, _Sum], unknown: dict[str, _Sum]) -> Iterator[QuantisedGroup]:
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
