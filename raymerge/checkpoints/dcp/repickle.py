"""Writes pickles of what ``unpickle`` has read, without importing what they name."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from raymerge.checkpoints.dcp.unpickle import Global, Made

_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def repickled(value: Any, *, most: int) -> bytes:
    """A pickle of a value that ``unpickle`` gave. Values that it shared are written for each place: raises
    ValueError if that makes more than ``most`` parts, or they are nested too deeply."""
    parts: list[bytes] = []
    try:
        for part in _parts(value, {}):
            parts.append(part)
            if len(parts) > most:
                raise ValueError("its values are shared in more places than a checkpoint needs")
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    return b"".join((b"\x80\x04", *parts, b"."))


def _parts(value: Any, known: dict[Global, int]) -> Iterator[bytes]:
    match value:
        case None | True | False:
            yield _CONSTANTS[value]
        case int():
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            yield b"\x8a" + bytes([len(digits)]) + digits
        case float():
            yield struct.pack(">cd", b"G", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            yield struct.pack("<cI", b"X", len(text)) + text
        case Global() if value in known:
            yield struct.pack("<cI", b"j", known[value])
        case Global():
            known[value] = len(known)
            yield f"c{value.module}\n{value.name}\n".encode() + b"\x94"
        case Made():
            yield from _parts(value.by, known)
            yield from _parts(value.arguments, known)
            # What has a state is made by its class without arguments; all else is called.
            yield b"R" if value.arguments and value.state is None else b"\x81"
            if value.state is not None:
                yield from _parts(value.state, known)
                yield b"b"
        case tuple():
            yield from _marked(b"", value, b"t", known)
        case list():
            yield from _marked(b"]", value, b"e", known)
        case dict():
            yield from _marked(b"}", (each for pair in value.items() for each in pair), b"u", known)
        case _:
            raise ValueError(f"it holds a {type(value).__name__}")


def _marked(start: bytes, values: Iterable[Any], end: bytes, known: dict[Global, int]) -> Iterator[bytes]:
    yield start + b"("
    for each in values:
        yield from _parts(each, known)
    yield end
