"""Selectors: which tensors a line of a recipe speaks of, by name, role and layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from raymerge.documents.faults import Fault, FaultError, attempt, kind, read_each, show
from raymerge.documents.fields import choice_of, read_integer, read_text

SELECTOR_KEYS = ("filter", "glob", "role", "layers")
"""The keys that make a selector, wherever one is written."""

# The values of architectures.Role, which recipes may not import; a test holds the two together.
ROLE_NAMES = (
    "embedding",
    "head",
    "norm",
    "attention",
    "mlp",
    "expert",
    "shared_expert",
    "router",
    "router_bias",
    "shared_expert_gate",
    "mtp",
    "vision",
    "buffer",
    "other",
)
"""What a tensor may do in a model."""

_EVERYTHING = (None, "*")
_PAIRS = {
    "gate_up": {"gate_proj": "gate", "up_proj": "up"},
    "gate_and_up": {"gate_proj": "gate", "up_proj": "up"},
    "w13": {"gate_proj": "w1", "up_proj": "w3"},
}
"""What layouts call gate and up where they store them as one, and what stands for each of the two in it."""
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_LAYER_FORMS = "Write a layer like 10, a range like 10..20 with both ends in it, or a list of those."

T = TypeVar("T")


class Subject(NamedTuple):
    """A tensor, as far as a selector is interested in it."""

    name: str
    """Its name."""
    roles: frozenset[str]
    """What it does in the model, of ``ROLE_NAMES``; a tensor may have several, such as an expert of a
    multi-token-prediction module."""
    layer: int | None
    """Its layer's number; None outside the layers."""
    aliases: tuple[str, ...] = ()
    """What else it is called where the same model is stored in another layout."""


@dataclass(frozen=True, slots=True)
class Selector:
    """What a tensor must be to be spoken of; all that is given must hold."""

    filter: str | None = None
    """A plain part of the name; None and ``*`` match every name."""
    glob: str | None = None
    """A pattern of the whole name, with ``*``, ``?`` and ``[...]``, in which case counts."""
    roles: tuple[str, ...] = ()
    """Roles, one of which the tensor must have; empty for any."""
    layers: tuple[tuple[int, int], ...] = ()
    """First and last layer of each range, one of which the tensor must be in; empty for any place."""

    @property
    def is_by_name(self) -> bool:
        """Whether it says what tensors are called, and not only what they do and where."""
        return self.glob is not None or self.filter not in _EVERYTHING

    def matches(self, subject: Subject) -> bool:
        """Whether this speaks of ``subject``. A tensor outside the layers is in no range of them."""
        return (
            (not self.roles or not subject.roles.isdisjoint(self.roles))
            and (not self.layers or self._is_within(subject.layer))
            and any(self._names(name, subject) for name in (subject.name, *subject.aliases))
        )

    def _names(self, name: str, subject: Subject) -> bool:
        if not (self._has_part(name) and self._has_whole(name)):
            return False
        pair = next((each for each in _PAIRS if each in name), None)
        half = None if pair is None else _PAIRS[pair].get(_projection(subject))
        if pair is None or half is None:
            return True
        # "gate_up_proj" also means "up_proj" by its letters: gate is meant only by what has the pair's name.
        own = name.replace(pair, half)
        return (pair in (self.filter or "") or self._has_part(own)) and (
            pair in (self.glob or "") or self._has_whole(own)
        )

    def _has_part(self, name: str) -> bool:
        return self.filter is None or self.filter == "*" or self.filter in name

    def _has_whole(self, name: str) -> bool:
        return self.glob is None or fnmatchcase(name, self.glob)

    def _is_within(self, layer: int | None) -> bool:
        return layer is not None and any(first <= layer <= last for first, last in self.layers)


def _projection(subject: Subject) -> str:
    """``gate_proj`` or ``up_proj`` where the tensor is that matrix of a network; empty for any other."""
    words = (word for name in (subject.name, *subject.aliases) for word in name.split("."))
    return next((word for word in words if word in ("gate_proj", "up_proj")), "")


def read_selector(value: Mapping[Any, object], faults: list[Fault]) -> Selector:
    """The selector that a map's keys of ``SELECTOR_KEYS`` mean; what is wrong is added to ``faults``."""

    def given(key: str, read: Callable[[object], T]) -> T | None:
        part = value.get(key)
        return None if part is None else attempt(read, part, (key,), faults)

    return Selector(
        given("filter", read_text),
        given("glob", read_text),
        given("role", read_roles) or (),
        given("layers", read_layers) or (),
    )


def plain_selector(selector: Selector) -> dict[str, object]:
    """The selector's keys as a recipe writes them."""
    plain = {
        "filter": selector.filter,
        "glob": selector.glob,
        "role": list(selector.roles),
        "layers": plain_layers(selector.layers),
    }
    return {key: value for key, value in plain.items() if value is not None and value != []}


def read_roles(value: object) -> tuple[str, ...]:
    """One role or a list of them, in the order of ``ROLE_NAMES``.

    Raises:
        FaultError: every one that is no role, and an empty list.
    """
    given = _read_listed(choice_of(*ROLE_NAMES), value, f"Write one of: {', '.join(ROLE_NAMES)}.")
    return tuple(role for role in ROLE_NAMES if role in given)


def read_layers(value: object) -> tuple[tuple[int, int], ...]:
    """A layer, a range of layers with both ends in it, or a list of those; in the order of layers.

    Raises:
        FaultError: every one that is no layer, and an empty list.
    """
    return tuple(sorted(set(_read_listed(_read_range, value, _LAYER_FORMS))))


def plain_layers(layers: Sequence[tuple[int, int]]) -> list[object]:
    """Layers as a recipe writes them."""
    return [first if first == last else f"{first}..{last}" for first, last in layers]


def _read_listed(read: Callable[[object], T], value: object, remedy: str) -> tuple[T, ...]:
    if not isinstance(value, (list, tuple)):
        return (read(value),)
    if not value:
        raise FaultError(Fault((), "the list is empty.", remedy))
    return read_each(read, value)


def _read_range(value: object) -> tuple[int, int]:
    match = _RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        layer = _read_layer(value)
        return layer, layer
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise FaultError(Fault((), f"the range {value} runs backwards.", f"Write {last}..{first}."))
    return first, last


def _read_layer(value: object) -> int:
    try:
        layer = read_integer(value)
    except FaultError:
        what = f"{show(value)} is {kind(value)}; expected layers."
        raise FaultError(Fault((), what, _LAYER_FORMS)) from None
    if layer < 0:
        raise FaultError(Fault((), f"{layer} is below layer 0.", "Layers count from 0."))
    return layer
