"""The output's ``config.json``: the donor's, with the fields that the merge changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from raymerge.architectures.sections import text_path
from raymerge.architectures.ties import TIE_KEY
from raymerge.dtypes import DType, config_name

VOCABULARY_KEY = "vocab_size"
"""The field that counts the rows of the embedding."""

_LAYERS_KEY = "vocab_size_per_layer_input"
# The rows of embeddings that each layer has of its own, as many as the embedding's or fewer.

_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    donor: Mapping[str, Any], *, dtype: DType | None = None, tie: bool | None = None
) -> dict[str, Any]:
    """A copy of the donor's config with the output's dtype and tie; None leaves a field as it is.

    A field is written everywhere the donor has it, at the top and in the text section; one that the donor
    lacks is added at the top. Equal to ``donor`` when nothing changes: its file can then be copied as it is.
    """
    result = copy.deepcopy(dict(donor))
    if dtype is not None:
        _set(result, _DTYPE_KEYS, config_name(dtype))
    if tie is not None:
        _set(result, (TIE_KEY,), tie)
    return result


def with_fields(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with fields changed or added, by dotted path; sections on the way must be there."""
    result = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section[name]
        section[key] = value
    return result


def vocabulary_size(config: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    """The fields that count the rows of the embedding, by dotted path, with another number."""
    text = text_path(config)
    found: dict[str, int] = {}
    section = config
    for depth in range(len(text) + 1):
        found |= {".".join((*text[:depth], key)): n for key, n in row_counts(section, num_rows).items()}
        section = section[text[depth]] if depth < len(text) else section
    return found


def row_counts(section: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    """The fields of one section that count the rows of the embedding, with another number."""
    if section.get(VOCABULARY_KEY, num_rows) == num_rows:
        return {}
    own = section[VOCABULARY_KEY]
    return {key: num_rows for key in (VOCABULARY_KEY, _LAYERS_KEY) if section.get(key, num_rows) == own}


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """A config as the text of ``config.json``: fields in their given order, indented by two."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _set(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    places = [(section, key) for section in _sections(config) for key in keys if key in section]
    for section, key in places or [(config, keys[0])]:
        section[key] = value


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for key in text_path(config):
        config = config[key]
        yield config
