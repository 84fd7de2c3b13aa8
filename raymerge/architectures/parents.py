"""The models that the layers of a stack come from, and what each config says of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.rules import DepthRules, Periodic
from raymerge.architectures.sections import config_int, first_int, text_section

ORDINARY = "mlp_only_layers"
"""The one list that names the ordinary (dense) layers. It works with a period and does not override it."""
LAYER_TYPES = "layer_types"
"""The list that overrides every period that has words for it."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parent:
    """A model that gives layers to a stack."""

    name: str
    """What messages call it."""
    config: Mapping[str, Any]
    """Its ``config.json``."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one model's config says of its layers."""

    name: str
    """What messages call the model."""
    config: Mapping[str, Any]
    """The whole config."""
    section: Mapping[str, Any]
    """Its part on the text decoder."""
    count: int | None
    """Its number of layers, where it has a field or a list that tells it."""
    mtp: int
    """Multi-token-prediction layers that it counts behind them."""
    depth: DepthRules
    """Which fields hang on depth."""

    def per_layer(self, key: str) -> Sequence[Any] | None:
        """The list (or string) of a field with one entry a layer; None where the field is no such list."""
        value = self.section.get(key)
        if self.count is None or key in (*self.depth.index_lists, *self.depth.index_lists_from_one):
            return None
        if isinstance(value, str):
            return value if key in self.depth.per_layer_strings and len(value) == self.count else None
        if not isinstance(value, list) or self.depth.not_per_layer.search(key):
            return None
        return value if len(value) in (self.count, self.count + self.mtp) else None

    def numbers(self, path: Path) -> frozenset[int] | None:
        """The layers, from 0, that a list of layer numbers names; None where there is no such list."""
        value = self.at(path)
        if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
            return None
        first = 1 if path[-1] in self.depth.index_lists_from_one else 0
        return frozenset(number - first for number in value)

    def at(self, path: Path) -> Any:
        """The value of a field of the section, or None."""
        value: Any = self.section
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one layer of the output comes from."""

    said: Said
    """Its model."""
    layer: int
    """Its number there."""

    def entry(self, key: str) -> tuple[Any, ...]:
        """``(value,)`` of the layer in a field of one entry a layer; () where the config does not say it."""
        values = self.said.per_layer(key)
        if values is not None and self.layer < len(values):
            return (values[self.layer],)
        return self._word() if key == LAYER_TYPES else ()

    def is_listed(self, path: Path) -> bool | None:
        """Whether a list of layer numbers names the layer; None where the config does not say it."""
        numbers = self.said.numbers(path)
        if numbers is not None:
            return self.layer in numbers
        if path == (ORDINARY,):
            return False
        rules = (rule for rule in self.said.depth.periodic if (rule.index_list,) == path)
        rule = next(rules, None)
        return self.is_special(rule) if rule is not None else None

    def is_special(self, rule: Periodic) -> bool | None:
        """Whether the layer is of the special kind by a period; None where the config has no such period."""
        length = period(self.said.section, rule)
        if length is None:
            return None
        offset = (first_int(self.said.section, [rule.offset]) or 0) if rule.offset else -rule.shift
        return (self.layer - offset) % length == 0

    def _word(self) -> tuple[str, ...]:
        for rule in self.said.depth.periodic:
            flag = self.is_special(rule) if rule.layer_types else None
            if rule.layer_types and flag is not None:
                return (rule.layer_types[0 if flag else 1],)
        return ()


def read_config(parent: Parent, depth: DepthRules) -> Said:
    """What a model's config says of its layers."""
    section = text_section(parent.config)
    mtp = config_int(parent.config, depth.mtp_counts) or 0
    return Said(parent.name, parent.config, section, _count(section, depth), mtp, depth)


def _count(section: Mapping[str, Any], depth: DepthRules) -> int | None:
    """Number of layers: the field that counts them, else the length of a list that tells their kinds."""
    said = first_int(section, depth.counts)
    lists = (section[key] for key in depth.counting_lists if isinstance(section.get(key), list))
    return said if said is not None else next(map(len, lists), None)


def period(section: Mapping[str, Any], rule: Periodic) -> int | None:
    """The period of a rule in a section; None where it has none."""
    value = section.get(rule.key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None
