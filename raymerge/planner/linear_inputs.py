"""Which matrices of a model are multiplied with which input, from their names: those that share one have one
Gram matrix of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raymerge.architectures.roles import describe
from raymerge.architectures.rules import Role
from raymerge.planner.inputs.quantised import in_numbers
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import is_conv1d
from raymerge.planner.matching.logical import LogicalTensors, Place

_ROLES = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
_WEIGHT = ".weight"
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
)
"""Modules of attention side by side that are given the same."""
_INTO = ("gate", "up", "gate_up")
"""Projections of a feed-forward network that are given the same."""


@dataclass(frozen=True, slots=True)
class LinearInput:
    """The input of some matrices of a model."""

    name: str
    """Logical name of the first of them."""
    width: int
    layer: int
    is_turned: bool
    """Whether they are stored ``[in, out]``."""


def linear_inputs(model: Source) -> Mapping[str, LinearInput]:
    """The input of each matrix in the layers that read text, by its logical name; none for routers."""
    model = in_numbers(model)
    logical, stack = LogicalTensors(model), model.layer_stack(None)
    inputs: dict[str, LinearInput] = {}
    first: dict[tuple[str, str, int], str] = {}
    for name in model.checkpoint.tensors:
        info = logical.infos[name]
        if stack is None or info.stack != stack.prefix or info.role not in _ROLES or info.layer is None:
            continue
        for member, place in _members(logical, name):
            is_turned = is_conv1d(member, model.model_type)
            width = place.shape[0 if is_turned else 1]
            path, _, leaf = member.removesuffix(_WEIGHT).rpartition(".")
            key = (path, _input_word(member, leaf, model), width)
            own = first.setdefault(key, member)
            inputs[member] = LinearInput(own, width, info.layer, is_turned)
    return inputs


def _members(logical: LogicalTensors, name: str) -> Iterator[tuple[str, Place]]:
    for member, place in (logical.members(name) or {}).items():
        if member.endswith(_WEIGHT) and len(place.shape) == 2 and min(place.shape) > 1:
            yield member, place


def _input_word(member: str, leaf: str, model: Source) -> str:
    if describe(member, model.rules).projection in _INTO:
        return _INTO[0]
    return next((words[0] for words in _TOGETHER if leaf in words), leaf)
