"""Fields of documents: maps with known keys, values of each type, and faults by path.

Readers and validators raise ``FaultError``, which pydantic propagates; every level adds its step to the
paths."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)

from raymerge.documents.grammar import NUMBER, SWITCH, TEXT, WHOLE_NUMBER, Grammar, accepts
from raymerge.errors import UserError

FieldPath: TypeAlias = tuple[str | int, ...]
"""Steps to one value: ``("models", 0, "parameters", "weight")``."""

T = TypeVar("T")

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Fault:
    path: FieldPath
    what: str
    remedy: str
    meant: str | None = None
    """The likely meaning: of the last key of the path if ``is_key``, else of the value there."""
    is_key: bool = False


class FaultError(ValueError):
    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__(" ".join(f"{fault.what} {fault.remedy}" for fault in self.faults))


def refusal(what: str, remedy: str, meant: str | None = None) -> FaultError:
    return FaultError(Fault((), what, remedy, meant))


def unexpected(value: object, expected: str, remedy: str) -> FaultError:
    return refusal(f"{show(value)} is {kind(value)}; expected {expected}.", remedy)


def attempt(read: Callable[[object], T], value: object, path: FieldPath, faults: list[Fault]) -> T | None:
    """``read(value)``, or None after adding its faults to ``faults`` below ``path``."""
    try:
        return read(value)
    except FaultError as error:
        faults += (replace(fault, path=path + fault.path) for fault in error.faults)
        return None


def read_each(read: Callable[[object], T], values: Sequence[object]) -> tuple[T, ...]:
    faults: list[Fault] = []
    items = tuple(attempt(read, value, (index,), faults) for index, value in enumerate(values))
    if faults:
        raise FaultError(faults)
    return tuple(item for item in items if item is not None)


def read_list(read: Callable[[object], T], values: Sequence[object], remedy: str) -> tuple[T, ...]:
    if not values:
        raise refusal("the list is empty.", remedy)
    return read_each(read, values)


def faults_of(error: ValidationError) -> list[Fault]:
    return [fault for detail in error.errors(include_url=False) for fault in _of_detail(detail)]


def show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value) if isinstance(value, (str, int, float, list, tuple, dict)) else f"'{value}'"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def kind(value: object) -> str:
    if value is None:
        return "empty"
    words = (word for word, types in _KINDS.items() if isinstance(value, types))
    return next(words, f"a {type(value).__name__}")


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "a yes-or-no value": bool,
    "a number": (int, float),
    "a text": str,
    "a map": Mapping,
    "a list": (list, tuple),
}


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
            error = unexpected(value, "a list", "Write it as [a, b].")
        case "dict_type" | "mapping_type":
            error = unexpected(value, "a map", "Write it as {key: value}.")
        case "string_type":
            error = unexpected(value, "a text", "Put it in quotes.")
        case _:
            error = refusal(f"{show(value)} is not accepted here.", "See the documentation.")
    return error.faults[0]


@dataclass(frozen=True, slots=True)
class DocumentKind:
    noun: str
    opening: str
    """Its usual first key, such as ``merge_method: ...``."""
    error: type[UserError]
    about_secrets: str


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice most like ``word``, ignoring case and ``-`` versus ``_``; None if none is close."""
    by_folded = {_fold(choice): choice for choice in choices}
    matches = difflib.get_close_matches(_fold(word), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    match = closest(word, choices)
    return f"Did you mean '{match}'?" if match is not None else ""


def unknown_key(
    key: object, known: Iterable[str], advice: Mapping[str, str] | None = None, hint: str = ""
) -> Fault:
    choices, word, advice = tuple(known), str(key), advice or {}
    match, what = closest(word, (*choices, *advice)), f"unknown key '{word}'."
    if match is None:
        return Fault((word,), what, f"{hint}Keys known here: {', '.join(choices)}.", is_key=True)
    guess = "" if match == word else f"Did you mean '{match}'?"
    remedy = f"{guess} {advice.get(match, '')}".strip()
    return Fault((word,), what, remedy, match if match in choices else None, is_key=True)


def attempt_key(
    read: Callable[[object], T], value: Mapping[Any, object], key: str, faults: list[Fault]
) -> T | None:
    part = value.get(key)
    return None if part is None else attempt(read, part, (key,), faults)


def _fold(word: str) -> str:
    return word.lower().strip("-").replace("-", "_")


class MapEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    shape: ClassVar[str] = "a map of keys to values"
    advice: ClassVar[Mapping[str, str]] = {}
    """Unknown keys that users write, and what to do about each."""
    hint: ClassVar[str] = ""
    """Shown for an unknown key that is like none of the known ones."""
    grammar: ClassVar[Grammar] = {}
    """What ``rules`` refuses, as far as JSON Schema can say it."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Faults that involve several keys. ``data`` is as the user wrote it, unchecked."""
        del data
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _collect(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            what = f"{show(data)} is {kind(data)} where a map belongs."
            raise refusal(what, f"Write {cls.shape}.")
        faults = [cls._unknown(str(key)) for key in data if key not in cls.model_fields]
        faults += cls.rules(data)
        given = {key: data[key] for key in data if key in cls.model_fields and data[key] is not None}
        try:
            entry = handler(given)
        except ValidationError as error:
            # What lies between keys says more of a place than what reads the value there.
            paths = {fault.path for fault in faults}
            rest = (fault for fault in faults_of(error) if fault.path not in paths)
            raise FaultError([*faults, *rest]) from None
        if faults:
            raise FaultError(faults)
        return entry

    @classmethod
    def _unknown(cls, key: str) -> Fault:
        return unknown_key(key, cls.model_fields, cls.advice, cls.hint)


def by(reader: Callable[[object], Any]) -> PlainValidator:
    """Read a field by ``reader`` alone, without pydantic's coercions."""
    return PlainValidator(reader)


@accepts(TEXT)
def read_text(value: object) -> str:
    """A text, unchanged; numbers and booleans are refused, since YAML may have changed their spelling."""
    if not isinstance(value, str):
        raise unexpected(value, "a text", "Put it in quotes.")
    if "\0" in value:
        raise refusal(f"{show(value)} holds the character U+0000.", "Remove it.")
    return value


_SWITCHES = ("true", "false", "yes", "no", "on", "off")


@accepts(NUMBER)
def read_number(value: object) -> float:
    """A finite float; booleans are 1.0 and 0.0, and numeric texts count (YAML's ``1e-5`` is one)."""
    number = _as_float(value)
    if number is None:
        is_switch = isinstance(value, str) and value.lower() in _SWITCHES
        remedy = "Write it without quotes." if is_switch else "Write a number, like 0.5."
        raise unexpected(value, "a number", remedy)
    if not math.isfinite(number):
        raise refusal(f"{show(value)} is not a finite number.", "Write a finite one.")
    return number


_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}
"""By the names that JSON Schema has for limits."""


def number_within(limits: Mapping[str, float], what: str, remedy: str) -> Callable[[object], float]:
    """A reader of numbers within ``limits``, such as ``{"exclusiveMinimum": 0}``; ``what`` is the end of a
    sentence about a value that is not."""

    def read_limited(value: object) -> float:
        number = read_number(value)
        if not all(_HOLDS[name](number, limit) for name, limit in limits.items()):
            raise refusal(f"{show(value)} {what}", remedy)
        return number

    return accepts({**NUMBER, **limits})(read_limited)


read_positive = number_within(
    {"exclusiveMinimum": 0}, "is not above 0.", "Write a positive number, like 0.5."
)
read_fraction = number_within(
    {"minimum": 0, "maximum": 1}, "is not a fraction.", "Write a number from 0 to 1."
)


@accepts(WHOLE_NUMBER)
def read_integer(value: object) -> int:
    """``4.0`` and ``"4"`` are 4; ``true`` is refused."""
    number = None if isinstance(value, bool) else value if isinstance(value, int) else _as_float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int):
        return number
    raise refusal(f"{show(value)} is not a whole number.", "Write it without a fraction.")


@accepts(SWITCH)
def read_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise unexpected(value, "true or false", "Write true or false.")


def choice_of(*choices: str) -> Callable[[object], str]:
    def read_choice(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        remedy = f"{did_you_mean(str(value), choices)} Write one of: {', '.join(choices)}.".lstrip()
        meant = closest(value, choices) if isinstance(value, str) else None
        raise refusal(f"{show(value)} is not known here.", remedy, meant)

    return accepts({"enum": [*choices]})(read_choice)


def between(low: int, high: int | None = None) -> Callable[[object], int]:
    limits = f"at least {low}" if high is None else f"from {low} to {high}"

    def read_limited(value: object) -> int:
        number = read_integer(value)
        if number < low or (high is not None and number > high):
            raise refusal(f"{number} is out of range.", f"Write a whole number {limits}.")
        return number

    above = {} if high is None else {"maximum": high}
    return accepts({**WHOLE_NUMBER, "minimum": low, **above})(read_limited)


def _as_float(value: object) -> float | None:
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf
