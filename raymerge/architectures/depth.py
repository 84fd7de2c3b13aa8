"""What a config says about the number and order of layers, said anew for other layers in another order.

Every field that hangs on depth is read layer by layer from the config of the model that a layer comes from.
What all layers say together is written in the donor's own form, or as a list where that form cannot say it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raymerge.architectures.layers import with_layers
from raymerge.architectures.parents import Origin, Parent, Path, Said, read_config
from raymerge.architectures.periods import restack_periods
from raymerge.architectures.quantised_names import restack_names
from raymerge.architectures.rules import DepthRules, Rules, load_rules
from raymerge.architectures.sections import text_path

# Only a model that uses sliding windows reads this count of layers without one.
_WINDOW = "max_window_layers"
_USES_WINDOW = "use_sliding_window"
# GPT-Neo tells the kinds of its layers twice: one by one, and as patterns with the times each is repeated.
_KINDS, _PATTERNS = "attention_layers", "attention_types"
# Above any layer's number: a limit that ends nothing.
_NO_LIMIT = 2**63


def restack_config(
    config: Mapping[str, Any],
    layers: Sequence[int],
    *,
    parents: Sequence[Parent] = (),
    dense: Sequence[bool] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config for layers in a new order.

    Args:
        config: the donor's ``config.json``, whose form the new one keeps.
        layers: for each layer of the output its number in the model that it comes from.
        parents: for each layer of the output that model; () where all come from the donor.
        dense: for each layer of the output whether it has no experts, where the tensors tell; else the
            configs are asked.

    Returns:
        The new config, and a sentence for each thing that no value of a field can express.
    """
    result = copy.deepcopy(dict(config))
    rules = load_rules(str(config.get("model_type") or "") or None)
    donor = read_config(Parent("the donor", config), rules.depth)
    if donor.count is None:
        return result, ("config.json has no field for the number of layers that could be changed.",)
    as_before = tuple(layers) == tuple(range(donor.count))
    if as_before and (config.get("is_encoder_decoder") or all(each.config == config for each in parents)):
        return result, ()
    if config.get("is_encoder_decoder"):
        return result, (
            "The config speaks of an encoder and a decoder, whose layers cannot be restacked yet.",
        )
    origins = _origins(donor, layers, parents)
    sentences = [*_fields(result, donor, origins, dense), *restack_names(result, donor, origins, rules)]
    # Parents that have the same to say against it say it once.
    return result, tuple(dict.fromkeys(sentences))


def count_mtp_layers(
    names: Iterable[str], prefixes: Collection[str], num_layers: int, rules: Rules
) -> int | None:
    """Multi-token-prediction layers among tensor names; None where such tensors are in no numbered layer.

    Args:
        names: the checkpoint's tensors.
        prefixes: how the main stack is called.
        num_layers: its layers; those at or beyond predict further tokens.
        rules: naming rules of the family.
    """
    places: set[tuple[str, int]] = set()
    unnumbered = False
    for name, place in with_layers(names):
        if place is not None:
            places.add(place)
        else:
            unnumbered = unnumbered or not rules.mtp.isdisjoint(name.split("."))
    found = sum(
        number >= num_layers if head in prefixes else not rules.mtp.isdisjoint(head.split("."))
        for head, number in places
    )
    return None if unnumbered and not found else found


def _origins(donor: Said, layers: Sequence[int], parents: Sequence[Parent]) -> tuple[Origin, ...]:
    if not parents:
        return tuple(Origin(donor, layer) for layer in layers)
    said: dict[str, Said] = {}
    for parent in parents:
        if parent.name not in said:
            said[parent.name] = read_config(parent, donor.depth)
    return tuple(Origin(said[parent.name], layer) for parent, layer in zip(parents, layers, strict=True))


def _fields(
    result: dict[str, Any], donor: Said, origins: tuple[Origin, ...], dense: Sequence[bool] | None
) -> Iterator[str]:
    section = result
    for key in text_path(result):
        section = section[key]
    work = _Restacking(section, donor, origins)
    yield from work.listed()
    yield from work.indexed()
    yield from work.counted()
    yield from work.led(dense)
    yield from restack_periods(section, origins, donor.depth)
    if section is not result and result.get("num_hidden_layers") == donor.count:
        result["num_hidden_layers"] = len(origins)


class _Restacking:
    """One section of a config, changed in place field by field; each step says what it could not say."""

    def __init__(self, section: dict[str, Any], donor: Said, origins: tuple[Origin, ...]) -> None:
        self._section = section
        self._donor = donor
        self._origins = origins
        self._depth: DepthRules = donor.depth
        self._models = list({each.said.name: each.said for each in origins}.values())
        # Multi-token-prediction layers are those of the model that ends the stack.
        self._last = origins[-1].said if origins else donor

    def listed(self) -> Iterator[str]:
        """Lists (and strings) of one entry a layer."""
        models = (self._donor, *self._models)
        keys = dict.fromkeys(key for said in models for key in said.section)
        for key in keys:
            fits = [said.per_layer(key) is not None for said in models]
            same = all(said.section.get(key) == models[0].section.get(key) for said in models)
            # The same list in models of other depths is no list of layers, whatever its length.
            if any(fits) and (all(fits) or not same):
                yield from self._list(key)
        kinds = self._section.get(_KINDS)
        if _PATTERNS in self._section and kinds != self._donor.section.get(_KINDS):
            self._section[_PATTERNS] = [[copy.deepcopy(kinds), 1]]

    def indexed(self) -> Iterator[str]:
        """Lists of layer numbers, also in tables inside."""
        models = (self._donor, *self._models)
        for path in dict.fromkeys(path for said in models for path in _index_paths(said)):
            flags = [origin.is_listed(path) for origin in self._origins]
            place = self._section if len(path) == 1 else self._section.get(path[0])
            if None in flags or not isinstance(place, dict):
                yield self._differ(path[-1], [flag is not None for flag in flags])
            else:
                place[path[-1]] = self._numbers(path, [flag is True for flag in flags])

    def counted(self) -> Iterator[str]:
        """Numbers of layers, and features that cannot follow."""
        for key in self._depth.counts:
            if self._section.get(key) == self._donor.count:
                self._section[key] = len(self._origins)
        only = self._models[0] if len(self._models) == 1 else None
        if only and [each.layer for each in self._origins] == list(range(only.count or 0)):
            return
        for key in self._depth.fixed:
            for said in (self._donor, *self._models):
                if said.section.get(key):
                    yield (
                        f"{key} is {said.section[key]}: some layers reuse what earlier ones have or compute, "
                        "which no other order of layers keeps."
                    )

    def led(self, dense: Sequence[bool] | None) -> Iterator[str]:
        """Counts of layers at the start that are of a kind of their own."""
        for key in self._depth.leading_dense:
            yield from self._lead(key, dense)
        for key in self._depth.last_index:
            yield from self._lead(key, None, shift=1)
        for key in self._depth.leading:
            yield from self._window() if key == _WINDOW else self._lead(key, None)

    def _list(self, key: str) -> Iterator[str]:
        entries = [origin.entry(key) for origin in self._origins]
        if not all(entries):
            yield self._differ(key, [bool(entry) for entry in entries])
            return
        values = [copy.deepcopy(entry[0]) for entry in entries]
        if all(isinstance(said.section.get(key), str) for said in self._models):
            self._section[key] = "".join(values)
        else:
            behind = self._last.per_layer(key) or ()
            self._section[key] = values + list(behind[self._last.count or 0 :])

    def _numbers(self, path: Path, flags: Sequence[bool]) -> list[int]:
        first = 1 if path[-1] in self._depth.index_lists_from_one else 0
        count, total = self._last.count, len(flags)
        numbers = self._last.numbers(path) or ()
        behind = sorted(total + n - count for n in numbers if count is not None and n >= count)
        return [first + number for number in (*(n for n, flag in enumerate(flags) if flag), *behind)]

    def _lead(self, key: str, known: Sequence[bool] | None, *, shift: int = 0) -> Iterator[str]:
        """A count of layers at the start, or with ``shift`` 1 the number of the last such layer."""
        limits = [_limit(said, key, shift) for said in (self._donor, *self._models)]
        value = next((limit for limit in limits if limit is not None), None)
        if value is None:
            return
        if known is None and None in limits[1:]:
            yield self._differ(key, [_limit(each.said, key, shift) is not None for each in self._origins])
            return
        leads = known or [each.layer < (_limit(each.said, key, shift) or 0) for each in self._origins]
        num_leading = list(leads).index(False) if False in leads else len(leads)
        if any(leads[num_leading:]) or num_leading < shift:
            yield (
                f"{key} counts the layers at the start that are of one kind, but in the new order "
                f"layer {num_leading} is not of that kind and layer {_last(leads)} is."
            )
        elif num_leading < len(leads) or value <= max(self._donor.count or 0, len(leads)):
            self._section[key] = num_leading - shift

    def _window(self) -> Iterator[str]:
        uses = [bool(each.said.section.get(_USES_WINDOW)) for each in self._origins]
        if len(set(uses)) > 1:
            yield self._differ(_USES_WINDOW, uses)
        elif all(uses):
            yield from self._lead(_WINDOW, None)
        elif self._section.get(_WINDOW) == self._donor.count:
            self._section[_WINDOW] = len(self._origins)

    def _differ(self, key: str, says: Sequence[bool]) -> str:
        """The sentence for a field that only some of the models have."""
        silent = [each.said.name for each, flag in zip(self._origins, says, strict=True) if not flag]
        saying = [each.said.name for each, flag in zip(self._origins, says, strict=True) if flag]
        one, other = (saying or ["the donor"])[0], (silent or ["the donor"])[0]
        return (
            f"{key} tells kinds of layers apart in {one} and does not in {other}, "
            "so no one config can say it for the layers of both."
        )


def _index_paths(said: Said) -> Iterator[Path]:
    names = (*said.depth.index_lists, *said.depth.index_lists_from_one)
    for key, value in said.section.items():
        inner = [(key, name) for name in value if name in names] if isinstance(value, Mapping) else []
        for path in [(key,)] if key in names else inner:
            if said.numbers(path) is not None:
                yield path


def _limit(said: Said, key: str, shift: int) -> int | None:
    value = said.section.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    # The number of a last layer that is negative means: to the end.
    return _NO_LIMIT if shift and value < 0 else value + shift


def _last(flags: Sequence[bool]) -> int:
    return max((index for index, flag in enumerate(flags) if flag), default=0)
