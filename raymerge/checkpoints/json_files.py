"""What comes with a model, read within bounds: JSON files, headers strictly, and regular expressions.

A pattern of thirty characters can take longer than the universe is old on a path of thirty. No rule tells
the honest ones from the others, so the matching itself is bounded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import regex

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import ReadStore

MAX_NBYTES = 128 * 2**20
"""Bytes of a file beside the weights that is read whole; the largest tokenizers have a quarter of it."""
MAX_DEPTH = 100
"""Levels of lists and maps in one another; no config has ten."""


def load_json(raw: bytes) -> Any:
    """The value that ``raw`` holds, with ``Infinity`` and the last of equal keys, as other readers take it.

    Raises:
        ValueError: it is not UTF-8, or not JSON.
        RecursionError: it is nested deeper than ``MAX_DEPTH``. Whoever walks through a value, copies it or
            shows it counts on the stack to suffice.
    """
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


def read_bounded(store: ReadStore, key: str, nbytes: int, *, most: int = MAX_NBYTES) -> bytes:
    """The whole of a file that is ``nbytes`` long.

    Raises:
        CheckpointError: it is longer than any honest file of its kind, or cannot be read.
    """
    if nbytes > most:
        what = f"has {nbytes} bytes; a file of this kind has at most {most}."
        remedy = "Take it from the place the weights come from."
        raise CheckpointError(Problem(store.location(key), what, remedy))
    return store.read(key, 0, nbytes)


def parse_strict_json(raw: bytes) -> Any:
    """The value that ``raw`` holds.

    Raises:
        ValueError: with a clause that completes "the file ..." when the bytes are not UTF-8, not JSON, nested
            too deep, or name a key twice in one object.
    """
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


class _RefusedError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RefusedError(f"names {key!r} twice")
        seen.add(key)
    return found


def _no_constant(name: str) -> float:
    raise _RefusedError(f"holds {name}, which is not JSON")


_MOST_SECONDS = 5.0
# A match takes microseconds; so long it takes only where it would not end.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ForeignPattern:
    """A pattern of somebody else's, as ``re`` understands it."""

    pattern: str
    _compiled: regex.Pattern[str] = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the beginning of ``path``.

        Raises:
            CheckpointError: that cannot be found out in reasonable time.
        """
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
    """A pattern that came with a checkpoint.

    Raises:
        ValueError: it is no regular expression; says why.
    """
    try:
        # What both take is meant in the one way that they share.
        re.compile(text)
        return ForeignPattern(text, regex.compile(text))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error
