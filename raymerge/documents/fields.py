"""Plain values of a document: texts, numbers, switches, choices. Each reader refuses with ``FaultError``."""

from __future__ import annotations

import math
from collections.abc import Callable

from raymerge.documents.faults import Fault, FaultError, kind, show
from raymerge.documents.suggest import closest, did_you_mean


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
