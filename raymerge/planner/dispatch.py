"""Dispatches a recipe to the planner of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.plan import Plan
from raymerge.planner.inputs.source import AlignSpec, Source, Stage, prepared_of
from raymerge.planner.inputs.sources import collector_paused
from raymerge.planner.moe.build import decide_mixture, moe_trunk
from raymerge.planner.moe.expert_permutation import align_stages
from raymerge.planner.moe.expert_set import decide_expert_set
from raymerge.planner.moe.shape import gate_stage, shape_of
from raymerge.planner.outputs.build import decide_merge
from raymerge.planner.outputs.finish import finish_plan
from raymerge.planner.recipe_check import check_recipe
from raymerge.recipes import AnyRecipe, ExpertSetRecipe, MoeRecipe


def stages_of(
    recipe: AnyRecipe, sources: Sequence[Source], *, version: str, made_by: Sequence[str] = ()
) -> tuple[Stage, ...]:
    """The stages that must run before a recipe, in order.

    ``made_by`` has the digests of the plans that make sources which do not exist yet: their headers do not
    depend on their numbers.

    Raises:
        PlanError: recipe and sources fit so little that there is nothing to show.
    """
    stages: tuple[Stage, ...]
    match recipe:
        case MoeRecipe():
            stages = (gate_stage(recipe, shape_of(recipe, sources), version=version),)
        case ExpertSetRecipe():
            stages = ()
        case _:
            stages = tuple(align_stages(recipe, sources, version=version))
    return tuple(_salted(stage, made_by) for stage in stages) if made_by else stages


def with_prepared(sources: Sequence[Source], stages: Sequence[Stage], root: Path) -> tuple[Source, ...]:
    """The sources with the results of stages below ``root``, each added to the model that it belongs to."""
    made: dict[int, list[Stage]] = {}
    for stage in stages:
        owner = stage.spec.other if isinstance(stage.spec, AlignSpec) else stage.spec.base
        made.setdefault(owner.index, []).append(stage)
    return tuple(
        replace(source, prepared=tuple(prepared_of(stage, root) for stage in made[source.index]))
        if source.index in made
        else source
        for source in sources
    )


def build_plan(recipe: AnyRecipe, sources: Sequence[Source], *, version: str) -> Plan:
    """The plan of a recipe over its sources, which have the results of its stages.

    Problems are in the plan, so that it can be shown; ``Plan.require`` refuses them.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    with collector_paused():
        match recipe:
            case MoeRecipe():
                return finish_plan(decide_mixture(recipe, sources), version=version)
            case ExpertSetRecipe():
                return finish_plan(decide_expert_set(recipe, sources), version=version)
            case _:
                return finish_plan(decide_merge(recipe, sources), version=version)


def recipe_problems(recipe: AnyRecipe) -> tuple[Problem, ...]:
    """Problems of a recipe's methods and parameters that hold for any models."""
    match recipe:
        case MoeRecipe():
            merge = moe_trunk(recipe)
        case ExpertSetRecipe():
            return ()
        case _:
            merge = recipe
    try:
        return check_recipe(merge).problems
    except PlanError as error:
        return error.problems


def _salted(stage: Stage, made_by: Sequence[str]) -> Stage:
    return replace(stage, digest=xxhash.xxh3_128_hexdigest("/".join((stage.digest, *made_by)).encode()))
