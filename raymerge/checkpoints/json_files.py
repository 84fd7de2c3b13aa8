"""JSON files that come with a model: read within bounds, and headers strictly."""

from __future__ import annotations

import json
from typing import Any

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
