"""Several merges in one file: their dependencies and order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeAlias, TypeVar

import xxhash

from raymerge.documents.fields import FieldPath
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.entry import Entry, Exists, ModelReference
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.router_repair import REPAIR, RepairDomain, RouterRepair
from raymerge.recipes.schema import ModelEntry, Recipe, TokenRow
from raymerge.storage.addresses import as_path

AnyRecipe: TypeAlias = Recipe | MoeRecipe | ExpertSetRecipe

Merge = TypeVar("Merge", bound=AnyRecipe)


def references(recipe: AnyRecipe) -> Iterator[tuple[FieldPath, ModelReference]]:
    """Every model that a recipe names, with its path.

    The base first, then in written order; selections among models named elsewhere (the sources of
    ``methods``, ``router``) last."""
    base = ("base_model",)
    if recipe.base_model is not None:
        yield base, recipe.base_model
    yield from (each for each in _references(recipe, ()) if each[0] != base)


def _references(value: object, path: FieldPath) -> Iterator[tuple[FieldPath, ModelReference]]:
    """The models named in a part of a recipe, in the order of its fields."""
    match value:
        case ModelReference():
            yield path, value
        case TokenRow():
            yield path, value.model
        case Entry():
            for key in type(value).model_fields:
                yield from _references(getattr(value, key), (*path, key))
        case Mapping():
            for key, each in value.items():
                yield from _references(each, (*path, key))
        case tuple():
            for index, each in enumerate(value):
                yield from _references(each, (*path, index))


def merge_order(recipes: Sequence[AnyRecipe], *, exists: Exists = os.path.isdir) -> tuple[AnyRecipe, ...]:
    """The merges to carry out, in order of dependency, else in file order; the last is the result. A recipe
    with ``router: repair`` stands for two.

    A model whose path is the name of a recipe stands for its result. Raises RecipeError for names that are
    repeated, missing or also directories, cycles, and more than one result."""
    ordered = recipe_order(recipes, exists=exists)
    return tuple(each for recipe in ordered for each in _with_repair(recipe))


def recipe_order(recipes: Sequence[Merge], *, exists: Exists = os.path.isdir) -> tuple[Merge, ...]:
    """As ``merge_order``, each recipe as written."""
    if problems := order_problems(recipes, exists=exists, are_all=True):
        raise RecipeError(problems)
    needed = _needed(recipes, tuple(_uses(recipes)))
    order: list[int] = []
    while len(order) < len(recipes):
        order.append(next(i for i in range(len(recipes)) if i not in order and needed[i].issubset(order)))
    return tuple(recipes[index] for index in order)


_OF_OUTPUT = ("calibrate", "shard_size", "duplicates", "layout", "training_state")
# What says how a merge is made or stored, and not what of.


def _with_repair(recipe: AnyRecipe) -> Iterator[AnyRecipe]:
    """Of a merge with ``router: repair`` the merge without it, and the one that repairs its routers."""
    if not isinstance(recipe, Recipe) or recipe.router != REPAIR:
        yield recipe
        return
    digest = xxhash.xxh3_64_hexdigest(recipe.model_dump_json(exclude={"name"}).encode())
    merged = f"before-repair-{digest[:8]}"
    without = {"name": merged, "router": "merge", "layout": None, "training_state": "keep"}
    yield recipe.model_copy(update=without).at_place_of(recipe)
    shared = () if recipe.calibrate is None else recipe.calibrate.texts
    domains = {
        entry.model: entry.texts or shared
        for entry in recipe.models
        if entry.texts or entry.model != recipe.base_model
    }
    repaired = Recipe(
        name=recipe.name,
        merge_method="passthrough",
        models=(ModelEntry(model=ModelReference(merged)),),
        router=RouterRepair(
            repair=tuple(RepairDomain(model=model, texts=texts) for model, texts in domains.items())
        ),
        **{key: getattr(recipe, key) for key in _OF_OUTPUT if key in recipe.model_fields_set},
    )
    yield repaired.at_place_of(recipe)


def order_problems(recipes: Sequence[AnyRecipe], *, exists: Exists, are_all: bool) -> list[Problem]:
    """Problems between the recipes of one file; unused ones only if ``are_all``."""
    uses = tuple(_uses(recipes))
    naming = [*_repeated(recipes), *_unnamed(recipes)]
    problems = [*naming, *_ambiguous(recipes, uses, exists), *_circles(recipes, uses)]
    if are_all and not naming:
        problems += _results(recipes, uses)
    return problems


@dataclass(frozen=True, slots=True)
class _Use:
    user: int
    used: int
    place: str
    revision: str | None


def _needed(recipes: Sequence[AnyRecipe], uses: Sequence[_Use]) -> dict[int, set[int]]:
    return {index: {use.used for use in uses if use.user == index} for index in range(len(recipes))}


def _uses(recipes: Sequence[AnyRecipe]) -> Iterator[_Use]:
    by_name: dict[str, int] = {}
    for index, recipe in enumerate(recipes):
        if recipe.name is not None:
            by_name.setdefault(recipe.name, index)
    for index, recipe in enumerate(recipes):
        for path, reference in references(recipe):
            parts = ((reference.path, reference.revision), (reference.lora_path, reference.lora_revision))
            for named, revision in parts:
                if named in by_name:
                    yield _Use(index, by_name[named], recipe.where(*path), revision)


def _repeated(recipes: Sequence[AnyRecipe]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for recipe in recipes:
        if recipe.name is None:
            continue
        place = recipe.where("name")
        if recipe.name in first:
            what = f"the name '{recipe.name}' was given before, at {first[recipe.name]}."
            yield Problem(place, what, "Give each merge a name of its own.")
        first.setdefault(recipe.name, place)


def _unnamed(recipes: Sequence[AnyRecipe]) -> Iterator[Problem]:
    unnamed = [recipe for recipe in recipes if recipe.name is None]
    for recipe in unnamed[1:]:
        what = f"this merge has no name, and neither has the one at {unnamed[0].where()}."
        yield Problem(
            recipe.where(), what, "Only one may go without, the result: add 'name: ...' to the others."
        )


def _ambiguous(recipes: Sequence[AnyRecipe], uses: Sequence[_Use], exists: Exists) -> Iterator[Problem]:
    for use in uses:
        name = recipes[use.used].name or ""
        if exists(name):
            what = f"'{name}' is a merge of this file, and a directory too."
            yield Problem(use.place, what, f"Rename the merge, or write './{name}' for the directory.")
        if use.revision is not None:
            what = f"'{name}' is a merge of this file and has no revision '{use.revision}'."
            yield Problem(use.place, what, f"Write '{name}' alone.")


def _circles(recipes: Sequence[AnyRecipe], uses: Sequence[_Use]) -> Iterator[Problem]:
    """Disjoint cycles; others are reported once these are broken."""
    graph = {index: sorted(needed) for index, needed in _needed(recipes, uses).items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return
        except CycleError as error:
            # graphlib names the one that is needed first, and the first one again at the end.
            circle: list[int] = error.args[1][::-1]
        names = [f"'{recipes[index].name}'" for index in circle]
        chain = ", ".join(f"{user} uses {used}" for user, used in pairwise(names))
        what = f"{names[0]} uses itself." if len(circle) == 2 else f"the merges need each other: {chain}."
        place = next(use.place for use in uses if [use.user, use.used] == circle[:2])
        yield Problem(place, what, "Name a model that is there before, or rename one of the merges.")
        left = [index for index in graph if index not in circle]
        graph = {index: [i for i in graph[index] if i in left] for index in left}


def _results(recipes: Sequence[AnyRecipe], uses: Sequence[_Use]) -> Iterator[Problem]:
    """Of several unused merges, the result is the one without a name, or the last."""
    used = {use.used for use in uses}
    unused = [recipe for index, recipe in enumerate(recipes) if index not in used]
    if len(unused) < 2:
        return
    result = next((recipe for recipe in unused if recipe.name is None), unused[-1])
    called = "the one without a name" if result.name is None else f"'{result.name}'"
    for recipe in unused:
        if recipe is not result:
            what = f"no other merge uses '{recipe.name}', but a file has one result, here {called}."
            remedy = "Use it as a model of another merge, or put it into a file of its own."
            yield Problem(recipe.where("name"), what, remedy)


def places_read(recipes: Sequence[AnyRecipe]) -> Iterator[tuple[str, str]]:
    names = {each.name for each in recipes if each.name}
    for recipe in recipes:
        for path, reference in references(recipe):
            for place in (reference.path, reference.lora_path):
                if place is not None and place not in names:
                    yield recipe.where(*path), as_path(place)
        yield from _files(recipe)


def _files(recipe: AnyRecipe) -> Iterator[tuple[str, str]]:
    yield from _calibrated(recipe)
    if isinstance(recipe, MoeRecipe):
        for key, experts in (("experts", recipe.experts), ("shared_experts", recipe.shared_experts)):
            for index, expert in enumerate(experts):
                if expert.prompt_file is not None:
                    yield recipe.where(key, index, "prompt_file"), expert.prompt_file
    elif isinstance(recipe, ExpertSetRecipe) and recipe.experts.scores not in (None, "weights", "saliency"):
        yield recipe.where("experts", "scores"), str(recipe.experts.scores)


def _calibrated(recipe: AnyRecipe) -> Iterator[tuple[str, str]]:
    """Texts that models are run on, and statistics that were made of them before."""
    if isinstance(recipe, MoeRecipe):
        return
    for index, text in enumerate(() if recipe.calibrate is None else recipe.calibrate.texts):
        yield recipe.where("calibrate", "texts", index), text
    for entry_index, entry in enumerate(recipe.models if isinstance(recipe, Recipe) else ()):
        for index, text in enumerate(entry.texts):
            yield recipe.where("models", entry_index, "texts", index), text
        if entry.statistics is not None:
            yield recipe.where("models", entry_index, "statistics"), entry.statistics
    router = recipe.router if isinstance(recipe, Recipe) else None
    for domain_index, domain in enumerate(router.repair if isinstance(router, RouterRepair) else ()):
        for index, text in enumerate(domain.texts):
            yield recipe.where("router", REPAIR, domain_index, "texts", index), text
