"""What is wrong inside a document, by path: a problem before its place in the text is known.

Validators raise ``FaultError``, which pydantic carries upwards; every level adds its own step to the paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from raymerge.errors import UserError

FieldPath: TypeAlias = tuple[str | int, ...]
"""Steps from the top of a document to one value: ``("models", 0, "parameters", "weight")``."""

T = TypeVar("T")

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a value."""

    path: FieldPath
    """Where, relative to the value that was being read."""
    what: str
    """The fact, a sentence with the value in it."""
    remedy: str
    """What to write instead."""
    meant: str | None = None
    """What was most likely meant: for the last key of the path if ``is_key``, else for the value there."""
    is_key: bool = False
    """Whether the last step of the path is a key that is not known."""


class FaultError(ValueError):
    """All that is wrong with one value."""

    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__(" ".join(f"{fault.what} {fault.remedy}" for fault in self.faults))


def attempt(read: Callable[[object], T], value: object, path: FieldPath, faults: list[Fault]) -> T | None:
    """What ``read`` makes of ``value``, or None after its faults were added to ``faults`` below ``path``."""
    try:
        return read(value)
    except FaultError as error:
        faults += (replace(fault, path=path + fault.path) for fault in error.faults)
        return None


def read_each(read: Callable[[object], T], values: Sequence[object]) -> tuple[T, ...]:
    """Every item read by ``read``; the faults of all items are raised together."""
    faults: list[Fault] = []
    items = tuple(attempt(read, value, (index,), faults) for index, value in enumerate(values))
    if faults:
        raise FaultError(faults)
    return tuple(item for item in items if item is not None)


def faults_of(error: ValidationError) -> list[Fault]:
    """The faults that a pydantic error stands for, in our words."""
    return [fault for detail in error.errors(include_url=False) for fault in _of_detail(detail)]


def show(value: object) -> str:
    """The value as a message shows it: short, and in YAML's words for null, true and false."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value) if isinstance(value, (str, int, float, list, tuple, dict)) else f"'{value}'"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def kind(value: object) -> str:
    """What sort of thing a value is, for messages."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "a yes-or-no value"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "a map"
    return "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def _of_detail(detail: Mapping[str, Any]) -> Iterator[Fault]:
    # A fault of a map's key has this marker behind the key; the key itself is the place.
    at: FieldPath = detail["loc"]
    if detail["type"] == "string_type" and at[-1:] == ("[key]",):
        at = at[:-1]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, FaultError):
        inner: Iterable[Fault] = cause.faults
    elif isinstance(cause, ValidationError):
        inner = faults_of(cause)
    else:
        inner = (_in_our_words(detail),)
    return (replace(fault, path=at + fault.path) for fault in inner)


def _in_our_words(detail: Mapping[str, Any]) -> Fault:
    value = detail["input"]
    match detail["type"]:
        case "missing":
            return Fault((), f"the key '{detail['loc'][-1]}' is missing or empty.", "Add it.")
        case "tuple_type":
            return Fault((), f"{show(value)} is {kind(value)}; expected a list.", "Write it as [a, b].")
        case "dict_type" | "mapping_type":
            return Fault((), f"{show(value)} is {kind(value)}; expected a map.", "Write it as {key: value}.")
        case "string_type":
            return Fault((), f"{show(value)} is {kind(value)}; expected a text.", "Put it in quotes.")
        case _:
            return Fault((), f"{show(value)} is not accepted here.", "See the documentation.")


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """A sort of text."""

    noun: str
    """What messages call it, like ``recipe``."""
    opening: str
    """How its first key is written, like ``merge_method: ...``."""
    error: type[UserError]
    """What is raised for one that is wrong."""
    about_secrets: str
    """Why none may stand in it and what to do with one, a sentence or more."""
