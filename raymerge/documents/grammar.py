"""What readers of values accept, declared beside them as JSON Schema (draft 2020-12).

A declaration refuses nothing that its reader accepts. What only code can tell (two numbers that do not go
together, a file that is not there) it leaves to the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Grammar: TypeAlias = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "grammar"
_EMPTY: list[object] = [None, False, 0, "", [], {}]

TEXT: Grammar = {"type": "string"}
SWITCH: Grammar = {"type": "boolean"}
WHOLE_NUMBER: Grammar = {"type": ["integer", "string"], "pattern": r"^\s*[-+]?[0-9_]+(\.0*)?\s*$"}
NUMBER: Grammar = {
    "type": ["number", "boolean", "string"],
    "pattern": r"^\s*[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*$",
}


def accepts(grammar: Grammar) -> Callable[[F], F]:
    """Declare what a reader accepts. A grammar with a ``title`` is written once in a schema; an empty one
    stands for what is annotated with the reader."""

    def declare(reader: F) -> F:
        vars(reader)[_ATTRIBUTE] = grammar
        return reader

    return declare


def declared(reader: Callable[..., Any]) -> Grammar:
    """Raises LookupError: a reader that declares nothing."""
    try:
        return dict(vars(reader)[_ATTRIBUTE])
    except (KeyError, TypeError):
        raise LookupError(f"{reader} does not declare what it accepts: decorate it with 'accepts'") from None


def any_of(*grammars: Grammar) -> Grammar:
    parts = [each["anyOf"] if [*each] == ["anyOf"] else [each] for each in grammars]
    return {"anyOf": [part for each in parts for part in each]}


def one_or_list(item: Grammar) -> Grammar:
    return any_of(item, list_of(item))


def list_of(item: Grammar) -> Grammar:
    return {"type": "array", "items": item, "minItems": 1}


def map_of(properties: Grammar, *required: str) -> Grammar:
    """A map with no other keys; those that are not required may be empty."""
    each = {key: value if key in required else or_empty(value) for key, value in properties.items()}
    return {"type": "object", "properties": each, "required": [*required], "additionalProperties": False}


def or_empty(grammar: Grammar) -> Grammar:
    if "type" not in grammar or "enum" in grammar:
        return any_of(grammar, {"type": "null"})
    kinds = grammar["type"]
    return {**grammar, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}


def given(key: str) -> Grammar:
    """Maps with a value at ``key``."""
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


def filled(key: str) -> Grammar:
    """Maps with a value at ``key`` that is not empty."""
    return {"required": [key], "properties": {key: {"not": {"enum": _EMPTY}}}}


def never_both(key: str, other: str) -> Grammar:
    return {"not": {"allOf": [given(key), given(other)]}}


def exactly_one(*keys: str) -> Grammar:
    return {"oneOf": [filled(key) for key in keys]}
