"""Dense models as parts of a mixture of experts: their feed-forward networks, and what their configs mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.layers import stacks
from raymerge.architectures.moe_targets import target_table
from raymerge.architectures.roles import NameReader, TensorInfo, describe
from raymerge.architectures.rules import Role, load_rules


@dataclass(frozen=True, slots=True)
class DenseFamily:
    """A family whose feed-forward is ``down(act(gate(x)) * up(x))`` in three matrices."""

    activation: tuple[str, ...]
    """Config fields that name ``act``, best first."""
    window: str
    """Layers with a sliding window where the config has one: ``all``, ``upper`` or ``none``."""
    is_latent: bool
    """Whether the width of its heads is no field of its own."""
    defaults: Mapping[str, Any]
    """What a config means that is silent."""


@dataclass(frozen=True, slots=True)
class DenseModel:
    """One parent, as far as choosing a target needs it."""

    name: str
    """What messages call it."""
    config: Mapping[str, Any]
    """Its ``config.json``, with what its family means where that is silent."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every stored tensor."""
    infos: Mapping[str, TensorInfo]
    """What the name of every tensor says."""
    is_gated: bool
    """Whether its family is known to have gate, up and down in three matrices."""
    activation: str | None
    """Activation of its feed-forward networks; None where nothing says it."""
    windows: tuple[int | None, ...]
    """For each layer the tokens of its sliding window, or None where it attends to all."""
    matrices: Mapping[tuple[int, str], str]
    """Names of its feed-forward matrices, as ``dense_mlp`` finds them."""

    @property
    def family(self) -> str:
        """``model_type`` of its config; "" where it names none."""
        return _family(self.config)

    @property
    def num_layers(self) -> int:
        """Layers, as its config says; 0 where it does not."""
        return whole(self.config, "num_hidden_layers") or 0


def dense_model(name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DenseModel:
    """Read a dense model from its config and the shapes of its tensors.

    Args:
        name: what messages call it.
        config: its ``config.json``.
        shapes: of every stored tensor.
    """
    full, rules = full_config(config), load_rules(_family(config) or None)
    # A config may tell of more layers than memory could list; none of them has a window then.
    is_sane = (whole(full, "num_hidden_layers") or 0) <= len(shapes)
    family = dense_families().get(_family(config))
    return DenseModel(
        name=name,
        config=full,
        shapes=shapes,
        infos={each: describe(each, rules) for each in shapes},
        is_gated=family is not None,
        activation=_activation(full, family),
        windows=windows(full) if is_sane else (),
        matrices=dense_mlp(shapes, config),
    )


def dense_families() -> Mapping[str, DenseFamily]:
    """The families whose feed-forward networks can become experts, by ``model_type``.

    Reads the table on every call: hold on to the result.
    """
    general = target_table("general")
    return {
        name: DenseFamily(
            tuple(said.get("activation", ("hidden_act",))),
            said.get("window", "none"),
            said.get("latent", False),
            {**general["silent"], **said.get("defaults", {})},
        )
        for name, said in general["dense"].items()
    }


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what its family means where it is silent, head counts and widths included."""
    family = dense_families().get(_family(config))
    full = {**(family.defaults if family else {}), **config}
    hidden, heads = whole(full, "hidden_size"), whole(full, "num_attention_heads")
    if full.get("num_key_value_heads") is None and heads:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and hidden and heads and not (family and family.is_latent):
        full["head_dim"] = hidden // heads
    return full


def windows(full: Mapping[str, Any]) -> tuple[int | None, ...]:
    """For each layer of a full config the tokens of its sliding window, or None where it attends to all."""
    count, size = whole(full, "num_hidden_layers") or 0, whole(full, "sliding_window")
    family = dense_families().get(_family(full))
    kind = family.window if family else "none"
    if kind == "none" or size is None or (kind == "upper" and not full.get("use_sliding_window")):
        return (None,) * count
    named = full.get("layer_types") if kind == "upper" else None
    if isinstance(named, list) and len(named) == count:
        return tuple(size if word == "sliding_attention" else None for word in named)
    first = (whole(full, "max_window_layers") or 0) if kind == "upper" else 0
    return tuple(size if layer >= first else None for layer in range(count))


def dense_mlp(names: Iterable[str], config: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """The matrices of the dense feed-forward networks of the main stack: (layer, projection) to tensor name.

    A projection is ``gate``, ``up`` or ``down``, or ``gate_up`` where a family stores two as one. Layers with
    experts, and networks of other kinds, are not in it.
    """
    listed = tuple(names)
    rules, found = load_rules(_family(config) or None), stacks(listed, config)
    main = next((stack for stack in found if stack.is_main), None)
    if main is None:
        return {}
    reader, matrices = NameReader(rules, stacks=found), dict[tuple[int, str], str]()
    for name in listed:
        info = reader.describe(name)
        is_mlp = info.role is Role.MLP and info.stack == main.prefix and name.endswith(".weight")
        if is_mlp and info.layer is not None and info.projection is not None:
            matrices[info.layer, info.projection] = name
    return matrices


def whole(config: Mapping[str, Any], key: str) -> int | None:
    """A field that is a whole number; None where it is something else."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _family(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or "")


def _activation(full: Mapping[str, Any], family: DenseFamily | None) -> str | None:
    named = (full.get(key) for key in (family.activation if family else ("hidden_act",)))
    return next((str(name) for name in named if name is not None), None)
