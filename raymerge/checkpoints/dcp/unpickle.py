"""Reads pickles without building anything: what a class or function would make becomes a ``Made``.

No name is imported and nothing is called, so no code can run.

A few bytes can describe nested shared values that would take ages to be hashed, compared or put into a
message, or overflow the stack. So only texts, numbers and what is ``Made`` are taken as keys of maps, and a
value may stand in a message only once it is known to be a text or a number."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MOST_DIGITS_NBYTES = 255
MOST_DIMENSIONS = 32
"""Of a tensor. Products over more sizes would take ages; no model has as many."""


@dataclass(frozen=True, slots=True)
class Global:
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class Made:
    """What calling a global would have made."""

    by: Global
    arguments: tuple[Any, ...]
    state: Any = None

    def fields(self) -> dict[str, Any]:
        """The attributes that it would have; {} where its state is no map."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(eq=False, repr=False, slots=True)
class Persistent:
    """What lies outside of the pickle, by its identifier."""

    identifier: Any


_KEYS = str | int | Made | None


def unpickle(data: bytes, allowed: Callable[[Global], bool]) -> Any:
    """The value that a pickle describes. Raises ValueError: it is damaged, of another kind, or names a global
    that is not ``allowed``."""
    try:
        return _Machine(data, allowed).run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


_MARK = object()


@dataclass(slots=True)
class _Machine:
    data: bytes
    allowed: Callable[[Global], bool]
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    globals: dict[tuple[str, str], Global] = field(default_factory=dict)

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            step = steps.get(code)
            if step is None:
                raise ValueError(
                    f"it has the instruction {chr(code)!r}, which no description of tensors needs"
                )
            step(self)

    def number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(value)

    def text(self, nbytes: int) -> str:
        begin = self.at
        if begin + nbytes > len(self.data):
            raise ValueError("it ends within a text")
        self.at += nbytes
        return str(self.data[begin : self.at], "utf-8", "surrogatepass")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = str(self.data[self.at : end], "utf-8")
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        stack, place = self.stack, len(self.stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("it takes more values than there are")
        values = stack[place + 1 :]
        del stack[place:]
        return values

    def name(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names a global by what is no text")
        known = self.globals.get((module, name))
        if known is None:
            known = self.globals[module, name] = Global(module, name)
            if not self.allowed(known):
                raise ValueError(f"to load it would run {known}")
        return known

    def make(self) -> None:
        arguments, by = self.stack.pop(), self.stack.pop()
        if not isinstance(by, Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no global")
        self.stack.append(Made(by, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made):
            raise ValueError("it gives a state to what has none")
        made.state = state

    def put(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if not isinstance(target, dict):
            # An OrderedDict, of hooks that no tensor here has.
            raise ValueError("it adds entries to what is no map")
        for key, value in zip(keys, items[1::2], strict=True):
            if not isinstance(key, _KEYS):
                raise ValueError(f"it has a {type(key).__name__} as a key")
            target[key] = value

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("it appends to what is no list")
        target += items

    def remember(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("it takes more values than there are")
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    def long(self, nbytes: int) -> None:
        if nbytes > _MOST_DIGITS_NBYTES:
            raise ValueError("it has a number of more digits than any size")
        self.push(int.from_bytes(self.data[self.at : self.at + nbytes], "little", signed=True))
        self.at += nbytes


_U8, _U16, _U32, _U64 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")
_FRAME_NBYTES = 8


def _skip(machine: _Machine, nbytes: int) -> None:
    machine.at += nbytes


def _float(machine: _Machine) -> None:
    (value,) = _F64.unpack_from(machine.data, machine.at)
    machine.at += _F64.size
    machine.push(value)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.put([key, value])


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push(machine.name(module, name))


_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        b"\x80": lambda m: _skip(m, 1),
        b"\x95": lambda m: _skip(m, _FRAME_NBYTES),
        b"(": lambda m: m.push(_MARK),
        b"0": lambda m: m.stack.pop(),
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"K": lambda m: m.push(m.number(_U8)),
        b"M": lambda m: m.push(m.number(_U16)),
        b"J": lambda m: m.push(m.number(_I32)),
        b"\x8a": lambda m: m.long(m.number(_U8)),
        b"G": _float,
        b"\x8c": lambda m: m.push(m.text(m.number(_U8))),
        b"X": lambda m: m.push(m.text(m.number(_U32))),
        b"\x8d": lambda m: m.push(m.text(m.number(_U64))),
        b")": lambda m: m.push(()),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"t": lambda m: m.push(tuple(m.since_mark())),
        b"}": lambda m: m.push({}),
        b"]": lambda m: m.push([]),
        b"a": lambda m: m.add([m.stack.pop()]),
        b"e": lambda m: m.add(m.since_mark()),
        b"s": _set_item,
        b"u": lambda m: m.put(m.since_mark()),
        b"\x94": lambda m: m.remember(len(m.memo)),
        b"q": lambda m: m.remember(m.number(_U8)),
        b"r": lambda m: m.remember(m.number(_U32)),
        b"h": lambda m: m.push(m.memo[m.number(_U8)]),
        b"j": lambda m: m.push(m.memo[m.number(_U32)]),
        b"c": lambda m: m.push(m.name(m.line(), m.line())),
        b"\x93": _stack_global,
        b"R": lambda m: m.make(),
        b"\x81": lambda m: m.make(),
        b"b": lambda m: m.build(),
        b"Q": lambda m: m.push(Persistent(m.stack.pop())),
    }.items()
}
