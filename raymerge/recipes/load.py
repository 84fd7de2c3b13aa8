"""From a file, a text or a mapping to a checked recipe; all faults are reported at once.

A recipe that is refused is still read without its faulty parts, so that what follows, such as finding the
models, can report its problems in the same run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import ValidationError

from raymerge.documents.fields import (
    Fault,
    FaultError,
    FieldPath,
    choice_of,
    did_you_mean,
    faults_of,
    kind,
    refusal,
)
from raymerge.documents.positions import (
    Located,
    Part,
    Places,
    in_order,
    read_document,
    read_file,
    secrets_in,
    split_documents,
    spot,
)
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.entry import RECIPE, Exists, Reading
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.order import AnyRecipe, order_problems
from raymerge.recipes.schema import TOKENIZER_WORDS, Recipe
from raymerge.recipes.settings import OUT_FORMATS, ROLE_NAMES, Scalar

UNREADABLE = Scalar(math.nan)
"""Stands for a setting that is present but unreadable."""


class MissingMethod(str):
    """Stands for a missing or unreadable ``merge_method``; a type of its own: any text could be a name."""

    __slots__ = ()


_UNNAMED = MissingMethod("?")

_ROUNDS = 16
_BY_THEMSELVES = {
    (name,) for name in ("dtype", "out_dtype", "seed", "shard_size", "duplicates", "warn_encoding_error")
}
"""Fields whose absence causes no further faults."""
_EXPERTS_FORMS = (
    "Write a list to build a mixture of experts from dense models: experts: [{source_model: PATH}, ...]; "
    "or a map to change the experts of one: experts: {keep: [0, 1]}."
)


SWEEP_KEYS = ("sweep", "checkpoints")
"""Keys of a document that stands for several recipes; ``outputs`` names what they make."""
MARK = "search"
"""Key of the block that says how to search, and of the map that stands for a value to search for."""
VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
PROMPTS = ("positive_prompts", "negative_prompts", "held_out_prompts")


@dataclass(frozen=True, slots=True)
class Draft:
    """Recipes as read, with all faults of the text."""

    recipes: tuple[AnyRecipe, ...]
    problems: tuple[Problem, ...] = ()
    partial: tuple[AnyRecipe, ...] = ()
    """Recipes that lack something on which the rest may depend."""
    names: tuple[str, ...] = ()
    guessed: frozenset[str] = frozenset()
    """Positions of replaced values: further faults there may follow from the replacement."""

    def require(self) -> tuple[AnyRecipe, ...]:
        if self.problems:
            raise RecipeError(self.problems)
        return self.recipes


def join_drafts(drafts: Iterable[Draft]) -> Draft:
    each = tuple(drafts)
    return Draft(
        tuple(recipe for draft in each for recipe in draft.recipes),
        in_order(problem for draft in each for problem in draft.problems),
        tuple(recipe for draft in each for recipe in draft.partial),
        tuple(name for draft in each for name in draft.names),
        frozenset(place for draft in each for place in draft.guessed),
    )


def with_order_problems(draft: Draft, exists: Exists) -> Draft:
    between = order_problems(draft.recipes, exists=exists, are_all=not draft.problems)
    return replace(draft, problems=in_order((*draft.problems, *between)))


def draft_document(document: Located, text: str | None, exists: Exists) -> Draft:
    if secret := list(secrets_in(document.data, RECIPE)):
        # Alone, for messages on the same values would repeat them.
        return Draft((), tuple(document.places.problems(secret)))
    if key := next((key for key in SWEEP_KEYS if key in document.data), None):
        what = f"'{key}' makes several outputs of a recipe, and one recipe is expected here."
        fault = Fault((key,), what, "Use 'raymerge submit' or 'raymerge plan'; in Python, 'submit_sweep'.")
        return Draft((), tuple(document.places.problems([fault])))
    if MARK in document.data:
        what = f"'{MARK}' stands for many recipes to choose from, and one recipe is expected here."
        fault = Fault((MARK,), what, "Use 'raymerge search' or 'raymerge plan'; in Python, 'search'.")
        return Draft((), tuple(document.places.problems([fault])))
    if marked := [_mark_alone(path) for path, _ in marks(document.data)]:
        return Draft((), tuple(document.places.problems(marked)))
    faults = [*document.faults, *_variables(document.data)]
    if "outputs" in document.data:
        what = "'outputs' names the outputs of a sweep, and there is none."
        faults.append(Fault(("outputs",), what, "Add a sweep, like sweep: {t: [0.3, 0.5]}, or remove it."))
    data = _without(document.data, "outputs")
    return _Drafting(replace(document, data=data, faults=tuple(faults)), text, exists).draft()


def marks(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
    """The maps that stand for values to search for, by their paths."""
    if isinstance(value, Mapping):
        if MARK in value:
            yield path, value
            return
        for key, each in value.items():
            yield from marks(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from marks(each, (*path, index))


def _mark_alone(path: FieldPath) -> Fault:
    what = "this stands for a value to search for, and nothing says how to search."
    return Fault(path, what, f"Write the value, or add '{MARK}' at the top of the recipe.")


def _variables(value: object, path: FieldPath = ()) -> Iterator[Fault]:
    """What stands for a value of a sweep, where there is no sweep."""
    if isinstance(value, str) and VARIABLE.fullmatch(value) is not None:
        remedy = f"Write the value, or add the sweep: sweep: {{{value[1:]}: [0.3, 0.5]}}."
        yield Fault(path, f"'{value}' stands for a value of a sweep, and there is none.", remedy)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in PROMPTS:
                yield from _variables(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _variables(each, (*path, index))


class _Drafting:
    """One document whose faults are collected and removed until the rest can be read."""

    def __init__(self, document: Located, text: str | None, exists: Exists) -> None:
        self._data: Any = document.data
        self._places = document.places
        self._text = text
        self._exists = exists
        self._anchored = document.anchored
        self._problems = self._places.problems(list(document.faults))
        # What YAML could not give is missing below: one fault for one cause.
        self._broken = {fault.path for fault in document.faults}
        self._guessed: set[FieldPath] = set()
        self._guessed_at: set[str] = set()
        self._is_unnamed = False
        self._is_partial = any(_lost(document.data, fault.path) for fault in document.faults)

    def draft(self) -> Draft:
        name = self._data.get("name")
        recipe, faults = self._noted()
        for _ in range(_ROUNDS):
            if not faults or not all(fault.path for fault in faults):
                break
            self._leave_out(faults)
            recipe, faults = self._read()
        if self._is_unnamed and isinstance(recipe, Recipe):
            recipe = recipe.model_copy(update={"merge_method": _UNNAMED})  # Reading makes plain text of it.
        recipes = () if recipe is None else (recipe,)
        names = (name,) if isinstance(name, str) else ()
        partial = recipes if self._is_partial else ()
        return Draft(recipes, in_order(self._problems), partial, names, frozenset(self._guessed_at))

    def _noted(self) -> tuple[AnyRecipe | None, list[Fault]]:
        """The recipe if it has no further faults, and the new faults, which are recorded.

        Typos are corrected first, keys before values, since other faults may follow from them."""
        recipe, faults = self._read()
        earlier: list[Fault] | None = None
        for _ in range(_ROUNDS):
            slips = [fault for fault in faults if fault.meant is not None]
            slips = [fault for fault in slips if fault.is_key] or slips
            if not slips:
                break
            if not slips[0].is_key:
                # A value that was guessed may not go with the others: that is no fault of theirs.
                earlier = faults
            self._note(slips)
            for fault in slips:
                self._mend(fault)
            recipe, faults = self._read()
        self._note(
            fault for fault in faults if not self._is_told(fault) and (earlier is None or fault in earlier)
        )
        return recipe, faults

    def _read(self) -> tuple[AnyRecipe | None, list[Fault]]:
        try:
            schema = _kind(self._data)
            ignored = schema.ignored(self._data, self._anchored)
            reading = Reading(
                self._places, self._text, self._exists, notes=tuple(filter(None, ignored.values()))
            )
            effective = {key: value for key, value in self._data.items() if key not in ignored}
            return schema.model_validate(effective, context=reading), []
        except FaultError as error:
            return None, list(error.faults)
        except ValidationError as error:
            return None, faults_of(error)

    def _is_told(self, fault: Fault) -> bool:
        """Whether a fault follows from another: from YAML without a value there, or a guessed key that does
        not fit."""
        path = fault.path
        # The nearest key at or above the place.
        key = path
        while key and not isinstance(key[-1], str):
            key = key[:-1]
        return key in self._guessed or path in self._broken

    def _note(self, faults: Iterable[Fault]) -> None:
        self._problems += self._places.problems(list(faults))

    def _mend(self, fault: Fault) -> None:
        *parents, last = fault.path
        above = tuple(parents)
        meant = str(fault.meant)
        if not fault.is_key:
            self._guessed_at.add(self._places.at(fault.path))
            self._data = _changed(self._data, fault.path, lambda _: meant)
            return
        holder = reduce(getitem, above, self._data)
        if meant in holder:
            self._data = _changed(self._data, above, lambda each: _without(each, last))
            return
        self._guessed.add((*above, meant))
        written = {**self._places.renamed, (*self._places.as_written(above), meant): str(last)}
        self._places = replace(self._places, renamed=written)
        self._data = _changed(
            self._data, above, lambda each: {meant if key == last else key: each[key] for key in each}
        )

    def _leave_out(self, faults: Sequence[Fault]) -> None:
        """Remove faulty values; a missing value removes its parent."""
        gone: set[FieldPath] = set()
        for fault in faults:
            path = fault.path
            self._is_partial |= not fault.is_key and "parameters" not in path and path not in _BY_THEMSELVES
            if "parameters" in path[:-1]:
                setting = path[: path.index("parameters") + 2]
                self._data = _changed(self._data, setting, lambda _: UNREADABLE)
            elif path == ("merge_method",):
                self._data = {**self._data, "merge_method": _UNNAMED}
                self._is_unnamed = True
            elif path[0] == "experts" and len(path) <= 2 and not _lost(self._data, path):
                # What the router lacks is nothing to those who look at the models.
                self._data = {**self._data, "gate_mode": "random", "experts_per_token": 1}
            else:
                while path and _lost(self._data, path):
                    path = path[:-1]
                gone.add(path)
        # From the end of a list: those behind an item that is removed would get other numbers.
        for path in sorted(gone, key=lambda path: [(isinstance(s, str), s) for s in path], reverse=True):
            if not any(path[:length] in gone for length in range(len(path))):
                self._remove(path)

    def _remove(self, path: FieldPath) -> None:
        if not path:
            self._data = {}
            return
        *above, last = path
        if isinstance(last, int):
            gone = self._places.left_out | {self._places.as_written(path)}
            self._places = replace(self._places, left_out=gone)
        self._data = _changed(self._data, tuple(above), lambda each: _without(each, last))


def _lost(data: Any, path: FieldPath) -> bool:
    for step in path:
        if isinstance(data, Mapping):
            data = data.get(step)
        elif isinstance(data, (list, tuple)) and isinstance(step, int) and step < len(data):
            data = data[step]
        else:
            return True
    return data is None


def _changed(value: Any, path: FieldPath, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    step, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {key: _changed(each, rest, change) if key == step else each for key, each in value.items()}
    return [_changed(each, rest, change) if index == step else each for index, each in enumerate(value)]


def _without(value: Any, step: str | int) -> Any:
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if key != step}
    return [each for index, each in enumerate(value) if index != step]


def _kind(data: Mapping[str, Any]) -> type[Recipe] | type[MoeRecipe] | type[ExpertSetRecipe]:
    experts = data.get("experts")
    if isinstance(experts, Mapping):
        return ExpertSetRecipe
    if isinstance(experts, (list, tuple)) or "gate_mode" in data:
        return MoeRecipe
    if "experts" not in data:
        return Recipe
    raise FaultError(Fault(("experts",), f"'experts' is {kind(experts)}.", _EXPERTS_FORMS))


_CHANGE_NO_BYTE = {"name", "warn_encoding_error"}


def draft_recipes(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> Draft:
    """All recipes in a YAML file as far as readable, with their faults.

    Messages name the file as given. ``exists`` says whether a text is a local directory; paths of models are
    relative to the current one, not to the recipe."""
    name = os.fspath(path)
    try:
        return _draft_parts(split_documents(read_file(name, RECIPE), name, RECIPE), name, exists)
    except RecipeError as error:
        return Draft((), error.problems)


def parse_recipe(text: str, name: str = "recipe", *, exists: Exists = os.path.isdir) -> AnyRecipe:
    """The only recipe in a YAML text; ``name`` stands before line and column in messages."""
    parts = split_documents(text, name, RECIPE)
    if len(parts) > 1:
        what = f"a second recipe starts here, the file has {len(parts)}; one is expected."
        remedy = (
            "Give the file to 'raymerge submit', which carries out all of them, or keep one recipe in it."
        )
        raise RecipeError(Problem(spot(name, parts[1].mark), what, remedy))
    return _draft_parts(parts, name, exists).require()[0]


def parse_recipes(
    text: str, name: str = "recipe", *, exists: Exists = os.path.isdir
) -> tuple[AnyRecipe, ...]:
    return _draft_parts(split_documents(text, name, RECIPE), name, exists).require()


def recipe_from_mapping(
    data: Mapping[str, Any], name: str | Places = "recipe", *, exists: Exists = os.path.isdir
) -> AnyRecipe:
    return draft_mapping(data, name, exists=exists).require()[0]


def draft_mapping(
    data: Mapping[str, Any], name: str | Places = "recipe", *, exists: Exists = os.path.isdir
) -> Draft:
    places = name if isinstance(name, Places) else Places(name)
    return draft_document(Located(data, places, ()), None, exists)


def canonical(recipe: AnyRecipe) -> str:
    """One line of JSON with every field that can change an output byte, for digests; independent of spelling,
    layout and name."""
    plain = recipe.model_dump(mode="json", exclude=_CHANGE_NO_BYTE)
    if isinstance(recipe, Recipe) and recipe.tokenizer is not None:
        # Tokens are added in the order of the recipe, which sorted keys would hide.
        plain["tokenizer"]["tokens"] = list(plain["tokenizer"]["tokens"].items())
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _draft_parts(parts: Sequence[Part], name: str, exists: Exists) -> Draft:
    drafts: list[Draft] = []
    for part in parts:
        try:
            document = read_document(part, name, RECIPE)
        except RecipeError as error:
            drafts.append(Draft((), error.problems))
        else:
            drafts.append(draft_document(document, part.text, exists))
    return with_order_problems(join_drafts(drafts), exists)


_NAME = "convert"
_PLACE = "--to"
_PATTERN = frozenset("*?[.")


def conversion_recipe(
    model: str, to: Sequence[str], *, layout: str | None = None, exists: Exists = os.path.isdir
) -> AnyRecipe:
    """A passthrough of one model with ``out_format``, and with a ``layout`` if one is given.

    ``to`` holds ``[SELECTOR:]FORMAT``, of which the first that matches a tensor holds; a selector is a role
    or a glob. Raises RecipeError with all faults."""
    lines: list[dict[str, str]] = []
    problems: list[Problem] = []
    for text in to:
        try:
            lines.append(_line(text))
        except FaultError as error:
            problems += (Problem(f"{_PLACE} {text}", fault.what, fault.remedy) for fault in error.faults)
    problems += _never_reached(to, lines) if not problems else ()
    if problems:
        raise RecipeError(problems)
    content = {"merge_method": "passthrough", "models": [{"model": model}], "out_format": lines}
    if layout is not None:
        content["layout"] = layout
    return recipe_from_mapping(content, _ArgumentPlaces(_NAME, arguments=tuple(to)), exists=exists)


_FLAGS = {
    ("models", 0, "model"): "MODEL",
    ("tokenizer", "source"): "--tokenizer",
    ("tokenizer", "approximation"): "--approximation",
    ("tokenizer", "k"): "--k",
    ("tokenizer", "pad_to_multiple_of"): "--pad-to-multiple-of",
}


def transplant_recipe(
    model: str, donor: str, settings: Mapping[str, Any], *, exists: Exists = os.path.isdir
) -> AnyRecipe:
    """A passthrough of one model with the vocabulary of another; ``settings`` are those of the ``tokenizer``
    block. Raises RecipeError with all faults."""
    # A directory may have the name of a word: here it is always a path.
    source = {"model": {"path": donor}} if donor in TOKENIZER_WORDS else donor
    block = {"source": source, **{key: value for key, value in settings.items() if value is not None}}
    content = {"merge_method": "passthrough", "models": [{"model": model}], "tokenizer": block}
    return recipe_from_mapping(content, _FlagPlaces("transplant"), exists=exists)


@dataclass(frozen=True, slots=True)
class _FlagPlaces(Places):
    def at(self, path: FieldPath) -> str:
        lengths = range(len(path), 0, -1)
        flags = (_FLAGS[path[:length]] for length in lengths if path[:length] in _FLAGS)
        return next(flags, None) or Places(self.name, self.marks).at(path)


@dataclass(frozen=True, slots=True)
class _ArgumentPlaces(Places):
    arguments: tuple[str, ...] = ()

    def at(self, path: FieldPath) -> str:
        if path == ("layout",):
            return "--like"
        if path[:1] != ("out_format",):
            return Places(self.name, self.marks).at(path)
        line = path[1] if len(path) > 1 else None
        argument = self.arguments[line] if isinstance(line, int) else ""
        return f"{_PLACE} {argument}".rstrip()


def _line(text: str) -> dict[str, str]:
    selector, colon, form = text.rpartition(":")
    line = {"value": choice_of(*OUT_FORMATS)(form)}
    if not colon:
        return line
    if selector in ROLE_NAMES:
        return {"role": selector, **line}
    if not _PATTERN.isdisjoint(selector):
        return {"glob": selector, **line}
    what = f"'{selector}' is no role, and no pattern of names either."
    hint = did_you_mean(selector, ROLE_NAMES)
    remedy = f"{hint} Roles are {', '.join(ROLE_NAMES)}; a pattern is like '*.self_attn.*'.".lstrip()
    raise refusal(what, remedy)


def _never_reached(to: Sequence[str], lines: Sequence[dict[str, str]]) -> list[Problem]:
    place = next((index for index, line in enumerate(lines) if len(line) == 1), len(lines))
    what = f"'{to[place]}' stands before it and is for all tensors." if place < len(to) else ""
    return [Problem(f"{_PLACE} {text}", what, f"Give '{to[place]}' last.") for text in to[place + 1 :]]
