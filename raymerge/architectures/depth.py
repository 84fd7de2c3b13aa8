"""What a config says about the number and order of layers, said anew for other layers in another order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.architectures.periods import restack_periods
from raymerge.architectures.rules import DepthRules, load_rules
from raymerge.architectures.sections import first_int, text_path, text_section


def restack_config(
    config: Mapping[str, Any], layers: Sequence[int], *, dense: Sequence[bool] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config for the donor's layers in a new order.

    Args:
        config: the donor's ``config.json``.
        layers: for each layer of the output the donor's layer that it comes from.
        dense: for each layer of the output whether it has no experts, where the tensors tell; else the
            donor's config is asked.

    Returns:
        The new config, and a sentence for each thing that no value of a field can express.
    """
    result = copy.deepcopy(dict(config))
    depth = load_rules(str(config.get("model_type") or "") or None).depth
    count = first_int(text_section(config), depth.counts)
    if count is None:
        return result, ("config.json has no field for the number of layers that could be changed.",)
    if tuple(layers) == tuple(range(count)):
        return result, ()
    if config.get("is_encoder_decoder"):
        return result, (
            "The config speaks of an encoder and a decoder, whose layers cannot be restacked yet.",
        )
    section = result
    for key in text_path(config):
        section = section[key]
    work = _Restacking(section, tuple(layers), count, depth)
    work.listed()
    periods = restack_periods(section, work.layers, depth)
    sentences = (*work.counted(), *work.led(dense), *periods)
    if section is not result and result.get("num_hidden_layers") == count:
        result["num_hidden_layers"] = len(layers)
    return result, sentences


class _Restacking:
    """One section of a config, changed in place field by field; each step returns what it could not say."""

    def __init__(
        self, section: dict[str, Any], layers: tuple[int, ...], count: int, depth: DepthRules
    ) -> None:
        self._section = section
        self.layers = layers
        self._count = count
        self._depth = depth
        self._mtp = first_int(section, depth.mtp_counts) or 0

    def counted(self) -> tuple[str, ...]:
        """Numbers of layers, of the last layer, and features that cannot follow."""
        for key in self._depth.counts:
            if self._section.get(key) == self._count:
                self._section[key] = len(self.layers)
        for key in self._depth.last_index:
            if self._section.get(key) == self._count - 1:
                self._section[key] = len(self.layers) - 1
        return tuple(
            f"{key} is {self._section[key]}: those layers reuse what earlier layers computed, "
            "which no other order of layers keeps."
            for key in self._depth.fixed
            if self._section.get(key)
        )

    def listed(self) -> None:
        """Lists (and strings) of one entry a layer, and lists of layer numbers, also in tables inside."""
        for key, value in self._section.items():
            if isinstance(value, list):
                self._section[key] = self._list(key, value)
            elif isinstance(value, dict):
                value.update(
                    {name: self._numbers(name, value[name]) for name in value if self._is_index(name)}
                )
            elif (
                isinstance(value, str) and key in self._depth.per_layer_strings and len(value) == self._count
            ):
                self._section[key] = "".join(value[layer] for layer in self.layers)

    def led(self, dense: Sequence[bool] | None) -> tuple[str, ...]:
        """Counts of layers at the start that are of a kind of their own."""
        sentences = []
        for key in self._depth.leading_dense:
            sentences += self._lead(key, dense)
        for key in self._depth.leading:
            matters = key != "max_window_layers" or bool(self._section.get("use_sliding_window"))
            sentences += self._lead(key, None) if matters else self._unused_window(key)
        return tuple(sentences)

    def _is_index(self, key: str) -> bool:
        return key in self._depth.index_lists or key in self._depth.index_lists_from_one

    def _list(self, key: str, value: list[Any]) -> list[Any]:
        if self._is_index(key):
            numbers: list[Any] = self._numbers(key, value)
            return numbers
        is_per_layer = len(value) in (self._count, self._count + self._mtp)
        if not is_per_layer or self._depth.not_per_layer.search(key):
            return value
        return [copy.deepcopy(value[layer]) for layer in self.layers] + value[self._count :]

    def _numbers(self, key: str, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
            return value
        first = 1 if key in self._depth.index_lists_from_one else 0
        old = {number - first for number in value}
        kept = [first + new for new, layer in enumerate(self.layers) if layer in old]
        # Multi-token-prediction layers stay behind the others.
        behind = sorted(number - self._count for number in old if number >= self._count)
        return kept + [first + len(self.layers) + number for number in behind]

    def _lead(self, key: str, known: Sequence[bool] | None) -> list[str]:
        value = self._section.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            return []
        leads = list(known) if known is not None else [layer < value for layer in self.layers]
        num_leading = leads.index(False) if False in leads else len(leads)
        if any(leads[num_leading:]):
            return [
                f"{key} counts the layers at the start that are of one kind, but in the new order "
                f"layer {num_leading} is not of that kind and layer {_last(leads)} is."
            ]
        if num_leading < len(leads) or value <= max(self._count, len(leads)):
            self._section[key] = num_leading
        return []

    def _unused_window(self, key: str) -> list[str]:
        if self._section.get(key) == self._count:
            self._section[key] = len(self.layers)
        return []


def _last(flags: Sequence[bool]) -> int:
    return max(index for index, flag in enumerate(flags) if flag)
