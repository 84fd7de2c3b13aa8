"""What the tensors of a built mixture of experts are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymerge.architectures.dense_models import DenseModel
from raymerge.architectures.moe_targets import Layout, MoeTarget
from raymerge.dtypes import DType

_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The tensors that hold all experts of one layer."""

    gate_up: str
    """Name of ``[experts, 2 * width, hidden]``: the gate's rows above the up projection's."""
    down: str
    """Name of ``[experts, hidden, width]``."""


@dataclass(frozen=True, slots=True)
class AddedTensor:
    """A tensor of one value that a target needs and the base has not."""

    name: str
    """Its name in the output."""
    dtype: DType | None
    """How it has to be stored; None for the dtype of the trunk."""
    shape: tuple[int, ...]
    """Its shape."""
    value: float
    """The value of every element."""


def trunk_name(target: MoeTarget, name: str) -> str | None:
    """What a tensor of the base is called in the target; None for the feed-forward that experts replace."""
    return None if target.replaced.search(name) else name


def is_fused(target: MoeTarget, layout: Layout) -> bool:
    """Whether experts lie together in fused tensors in a layout of the target."""
    return layout == "fused" or target.hub is None


def expert_names(target: MoeTarget, layer: int, expert: int) -> Mapping[str, str]:
    """Names of one expert's ``gate``, ``up`` and ``down`` in the published layout.

    Raises:
        ValueError: the target is published with fused experts.
    """
    if target.hub is None:
        raise ValueError(f"{target.title} is published with fused experts, which have no names one by one")
    return {each: _below(layer, target.hub[each].format(expert=expert)) for each in _MATRICES}


def fused_names(target: MoeTarget, layer: int) -> FusedExperts:
    """Names of the tensors that hold all experts of a layer where they are fused.

    Raises:
        ValueError: the target has no such layout.
    """
    names = _fused(target)
    return FusedExperts(_below(layer, names["gate_up"]), _below(layer, names["down"]))


def router_name(target: MoeTarget, layer: int, layout: Layout) -> str:
    """Name of the router's rows, ``[experts, hidden]``.

    Raises:
        ValueError: the target has no such layout.
    """
    names = target.hub if layout == "hub" and target.hub is not None else _fused(target)
    return _below(layer, names["router"])


def shared_names(target: MoeTarget, layer: int) -> Mapping[str, str]:
    """Names of ``gate``, ``up`` and ``down`` of the shared experts, in either layout; {} where it has none.

    Several of them are one network: their rows of gate and up, and their columns of down, side by side.
    """
    if target.shared is None:
        return {}
    return {each: _below(layer, target.shared.names[each]) for each in _MATRICES}


def shared_gate_name(target: MoeTarget, layer: int) -> str | None:
    """Name of the row ``[1, hidden]`` that weighs the shared expert; None where nothing does."""
    own = target.shared.own_gate if target.shared is not None else None
    return _below(layer, own) if own is not None else None


def added_tensors(target: MoeTarget, base: DenseModel, num_experts: int) -> tuple[AddedTensor, ...]:
    """Tensors that the target needs and the base has not, in order of layers.

    A bias is as long as the matrix beside it has rows. The base has to fit the target.
    """
    biases = target.trunk.zeros if target.trunk is not None else ()
    found: list[AddedTensor] = []
    for layer in range(base.num_layers):
        for name in (_below(layer, bias) for bias in biases):
            rows = base.shapes[f"{name.removesuffix('.bias')}.weight"][:1]
            if name not in base.shapes:
                found.append(AddedTensor(name, None, rows, 0.0))
        if target.selection_bias is not None:
            name = _below(layer, target.selection_bias)
            found.append(AddedTensor(name, DType.F32, (num_experts,), 0.0))
    return tuple(found)


def _fused(target: MoeTarget) -> Mapping[str, str]:
    if target.fused is None:
        raise ValueError(f"the code of {target.title} reads no fused experts")
    return target.fused


def _below(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"
