"""A recipe with a ``sweep``: as many plain recipes as it has outputs, each as the user could have written it.

Positions in messages are those of the original document."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from yaml.representer import RepresenterError

from raymerge.documents.edits import edited, scalar_at
from raymerge.documents.fields import Fault, FieldPath, attempt, did_you_mean, kind
from raymerge.documents.positions import (
    Located,
    Part,
    Places,
    in_order,
    read_document,
    read_file,
    secrets_in,
    split_documents,
    yaml_text,
)
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.axes import AXIS, Assignment, AxesReader, described, shown_values
from raymerge.recipes.entry import NAME_FORM, RECIPE, Exists, is_name
from raymerge.recipes.load import (
    SWEEP_KEYS,
    VARIABLE,
    Draft,
    canonical,
    draft_document,
    join_drafts,
    with_order_problems,
)
from raymerge.recipes.order import AnyRecipe, recipe_order
from raymerge.recipes.training_run import NO_CHECKPOINTS, USUAL_FILES, Checkpoints, RunFiles
from raymerge.recipes.windows import UNKNOWN_WINDOW, Window, read_windows

_KEYS = (*SWEEP_KEYS, "outputs")
_WINDOW = "window"


@dataclass(frozen=True, slots=True)
class SweepOutput:
    name: str
    """Of its directory."""
    values: Mapping[str, str]
    """By axis, as written."""
    recipes: tuple[AnyRecipe, ...]
    """In file order; all but the last are the same for all outputs."""
    text: str
    """Of the plain recipe file that makes this output alone."""
    coefficients: Mapping[str, float] = field(default_factory=dict)
    """Of an average of checkpoints, by their places, oldest first."""
    checkpoints: Checkpoints = NO_CHECKPOINTS
    """Those that such an average reads."""


@dataclass(frozen=True, slots=True)
class SweepDraft:
    """The outputs of a sweep as far as readable, with all faults of the text."""

    values: tuple[Mapping[str, str], ...]
    drafts: tuple[Draft, ...]
    """One for each of ``values``."""
    problems: tuple[Problem, ...]
    outputs: tuple[SweepOutput, ...] = ()
    """Empty with problems."""

    def require(self) -> tuple[SweepOutput, ...]:
        if self.problems:
            raise RecipeError(self.problems)
        return self.outputs


def draft_sweep(
    path: str | os.PathLike[str], *, exists: Exists = os.path.isdir, files: RunFiles = USUAL_FILES
) -> SweepDraft | None:
    """None where the file has no sweep, or cannot be read at all."""
    name = os.fspath(path)
    try:
        parts = split_documents(read_file(name, RECIPE), name, RECIPE)
        documents = [read_document(part, name, RECIPE) for part in parts]
    except RecipeError:
        return None
    if not any(has_sweep_keys(document.data) for document in documents):
        return None
    *common, _ = documents
    if misplaced := [_misplaced(each) for each in common if has_sweep_keys(each.data)]:
        return SweepDraft((), (), tuple(misplaced))
    drafts = [draft_document(each, part.text, exists) for each, part in zip(common, parts, strict=False)]
    before = "".join(part.text for part in parts[:-1])
    return _Expansion(documents[-1], parts[-1], before, exists, files).draft(drafts)


def draft_sweep_mapping(
    data: Mapping[str, Any],
    name: str = "recipe",
    *,
    exists: Exists = os.path.isdir,
    files: RunFiles = USUAL_FILES,
) -> SweepDraft | None:
    if not has_sweep_keys(data):
        return None
    return _Expansion(Located(data, Places(name), ()), None, "", exists, files).draft(())


def is_sweep_file(path: str | os.PathLike[str]) -> bool:
    return has_document(path, has_sweep_keys)


def has_document(path: str | os.PathLike[str], accepts: Callable[[Mapping[str, object]], bool]) -> bool:
    """Whether any document of a file is such; no for a file that cannot be read."""
    name = os.fspath(path)
    try:
        parts = split_documents(read_file(name, RECIPE), name, RECIPE)
        return any(accepts(read_document(part, name, RECIPE).data) for part in parts)
    except RecipeError:
        return False


def plain_text(text: str, data: Mapping[str, Any], before: str) -> str | None:
    """The edited text of a document behind the text ``before`` of others; where that is not the recipe, as
    with anchors in what was removed, a new one."""
    try:
        (part,) = split_documents(text, "", RECIPE)
        if read_document(part, "", RECIPE).data == data:
            return text
    except (RecipeError, ValueError):
        pass
    return new_text(data, before)


def new_text(data: Mapping[str, Any], before: str) -> str | None:
    try:
        return ("---\n" if before else "") + yaml_text(data)
    except RepresenterError:
        return None  # It has values of Python's own.


def joined_problems(
    values: Sequence[Mapping[str, str]], each: Sequence[Iterable[Problem]]
) -> tuple[Problem, ...]:
    """The problems of all outputs: once what is the same for all, else with the values that have it."""
    holders: dict[Problem, list[int]] = {}
    for number, problems in enumerate(each):
        for problem in dict.fromkeys(problems):
            holders.setdefault(problem, []).append(number)
    return in_order(
        problem
        if len(having) == len(values)
        else replace(problem, what=f"{_which(values, having)}: {problem.what}")
        for problem, having in holders.items()
    )


def _which(values: Sequence[Mapping[str, str]], having: Sequence[int]) -> str:
    first = values[having[0]]
    for axis, value in first.items():
        if [number for number, each in enumerate(values) if each[axis] == value] == having:
            return f"with {axis} = {value}"
    others = f" and {len(having) - 1} more" if len(having) > 1 else ""
    return f"with {described(first)}{others}"


def has_sweep_keys(data: Mapping[str, object]) -> bool:
    return any(key in data for key in SWEEP_KEYS)


def _misplaced(document: Located) -> Problem:
    key = next(key for key in SWEEP_KEYS if key in document.data)
    what = f"'{key}' stands in a merge that is not the last of the file."
    return Problem(document.places.at((key,)), what, "Only the last, the result, may make several outputs.")


class _UnreadOutput(NamedTuple):
    """One output before it is read."""

    values: Mapping[str, str]
    data: Mapping[str, Any]
    text: str | None
    window: Window | None = None


class _Expansion:
    def __init__(
        self, document: Located, part: Part | None, before: str, exists: Exists, files: RunFiles
    ) -> None:
        self._document = document
        self._part = part
        self._before = before
        self._exists = exists
        self._files = files
        self._axes: tuple[str, ...] = ()
        self._lacks_windows = False
        self._faults: list[Fault] = []
        self._used: set[str] = set()
        self._unresolved: set[FieldPath] = set()
        """Where a value of an axis is missing: why is a fault already."""

    def draft(self, common: Sequence[Draft]) -> SweepDraft:
        places = self._document.places
        if secret := list(secrets_in(self._document.data, RECIPE)):
            return SweepDraft((), (), tuple(places.problems(secret)))
        unread = [output for each in self._assignments() for output in self._unread(each)]
        self._check_use()
        names = self._names([output.values for output in unread])
        own = places.problems(list(dict.fromkeys(self._faults)))
        hidden = {places.at(path) for path in self._unresolved}
        drafts = [self._drafted(output, common, hidden) for output in unread]
        values = tuple(output.values for output in unread)
        problems = in_order([*own, *joined_problems(values, [draft.problems for draft in drafts])])
        if self._lacks_windows:
            return SweepDraft((), (), problems)
        problems = problems or self._not_last(drafts[0].recipes) or self._repeated(names, drafts)
        outputs = () if problems else tuple(map(self._output, names, unread, drafts))
        return SweepDraft(values, tuple(drafts), problems, outputs)

    def _assignments(self) -> tuple[Assignment, ...]:
        """Where the sweep is refused, one to find other faults with."""
        data = self._document.data
        if "sweep" not in data:
            return ({},)
        reader = AxesReader(data["sweep"], self._scalar)
        self._axes, assignments = reader.names, reader.assignments()
        self._faults += (replace(fault, path=("sweep", *fault.path)) for fault in reader.faults)
        if _WINDOW in self._axes and "checkpoints" in data:
            what = f"the axis '{_WINDOW}' has the name of the windows of 'checkpoints'."
            self._faults.append(Fault(("sweep", _WINDOW), what, "Rename it."))
        return assignments or ({name: values[0] for name, values in reader.axes.items() if values},)

    def _scalar(self, path: FieldPath) -> str | None:
        return None if self._part is None else scalar_at(self._part, ("sweep", *path))

    def _unread(self, assignment: Assignment) -> list[_UnreadOutput]:
        given = self._document.data
        plain = {key: value for key, value in given.items() if key not in _KEYS}
        data, values = self._substituted(plain, assignment, ()), shown_values(assignment)
        if "checkpoints" in given:
            return list(self._windows(assignment, data))
        text = None
        if self._part is not None:
            replaced = {f"${axis}": value.yaml for axis, value in assignment.items()}
            text = plain_text(edited(self._part, replaced, _KEYS), data, self._before)
        return [_UnreadOutput(values, data, text)]

    def _windows(self, assignment: Assignment, data: Mapping[str, Any]) -> Iterator[_UnreadOutput]:
        block = ("checkpoints",)
        given = self._substituted(self._document.data["checkpoints"], assignment, block)
        windows = attempt(lambda each: read_windows(each, self._files), given, block, self._faults)
        self._lacks_windows |= windows is None
        # The other keys may have faults of their own.
        for window in windows or (UNKNOWN_WINDOW,):
            recipe = attempt(partial(window.recipe, files=self._files), data, (), self._faults)
            if recipe is not None:
                size = str(window.size)
                text = new_text(recipe, self._before)
                values = {_WINDOW: size, **shown_values(assignment)}
                yield _UnreadOutput(values, recipe, text, window)

    def _substituted(self, value: Any, assignment: Assignment, path: FieldPath) -> Any:
        if isinstance(value, Mapping):
            return {key: self._substituted(each, assignment, (*path, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._substituted(each, assignment, (*path, index)) for index, each in enumerate(value)]
        match = VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return self._checked_text(value, path) if isinstance(value, str) else value
        axis = match[1]
        self._used.add(axis)
        if axis in assignment:
            return assignment[axis].value
        if path not in self._unresolved:
            self._unresolved.add(path)
            if axis not in self._axes:
                self._faults.append(_unknown(path, value, self._axes))
        return None

    def _checked_text(self, value: str, path: FieldPath) -> str:
        for match in VARIABLE.finditer(value):
            if (axis := match[1]) in self._axes:
                what = f"'${axis}' stands within a longer text, where it is not replaced."
                remedy = f"Make the whole text the value of an axis: '${axis}' stands alone."
                self._used.add(axis)
                self._faults.append(Fault(path, what, remedy))
        return value

    def _check_use(self) -> None:
        pattern = self._document.data.get("outputs")
        in_pattern = _PLACEHOLDER.findall(pattern) if isinstance(pattern, str) else ()
        for name in filter(AXIS.fullmatch, self._axes):
            if name not in self._used and name not in in_pattern:
                what = f"nothing uses the axis '{name}'."
                remedy = f"Write ${name} where its values belong, or remove it."
                self._faults.append(Fault(("sweep", name), what, remedy))

    def _names(self, values: Sequence[Mapping[str, str]]) -> list[str]:
        """Empty where they are refused, or follow from what is refused."""
        pattern = self._document.data.get("outputs")
        if pattern is not None:
            self._check_pattern(pattern)
        if self._faults:
            return []
        names = [_filled(str(pattern), each) if pattern is not None else _usual_name(each) for each in values]
        first: dict[str, Mapping[str, str]] = {}
        for name, each in zip(names, values, strict=True):
            if not is_name(name):
                what = f"'{name}' (with {described(each)}) cannot be the name of an output."
                return self._refused_names(what, f"Write {NAME_FORM}.")
            if name in first:
                what = f"both {described(first[name])} and {described(each)} are named '{name}'."
                return self._refused_names(what, "Put all axes that tell them apart into 'outputs'.")
            first[name] = each
        return names

    def _refused_names(self, what: str, remedy: str) -> list[str]:
        if "outputs" not in self._document.data:
            remedy = f"{remedy} Choose names: outputs: 'NAME-{{AXIS}}'."
        key = next(key for key in ("outputs", *SWEEP_KEYS) if key in self._document.data)
        self._faults.append(Fault((key,), what, remedy))
        return []

    def _check_pattern(self, pattern: object) -> None:
        axes = (*self._axes, _WINDOW) if "checkpoints" in self._document.data else self._axes
        if not isinstance(pattern, str):
            self._faults.append(
                Fault(("outputs",), f"'outputs' is {kind(pattern)}.", "Write a text: 'merged-{t}'.")
            )
            return
        for name in (name for name in _PLACEHOLDER.findall(pattern) if name not in axes):
            self._faults.append(_unknown(("outputs",), f"{{{name}}}", axes))
        if not {*_PLACEHOLDER.sub("", pattern)}.isdisjoint("{}"):
            what = f"a bracket of '{pattern}' has no partner."
            self._faults.append(Fault(("outputs",), what, "Write the axis between two: {t}."))

    def _drafted(self, output: _UnreadOutput, common: Sequence[Draft], hidden: Collection[str]) -> Draft:
        places = self._document.places
        if output.window is not None:
            places = replace(places, renamed={("models",): "checkpoints"})
        located = replace(self._document, data=output.data, places=places)
        own = draft_document(located, output.text, self._exists)
        draft = with_order_problems(join_drafts([*common, own]), self._exists)
        return replace(draft, problems=tuple(each for each in draft.problems if each.where not in hidden))

    def _not_last(self, recipes: Sequence[AnyRecipe]) -> tuple[Problem, ...]:
        result = recipe_order(recipes, exists=self._exists)[-1]
        if result is recipes[-1]:
            return ()
        what = f"the sweep makes several outputs, and '{result.name}' uses this merge."
        return (
            Problem(recipes[-1].where(), what, "Only the result, which no other merge uses, may be a sweep."),
        )

    def _repeated(self, names: Sequence[str], drafts: Sequence[Draft]) -> tuple[Problem, ...]:
        """Equal recipes, as of an axis that is only in the names. Small windows are equal by nature."""
        first: dict[str, str] = {}
        for name, draft in zip(names, drafts, strict=True):
            other = first.setdefault(canonical(draft.recipes[-1]), name)
            if other != name and "checkpoints" not in self._document.data:
                what = f"the outputs '{other}' and '{name}' are the same merge."
                place = self._document.places.at(("sweep",))
                return (Problem(place, what, "Use every axis in the recipe, or let it go in step: 'zip'."),)
        return ()

    def _output(self, name: str, output: _UnreadOutput, draft: Draft) -> SweepOutput:
        text = draft.recipes[-1].text if output.text is None else f"{self._before}{output.text}"
        window = output.window
        if window is None:
            return SweepOutput(name, output.values, draft.recipes, text)
        return SweepOutput(name, output.values, draft.recipes, text, window.coefficients, window.checkpoints)


_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def _filled(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)


def _usual_name(values: Mapping[str, str]) -> str:
    """``window-5``, ``t0.3-method-ties``: numbers stand directly behind the axes of a sweep."""
    return "-".join(
        f"{axis}{value}" if axis != _WINDOW and value[:1] in "0123456789.-" else f"{axis}-{value}"
        for axis, value in values.items()
    )


def _unknown(path: FieldPath, written: str, axes: Collection[str]) -> Fault:
    listed = f"Axes of the sweep: {', '.join(axes)}." if axes else "Add the axis to 'sweep'."
    what = f"'{written}' is no axis of the sweep."
    return Fault(path, what, f"{did_you_mean(written.strip('${}'), axes)} {listed}".strip())
