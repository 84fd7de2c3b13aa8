"""The config of a built mixture of experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from raymerge.architectures.dense_models import full_config, windows
from raymerge.architectures.moe_targets import MoeTarget

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
