"""Numbers of special tokens in configs: the same token, under the output's id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.sections import text_path
from raymerge.errors import CheckpointError, Problem

VOCAB_SIZE = "vocab_size"
"""Field for the number of rows."""

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

    def config_changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``config`` that change, by dotted path."""
        changes: dict[str, Any] = {}
        text = text_path(config)
        sections = [text[:depth] for depth in range(len(text) + 1)]
        for path in sections:
            section = _at(config, path)
            changes |= {_dotted(path, key): value for key, value in self._changed(section)}
            is_stated = VOCAB_SIZE in section or path == text
            if is_stated and section.get(VOCAB_SIZE) != self.num_rows:
                changes[_dotted(path, VOCAB_SIZE)] = self.num_rows
        return changes

    def generation_config(self, raw: bytes, place: str) -> bytes | None:
        """The text of ``generation_config.json`` with the output's ids; None if it stays as it is.

        Raises:
            CheckpointError: it is not a JSON object.
        """
        try:
            config = json.loads(raw.decode("utf-8"))
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
        if isinstance(value, list):
            new = [self._renumber_one(each) for each in value]
            return [each for each in new if each is not None]
        new = self._renumber_one(value)
        return self.ids.get(self.roles.get(role, "")) if new is None else new

    def _renumber_one(self, value: Any) -> Any:
        """The output's id of a token; None for one that the output lacks. What is no id stays."""
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value in self.texts:
            return self.ids.get(self.texts[value])
        return value if value < self.num_rows else None


def json_bytes(value: object) -> bytes:
    """A JSON file as the tokenizers' and transformers' own writers lay it out."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for key in path:
        config = config[key]
    return config


def _dotted(path: tuple[str, ...], key: str) -> str:
    return ".".join((*path, key))
