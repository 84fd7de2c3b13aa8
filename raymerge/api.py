"""The Python API: the same power as the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from raymerge.errors import CheckpointError, PlanError, Problem
from raymerge.planner.build import build_plan
from raymerge.planner.inspection import Inspection, inspect_checkpoint
from raymerge.planner.sources import Source, open_reference, open_sources
from raymerge.planner.tables import Plan
from raymerge.recipes import MoeRecipe, Recipe, load_recipe, parse_reference, recipe_from_mapping
from raymerge.recipes.faults import FaultError
from raymerge.runtime.events import Event, OnEvent
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import Pool
from raymerge.runtime.run import Run, RunResult
from raymerge.verifier.structure import Verdict, verify_structure

__all__ = [
    "Inspection",
    "Plan",
    "RecipeLike",
    "RunOptions",
    "RunResult",
    "Verdict",
    "inspect",
    "plan",
    "read_recipe",
    "submit",
    "verify",
]

RecipeLike = Recipe | Mapping[str, object] | str | Path
"""A recipe, its mapping, or the path of its file."""

_EARLY_ERRORS_SECONDS = 1.0


def read_recipe(recipe: RecipeLike) -> Recipe:
    """The recipe that is meant.

    Raises:
        RecipeError: it is not valid.
        PlanError: it is of a kind that cannot be carried out yet.
    """
    found: Recipe | MoeRecipe
    if isinstance(recipe, Recipe):
        found = recipe
    elif isinstance(recipe, Mapping):
        found = recipe_from_mapping(recipe)
    else:
        found = load_recipe(Path(recipe))
    if isinstance(found, MoeRecipe):
        raise PlanError(
            Problem(
                found.where("experts"),
                "this recipe builds a mixture of experts from dense models, which raymerge does not do yet.",
                "Recipes that merge whole models ('merge_method' with 'models' or 'slices') work.",
            )
        )
    return found


def plan(recipe: RecipeLike) -> Plan:
    """What a merge would do: every output byte with where it comes from. Reads headers, writes nothing.

    The plan carries its problems; ``Plan.require`` raises them.

    Raises:
        RecipeError: the recipe is not valid.
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    return _planned(read_recipe(recipe))[0]


def submit(
    recipe: RecipeLike,
    output: str | Path,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent | None = None,
) -> RunResult:
    """Merge, verify and publish; the same call goes on where an earlier one stopped.

    Args:
        recipe: what to merge.
        output: directory of the new checkpoint.
        options: how to run; changes no byte.
        on_event: receives progress.

    Raises:
        RaymergeError: see its subclasses; ``exit_code`` tells a user's error from an unfinished run.
    """
    began = time.monotonic()
    chosen = options or RunOptions()
    emit = on_event or _ignore
    read = read_recipe(recipe)
    with ThreadPoolExecutor(1) as thread:
        planning = thread.submit(_planned, read)
        # Most errors of a recipe show at once; only a long planning is overlapped with starting the workers.
        wait([planning], timeout=_EARLY_ERRORS_SECONDS)
        pool = _prepared(planning, chosen, Path(output), emit)
        try:
            pool.start()
            plan_made, sources = planning.result()
            run = Run(plan_made, sources, Path(output), chosen, on_event=emit, began=began)
            run.announce()
            return run.carry_out(pool)
        finally:
            pool.close()


def verify(path: str | Path) -> Verdict:
    """Verify the structure of a checkpoint on disk; the verdict lists what is wrong."""
    return verify_structure(Path(path))


def inspect(path: str | Path) -> Inspection:
    """What a checkpoint holds, from its headers; it is a directory, or a Hub name with or without a revision.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    text = str(path)
    try:
        reference = parse_reference(text, exists=os.path.isdir)
    except FaultError as error:
        raise CheckpointError([Problem(text, fault.what, fault.remedy) for fault in error.faults]) from error
    if reference.lora_path is not None:
        raise CheckpointError(
            Problem(text, "this names an adapter on a model.", "Give the model alone to inspect it.")
        )
    return inspect_checkpoint(open_reference(reference))


def _planned(recipe: Recipe) -> tuple[Plan, Sequence[Source]]:
    sources = open_sources(recipe)
    return build_plan(recipe, sources, version=version("raymerge")), sources


def _prepared(
    planning: Future[tuple[Plan, Sequence[Source]]], options: RunOptions, output: Path, emit: OnEvent
) -> Pool:
    """A pool to start; errors that planning has found by now are raised first.

    No more workers are asked for than there are segments, where that is known by now.
    """
    if planning.done():
        made, sources = planning.result()
        Run(made, sources, output, options, on_event=emit).check()
        if options.workers is not None:
            options = replace(options, workers=max(1, min(options.workers, len(made["segments"]))))
    if options.inline:
        from raymerge.runtime.inline import InlinePool

        return InlinePool(options.device)
    from raymerge.runtime.ray_pool import RayPool

    return RayPool(options, emit)


def _ignore(event: Event) -> None:
    del event
