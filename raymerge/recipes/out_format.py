"""``out_format``: how the output stores its numbers, plain or as codes with scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from raymerge.documents.faults import Fault, FaultError, attempt, kind, read_each, show
from raymerge.documents.fields import choice_of, closest, did_you_mean
from raymerge.recipes.selector import SELECTOR_KEYS, Selector, Subject, plain_selector, read_selector

OUT_FORMATS = ("same", "bf16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp4", "nvfp4", "int4")
"""``same``: as the checkpoint has it that the output's names come from; ``bf16``: plain numbers."""

_KEYS = (*SELECTOR_KEYS, "value")
_FORMS = f"Write one of {', '.join(OUT_FORMATS)}, or a list of {{role: expert, value: fp8_block}}."


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """One line: a format for some tensors."""

    selector: Selector | None
    """Which tensors it speaks of; None for all that are usually quantised."""
    value: str
    """One of ``OUT_FORMATS``."""

    def selects(self, subject: Subject) -> bool:
        """Whether it speaks of a tensor."""
        return self.selector is None or self.selector.matches(subject)

    def is_for(self, subjects: Sequence[Subject]) -> bool:
        """Whether it speaks of all these tensors."""
        return all(map(self.selects, subjects))


@dataclass(frozen=True, slots=True)
class OutFormats:
    """Formats by tensor."""

    choices: tuple[FormatChoice, ...]
    """At least one, in the recipe's order; the first that speaks of a tensor holds for it."""

    @property
    def is_by_name(self) -> bool:
        """Whether some lines say what tensors are called."""
        return any(each.selector is not None and each.selector.is_by_name for each in self.choices)

    def matching(self, subjects: Sequence[Subject]) -> Iterator[FormatChoice]:
        """The lines that select some of the logical tensors of an output, in order."""
        return (each for each in self.choices if any(map(each.selects, subjects)))


def _read_formats(value: object) -> OutFormats | None:
    if value is None or isinstance(value, OutFormats):
        return value
    if isinstance(value, (list, tuple)):
        if not value:
            raise FaultError(Fault((), "the list is empty.", _FORMS))
        return OutFormats(read_each(_read_choice, value))
    return OutFormats((_read_choice(value),))


def _read_choice(value: object) -> FormatChoice:
    if isinstance(value, str):
        return FormatChoice(None, choice_of(*OUT_FORMATS)(value))
    if not isinstance(value, Mapping):
        raise FaultError(Fault((), f"{show(value)} is {kind(value)} and no format.", _FORMS))
    faults = [_unknown(str(key)) for key in value if key not in _KEYS]
    selector = read_selector(value, faults)
    form = attempt(choice_of(*OUT_FORMATS), value.get("value"), ("value",), faults)
    if faults or form is None:
        raise FaultError(faults)
    given = any(value.get(key) is not None for key in SELECTOR_KEYS)
    return FormatChoice(selector if given else None, form)


def _unknown(key: str) -> Fault:
    hint = did_you_mean(key, _KEYS) or f"Keys known here: {', '.join(_KEYS)}."
    return Fault((key,), f"unknown key '{key}'.", hint, closest(key, _KEYS), is_key=True)


def _plain_formats(formats: OutFormats | None) -> object:
    if formats is None:
        return None
    return [
        {**(plain_selector(each.selector) if each.selector is not None else {}), "value": each.value}
        for each in formats.choices
    ]


OutFormat: TypeAlias = Annotated[
    OutFormats | None, PlainValidator(_read_formats), PlainSerializer(_plain_formats)
]
