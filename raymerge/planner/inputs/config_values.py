"""Values of a config that cannot be: sizes and counts that are no whole numbers, or too small."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raymerge.architectures import Rules
from raymerge.architectures.sections import text_path, text_section
from raymerge.errors import Problem

_NEEDED = frozenset({"hidden_size", "num_hidden_layers"})
# All others may be null, which stands for a default or for nothing of the kind.
_COUNTS = ("vocab_size", "num_attention_heads", "num_key_value_heads")
_MAX_SHOWN = 60


def value_problems(config: Mapping[str, Any], rules: Rules, where: str) -> Iterator[Problem]:
    """A problem for each size or count of a config, at the top or in its text section, that cannot be.

    Args:
        config: the config.
        rules: those of its family.
        where: its place, for messages.
    """
    widths = rules.sizes["hidden"]
    experts = (*rules.sizes["num_experts"], *rules.sizes["chosen_experts"])
    counts = (*rules.depth.counts, *experts, *_COUNTS)
    path = text_path(config)
    for prefix, section in {(): config, path: text_section(config)}.items():
        for field in dict.fromkeys((*widths, *counts)):
            least = 1 if field in widths else 0
            is_needed = field in _NEEDED and prefix == path
            if not _can_be(section, field.split("."), least, is_needed=is_needed):
                key = ".".join((*prefix, field))
                yield Problem(
                    where,
                    f"{key} is {_shown(section, field)}; expected a whole number of at least {least}.",
                    "Correct it, or take config.json from the place the weights come from.",
                )


def _can_be(section: Mapping[str, Any], path: list[str], least: int, *, is_needed: bool) -> bool:
    for key in path[:-1]:
        inside = section.get(key)
        section = inside if isinstance(inside, Mapping) else {}
    if path[-1] not in section:
        return True
    value = section[path[-1]]
    if value is None:
        return not is_needed
    # Some families have a list of one number for each layer.
    numbers = value if isinstance(value, list) else [value]
    return all(each is None or (type(each) is int and each >= least) for each in numbers)


def _shown(section: Mapping[str, Any], field: str) -> str:
    value: Any = section
    for key in field.split("."):
        value = value[key]
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
