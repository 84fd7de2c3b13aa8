"""Rewrites what a config says of its layers for a new stack of layers.

Every per-layer field is read from the config of the layer's own model. The result takes the donor's form, or
a list where that form cannot express it."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.roles import layers_of
from raymerge.architectures.rules import (
    QUANTISATION_TABLES,
    DepthRules,
    Periodic,
    Rules,
    config_int,
    first_int,
    rules_of,
    sections,
    text_section,
    value_at,
)

ORDINARY = "mlp_only_layers"
"""The list of ordinary (dense) layers; it combines with a period instead of overriding it."""
LAYER_TYPES = "layer_types"
"""The list that overrides every period with words for it."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parent:
    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    name: str
    config: Mapping[str, Any]
    section: Mapping[str, Any]
    count: int | None
    """Number of layers; None if neither a field nor a list gives it."""
    mtp: int
    """Multi-token-prediction layers behind them."""
    depth: DepthRules

    def per_layer(self, key: str) -> Sequence[Any] | None:
        """A list (or string) with one entry a layer; else None."""
        value = self.section.get(key)
        if self.count is None or key in (*self.depth.index_lists, *self.depth.index_lists_from_one):
            return None
        if isinstance(value, str):
            return value if key in self.depth.per_layer_strings and len(value) == self.count else None
        if not isinstance(value, list) or self.depth.not_per_layer.search(key):
            return None
        return value if len(value) in (self.count, self.count + self.mtp) else None

    def numbers(self, path: Path) -> frozenset[int] | None:
        """The layers, from 0, in a list of layer numbers; None without one."""
        value = value_at(self.section, path)
        if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
            return None
        first = 1 if path[-1] in self.depth.index_lists_from_one else 0
        return frozenset(number - first for number in value)


@dataclass(frozen=True, slots=True)
class Origin:
    model: LayerConfig
    layer: int

    def entry(self, key: str) -> tuple[Any, ...]:
        """``(value,)`` of the layer in a per-layer field; () where the config lacks it."""
        values = self.model.per_layer(key)
        if values is not None and self.layer < len(values):
            return (values[self.layer],)
        return self._word() if key == LAYER_TYPES else ()

    def is_listed(self, path: Path) -> bool | None:
        numbers = self.model.numbers(path)
        if numbers is not None:
            return self.layer in numbers
        if path == (ORDINARY,):
            return False
        rules = (rule for rule in self.model.depth.periodic if (rule.index_list,) == path)
        rule = next(rules, None)
        return self.is_special(rule) if rule is not None else None

    def is_special(self, rule: Periodic) -> bool | None:
        length = period(self.model.section, rule)
        if length is None:
            return None
        offset = (first_int(self.model.section, [rule.offset]) or 0) if rule.offset else -rule.shift
        return (self.layer - offset) % length == 0

    def _word(self) -> tuple[str, ...]:
        for rule in self.model.depth.periodic:
            flag = self.is_special(rule) if rule.layer_types else None
            if rule.layer_types and flag is not None:
                return (rule.layer_types[0 if flag else 1],)
        return ()


def read_config(parent: Parent, depth: DepthRules) -> LayerConfig:
    section = text_section(parent.config)
    mtp = config_int(parent.config, depth.mtp_counts) or 0
    return LayerConfig(parent.name, parent.config, section, _count(section, depth), mtp, depth)


def _count(section: Mapping[str, Any], depth: DepthRules) -> int | None:
    stated = first_int(section, depth.counts)
    lists = (section[key] for key in depth.counting_lists if isinstance(section.get(key), list))
    return stated if stated is not None else next(map(len, lists), None)


def period(section: Mapping[str, Any], rule: Periodic) -> int | None:
    value = section.get(rule.key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def restack_period(section: dict[str, Any], origins: Sequence[Origin], rule: Periodic) -> str | None:
    """Change a periodic field in place; a sentence if it cannot express the new order."""
    own = period(section, rule)
    theirs = next((value for each in origins if (value := period(each.model.section, rule))), None)
    shared = own or theirs
    is_listed = rule.index_list not in (None, ORDINARY) and section.get(str(rule.index_list)) is not None
    has_precedence = is_listed or (rule.layer_types and section.get(LAYER_TYPES))
    # Such a list was restacked with the others.
    if shared is None or has_precedence:
        return None
    special = [origin.is_special(rule) for origin in origins]
    silent = next((origin.model.name for origin in origins if origin.is_special(rule) is None), None)
    if silent is not None or (own is None and section.get(rule.key) is not None):
        return (
            f"{rule.key} is {shared} in one model, but {silent or 'the donor'} does not say with a period "
            "which layers are of that kind, and one config has to say it for all layers."
        )
    return _fold(section, rule, [flag is True for flag in special], shared)


def _fold(section: dict[str, Any], rule: Periodic, special: list[bool], period: int) -> str | None:
    numbers = [index for index, flag in enumerate(special) if flag]
    if _as_period(section, rule, special, period):
        return None
    if rule.layer_types:
        section[LAYER_TYPES] = [rule.layer_types[0 if flag else 1] for flag in special]
    elif rule.index_list == ORDINARY:
        section[ORDINARY] = sorted({*range(len(special))} - {*numbers} | {*(section.get(ORDINARY) or ())})
        section[rule.key] = 1
    elif rule.index_list:
        section[rule.index_list] = numbers
    else:
        return (
            f"{rule.key} is {period}, but in the new order the layers of that kind are {numbers}, "
            "which no period gives."
        )
    return None


def _as_period(section: dict[str, Any], rule: Periodic, special: Sequence[bool], period: int) -> bool:
    for candidate in (period, *range(1, len(special) + 2)):
        for offset in range(candidate) if rule.offset else (-rule.shift,):
            if all(((index - offset) % candidate == 0) == flag for index, flag in enumerate(special)):
                section[rule.key] = candidate
                if rule.offset:
                    section[rule.offset] = offset
                return True
    return False


_PATTERN = re.compile(r"^(?:re|[-+]):|[*?+^$|\\()\[\]{}]")
_BESIDE_TEXT = ("audio", "speech", "talker")


def restack_names(
    result: dict[str, Any], donor: LayerConfig, origins: Sequence[Origin], rules: Rules
) -> Iterator[str]:
    """Rename layers in the quantisation tables of a config in place; yields what one table cannot express.

    A name becomes one name for each use of its layer, none if the layer is left out."""
    for keys, section in sections(result):
        for table in QUANTISATION_TABLES:
            work = _Renaming(donor, origins, _LayerNames(rules))
            value = work.fold((*keys, table))
            if value is not None:
                section[table] = value
            yield from work.sentences(table)


class _LayerNames:
    def __init__(self, rules: Rules) -> None:
        words = "|".join(sorted(map(re.escape, rules.layer_words)))
        self._aside = rules.vision | rules.mtp
        self._name = re.compile(rf"((?:\w+\.)*?(?:{words}))\.([0-9]+)(\..*)?")
        self._numbered = re.compile(rf"(?:^|[^A-Za-z])(?:{words})[^A-Za-z]*[0-9]")

    def layer(self, name: str) -> int | None:
        # A glob's last star, as ModelOpt lists modules, is no matter behind the name that follows the number.
        bare = name.rstrip("*")
        match = None if _PATTERN.search(bare) else self._name.fullmatch(bare)
        is_whole = bare == name or (match is not None and len(match[3] or "") > 1)
        return int(match[2]) if match and is_whole and not self._is_aside(match[1]) else None

    def renamed(self, name: str, layer: int) -> str:
        return self._name.sub(lambda match: f"{match[1]}.{layer}{match[3] or ''}", name, count=1)

    def is_numbered_pattern(self, text: str) -> bool:
        # A class of all digits means any layer, as \d does, whose letter keeps it from being found.
        plain = text.replace("[0-9]", r"\d")
        return bool(_PATTERN.search(text) and self._numbered.search(plain)) and not self._is_aside(plain)

    def _is_aside(self, text: str) -> bool:
        words = re.split(r"[^A-Za-z0-9_]+", text)
        return not self._aside.isdisjoint(words) or any(word.startswith(_BESIDE_TEXT) for word in words)


class _Renaming:
    def __init__(self, donor: LayerConfig, origins: Sequence[Origin], names: _LayerNames) -> None:
        self._donor = donor
        self._origins = origins
        self._names = names
        self._models = list({each.model.name: each.model for each in origins}.values())
        self._differing: dict[str, list[str]] = {}
        self._patterns: dict[str, None] = {}

    def fold(self, path: Path) -> Any:
        values = [value_at(model.config, path) for model in (self._donor, *self._models)]
        if any(isinstance(value, Mapping) for value in values):
            return self._folded(path)
        if any(_is_names(value) for value in values):
            return list(self._folded(path))
        for model, value in zip(self._models, values[1:], strict=True):
            if value != values[0]:
                self._differ(model, path)
        return copy.deepcopy(values[0])

    def sentences(self, table: str) -> Iterator[str]:
        for name, fields in self._differing.items():
            yield (
                f"{table} says other things in {name} than in the donor ({', '.join(fields)}), "
                "and one config has to hold for all layers."
            )
        for pattern in self._patterns:
            yield f"{table} has the pattern '{pattern}', whose layer numbers cannot follow the new order."

    def _folded(self, path: Path) -> dict[str, Any]:
        renamed: dict[str, Any] = {}
        for new, origin in enumerate(self._origins):
            renamed |= self._moved(origin.model, path, {origin.layer: new})
        if self._origins and self._origins[-1].model.count is not None:
            # Multi-token-prediction layers stay behind those of the model that ends the stack.
            last = self._origins[-1].model
            count, total = last.count or 0, len(self._origins)
            renamed |= self._moved(last, path, {count + n: total + n for n in range(last.mtp)})
        keys = self._kept(path)
        return {**renamed, **{key: self.fold((*path, key)) for key in keys}}

    def _kept(self, path: Path) -> tuple[str, ...]:
        """Members without layer numbers, which must be the same in every model."""
        unnumbered: dict[str, list[str]] = {}
        models = (self._donor, *self._models)
        is_list = not any(isinstance(value_at(model.config, path), Mapping) for model in models)
        for model in models:
            members = _members(value_at(model.config, path))
            unnumbered[model.name] = [key for key in members if self._names.layer(key) is None]
            numbered = filter(self._names.is_numbered_pattern, unnumbered[model.name])
            self._patterns |= dict.fromkeys(numbered)
            if is_list and set(unnumbered[model.name]) != set(unnumbered[self._donor.name]):
                self._differ(model, path)
        return tuple(dict.fromkeys(key for keys in unnumbered.values() for key in keys))

    def _moved(self, model: LayerConfig, path: Path, numbers: Mapping[int, int]) -> dict[str, Any]:
        return {
            self._names.renamed(key, numbers[layer]): copy.deepcopy(value)
            for key, value in _members(value_at(model.config, path)).items()
            if (layer := self._names.layer(key)) is not None and layer in numbers
        }

    def _differ(self, model: LayerConfig, path: Path) -> None:
        fields = self._differing.setdefault(model.name, [])
        if path[-1] not in fields:
            fields.append(path[-1])


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _members(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return dict.fromkeys(value) if _is_names(value) else {}


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
    """A config for layers in a new order, and a sentence for each thing that no field can express.
    ``config``: the donor's ``config.json``, whose form the new one keeps. ``layers``: for each layer of the
    output its number in its model. ``parents``: for each layer its model; () where all come from the donor.
    ``dense``: for each layer whether it has no experts, if the tensors tell; else the configs are asked."""
    result = copy.deepcopy(dict(config))
    rules = rules_of(config)
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
    """Multi-token-prediction layers among tensor names; None if such tensors have no layer number."""
    places: set[tuple[str, int]] = set()
    unnumbered = False
    for name, place in layers_of(names):
        if place is not None:
            places.add(place)
        else:
            unnumbered = unnumbered or not rules.mtp.isdisjoint(name.split("."))
    count = sum(
        number >= num_layers if head in prefixes else not rules.mtp.isdisjoint(head.split("."))
        for head, number in places
    )
    return None if unnumbered and not count else count


def _origins(donor: LayerConfig, layers: Sequence[int], parents: Sequence[Parent]) -> tuple[Origin, ...]:
    if not parents:
        return tuple(Origin(donor, layer) for layer in layers)
    configs: dict[str, LayerConfig] = {}
    for parent in parents:
        if parent.name not in configs:
            configs[parent.name] = read_config(parent, donor.depth)
    return tuple(Origin(configs[parent.name], layer) for parent, layer in zip(parents, layers, strict=True))


def _fields(
    result: dict[str, Any], donor: LayerConfig, origins: tuple[Origin, ...], dense: Sequence[bool] | None
) -> Iterator[str]:
    section = text_section(result)
    work = _Restacking(section, donor, origins)
    yield from work.listed()
    yield from work.indexed()
    yield from work.counted()
    yield from work.led(dense)
    yield from filter(None, (restack_period(section, origins, rule) for rule in donor.depth.periodic))
    if section is not result and result.get("num_hidden_layers") == donor.count:
        result["num_hidden_layers"] = len(origins)


class _Restacking:
    """One section of a config, changed in place; each step yields what it could not express."""

    def __init__(self, section: dict[str, Any], donor: LayerConfig, origins: tuple[Origin, ...]) -> None:
        self._section = section
        self._donor = donor
        self._origins = origins
        self._depth: DepthRules = donor.depth
        self._models = list({each.model.name: each.model for each in origins}.values())
        # Multi-token-prediction layers are those of the model that ends the stack.
        self._last = origins[-1].model if origins else donor

    def listed(self) -> Iterator[str]:
        models = (self._donor, *self._models)
        keys = dict.fromkeys(key for model in models for key in model.section)
        for key in keys:
            fits = [model.per_layer(key) is not None for model in models]
            same = all(model.section.get(key) == models[0].section.get(key) for model in models)
            # The same list in models of other depths is no list of layers, whatever its length.
            if any(fits) and (all(fits) or not same):
                yield from self._list(key)
        kinds = self._section.get(_KINDS)
        if _PATTERNS in self._section and kinds != self._donor.section.get(_KINDS):
            self._section[_PATTERNS] = [[copy.deepcopy(kinds), 1]]

    def indexed(self) -> Iterator[str]:
        models = (self._donor, *self._models)
        for path in dict.fromkeys(path for model in models for path in _index_paths(model)):
            flags = [origin.is_listed(path) for origin in self._origins]
            place = self._section if len(path) == 1 else self._section.get(path[0])
            if None in flags or not isinstance(place, dict):
                yield self._differ(path[-1], [flag is not None for flag in flags])
            else:
                place[path[-1]] = self._numbers(path, [flag is True for flag in flags])

    def counted(self) -> Iterator[str]:
        for key in self._depth.counts:
            if self._section.get(key) == self._donor.count:
                self._section[key] = len(self._origins)
        only = self._models[0] if len(self._models) == 1 else None
        if only and [each.layer for each in self._origins] == list(range(only.count or 0)):
            return
        for key in self._depth.fixed:
            for model in (self._donor, *self._models):
                if model.section.get(key):
                    yield (
                        f"{key} is {model.section[key]}: some layers reuse what earlier ones have or "
                        "compute, which no other order of layers keeps."
                    )

    def led(self, dense: Sequence[bool] | None) -> Iterator[str]:
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
        if all(isinstance(model.section.get(key), str) for model in self._models):
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
        """A count of special layers at the start, or with ``shift`` 1 the number of the last one."""
        limits = [_limit(model, key, shift) for model in (self._donor, *self._models)]
        value = next((limit for limit in limits if limit is not None), None)
        if value is None:
            return
        if known is None and None in limits[1:]:
            yield self._differ(key, [_limit(each.model, key, shift) is not None for each in self._origins])
            return
        leads = known or [each.layer < (_limit(each.model, key, shift) or 0) for each in self._origins]
        num_leading = list(leads).index(False) if False in leads else len(leads)
        if any(leads[num_leading:]) or num_leading < shift:
            last = max((index for index, flag in enumerate(leads) if flag), default=0)
            yield (
                f"{key} counts the layers at the start that are of one kind, but in the new order "
                f"layer {num_leading} is not of that kind and layer {last} is."
            )
        elif num_leading < len(leads) or value <= max(self._donor.count or 0, len(leads)):
            self._section[key] = num_leading - shift

    def _window(self) -> Iterator[str]:
        uses = [bool(each.model.section.get(_USES_WINDOW)) for each in self._origins]
        if len(set(uses)) > 1:
            yield self._differ(_USES_WINDOW, uses)
        elif all(uses):
            yield from self._lead(_WINDOW, None)
        elif self._section.get(_WINDOW) == self._donor.count:
            self._section[_WINDOW] = len(self._origins)

    def _differ(self, key: str, says: Sequence[bool]) -> str:
        silent = [each.model.name for each, flag in zip(self._origins, says, strict=True) if not flag]
        saying = [each.model.name for each, flag in zip(self._origins, says, strict=True) if flag]
        one, other = (saying or ["the donor"])[0], (silent or ["the donor"])[0]
        return (
            f"{key} tells kinds of layers apart in {one} and does not in {other}, "
            "so no one config can say it for the layers of both."
        )


def _index_paths(model: LayerConfig) -> Iterator[Path]:
    names = (*model.depth.index_lists, *model.depth.index_lists_from_one)
    for key, value in model.section.items():
        inner = [(key, name) for name in value if name in names] if isinstance(value, Mapping) else []
        for path in [(key,)] if key in names else inner:
            if model.numbers(path) is not None:
                yield path


def _limit(model: LayerConfig, key: str, shift: int) -> int | None:
    value = model.section.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    # The number of a last layer that is negative means: to the end.
    return _NO_LIMIT if shift and value < 0 else value + shift
