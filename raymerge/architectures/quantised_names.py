"""Names of layers inside what a config says of quantisation, for layers in another order."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raymerge.architectures.parents import Origin, Path, Said
from raymerge.architectures.rules import Rules
from raymerge.architectures.sections import text_path

_TABLES = ("quantization_config", "compression_config")
_PATTERN = re.compile(r"^(?:re|[-+]):|[*?+^$|\\()\[\]{}]")
_BESIDE_TEXT = ("audio", "speech", "talker")


def restack_names(
    result: dict[str, Any], donor: Said, origins: Sequence[Origin], rules: Rules
) -> Iterator[str]:
    """Rename the layers in the quantisation tables of a config in place; yields what one table cannot say.

    A name becomes as many names as its layer is used times, and none where the layer is left out.
    """
    keys = text_path(result)
    section = result
    for depth in range(len(keys) + 1):
        section = section[keys[depth - 1]] if depth else result
        for table in _TABLES:
            work = _Renaming(donor, origins, _LayerNames(rules))
            value = work.fold((*keys[:depth], table))
            if value is not None:
                section[table] = value
            yield from work.sentences(table)


class _LayerNames:
    """Finds the layer numbers of the main stack in names and patterns."""

    def __init__(self, rules: Rules) -> None:
        words = "|".join(sorted(map(re.escape, rules.layer_words)))
        self._aside = rules.vision | rules.mtp
        self._name = re.compile(rf"((?:\w+\.)*?(?:{words}))\.([0-9]+)(\..*)?")
        self._numbered = re.compile(rf"(?:^|[^A-Za-z])(?:{words})[^A-Za-z]*[0-9]")

    def layer(self, name: str) -> int | None:
        """The layer that a plain name speaks of, or None."""
        found = None if _PATTERN.search(name) else self._name.fullmatch(name)
        return int(found[2]) if found and not self._is_aside(found[1]) else None

    def renamed(self, name: str, layer: int) -> str:
        """The name with another layer number."""
        return self._name.sub(lambda found: f"{found[1]}.{layer}{found[3] or ''}", name, count=1)

    def is_numbered_pattern(self, text: str) -> bool:
        """Whether a text is a pattern that means layers by their numbers."""
        # A class of all digits means any layer, as \d does, whose letter keeps it from being found.
        plain = text.replace("[0-9]", r"\d")
        return bool(_PATTERN.search(text) and self._numbered.search(plain)) and not self._is_aside(plain)

    def _is_aside(self, text: str) -> bool:
        words = re.split(r"[^A-Za-z0-9_]+", text)
        return not self._aside.isdisjoint(words) or any(word.startswith(_BESIDE_TEXT) for word in words)


class _Renaming:
    """One table of all models, folded into one."""

    def __init__(self, donor: Said, origins: Sequence[Origin], names: _LayerNames) -> None:
        self._donor = donor
        self._origins = origins
        self._names = names
        self._models = list({each.said.name: each.said for each in origins}.values())
        self._differing: dict[str, list[str]] = {}
        self._patterns: dict[str, None] = {}

    def fold(self, path: Path) -> Any:
        """The value under ``path`` for the new order; None where no model has it."""
        values = [_at(said, path) for said in (self._donor, *self._models)]
        if any(isinstance(value, Mapping) for value in values):
            return self._folded(path)
        if any(_is_names(value) for value in values):
            return list(self._folded(path))
        for said, value in zip(self._models, values[1:], strict=True):
            if value != values[0]:
                self._differ(said, path)
        return copy.deepcopy(values[0])

    def sentences(self, table: str) -> Iterator[str]:
        """What was found that one table cannot say."""
        for name, fields in self._differing.items():
            yield (
                f"{table} says other things in {name} than in the donor ({', '.join(fields)}), "
                "and one config has to hold for all layers."
            )
        for pattern in self._patterns:
            yield f"{table} has the pattern '{pattern}', whose layer numbers cannot follow the new order."

    def _folded(self, path: Path) -> dict[str, Any]:
        """The members of a table, or the names of a list as its keys."""
        renamed: dict[str, Any] = {}
        for new, origin in enumerate(self._origins):
            renamed |= self._moved(origin.said, path, {origin.layer: new})
        if self._origins and self._origins[-1].said.count is not None:
            # Multi-token-prediction layers stay behind those of the model that ends the stack.
            last = self._origins[-1].said
            count, total = last.count or 0, len(self._origins)
            renamed |= self._moved(last, path, {count + n: total + n for n in range(last.mtp)})
        kept = self._kept(path)
        return {**renamed, **{key: self.fold((*path, key)) for key in kept}}

    def _kept(self, path: Path) -> tuple[str, ...]:
        """Members that name no layer. Every model must have the same ones."""
        kept: dict[str, list[str]] = {}
        models = (self._donor, *self._models)
        is_list = not any(isinstance(_at(said, path), Mapping) for said in models)
        for said in models:
            members = _members(_at(said, path))
            self._patterns |= dict.fromkeys(key for key in members if self._names.is_numbered_pattern(key))
            kept[said.name] = [key for key in members if self._names.layer(key) is None]
            if is_list and set(kept[said.name]) != set(kept[self._donor.name]):
                self._differ(said, path)
        return tuple(dict.fromkeys(key for keys in kept.values() for key in keys))

    def _moved(self, said: Said, path: Path, numbers: Mapping[int, int]) -> dict[str, Any]:
        return {
            self._names.renamed(key, numbers[layer]): copy.deepcopy(value)
            for key, value in _members(_at(said, path)).items()
            if (layer := self._names.layer(key)) is not None and layer in numbers
        }

    def _differ(self, said: Said, path: Path) -> None:
        fields = self._differing.setdefault(said.name, [])
        if path[-1] not in fields:
            fields.append(path[-1])


def _at(said: Said, path: Path) -> Any:
    value: Any = said.config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _members(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return dict.fromkeys(value) if _is_names(value) else {}
