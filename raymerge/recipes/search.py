"""A recipe with marks, ``{search: ...}``, in place of values: a plain recipe for each choice of values.

Positions in messages are those of the original document."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from raymerge.documents.edits import edited_at, node_at
from raymerge.documents.fields import (
    Fault,
    FaultError,
    FieldPath,
    attempt,
    attempt_key,
    read_each,
    read_number,
    read_switch,
    refusal,
    show,
    unknown_key,
)
from raymerge.documents.grammar import NUMBER, SWITCH, Grammar, any_of, map_of
from raymerge.documents.positions import (
    Located,
    Part,
    Places,
    in_order,
    read_document,
    read_file,
    secrets_in,
    split_documents,
)
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.axes import VALUE, AxisValue, Plain, read_value
from raymerge.recipes.entry import RECIPE, Exists
from raymerge.recipes.load import MARK, Draft, draft_document, join_drafts, marks, with_order_problems
from raymerge.recipes.order import AnyRecipe, recipe_order
from raymerge.recipes.sweep import has_document, has_sweep_keys, new_text, plain_text

_FORMS = "Write {search: [0, 1]}, {search: {low: 0, high: 1, step: 0.25}} or {search: {choices: [a, b]}}."
_RANGE_KEYS = ("low", "high", "step", "log")
_BOUNDS: Grammar = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
_CHOICES: Grammar = {"type": "array", "items": VALUE, "minItems": 2}
MARK_GRAMMAR: Grammar = map_of(
    {
        MARK: any_of(
            _BOUNDS,
            map_of({"low": NUMBER, "high": NUMBER, "step": NUMBER, "log": SWITCH}, "low", "high"),
            map_of({"choices": _CHOICES}, "choices"),
        )
    },
    MARK,
)
_DIGITS = 6
"""Of a number between the ends of a range: more would only make tables wide."""

Values: TypeAlias = Mapping[str, Plain]
"""By the name of the parameter."""


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float
    step: float | None = None
    is_log: bool = False
    is_whole: bool = False
    """Whether all its values are whole numbers."""

    @property
    def count(self) -> int | None:
        """None without a step."""
        return None if self.step is None else math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def at(self, unit: float) -> float | int:
        """The value at so much of the way from one end (0) to the other (1)."""
        if self.count is not None:
            return self.number(min(int(unit * self.count), self.count - 1))
        if self.is_log:
            value = math.exp(math.log(self.low) + unit * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + unit * (self.high - self.low)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    def number(self, index: int) -> float | int:
        """Of a range with a step."""
        assert self.step is not None
        value = float(f"{self.low + index * self.step:.12g}")
        return int(value) if self.is_whole else value

    @property
    def shown(self) -> str:
        step = "" if self.step is None else f" by {self.step:g}"
        return f"{self.low:g} to {self.high:g}{step}{', log' if self.is_log else ''}"


@dataclass(frozen=True, slots=True)
class Choices:
    values: tuple[AxisValue, ...]

    @property
    def shown(self) -> str:
        return ", ".join(value.shown for value in self.values)


class Parameter(NamedTuple):
    """One value that is searched for, in all places that have it."""

    name: str
    """Of its first place: ``models[0].weight``."""
    paths: tuple[FieldPath, ...]
    space: Range | Choices

    def written(self, value: Plain) -> AxisValue:
        if isinstance(self.space, Choices):
            chosen = [each for each in self.space.values if each.identity == (isinstance(value, bool), value)]
            return chosen[0] if chosen else read_value(value, None)
        text = show(value)
        # YAML takes a number with an exponent and no point for a text.
        return AxisValue(value, text, text if "." in text else text.replace("e", ".0e"))

    @property
    def extremes(self) -> tuple[Plain, ...]:
        """The ends of a range, or all choices."""
        if isinstance(self.space, Choices):
            return tuple(each.value for each in self.space.values)
        return (self.space.at(0.0), self.space.at(1.0))


@dataclass(frozen=True, slots=True)
class Candidate:
    recipes: tuple[AnyRecipe, ...]
    """In file order."""
    text: str
    """Of the plain recipe file that makes it."""


@dataclass(frozen=True, slots=True)
class MarkedRecipe:
    """A recipe to search in, as far as readable, with the faults of its marks."""

    parameters: tuple[Parameter, ...]
    block: Any
    """What stands below ``search``."""
    places: Places
    documents: tuple[Mapping[str, Any], ...]
    """As read, in file order."""
    problems: tuple[Problem, ...]
    _document: Located
    _part: Part | None
    _before: str
    _common: tuple[Draft, ...]
    _exists: Exists

    def candidate(self, values: Values) -> Candidate:
        """Raises RecipeError where these values make no recipe."""
        draft, text = self.draft(values), self._text(values)
        recipes = draft.require()
        return Candidate(recipes, str(recipes[-1].text) if text is None else f"{self._before}{text}")

    def draft(self, values: Values) -> Draft:
        data = self._data(values)
        own = draft_document(replace(self._document, data=data), self._text(values), self._exists)
        return with_order_problems(join_drafts([*self._common, own]), self._exists)

    def _data(self, values: Values) -> Mapping[str, Any]:
        at = {path: values[each.name] for each in self.parameters for path in each.paths}
        rest = {key: value for key, value in self._document.data.items() if key != MARK}
        substituted: Mapping[str, Any] = _substituted(rest, at, ())
        return substituted

    def _text(self, values: Values) -> str | None:
        data = self._data(values)
        if self._part is None:
            return new_text(data, self._before)
        at = {path: each.written(values[each.name]).yaml for each in self.parameters for path in each.paths}
        return plain_text(edited_at(self._part, at, (MARK,)), data, self._before)

    def probes(self) -> Iterator[Values]:
        """Values with every extreme of every parameter, as few as possible: what is wrong with one of them
        is to be seen before the search. Low ends stand beside high ones, since weights that are all 0 are
        wrong together."""
        most = max((len(each.extremes) for each in self.parameters), default=1)
        for number in range(most):
            yield {
                each.name: each.extremes[(number + place) % len(each.extremes)]
                for place, each in enumerate(self.parameters)
            }


def is_search_file(path: str | os.PathLike[str]) -> bool:
    return has_document(path, has_search)


def has_search(data: Mapping[str, object]) -> bool:
    return MARK in data


def read_marked(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> MarkedRecipe:
    """Raises RecipeError where nothing can be read, or there is no search."""
    name = os.fspath(path)
    parts = split_documents(read_file(name, RECIPE), name, RECIPE)
    documents = [read_document(part, name, RECIPE) for part in parts]
    *common, last = documents
    if misplaced := [_misplaced(each) for each in common if has_search(each.data)]:
        raise RecipeError(misplaced)
    drafts = [draft_document(each, part.text, exists) for each, part in zip(common, parts, strict=False)]
    before = "".join(part.text for part in parts[:-1])
    whole = tuple(each.data for each in documents)
    return _marked(last, parts[-1], before, drafts, whole, exists)


def read_marked_mapping(
    data: Mapping[str, Any], name: str = "recipe", *, exists: Exists = os.path.isdir
) -> MarkedRecipe:
    return _marked(Located(data, Places(name), ()), None, "", (), (data,), exists)


def _misplaced(document: Located) -> Problem:
    what = f"'{MARK}' stands in a merge that is not the last of the file."
    return Problem(document.places.at((MARK,)), what, "Only the last, the result, may be searched for.")


def _marked(
    document: Located,
    part: Part | None,
    before: str,
    common: Sequence[Draft],
    documents: tuple[Mapping[str, Any], ...],
    exists: Exists,
) -> MarkedRecipe:
    data, places = document.data, document.places
    if not has_search(data):
        what = f"there is no '{MARK}' in this recipe, which says how to search and by which evaluation."
        raise RecipeError(Problem(places.at(()), what, "Add it, or use 'raymerge submit'."))
    if secret := list(secrets_in(data, RECIPE)):
        raise RecipeError(places.problems(secret))
    faults: list[Fault] = []
    if has_sweep_keys(data):
        what = "a recipe is searched or makes several outputs, and not both."
        faults.append(Fault((MARK,), what, "Remove this or the sweep."))
    rest = {key: value for key, value in data.items() if key != MARK}
    parameters = tuple(_parameters(rest, part, faults))
    if not parameters and not faults:
        what = "no value of the recipe is searched for."
        faults.append(Fault((MARK,), what, "Mark one, like weight: {search: [0, 1]}."))
    problems = tuple(places.problems(faults))
    return MarkedRecipe(
        parameters, data[MARK], places, documents, problems, document, part, before, tuple(common), exists
    )


def marked_problems(marked: MarkedRecipe) -> tuple[Problem, ...]:
    """Those of the marks, or else of the plain recipes at the extremes."""
    if marked.problems:
        return marked.problems
    drafts = [marked.draft(values) for values in marked.probes()]
    problems = in_order(problem for draft in drafts for problem in draft.problems)
    return problems or _not_last(drafts[0].recipes)


def _not_last(recipes: Sequence[AnyRecipe]) -> tuple[Problem, ...]:
    result = recipe_order(recipes)[-1]
    if result is recipes[-1]:
        return ()
    what = f"this merge is searched for, and '{result.name}' uses it."
    return (Problem(recipes[-1].where(), what, "Only the result, which no other uses, may have marks."),)


def _parameters(data: Mapping[str, Any], part: Part | None, faults: list[Fault]) -> Iterator[Parameter]:
    """Values that are one in the text, by an alias, are one parameter."""
    same: dict[object, list[FieldPath]] = {}
    read = dict(marks(data))
    for path in read:
        node = None if part is None else node_at(part, path)
        same.setdefault(path if node is None else id(node), []).append(path)
    for first, *others in same.values():
        faults += _beside(read[first], first)
        space = attempt(_read_space, read[first][MARK], (*first, MARK), faults)
        if space is not None:
            yield Parameter(_name(first), (first, *others), space)


def _name(path: FieldPath) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path if step != "parameters")
    return "".join(steps).removeprefix(".")


def _substituted(value: Any, at: Mapping[FieldPath, Plain], path: FieldPath) -> Any:
    if path in at:
        return at[path]
    if isinstance(value, Mapping):
        return {key: _substituted(each, at, (*path, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_substituted(each, at, (*path, index)) for index, each in enumerate(value)]
    return value


def _beside(mark: Mapping[str, Any], path: FieldPath) -> Iterator[Fault]:
    for key in (key for key in mark if key != MARK):
        what = f"'{key}' stands beside '{MARK}', which stands for the whole value."
        yield Fault((*path, key), what, "Remove one of the two.")


def _read_space(space: object) -> Range | Choices:
    if isinstance(space, list | tuple):
        if len(space) != 2:
            raise refusal(f"{show(space)} is no range: it has two numbers.", _FORMS)
        low, high = read_each(read_number, space)
        return _checked_range(Range(low, high))
    if not isinstance(space, Mapping):
        raise refusal(f"{show(space)} says no values to search among.", _FORMS)
    return _read_choices(space) if "choices" in space else _read_range(space)


def _read_choices(space: Mapping[str, Any]) -> Choices:
    faults = [unknown_key(key, ("choices",)) for key in space if key != "choices"]
    given = space["choices"]
    if not isinstance(given, list | tuple) or len(given) < 2:
        faults.append(Fault(("choices",), f"{show(given)} leaves no choice.", "Write a list of two or more."))
        raise FaultError(faults)
    values = attempt(lambda _: read_each(_read_choice, given), given, ("choices",), faults) or ()
    for number, value in enumerate(values):
        if value.identity in (other.identity for other in values[:number]):
            faults.append(Fault(("choices",), f"'{value.shown}' stands twice.", "Remove one of the two."))
    if faults:
        raise FaultError(faults)
    return Choices(values)


def _read_choice(value: object) -> AxisValue:
    return read_value(value, None)


def _read_range(space: Mapping[str, Any]) -> Range:
    faults = [unknown_key(key, (*_RANGE_KEYS, "choices")) for key in space if key not in _RANGE_KEYS]
    for key in ("low", "high"):
        if space.get(key) is None and not faults:
            faults.append(Fault((), f"the key '{key}' is missing or empty.", _FORMS))
    low, high, step = (attempt_key(read_number, space, key, faults) for key in ("low", "high", "step"))
    is_log = attempt_key(read_switch, space, "log", faults)
    if step is not None and step <= 0:
        faults.append(Fault(("step",), f"{show(step)} is not above 0.", "Write a positive number."))
    if step is not None and is_log:
        faults.append(Fault(("log",), "a range with a step is not logarithmic.", "Remove one of the two."))
    if faults or low is None or high is None:
        raise FaultError(faults)
    whole = step is not None and all(isinstance(space[key], int) for key in ("low", "high", "step"))
    return _checked_range(Range(low, high, step, bool(is_log), whole))


def _checked_range(space: Range) -> Range:
    if not space.low < space.high:
        what = f"the range from {space.low:g} to {space.high:g} holds nothing to search."
        raise refusal(what, "Write the smaller number first.")
    if space.is_log and space.low <= 0:
        what = f"a logarithmic range cannot begin at {space.low:g}."
        raise refusal(what, "Write a positive number, or remove 'log'.")
    if space.count == 1:
        what = f"a step of {space.step:g} leads from {space.low:g} past {space.high:g}."
        raise refusal(what, "Write a smaller one.")
    return space
