"""Per-tensor values of a recipe: selectors, parameter settings and output formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from pydantic import PlainSerializer, PlainValidator

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    attempt_key,
    choice_of,
    kind,
    read_each,
    read_integer,
    read_list,
    read_number,
    read_text,
    refusal,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import (
    NUMBER,
    TEXT,
    WHOLE_NUMBER,
    Grammar,
    accepts,
    any_of,
    declared,
    list_of,
    map_of,
    one_or_list,
)

SELECTOR_KEYS = ("filter", "glob", "role", "layers")

# The values of architectures.Role, which recipes may not import; a test holds the two together.
ROLE_NAMES = (
    *("embedding", "head", "norm", "attention", "mlp", "expert", "shared_expert", "router", "router_bias"),
    *("shared_expert_gate", "mtp", "vision", "buffer", "other"),
)

_EVERYTHING = (None, "*")
_PAIRS = {
    "gate_up": {"gate_proj": "gate", "up_proj": "up"},
    "gate_and_up": {"gate_proj": "gate", "up_proj": "up"},
    "w13": {"gate_proj": "w1", "up_proj": "w3"},
}
"""Names of fused gate and up projections, with the names of the parts."""
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_LAYER_FORMS = "Write a layer like 10, a range like 10..20 with both ends in it, or a list of those."

T = TypeVar("T")


class Subject(NamedTuple):
    name: str
    roles: frozenset[str]
    """Of ``ROLE_NAMES``; several for, say, an expert of a multi-token-prediction module."""
    layer: int | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selector:
    filter: str | None = None
    """A substring of the name; None and ``*`` match every name."""
    glob: str | None = None
    """A case-sensitive pattern of the whole name, with ``*``, ``?`` and ``[...]``."""
    roles: tuple[str, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    """First and last layer of each range; empty for any place."""

    @property
    def is_by_name(self) -> bool:
        return self.glob is not None or self.filter not in _EVERYTHING

    def matches(self, subject: Subject) -> bool:
        """Tensors outside the layers are in no range."""
        layer = subject.layer
        if self.roles and subject.roles.isdisjoint(self.roles):
            return False
        if self.layers and (layer is None or not any(low <= layer <= high for low, high in self.layers)):
            return False
        return any(self._names(name, subject) for name in (subject.name, *subject.aliases))

    def _names(self, name: str, subject: Subject) -> bool:
        if not (self._has_part(name) and self._has_whole(name)):
            return False
        pair = next((each for each in _PAIRS if each in name), "")
        half = _PAIRS.get(pair, {}).get(_projection(subject))
        if half is None:
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


def _projection(subject: Subject) -> str:
    """``gate_proj`` or ``up_proj`` where the tensor is that matrix; else empty."""
    words = (word for name in (subject.name, *subject.aliases) for word in name.split("."))
    return next((word for word in words if word in ("gate_proj", "up_proj")), "")


def read_selector(value: Mapping[Any, object], faults: list[Fault]) -> Selector:
    return Selector(
        attempt_key(read_text, value, "filter", faults),
        attempt_key(read_text, value, "glob", faults),
        attempt_key(read_roles, value, "role", faults) or (),
        attempt_key(read_layers, value, "layers", faults) or (),
    )


def plain_selector(selector: Selector) -> dict[str, object]:
    values = (selector.filter, selector.glob, list(selector.roles), plain_layers(selector.layers))
    plain = dict(zip(SELECTOR_KEYS, values, strict=True))
    return {key: value for key, value in plain.items() if value is not None and value != []}


@accepts(one_or_list({"enum": [*ROLE_NAMES]}))
def read_roles(value: object) -> tuple[str, ...]:
    given = _read_listed(choice_of(*ROLE_NAMES), value, f"Write one of: {', '.join(ROLE_NAMES)}.")
    return tuple(role for role in ROLE_NAMES if role in given)


@accepts(one_or_list({**WHOLE_NUMBER, "minimum": 0, "pattern": r"^\s*[0-9]+(\.\.[0-9]+)?\s*$"}))
def read_layers(value: object) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(set(_read_listed(_read_range, value, _LAYER_FORMS))))


def plain_layers(layers: Sequence[tuple[int, int]]) -> list[object]:
    return [first if first == last else f"{first}..{last}" for first, last in layers]


def _read_listed(read: Callable[[object], T], value: object, remedy: str) -> tuple[T, ...]:
    if not isinstance(value, (list, tuple)):
        return (read(value),)
    return read_list(read, value, remedy)


def _read_range(value: object) -> tuple[int, int]:
    match = _RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        layer = _read_layer(value)
        return layer, layer
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise refusal(f"the range {value} runs backwards.", f"Write {last}..{first}.")
    return first, last


def _read_layer(value: object) -> int:
    try:
        layer = read_integer(value)
    except FaultError:
        raise unexpected(value, "layers", _LAYER_FORMS) from None
    if layer < 0:
        raise refusal(f"{layer} is below layer 0.", "Layers count from 0.")
    return layer


_CHOICE_KEYS = (*SELECTOR_KEYS, "value")
_FORMS = "Write a number, a list of numbers, or a list of {filter: TEXT, value: NUMBER}."


@dataclass(frozen=True, slots=True)
class Scalar:
    value: float


@dataclass(frozen=True, slots=True)
class Gradient:
    """Values spread evenly over the layers of a slice, linearly interpolated."""

    values: tuple[float, ...]
    """At least one; the first for the first layer, the last for the last."""


@dataclass(frozen=True, slots=True)
class Choice:
    selector: Selector
    value: Scalar | Gradient


@dataclass(frozen=True, slots=True)
class Conditional:
    choices: tuple[Choice, ...]


Setting: TypeAlias = Scalar | Gradient | Conditional


def evaluate(setting: Setting, subject: Subject, t: float) -> float | None:
    """The number for a tensor at position ``t`` of its slice; None if no choice matches.

    ``t`` is 0 at the first layer of the slice and 1 at the last one; 0 for tensors outside the layers."""
    match setting:
        case Scalar(value):
            return value
        case Gradient(values):
            position = t * (len(values) - 1)
            left = int(position)
            fraction = position - left
            return (1 - fraction) * values[left] + fraction * values[min(len(values) - 1, left + 1)]
        case Conditional(choices):
            chosen = next((choice.value for choice in choices if choice.selector.matches(subject)), None)
            return None if chosen is None else evaluate(chosen, subject, t)


_SELECTORS: Grammar = {
    "filter": TEXT,
    "glob": TEXT,
    "role": declared(read_roles),
    "layers": declared(read_layers),
}


def setting_grammar(number: Grammar) -> Grammar:
    """Settings of ``number``s."""
    plain = one_or_list(number)
    choice = map_of({**_SELECTORS, "value": plain}, "value")
    return any_of(plain, choice, list_of(choice))


@accepts({"title": "Setting", **setting_grammar(NUMBER)})
def read_setting(value: object) -> Setting:
    if isinstance(value, (Scalar, Gradient, Conditional)):
        return value
    if isinstance(value, Mapping):
        return Conditional((_read_choice(value),))
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return Conditional(read_each(_read_choice, value))
    return _read_plain(value)


def plain_setting(setting: Setting) -> object:
    match setting:
        case Scalar(value):
            return value
        case Gradient(values):
            return list(values)
        case Conditional(choices):
            return [
                {**plain_selector(choice.selector), "value": plain_setting(choice.value)}
                for choice in choices
            ]


def _read_plain(value: object) -> Scalar | Gradient:
    if isinstance(value, (list, tuple)):
        if not value:
            raise refusal("the list of numbers is empty.", _FORMS)
        return Gradient(read_each(read_number, value))
    if value is None:
        raise refusal("the setting has no value.", _FORMS)
    return Scalar(read_number(value))


def _read_choice(value: object) -> Choice:
    if not isinstance(value, Mapping):
        raise refusal(f"{show(value)} is {kind(value)} among filters.", "Write {value: NUMBER}.")
    faults = [unknown_key(key, _CHOICE_KEYS) for key in value if key not in _CHOICE_KEYS]
    selector = read_selector(value, faults)
    number: Scalar | Gradient | None = None
    if "value" in value:
        number = attempt(_read_plain, value["value"], ("value",), faults)
    elif not faults:
        faults.append(Fault((), "a filter without a value.", "Add 'value: NUMBER' to it."))
    if faults or number is None:
        raise FaultError(faults)
    return Choice(selector, number)


OUT_FORMATS = (
    *("same", "bf16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "mxfp4"),
    *("nvfp4", "nvfp4_modelopt", "int4", "int4_channel", "int4_asymmetric", "int4_channel_asymmetric"),
    *("int8_channel", "int8_asymmetric"),
)
"""``same``: as in the checkpoint that gives the names; ``bf16``: plain numbers."""

_FORMAT_FORMS = f"Write one of {', '.join(OUT_FORMATS)}, or a list of {{role: expert, value: fp8_block}}."


@dataclass(frozen=True, slots=True)
class FormatChoice:
    selector: Selector | None
    """None for all tensors that are usually quantised."""
    value: str

    def selects(self, subject: Subject) -> bool:
        return self.selector is None or self.selector.matches(subject)

    def is_for(self, subjects: Sequence[Subject]) -> bool:
        return all(map(self.selects, subjects))


@dataclass(frozen=True, slots=True)
class OutFormats:
    choices: tuple[FormatChoice, ...]

    @property
    def is_by_name(self) -> bool:
        return any(each.selector is not None and each.selector.is_by_name for each in self.choices)

    def matching(self, subjects: Sequence[Subject]) -> Iterator[FormatChoice]:
        return (each for each in self.choices if any(map(each.selects, subjects)))


_FORMAT: Grammar = {"enum": [*OUT_FORMATS]}
_FORMAT_CHOICE = any_of(_FORMAT, map_of({**_SELECTORS, "value": _FORMAT}, "value"))


@accepts({"title": "OutFormat", **any_of(_FORMAT_CHOICE, list_of(_FORMAT_CHOICE))})
def _read_formats(value: object) -> OutFormats | None:
    if value is None or isinstance(value, OutFormats):
        return value
    if isinstance(value, (list, tuple)):
        return OutFormats(read_list(_read_format_choice, value, _FORMAT_FORMS))
    return OutFormats((_read_format_choice(value),))


def _read_format_choice(value: object) -> FormatChoice:
    if isinstance(value, str):
        return FormatChoice(None, choice_of(*OUT_FORMATS)(value))
    if not isinstance(value, Mapping):
        raise refusal(f"{show(value)} is {kind(value)} and no format.", _FORMAT_FORMS)
    faults = [unknown_key(key, _CHOICE_KEYS) for key in value if key not in _CHOICE_KEYS]
    selector = read_selector(value, faults)
    form = attempt(choice_of(*OUT_FORMATS), value.get("value"), ("value",), faults)
    if faults or form is None:
        raise FaultError(faults)
    given = any(value.get(key) is not None for key in SELECTOR_KEYS)
    return FormatChoice(selector if given else None, form)


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
