"""Families of mixtures of experts that dense models can be built into, read from tables in ``families``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

Layout = Literal["hub", "fused"]
"""How a mixture is written: as its family is published, or as transformers 5 holds it."""

Windows = Literal["none", "all", "layers"]
"""Layers that can attend to a sliding window: none, all of them or none, or any by name."""


@dataclass(frozen=True, slots=True)
class BaseFamily:
    """What a target asks of a base of one family."""

    layer: tuple[str, ...]
    """Tensors of each layer besides those that bases of every family have."""
    config: Mapping[str, Any]
    """Config fields that make the target compute as the family does."""


@dataclass(frozen=True, slots=True)
class TrunkTensors:
    """Tensors of the base's layers that a target has a place for, by their names below the layer."""

    layer: tuple[str, ...]
    """Needed in every layer."""
    groups: tuple[tuple[str, ...], ...]
    """Sets of which a base has all or none."""
    zeros: tuple[str, ...]
    """Biases that are zeros where the base has none."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that work on every token, stored as one network."""

    names: Mapping[str, str]
    """Name below the layer by projection."""
    own_gate: str | None
    """Name below the layer of the row ``[1, hidden]`` that weighs them; None where they simply are added."""
    least: int
    """Fewest that a recipe must name."""
    most: int | None
    """Most that it may name; None without a limit."""
    any_width: bool
    """Whether their width is free, or a multiple of an expert's."""


@dataclass(frozen=True, slots=True)
class MoeTarget:
    """A family of mixtures of experts, and what it takes to be built from dense models."""

    name: str
    """``model_type`` of its config."""
    title: str
    """What people call it."""
    aliases: tuple[str, ...]
    """Other names that a recipe may use."""
    architecture: str
    """Class in its config."""
    trunk_is: str
    """What its trunk is, as messages say it."""
    bases: Mapping[str, BaseFamily]
    """Families of bases that it computes as they do, by ``model_type``."""
    trunk: TrunkTensors | None
    """Tensors of the base; None where only a base of its own family fits, which has the right ones."""
    replaced: re.Pattern[str]
    """Found in the names of the base's feed-forward tensors, which experts take the place of."""
    full_width: tuple[str, ...]
    """Norms below the layer that must be as wide as all heads together."""
    windows: Windows
    """Layers that can attend to a sliding window."""
    rope_types: tuple[str, ...]
    """Kinds of rotary scaling that its code knows; () where it knows all."""
    divided_heads: bool
    """Whether the width of a head has to be the hidden size divided by the number of heads."""
    hub: Mapping[str, str] | None
    """Names below the layer by projection, and of the ``router``; None where published with fused experts."""
    fused: Mapping[str, str] | None
    """Names below the layer of ``gate_up``, ``down`` and ``router``; None where its code cannot read them."""
    selection_bias: str | None
    """Name below the layer of the float32 vector that moves the choice of experts; None without one."""
    shared: SharedExperts | None
    """Its shared experts; None where it has none."""
    least_experts: int
    """Fewest routed experts that its router works with."""
    config: Mapping[str, Any]
    """Fields of its config; a text with ``$`` before it names a number of the mixture or of the base."""
    drop: frozenset[str]
    """Fields of a base's config that it has no use for."""
    weights_sum_to_one: bool
    """Whether the weights of the chosen experts are made to sum to 1, so that equal experts are as one."""


def targets() -> Mapping[str, MoeTarget]:
    """All targets by name, in order of preference.

    Reads the tables on every call: hold on to the result.
    """
    general = target_table("general")
    return {name: _target(name, target_table(name), general) for name in general["order"]}


def named_targets(prefix: str) -> tuple[MoeTarget, ...]:
    """The targets that a recipe's ``architecture`` can mean, in order of preference; () where it means none.

    Capitals, dashes, underscores and blanks make no difference. A whole name wins over the beginning of one.
    """
    wanted = _squeezed(prefix)
    known = tuple(targets().values())
    names = {target.name: {_squeezed(name) for name in _names(target)} for target in known}
    exact = tuple(target for target in known if wanted in names[target.name])
    return exact or tuple(
        target for target in known if wanted and any(name.startswith(wanted) for name in names[target.name])
    )


def implied_tokenizer_class(model_type: str) -> str | None:
    """The tokenizer's class that loaders take for a family whatever its files say; None where these count."""
    found: str | None = target_table("general")["tokenizer_class"].get(model_type)
    return found


def target_table(name: str) -> dict[str, Any]:
    """One of the tables as it stands in its file: a target's, or ``general``."""
    table = files("raymerge.architectures").joinpath("families", "targets", f"{name}.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))


def _names(target: MoeTarget) -> tuple[str, ...]:
    return (target.name, target.title, *target.aliases)


def _squeezed(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter not in "-_ ")


def _target(name: str, table: Mapping[str, Any], general: Mapping[str, Any]) -> MoeTarget:
    trunk = table.get("trunk", {})
    return MoeTarget(
        name=name,
        title=table["title"],
        aliases=tuple(table.get("aliases", ())),
        architecture=table["architecture"],
        trunk_is=table["trunk_is"],
        bases={
            family: BaseFamily(tuple(said.get("layer", ())), said.get("config", {}))
            for family, said in table["bases"].items()
        },
        trunk=_trunk({**general["trunk"], **trunk}) if trunk is not False else None,
        replaced=re.compile(table.get("replaced", general["replaced"])),
        full_width=tuple(table.get("full_width", ())),
        windows=table.get("windows", "none"),
        rope_types=tuple(table.get("rope_types", ())),
        divided_heads=table.get("divided_heads", False),
        hub=table.get("hub", general["hub"]) or None,
        fused=table.get("fused", general["fused"]) or None,
        selection_bias=table.get("selection_bias"),
        shared=_shared(table["shared"]) if "shared" in table else None,
        least_experts=table.get("least_experts", 1),
        config=table["config"],
        drop=frozenset([*general["drop"], *table.get("drop", ())]),
        weights_sum_to_one=table.get("weights_sum_to_one", True),
    )


def _trunk(table: Mapping[str, Any]) -> TrunkTensors:
    return TrunkTensors(
        layer=tuple(table["layer"]),
        groups=tuple(tuple(group) for group in table.get("groups", ())),
        zeros=tuple(table.get("zeros", ())),
    )


def _shared(table: Mapping[str, Any]) -> SharedExperts:
    return SharedExperts(
        names={projection: table[projection] for projection in ("gate", "up", "down")},
        own_gate=table.get("own_gate"),
        least=table["least"],
        most=table.get("most"),
        any_width=table.get("any_width", False),
    )
