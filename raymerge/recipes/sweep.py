"""A recipe with a ``sweep``: as many plain recipes as it has outputs, each as the user could have written it.

Positions in messages are those of the original document."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raymerge.documents.edits import edited, scalar_at
from raymerge.documents.fields import Fault, FieldPath, did_you_mean, kind
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
from raymerge.recipes.axes import Assignment, AxesReader, described, shown_values, usual_name
from raymerge.recipes.entry import NAME_FORM, RECIPE, Exists, is_name
from raymerge.recipes.load import (
    SWEEP_KEYS,
    VARIABLE,
    Draft,
    draft_document,
    join_drafts,
    with_order_problems,
)
from raymerge.recipes.order import AnyRecipe, merge_order


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


def draft_sweep(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> SweepDraft | None:
    """None where the file has no sweep, or cannot be read at all."""
    name = os.fspath(path)
    try:
        parts = split_documents(read_file(name, RECIPE), name, RECIPE)
        documents = [read_document(part, name, RECIPE) for part in parts]
    except RecipeError:
        return None
    if not any(_is_sweep(document.data) for document in documents):
        return None
    *common, _ = documents
    if misplaced := [_misplaced(each) for each in common if _is_sweep(each.data)]:
        return SweepDraft((), (), tuple(misplaced))
    drafts = [draft_document(each, part.text, exists) for each, part in zip(common, parts, strict=False)]
    before = "".join(part.text for part in parts[:-1])
    return _Expansion(documents[-1], parts[-1], before, exists).draft(drafts)


def draft_sweep_mapping(
    data: Mapping[str, Any], name: str = "recipe", *, exists: Exists = os.path.isdir
) -> SweepDraft | None:
    if not _is_sweep(data):
        return None
    return _Expansion(Located(data, Places(name), ()), None, "", exists).draft(())


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


def _is_sweep(data: Mapping[str, object]) -> bool:
    return any(key in data for key in SWEEP_KEYS)


def _misplaced(document: Located) -> Problem:
    key = next(key for key in SWEEP_KEYS if key in document.data)
    what = f"'{key}' stands in a merge that is not the last of the file."
    return Problem(document.places.at((key,)), what, "Only the last, the result, may make several outputs.")


class _Variant(NamedTuple):
    """One output before it is read."""

    values: Mapping[str, str]
    data: Mapping[str, Any]
    text: str | None


class _Expansion:
    def __init__(self, document: Located, part: Part | None, before: str, exists: Exists) -> None:
        self._document = document
        self._part = part
        self._before = before
        self._exists = exists
        self._faults: list[Fault] = []
        self._used: set[str] = set()
        self._unresolved: set[FieldPath] = set()

    def draft(self, common: Sequence[Draft]) -> SweepDraft:
        places = self._document.places
        if secret := list(secrets_in(self._document.data, RECIPE)):
            return SweepDraft((), (), tuple(places.problems(secret)))
        variants = self._variants()
        names = self._names([variant.values for variant in variants])
        own = places.problems(self._faults)
        hidden = {places.at(path) for path in self._unresolved}
        drafts = [self._drafted(variant, common, hidden) for variant in variants]
        values = tuple(variant.values for variant in variants)
        problems = in_order([*own, *joined_problems(values, [draft.problems for draft in drafts])])
        problems = problems or self._not_last(drafts[0].recipes)
        outputs = () if problems else tuple(map(self._output, names, variants, drafts))
        return SweepDraft(values, tuple(drafts), problems, outputs)

    def _variants(self) -> list[_Variant]:
        """One for each output; where the sweep is refused, one to find other faults with."""
        block = self._document.data.get("sweep")
        reader = AxesReader(block, self._scalar)
        assignments = reader.assignments()
        self._faults += (replace(fault, path=("sweep", *fault.path)) for fault in reader.faults)
        usual = {name: values[0] for name, values in reader.axes.items() if values}
        variants = [self._variant(each, reader.names) for each in assignments or (usual,)]
        self._check_use(reader.names)
        return variants

    def _scalar(self, path: FieldPath) -> str | None:
        return None if self._part is None else scalar_at(self._part, ("sweep", *path))

    def _variant(self, assignment: Assignment, names: Sequence[str]) -> _Variant:
        plain = {key: value for key, value in self._document.data.items() if key not in SWEEP_KEYS}
        data = self._substituted(plain, assignment, names, ())
        text = None
        if self._part is not None:
            replaced = {f"${axis}": value.yaml for axis, value in assignment.items()}
            text = self._checked(edited(self._part, replaced, SWEEP_KEYS), data)
        return _Variant(shown_values(assignment), data, text)

    def _checked(self, text: str, data: Mapping[str, Any]) -> str:
        """The edited text; where that is not the recipe, as with anchors in what was removed, a new one."""
        try:
            (part,) = split_documents(text, "", RECIPE)
            if read_document(part, "", RECIPE).data == data:
                return text
        except (RecipeError, ValueError):
            pass
        return ("---\n" if self._before else "") + yaml_text(data)

    def _substituted(self, value: Any, assignment: Assignment, names: Sequence[str], path: FieldPath) -> Any:
        if isinstance(value, Mapping):
            return {
                key: self._substituted(each, assignment, names, (*path, key)) for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self._substituted(each, assignment, names, (*path, index)) for index, each in enumerate(value)
            ]
        match = VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        axis = match[1]
        self._used.add(axis)
        if axis in assignment:
            return assignment[axis].value
        if path not in self._unresolved:
            self._unresolved.add(path)
            if axis not in names:
                self._faults.append(_unknown(path, axis, names))
        return None

    def _check_use(self, names: Sequence[str]) -> None:
        pattern = self._document.data.get("outputs")
        in_pattern = _PLACEHOLDER.findall(pattern) if isinstance(pattern, str) else ()
        for name in names:
            if name not in self._used and name not in in_pattern:
                what = f"nothing uses the axis '{name}'."
                remedy = f"Write ${name} where its values belong, or remove it."
                self._faults.append(Fault(("sweep", name), what, remedy))

    def _names(self, values: Sequence[Mapping[str, str]]) -> list[str]:
        pattern = self._document.data.get("outputs")
        if pattern is not None and not self._is_pattern(pattern, values[0]):
            return []
        names = [_filled(str(pattern), each) if pattern is not None else usual_name(each) for each in values]
        first: dict[str, Mapping[str, str]] = {}
        for name, each in zip(names, values, strict=True):
            if not is_name(name):
                what = f"'{name}' (with {described(each)}) cannot be the name of an output."
                self._refuse_names(
                    what, f"A name has {NAME_FORM}. Write outputs: 'NAME-{{{next(iter(each))}}}'."
                )
                break
            if name in first:
                what = (
                    f"two outputs are named '{name}': with {described(first[name])}, and {described(each)}."
                )
                self._refuse_names(what, "Put every axis that tells them apart into 'outputs'.")
                break
            first[name] = each
        return names

    def _refuse_names(self, what: str, remedy: str) -> None:
        if not self._faults:
            key = "outputs" if "outputs" in self._document.data else "sweep"
            self._faults.append(Fault((key,), what, remedy))

    def _is_pattern(self, pattern: object, axes: Collection[str]) -> bool:
        if not isinstance(pattern, str):
            self._refuse_names(f"'outputs' is {kind(pattern)}.", "Write a text like 'merged-t{t}'.")
            return False
        unknown = [name for name in _PLACEHOLDER.findall(pattern) if name not in axes]
        for name in unknown:
            self._faults.append(_unknown(("outputs",), name, axes, f"{{{name}}}"))
        if set("{}") & set(_PLACEHOLDER.sub("", pattern)):
            self._refuse_names(f"a bracket of '{pattern}' has no partner.", "Write {AXIS}.")
        return not unknown

    def _drafted(self, variant: _Variant, common: Sequence[Draft], hidden: Collection[str]) -> Draft:
        located = replace(self._document, data=variant.data)
        own = draft_document(located, variant.text, self._exists)
        draft = with_order_problems(join_drafts([*common, own]), self._exists)
        return replace(draft, problems=tuple(each for each in draft.problems if each.where not in hidden))

    def _not_last(self, recipes: Sequence[AnyRecipe]) -> tuple[Problem, ...]:
        result = merge_order(recipes, exists=self._exists)[-1]
        if result is recipes[-1]:
            return ()
        what = f"the sweep makes several outputs, and '{result.name}' uses this merge."
        return (
            Problem(recipes[-1].where(), what, "Only the result, which no other merge uses, may be a sweep."),
        )

    def _output(self, name: str, variant: _Variant, draft: Draft) -> SweepOutput:
        text = draft.recipes[-1].text if variant.text is None else f"{self._before}{variant.text}"
        return SweepOutput(name, variant.values, draft.recipes, text)


_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def _filled(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)


def _unknown(path: FieldPath, axis: str, axes: Collection[str], written: str | None = None) -> Fault:
    listed = f"Axes of the sweep: {', '.join(axes)}." if axes else ""
    return Fault(
        path,
        f"'{written or f'${axis}'}' is no axis of the sweep.",
        f"{did_you_mean(axis, axes)} {listed}".strip(),
    )
