"""The config of a built mixture of experts, and the names of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.dense_models import DenseModel, full_config, windows
from raymerge.architectures.moe_targets import Layout, MoeTarget
from raymerge.dtypes import DType

_MARK = "$"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def moe_config(
    target: MoeTarget,
    base_config: Mapping[str, Any],
    *,
    num_experts: int,
    experts_per_token: int,
    expert_width: int,
    shared_width: int,
    dtype_name: str | None,
) -> dict[str, Any]:
    """The whole ``config.json`` of a mixture: the base's with what it leaves unsaid, and the target's fields.

    Args:
        target: the family built.
        base_config: ``config.json`` of the base, which fits the target.
        num_experts: routed experts in each layer.
        experts_per_token: how many of them work on a token.
        expert_width: rows of one routed expert's gate matrix.
        shared_width: rows of the gate matrix of all shared experts together; 0 without any.
        dtype_name: torch's name for the dtype of the output; None keeps what the base's config says.

    Raises:
        ValueError: the shared experts' width is no multiple of an expert's where the target counts them.
    """
    full = full_config(base_config)
    values = {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_width": expert_width,
        "shared_width": shared_width,
        "num_shared": _num_shared(target, expert_width, shared_width),
        "dtype": dtype_name or _stated_dtype(base_config),
        **_base_values(full),
    }
    base = target.bases[str(full["model_type"])]
    kept = {key: copy.deepcopy(value) for key, value in full.items() if key not in target.drop}
    own = {key: _value(said, values) for key, said in {**target.config, **base.config}.items()}
    result = {**kept, **own, "architectures": [target.architecture], "model_type": target.name}
    _state_rotary(result, own)
    _state_dtype(result, dtype_name)
    return result


def rotary(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind of rotary scaling and its fields, from either spelling of a config; "default" and {} without."""
    found = (config[key] for key in _ROPE_KEYS if isinstance(config.get(key), Mapping))
    stated: Mapping[str, Any] = next(found, {})
    kind = stated.get("rope_type", stated.get("type", "default"))
    fields = {key: value for key, value in stated.items() if key not in ("rope_type", "type", "rope_theta")}
    return str(kind), fields if kind != "default" else {}


def _num_shared(target: MoeTarget, expert_width: int, shared_width: int) -> int | None:
    """Shared experts as a config counts them: each as wide as a routed one; None for none at all."""
    if target.shared is None or target.shared.any_width or not shared_width:
        return None
    if shared_width % expert_width:
        raise ValueError(f"shared experts {shared_width} wide are no whole number of {expert_width}")
    return shared_width // expert_width


def _base_values(full: Mapping[str, Any]) -> dict[str, Any]:
    """What fields of a target ask of the base."""
    sliding = windows(full)
    kind, scaling = rotary(full)
    stated = full.get("rope_parameters") or {}
    return {
        "window": next((size for size in sliding if size is not None), None),
        "has_window": any(size is not None for size in sliding),
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in sliding],
        "attention_scale": full["head_dim"] ** -0.5 if "head_dim" in full else None,
        "rope_theta": stated.get("rope_theta", full.get("rope_theta")),
        "rope_scaling": {"type": kind, **scaling} if kind != "default" else None,
    }


def _value(said: Any, values: Mapping[str, Any]) -> Any:
    is_name = isinstance(said, str) and said.startswith(_MARK)
    return values[said.removeprefix(_MARK)] if is_name else copy.deepcopy(said)


def _stated_dtype(config: Mapping[str, Any]) -> str | None:
    return next((str(config[key]) for key in _DTYPE_KEYS if config.get(key)), None)


def _state_rotary(result: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Say the rotary fields in one place, wherever a reader looks for them."""
    stated = result.get("rope_parameters")
    if not isinstance(stated, dict):
        return
    if "rope_theta" in stated and "rope_theta" not in own:
        result.pop("rope_theta", None)
    if "partial_rotary_factor" in own:
        stated["partial_rotary_factor"] = own["partial_rotary_factor"]


def _state_dtype(result: dict[str, Any], dtype_name: str | None) -> None:
    """Write the dtype where the base's config has it, else under its present name."""
    if dtype_name is None:
        return
    keys = [key for key in _DTYPE_KEYS if key in result] or [_DTYPE_KEYS[0]]
    result.update(dict.fromkeys(keys, dtype_name))


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
