"""JSON as weights files use it, where a name that stands twice is an attack or a defect, not a choice."""

from __future__ import annotations

import json
from typing import Any


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
