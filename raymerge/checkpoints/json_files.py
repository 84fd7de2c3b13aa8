"""JSON files and regular expressions that come with a model, read as untrusted input within bounds.

A short regular expression can take exponential time and cannot be recognised, so matching has a time limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import regex

from raymerge.errors import CheckpointError, Problem, UserError
from raymerge.storage.store import ReadStore

_T = TypeVar("_T")

MAX_NBYTES = 128 * 2**20
"""Largest file beside the weights that is read whole, in bytes; four times the largest tokenizers."""
MAX_DEPTH = 100
"""Nesting depth; no config reaches ten."""


def attempt(
    problems: list[Problem], action: Callable[[], _T], catching: type[UserError] = CheckpointError
) -> _T | None:
    """What an action gives, or None after adding its problems."""
    try:
        return action()
    except catching as error:
        problems.extend(error.problems)
        return None


def load_json(raw: bytes) -> Any:
    """The value that ``raw`` holds, with ``Infinity`` and the last of equal keys, as other readers take it.
    Raises ValueError: not UTF-8, or not JSON; RecursionError: deeper than ``MAX_DEPTH``, which code that
    recurses through the value relies on."""
    value = json.loads(raw.decode("utf-8"))
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each if type(each) is list else ())
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return value
    raise RecursionError(f"nested deeper than {MAX_DEPTH} levels")


def json_bytes(value: object) -> bytes:
    """The text of a JSON file, as transformers lays it out."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def read_object(raw: bytes, where: str, remedy: str) -> dict[str, Any]:
    """A JSON object as ``load_json`` takes it; raises CheckpointError: it is none."""
    try:
        value = load_json(raw)
    except json.JSONDecodeError as error:
        at = f"{where}:{error.lineno}:{error.colno}"
        raise CheckpointError(Problem(at, f"is not JSON: {error.msg}.", remedy)) from error
    except (ValueError, RecursionError) as error:
        what = f"is not JSON text that can be read ({str(error)[:80]})."
        raise CheckpointError(Problem(where, what, remedy)) from error
    if not isinstance(value, dict):
        raise CheckpointError(Problem(where, "is not a JSON object.", remedy))
    return value


def read_bounded(store: ReadStore, key: str, nbytes: int, *, most: int = MAX_NBYTES) -> bytes:
    """Raises CheckpointError: longer than ``most``, or unreadable."""
    if nbytes > most:
        what = f"has {nbytes} bytes; a file of this kind has at most {most}."
        remedy = "Take it from the place the weights come from."
        raise CheckpointError(Problem(store.location(key), what, remedy))
    return store.read(key, 0, nbytes)


def parse_strict_json(raw: bytes) -> Any:
    """Raises ValueError with a clause that completes "the file ...", also where a key is there twice."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"is not JSON ({error.msg} at {where})") from error
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    except _RefusedError:
        raise
    except ValueError as error:  # a number with thousands of digits, which Python refuses to read
        raise ValueError(f"is not JSON that can be read ({str(error)[:80]})") from error


def strict_object(raw: bytes, where: str, subject: str, remedy: str) -> dict[str, Any]:
    """A JSON object as ``parse_strict_json`` takes it, ``subject`` in messages; raises CheckpointError."""
    try:
        value = parse_strict_json(raw)
    except ValueError as error:
        raise CheckpointError(Problem(where, f"{subject} {error}.", remedy)) from error
    if not isinstance(value, dict):
        raise CheckpointError(Problem(where, f"{subject} is not a JSON object.", remedy))
    return value


class _RefusedError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) == len(pairs):
        return entries
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RefusedError(f"names {key!r} twice")
        seen.add(key)
    return entries


def _no_constant(name: str) -> float:
    raise _RefusedError(f"holds {name}, which is not JSON")


_MOST_SECONDS = 5.0
# A match takes microseconds; so long it takes only where it would not end.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ForeignPattern:
    """An untrusted regular expression."""

    pattern: str
    _compiled: regex.Pattern[str] = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether the pattern matches at the start of ``path``. Raises CheckpointError: matching exceeds its
        time limit."""
        try:
            return self._compiled.match(path, timeout=_MOST_SECONDS) is not None
        except TimeoutError as error:
            shown = self.pattern if len(self.pattern) <= _SHOWN else f"{self.pattern[: _SHOWN - 3]}..."
            what = (
                f"this pattern of its config is still not matched after {_MOST_SECONDS:g} seconds: {shown}."
            )
            remedy = "No honest tool writes such a pattern: do not use this checkpoint unless you know why."
            raise CheckpointError(Problem(path, what, remedy)) from error


def foreign_pattern(text: str) -> ForeignPattern:
    """Raises ValueError: not a regular expression; the message says why."""
    try:
        # What both take is meant in the one way that they share.
        re.compile(text)
        return ForeignPattern(text, regex.compile(text))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error
