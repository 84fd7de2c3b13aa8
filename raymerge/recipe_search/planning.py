"""A search before its first evaluation: what is searched for, and every problem of its candidates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from raymerge.documents.fields import FaultError
from raymerge.documents.positions import in_order
from raymerge.errors import PlanError, Problem, RecipeError
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import Source, holdings
from raymerge.planner.merges import PlannedMerge
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges
from raymerge.recipe_search.job import Search
from raymerge.recipe_search.settings import SearchSettings, read_settings
from raymerge.recipes.load import MARK
from raymerge.recipes.search import MarkedRecipe, Values, marked_problems
from raymerge.recipes.sweep import joined_problems
from raymerge.runtime.driver.versions import companion_versions, file_versions


@dataclass(frozen=True, slots=True)
class PlannedSearch:
    search: Search
    values: Values
    """Of the candidate that is planned as an example."""
    text: str
    """Its plain recipe."""
    merges: tuple[PlannedMerge, ...]


def plan_search(
    marked: MarkedRecipe, output: Path | str, options: RunOptions, *, evaluations: int | None = None
) -> PlannedSearch:
    """Plan candidates with every extreme of every parameter, and give the first.

    Raises:
        RecipeError: marks, the ``search`` block or the recipe are not valid.
        PlanError: candidates and sources do not fit, or what they are evaluated by cannot be read."""
    settings = _settings(marked, evaluations)
    planner, probes = CandidateMerges(options), list(marked.probes())
    merges: list[tuple[PlannedMerge, ...]] = []
    problems: list[tuple[Problem, ...]] = []
    for values in probes:
        recipes = marked.candidate(values).recipes
        try:
            merges.append(planner.plan(recipes, output))
            problems.append(())
        except PlanError as error:
            problems.append(error.problems)
    if any(problems):
        raise PlanError(joined_problems([_shown(marked, values) for values in probes], problems))
    search = Search(marked, settings, _models_digest([each for own in merges for each in own]))
    # What it evaluates by is read for it.
    assert search.identity
    return PlannedSearch(search, probes[0], marked.candidate(probes[0]).text, merges[0])


def _models_digest(merges: Sequence[PlannedMerge]) -> str:
    """Of what the merges read and copy, by the versions of the files."""
    facts = [
        (each.plan.digest, file_versions(holdings(each.sources)), companion_versions(_donor(each)))
        for each in merges
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def _donor(merge: PlannedMerge) -> Source:
    return merge.sources[int(merge.plan.manifest["donor"])]


def _settings(marked: MarkedRecipe, evaluations: int | None) -> SearchSettings:
    problems = [*marked_problems(marked)]
    try:
        settings = read_settings(marked.block, marked.parameters, evaluations=evaluations)
    except FaultError as error:
        problems += _placed(marked, error)
    if problems:
        raise RecipeError(in_order(problems))
    return settings


def _placed(marked: MarkedRecipe, error: FaultError) -> Iterator[Problem]:
    yield from marked.places.problems([replace(each, path=(MARK, *each.path)) for each in error.faults])


def _shown(marked: MarkedRecipe, values: Values) -> dict[str, str]:
    return {each.name: each.written(values[each.name]).shown for each in marked.parameters}
