"""Fields of documents: maps with known keys, and values of each kind. Readers refuse with ``FaultError``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)

from raymerge.documents.faults import Fault, FaultError, faults_of, kind, show

_CUTOFF = 0.6


def closest(word: str, choices: Iterable[str], *, cutoff: float = _CUTOFF) -> str | None:
    """The choice most like ``word``, whatever its case and with ``-`` for ``_``; None if none is close.

    Args:
        word: what was written.
        choices: what is known.
        cutoff: how like it must be, from 0 to 1.
    """
    by_folded = {_fold(choice): choice for choice in choices}
    matches = difflib.get_close_matches(_fold(word), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"Did you mean 'density'?"``, or an empty text when no choice is close to ``word``."""
    match = closest(word, choices)
    return f"Did you mean '{match}'?" if match is not None else ""


def _fold(word: str) -> str:
    return word.lower().strip("-").replace("-", "_")


class MapEntry(BaseModel):
    """A map in a document. Frozen; a key that is not a field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    shape: ClassVar[str] = "a map of keys to values"
    """How such a map is written, for one who wrote something else."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Keys that are no fields but are met in the wild, and what to do about each."""
    hint: ClassVar[str] = ""
    """What is said of an unknown key that is like none of the known ones."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Faults that lie between keys. ``data`` is as the user wrote it: nothing in it is checked yet."""
        del data
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _collect(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            what = f"{show(data)} is {kind(data)} where a map belongs."
            raise FaultError(Fault((), what, f"Write {cls.shape}."))
        faults = [cls._unknown(str(key)) for key in data if key not in cls.model_fields]
        faults += cls.rules(data)
        given = {key: data[key] for key in data if key in cls.model_fields and data[key] is not None}
        try:
            entry = handler(given)
        except ValidationError as error:
            # What lies between keys says more of a place than what reads the value there.
            said = {fault.path for fault in faults}
            rest = (fault for fault in faults_of(error) if fault.path not in said)
            raise FaultError([*faults, *rest]) from None
        if faults:
            raise FaultError(faults)
        return entry

    @classmethod
    def _unknown(cls, key: str) -> Fault:
        known = tuple(cls.model_fields)
        match = closest(key, (*known, *cls.advice))
        what = f"unknown key '{key}'."
        if match is None:
            return Fault((key,), what, f"{cls.hint}Keys known here: {', '.join(known)}.", is_key=True)
        guess = "" if match == key else did_you_mean(key, (match,))
        meant = match if match in known else None
        return Fault((key,), what, f"{guess} {cls.advice.get(match, '')}".strip(), meant, is_key=True)


def by(reader: Callable[[object], Any]) -> PlainValidator:
    """Read a field by ``reader`` alone, without pydantic's own coercions."""
    return PlainValidator(reader)


def read_text(value: object) -> str:
    """A text as it stands; numbers and switches are refused, since YAML may have changed their spelling."""
    if not isinstance(value, str):
        raise FaultError(Fault((), f"{show(value)} is {kind(value)}; expected a text.", "Put it in quotes."))
    if "\0" in value:
        raise FaultError(Fault((), f"{show(value)} holds the character U+0000.", "Remove it."))
    return value


def read_number(value: object) -> float:
    """A finite float; true and false are 1.0 and 0.0, and digits in a text count (YAML's ``1e-5`` is one)."""
    number = _as_float(value)
    if number is None:
        raise FaultError(
            Fault((), f"{show(value)} is {kind(value)}; expected a number.", _number_remedy(value))
        )
    if not math.isfinite(number):
        raise FaultError(Fault((), f"{show(value)} is not a finite number.", "Write a finite one."))
    return number


def read_positive(value: object) -> float:
    """A finite number above 0."""
    number = read_number(value)
    if number <= 0:
        raise FaultError(Fault((), f"{show(value)} is not above 0.", "Write a positive number, like 0.5."))
    return number


def read_fraction(value: object) -> float:
    """A number from 0 to 1, both included."""
    number = read_number(value)
    if not 0 <= number <= 1:
        raise FaultError(Fault((), f"{show(value)} is not a fraction.", "Write a number from 0 to 1."))
    return number


def read_integer(value: object) -> int:
    """A whole number; ``4.0`` and ``"4"`` are read as 4, ``true`` is not."""
    number = None if isinstance(value, bool) else value if isinstance(value, int) else _as_float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int):
        return number
    raise FaultError(Fault((), f"{show(value)} is not a whole number.", "Write it without a fraction."))


def read_switch(value: object) -> bool:
    """``true`` or ``false``."""
    if isinstance(value, bool):
        return value
    raise FaultError(
        Fault((), f"{show(value)} is {kind(value)}; expected true or false.", "Write true or false.")
    )


def choice_of(*choices: str) -> Callable[[object], str]:
    """A reader that takes one of the given words."""

    def read_choice(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        remedy = f"{did_you_mean(str(value), choices)} Write one of: {', '.join(choices)}.".lstrip()
        meant = closest(value, choices) if isinstance(value, str) else None
        raise FaultError(Fault((), f"{show(value)} is not known here.", remedy, meant))

    return read_choice


def between(low: int, high: int | None = None) -> Callable[[object], int]:
    """A reader of whole numbers from ``low`` to ``high``, both included."""
    limits = f"at least {low}" if high is None else f"from {low} to {high}"

    def read_limited(value: object) -> int:
        number = read_integer(value)
        if number < low or (high is not None and number > high):
            raise FaultError(Fault((), f"{number} is out of range.", f"Write a whole number {limits}."))
        return number

    return read_limited


def _as_float(value: object) -> float | None:
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _number_remedy(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "Write it without quotes."
    return "Write a number, like 0.5."
