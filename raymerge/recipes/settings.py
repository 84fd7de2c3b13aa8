"""A parameter's setting: one number, a gradient over the layers, or a choice by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from raymerge.documents.faults import Fault, FaultError, attempt, kind, read_each, show
from raymerge.documents.fields import closest, did_you_mean, read_number
from raymerge.recipes.selector import SELECTOR_KEYS, Selector, Subject, plain_selector, read_selector

_CHOICE_KEYS = (*SELECTOR_KEYS, "value")
_FORMS = "Write a number, a list of numbers, or a list of {filter: TEXT, value: NUMBER}."


@dataclass(frozen=True, slots=True)
class Scalar:
    """The same number everywhere."""

    value: float
    """The number; switches are 1.0 and 0.0."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Numbers spread evenly over the layers of a slice, with straight lines between them."""

    values: tuple[float, ...]
    """At least one number; the first belongs to the first layer, the last to the last one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a conditional setting."""

    selector: Selector
    """Which tensors this line speaks of."""
    value: Scalar | Gradient
    """What holds for them."""


@dataclass(frozen=True, slots=True)
class Conditional:
    """Choices by tensor; the first that matches holds."""

    choices: tuple[Choice, ...]
    """At least one, in the recipe's order."""


Setting: TypeAlias = Scalar | Gradient | Conditional


def evaluate(setting: Setting, subject: Subject, t: float) -> float | None:
    """The number that ``setting`` means for the tensor ``subject`` at position ``t`` of its slice.

    Args:
        setting: what the recipe says.
        subject: the tensor, which selectors look at.
        t: 0 at the first layer of the slice and 1 at the last one; 0 for tensors outside the layers.

    Returns:
        The number, or None if no choice matches: the next level of precedence decides then.
    """
    match setting:
        case Scalar(value):
            return value
        case Gradient(values):
            return _interpolate(values, t)
        case Conditional(choices):
            found = next((choice.value for choice in choices if choice.selector.matches(subject)), None)
            return None if found is None else evaluate(found, subject, t)


def read_setting(value: object) -> Setting:
    """The setting that a recipe's value means.

    Raises:
        FaultError: every part of it that is neither a number, nor a gradient, nor a selector with its value.
    """
    if isinstance(value, (Scalar, Gradient, Conditional)):
        return value
    if isinstance(value, Mapping):
        return Conditional((_read_choice(value),))
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return Conditional(read_each(_read_choice, value))
    return _read_plain(value)


def plain_setting(setting: Setting) -> object:
    """The setting as numbers, lists and maps, as a recipe writes it."""
    match setting:
        case Scalar(value):
            return value
        case Gradient(values):
            return list(values)
        case Conditional(choices):
            return [_plain_choice(choice) for choice in choices]


def _interpolate(values: tuple[float, ...], t: float) -> float:
    position = t * (len(values) - 1)
    left = int(position)
    right = min(len(values) - 1, left + 1)
    fraction = position - left
    return (1 - fraction) * values[left] + fraction * values[right]


def _read_plain(value: object) -> Scalar | Gradient:
    if isinstance(value, (list, tuple)):
        if not value:
            raise FaultError(Fault((), "the list of numbers is empty.", _FORMS))
        return Gradient(read_each(read_number, value))
    if value is None:
        raise FaultError(Fault((), "the setting has no value.", _FORMS))
    return Scalar(read_number(value))


def _read_choice(value: object) -> Choice:
    if not isinstance(value, Mapping):
        raise FaultError(
            Fault((), f"{show(value)} is {kind(value)} among filters.", "Write {value: NUMBER}.")
        )
    faults = [_unknown(str(key)) for key in value if key not in _CHOICE_KEYS]
    selector = read_selector(value, faults)
    number: Scalar | Gradient | None = None
    if "value" in value:
        number = attempt(_read_plain, value["value"], ("value",), faults)
    elif not faults:
        faults.append(Fault((), "a filter without a value.", "Add 'value: NUMBER' to it."))
    if faults or number is None:
        raise FaultError(faults)
    return Choice(selector, number)


def _unknown(key: str) -> Fault:
    hint = did_you_mean(key, _CHOICE_KEYS) or f"Keys known here: {', '.join(_CHOICE_KEYS)}."
    return Fault((key,), f"unknown key '{key}'.", hint, closest(key, _CHOICE_KEYS), is_key=True)


def _plain_choice(choice: Choice) -> dict[str, object]:
    return {**plain_selector(choice.selector), "value": plain_setting(choice.value)}
