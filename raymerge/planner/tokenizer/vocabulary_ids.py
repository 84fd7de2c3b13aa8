"""Numbers of special tokens in configs: the same token, under the output's id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raymerge.architectures.sections import text_path
from raymerge.checkpoints.json_files import load_json
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.config.fields import VOCABULARY_KEY, row_counts

# Fields of configs that hold the id of a token, or a list of such.
_ID_FIELD = re.compile(r"(\w+)_token_(?:id|ids|index)|(?:begin_)?suppress_tokens")


@dataclass(frozen=True, slots=True)
class Renumbering:
    """How an id of the config's model becomes one of the output."""

    texts: Mapping[int, str]
    """Tokens of the config's model by id."""
    ids: Mapping[str, int]
    """The output's ids by token."""
    num_rows: int
    """Rows of the output's embedding: what is beyond is no id."""
    roles: Mapping[str, str]
    """Special tokens of the output's tokenizer by role; they stand in for tokens that are gone."""
    other_roles: Mapping[str, str] = field(default_factory=dict)
    """Those among them that the tokenizer beside the config gives another token: the config follows."""

    def config_changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``config`` that change, by dotted path."""
        changes: dict[str, Any] = {}
        text = text_path(config)
        sections = [text[:depth] for depth in range(len(text) + 1)]
        for path in sections:
            section = _at(config, path)
            changes |= {_dotted(path, key): value for key, value in self._changed(section)}
            changes |= {
                _dotted(path, key): value for key, value in row_counts(section, self.num_rows).items()
            }
            if path == text and VOCABULARY_KEY not in section:
                changes[_dotted(path, VOCABULARY_KEY)] = self.num_rows
        return changes

    def generation_config(self, raw: bytes, place: str) -> bytes | None:
        """The text of ``generation_config.json`` with the output's ids; None if it stays as it is.

        Raises:
            CheckpointError: it is not a JSON object.
        """
        try:
            config = load_json(raw)
        except (ValueError, RecursionError) as error:
            config = str(error)[:80]
        if not isinstance(config, dict):
            remedy = "Mend the file, or take it away."
            raise CheckpointError(Problem(place, f"is not a JSON object ({str(config)[:80]}).", remedy))
        changes = dict(self._changed(config))
        return json_bytes({**config, **changes}) if changes else None

    def _changed(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            match = _ID_FIELD.fullmatch(key)
            if match is None or value is None:
                continue
            new = self._renumber(value, f"{match[1]}_token")
            if new != value:
                yield key, new

    def _renumber(self, value: Any, role: str) -> Any:
        chosen = self.ids.get(self.other_roles.get(role.removeprefix("forced_"), ""))
        if isinstance(value, list):
            kept = [new for each in value if (new := self._renumber_one(each)) is not None]
            # Further tokens that end a text go on to do so.
            return kept if chosen is None else [chosen, *(each for each in kept if each != chosen)]
        new = chosen if chosen is not None else self._renumber_one(value)
        return self.ids.get(self.roles.get(role, "")) if new is None else new

    def _renumber_one(self, value: Any) -> Any:
        """The output's id of a token; None for one that the output lacks. What is no id stays."""
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value in self.texts:
            return self.ids.get(self.texts[value])
        return value if value < self.num_rows else None


def token_ids(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ids of tokens in a config, at the top and in the text section, by the name of their field."""
    text = text_path(config)
    found: dict[str, list[int]] = {}
    for depth in range(len(text) + 1):
        for key, value in _at(config, text[:depth]).items():
            listed = value if isinstance(value, list) else [value]
            if _ID_FIELD.fullmatch(key):
                found[_dotted(text[:depth], key)] = [each for each in listed if type(each) is int]
    return found


def json_bytes(value: object) -> bytes:
    """A JSON file as the tokenizers' and transformers' own writers lay it out."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for key in path:
        config = config[key]
    return config


def _dotted(path: tuple[str, ...], key: str) -> str:
    return ".".join((*path, key))
