"""The text decoder's section of a config: the top, or a nested one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that lead to the text decoder's section; () for the top."""
    for key in _SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping) and section:
            return (key, *text_path(section))
    return ()


def sections(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The top and each section towards the text decoder, with their keys."""
    path = text_path(config)
    yield (), config
    for depth, key in enumerate(path, start=1):
        config = config[key]
        yield path[:depth], config


def text_section(config: Mapping[str, Any]) -> Any:
    return [section for _, section in sections(config)][-1]


def first_int(section: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """The first integer among some fields (dotted paths)."""
    for key in keys:
        value: Any = section
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def config_int(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """As ``first_int``, in the text section and then at the top."""
    wanted = tuple(keys)
    found = first_int(text_section(config), wanted)
    return found if found is not None else first_int(config, wanted)


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    stated = config.get("architectures")
    return tuple(map(str, stated)) if isinstance(stated, list) else ()
