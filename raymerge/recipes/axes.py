"""The ``sweep`` block of a recipe: named axes, and which assignments of values to them are meant."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from raymerge.documents.fields import Fault, FieldPath, attempt, did_you_mean, kind, refusal, show
from raymerge.documents.grammar import TEXT, Grammar, any_of
from raymerge.errors import shortlist
from raymerge.recipes.load import VARIABLE

MAX_OUTPUTS = 1000
"""Every output has a plan, and all plans are in memory before the first byte is read."""
_MAX_ASSIGNMENTS = 100 * MAX_OUTPUTS
"""Before ``exclude`` takes some of them out."""

AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("zip", "include", "exclude")
VALUE: Grammar = {"type": ["string", "number", "boolean"]}
_ENTRIES: Grammar = {
    "type": "array",
    "items": {"type": "object", "additionalProperties": VALUE, "minProperties": 1},
}
AXES_GRAMMAR: Grammar = {
    "type": "object",
    "properties": {
        "zip": any_of({"type": "boolean"}, {"type": "array", "items": TEXT, "minItems": 1}),
        "include": _ENTRIES,
        "exclude": _ENTRIES,
    },
    "propertyNames": {"pattern": f"^{AXIS.pattern}$"},
    "additionalProperties": {"type": "array", "items": VALUE, "minItems": 1},
    "minProperties": 1,
}
_FORM = "Write it as sweep: {t: [0.3, 0.5]}."

Plain: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class AxisValue:
    value: Plain
    shown: str
    """As the user wrote it, without quotes."""
    yaml: str
    """As it may stand anywhere in a YAML text."""

    @property
    def identity(self) -> tuple[bool, Plain]:
        """Equal for equal values; Python takes ``true`` for 1."""
        return isinstance(self.value, bool), self.value


Assignment: TypeAlias = Mapping[str, AxisValue]
_Identities: TypeAlias = tuple[tuple[bool, Plain], ...]
ScalarText: TypeAlias = Callable[[FieldPath], str | None]
"""A scalar of the block as YAML, by its path; None where there is no text."""


def described(values: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} = {value}" for axis, value in values.items())


def shown_values(assignment: Assignment) -> dict[str, str]:
    return {axis: value.shown for axis, value in assignment.items()}


def read_value(value: object, yaml: str | None) -> AxisValue:
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(f"{show(value)} is not a finite number.", "Write a finite one.")
    if not isinstance(value, str | int | float):
        raise refusal(f"{show(value)} is {kind(value)}.", "An axis has numbers, texts, true and false.")
    if isinstance(value, str) and VARIABLE.fullmatch(value) is not None:
        raise refusal(f"'{value}' stands for a value itself.", "Write the value.")
    plain = value if isinstance(value, str) else show(value)
    shown = plain if isinstance(value, str) or yaml is None else yaml
    return AxisValue(value, shown, plain if yaml is None else yaml)


class AxesReader:
    """Reads the block and collects its faults, whose paths begin in the block."""

    def __init__(self, block: object, text_at: ScalarText) -> None:
        self.faults: list[Fault] = []
        self._text_at = text_at
        given = block.items() if isinstance(block, Mapping) else ()
        self._block: Mapping[str, Any] = {str(key): value for key, value in given}
        self.names = tuple(key for key in self._block if key not in _RESERVED)
        if not self.names:
            is_map = isinstance(block, Mapping)
            self._refuse(
                (),
                "'sweep' has no axes." if is_map else f"'sweep' is {kind(block)} where a map belongs.",
                _FORM,
            )
        self.axes = {name: self._axis(name) for name in self.names}
        """Values by axis, as far as readable."""

    def assignments(self) -> tuple[Assignment, ...]:
        """In the order of the axes, the last changing fastest; empty if anything is refused."""
        groups = [self._rows(group) for group in self._groups()]
        included, excluded = self._entries("include"), self._entries("exclude")
        for number in included:
            given = self._block["include"][number]
            if missing := [f"'{name}'" for name in self.names if name not in given]:
                what = f"the assignment has no value for {shortlist(missing)}."
                self._refuse(("include", number), what, "Give a value for every axis.")
        product_size = math.prod(map(len, groups))
        if self._exceeds(_MAX_ASSIGNMENTS, product_size, "assignments before 'exclude'") or self.faults:
            return ()
        whole = [{name: value for row in rows for name, value in row.items()} for rows in product(*groups)]
        left = self._without(excluded, whole)
        if self._exceeds(MAX_OUTPUTS, len(left) + len(included), "outputs"):
            return ()
        there = {_identities(each, self.names) for each in left}
        for number, each in included.items():
            if (own := _identities(each, self.names)) in there:
                what = f"the assignment {described(shown_values(each))} is there already."
                self._refuse(("include", number), what, "Remove it.")
            there.add(own)
            left.append(each)
        if not left and not self.faults:
            self._refuse(("exclude",), "every assignment is excluded.", "Leave some.")
        return () if self.faults else tuple({name: each[name] for name in self.names} for each in left)

    def _exceeds(self, most: int, number: int, things: str) -> bool:
        """Refuses the sweep where it does."""
        if number > most:
            what = f"'sweep' has {number} {things}; at most {most} are planned together."
            self._refuse((), what, "Make several sweeps of it.")
        return number > most

    def _refuse(self, path: FieldPath, what: str, remedy: str) -> None:
        self.faults.append(Fault(path, what, remedy))

    def _axis(self, name: str) -> tuple[AxisValue, ...]:
        values = self._block[name]
        if AXIS.fullmatch(name) is None:
            what = f"'{name}' cannot be the name of an axis."
            self._refuse((name,), what, "Write letters, digits and '_', with no digit first.")
        elif not isinstance(values, list | tuple):
            self._refuse((name,), f"the axis '{name}' is {kind(values)}.", f"Write {name}: [0.3, 0.5].")
        elif not values:
            self._refuse((name,), f"the axis '{name}' has no values.", "Add some, or remove it.")
        else:
            read = [self._value((name, index), value) for index, value in enumerate(values)]
            return tuple(value for value in read if value is not None)
        return ()

    def _value(self, path: FieldPath, value: object) -> AxisValue | None:
        return attempt(lambda given: read_value(given, self._text_at(path)), value, path, self.faults)

    def _groups(self) -> list[tuple[str, ...]]:
        """The axes that go in step together, in the place of the first; the others alone."""
        zipped = self._zipped()
        groups = [zipped if name in zipped[:1] else (name,) for name in self.names if name not in zipped[1:]]
        lengths = {name: len(self.axes[name]) for name in zipped}
        if len({*lengths.values()}) > 1 and not self.faults:
            listed = ", ".join(f"'{name}' has {length}" for name, length in lengths.items())
            self._refuse(("zip",), f"axes in step need equally many values: {listed}.", "Add or remove some.")
        return groups

    def _zipped(self) -> tuple[str, ...]:
        given = self._block.get("zip", False)
        if isinstance(given, bool):
            return self.names if given else ()
        if not isinstance(given, list | tuple) or not given:
            self._refuse(("zip",), f"{show(given)} is not known here.", "Write true, or a list of axes.")
            return ()
        for index, name in enumerate(given):
            if name not in self.names:
                self._refuse(("zip", index), *self._unknown(name))
            elif name in given[:index]:
                self._refuse(("zip", index), f"'{name}' stands twice.", "Remove one of the two.")
        return tuple(name for name in self.names if name in given)

    def _unknown(self, name: object) -> tuple[str, str]:
        remedy = f"{did_you_mean(str(name), self.names)} Axes of the sweep: {', '.join(self.names)}."
        return f"'{name}' is no axis of the sweep.", remedy.lstrip()

    def _rows(self, group: Sequence[str]) -> list[dict[str, AxisValue]]:
        rows = [
            dict(zip(group, values, strict=True))
            for values in zip(*(self.axes[name] for name in group), strict=False)
        ]
        before: set[_Identities] = set()
        for number, row in enumerate(rows):
            if (own := _identities(row, group)) in before:
                what = f"{described(shown_values(row))} stands twice."
                self._refuse((group[0], number), what, "Remove one of the two.")
            before.add(own)
        return rows

    def _entries(self, key: str) -> dict[int, dict[str, AxisValue]]:
        """The maps of ``include`` or ``exclude`` by their numbers, as far as readable."""
        given = self._block.get(key, ())
        if not isinstance(given, list | tuple):
            self._refuse((key,), f"'{key}' is {kind(given)}.", f"Write {key}: [{{t: 0.3}}].")
            return {}
        entries: dict[int, dict[str, AxisValue]] = {}
        for number, entry in enumerate(given):
            if not isinstance(entry, Mapping) or not entry:
                self._refuse((key, number), f"{show(entry)} assigns nothing.", "Write a map like {t: 0.3}.")
                continue
            for name in entry:
                if name not in self.names:
                    self._refuse((key, number, name), *self._unknown(name))
            read = {
                name: self._value((key, number, name), entry[name]) for name in entry if name in self.names
            }
            entries[number] = {name: value for name, value in read.items() if value is not None}
        return entries

    def _without(self, excluded: Mapping[int, Assignment], whole: Sequence[Assignment]) -> list[Assignment]:
        there: dict[tuple[str, ...], set[_Identities]] = {}
        taken: dict[tuple[str, ...], set[_Identities]] = {}
        for number, entry in excluded.items():
            axes = tuple(sorted(entry))
            if axes not in there:
                there[axes], taken[axes] = {_identities(each, axes) for each in whole}, set()
            taken[axes].add(own := _identities(entry, axes))
            if own not in there[axes]:
                what = f"nothing has {described(shown_values(entry))}."
                self._refuse(("exclude", number), what, "Remove it, or correct a value.")
        return [
            each
            for each in whole
            if not any(_identities(each, axes) in entries for axes, entries in taken.items())
        ]


def _identities(assignment: Assignment, axes: Iterable[str]) -> _Identities:
    return tuple(assignment[axis].identity for axis in axes)
