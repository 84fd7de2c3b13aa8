"""``router: base | MODEL``: routers that come from one model, whatever is done with the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.architectures import Role
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.expressions import Output
from raymerge.planner.inputs.sources import model_references
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes import MethodRule, Recipe

ROUTER_ROLES = (Role.ROUTER.value, Role.ROUTER_BIAS.value)
"""Roles of the tensors that the policy speaks of."""


def with_router_rule(recipe: Recipe) -> tuple[Recipe, int | None]:
    """The recipe with its ``router`` as one more rule, and that rule's number; itself for ``merge``.

    Raises:
        PlanError: the model named is not one that the recipe merges.
    """
    if recipe.router == "merge":
        return recipe, None
    wanted = recipe.base_model if recipe.router == "base" else recipe.router
    if wanted is None:
        what = "'router: base' keeps the base's routers, and there is no base_model."
        raise PlanError(Problem(recipe.where("router"), what, "Name the base_model, or one of the models."))
    known = list(dict.fromkeys(reference for _, reference in model_references(recipe)))
    if wanted not in known:
        what = f"{wanted} is not one of the models that the recipe merges."
        remedy = f"Name one of: {', '.join(map(str, known))}; or write merge, or base."
        raise PlanError(Problem(recipe.where("router"), what, remedy))
    rule = MethodRule(role=ROUTER_ROLES, merge_method="passthrough", sources=(wanted,))
    return recipe.model_copy(update={"methods": (*recipe.methods, rule)}), len(recipe.methods)


def router_notes(recipe: Recipe, outputs: Sequence[Output], logical: LogicalTensors) -> Iterator[str]:
    """Where routers come from, if there are any.

    Args:
        recipe: with its ``router``.
        outputs: what is written.
        logical: tensors of the model whose names the output takes.
    """
    infos = logical.infos
    if not any(o.name in infos and infos[o.name].part in ROUTER_ROLES for o in outputs):
        return
    if recipe.router == "merge":
        by = "as 'methods' and merge_method say" if recipe.methods else f"by {recipe.merge_method}"
        yield f"routers are merged {by} (router: merge)"
    else:
        chosen = recipe.base_model if recipe.router == "base" else recipe.router
        yield f"routers and their biases are those of {chosen} (router: {recipe.router})"
