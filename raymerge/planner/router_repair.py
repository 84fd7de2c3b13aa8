"""Which routers of a merge are repaired, and what from: from headers and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from raymerge.architectures.rules import Role
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.errors import PlanError, Problem
from raymerge.planner.calibration import check_length, digested_texts, routed_blocks
from raymerge.planner.inputs.sources import (
    RepairSpec,
    RouterPlace,
    Source,
    Stage,
    make_stage,
    model_references,
)
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.recipes.calibration import Calibrate
from raymerge.recipes.router_repair import RouterRepair
from raymerge.recipes.schema import Recipe

KIND = "router_repair"
"""Of the stage's report."""

_MERGE = "Or write 'router: merge'."


def repair_stage(recipe: Recipe, repair: RouterRepair, sources: Sequence[Source], *, version: str) -> Stage:
    """The stage that solves for the routers. Raises PlanError: they cannot be repaired; with all problems."""
    by_reference = {source.reference: source for source in sources}
    merged_models = dict.fromkeys(reference for _, reference in model_references(recipe))
    merged = by_reference[next(iter(merged_models))]
    models = tuple(by_reference[domain.model] for domain in repair.repair)
    calibrate = recipe.calibrate or Calibrate()
    routers, problems = _routers(merged)
    if recipe.merge_method != "passthrough" or len(merged_models) > 1:
        what = "routers are repaired in a merge that is made: by a passthrough of that one model."
        problems.append(Problem(recipe.where("router"), what, "In a merge write 'router: repair' alone."))
    if not problems:
        problems += [problem for model in models for problem in _misfits(routers, merged, model)]
    try:
        check_length(calibrate.length, merged, recipe.where("calibrate", "length"))
    except PlanError as error:
        problems += error.problems
    texts = []
    for index, domain in enumerate(repair.repair):
        try:
            texts.append(digested_texts(domain.texts, recipe.where("router", "repair", index, "texts")))
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)
    spec = RepairSpec(merged, models, tuple(texts), routers, calibrate.tokens, calibrate.length)
    return make_stage(
        name=f"@routers-{xxhash.xxh3_64_hexdigest(str(merged.reference).encode())}",
        title=f"repair of the routers of {merged.name}",
        place=recipe.where("router"),
        spec=spec,
        tensors=[*_results(merged, routers)],
        version=version,
    )


def _results(merged: Source, routers: Sequence[RouterPlace]) -> Iterator[TensorSpec]:
    logical = LogicalTensors(merged)
    for router in routers:
        for name in filter(None, (router.weight, router.bias)):
            place = logical.find(name)
            assert place is not None
            yield TensorSpec(name, place.tensor.dtype, place.shape)


def _routers(merged: Source) -> tuple[tuple[RouterPlace, ...], list[Problem]]:
    problems: list[Problem] = []
    routers: list[RouterPlace] = []
    try:
        blocks = routed_blocks(merged)
    except PlanError as error:
        return (), list(error.problems)
    logical = LogicalTensors(merged)
    for block in blocks:
        own = (each.tensor for each in block.stacked if each.part is Role.ROUTER)
        weights = [tensor for tensor in own if len(tensor.shape) == 2]
        if len(weights) != 1 or weights[0].shape[0] != block.num_experts:
            what = f"layer {block.layer} has experts, and no one router matrix with a row for each."
            problems.append(Problem(merged.name, what, _MERGE))
        elif not weights[0].dtype.is_mergeable:
            what = (
                f"{weights[0].name} is stored as {weights[0].dtype.value} codes, and plain routers alone are "
            )
            what += "repaired."
            problems.append(Problem(merged.name, what, f"Convert it first. {_MERGE}"))
        else:
            routers.append(_router(block, weights[0], logical))
    if not blocks:
        what = "it has no layers with experts, and so no routers to repair."
        problems.append(Problem(merged.name, what, "Merge mixtures of experts, or remove 'router: repair'."))
    return tuple(routers), problems


def _router(block: ExpertBlock, weight: StoredTensor, logical: LogicalTensors) -> RouterPlace:
    # A selection bias is another thing: it has no part in the scores.
    own = f"{weight.name.removesuffix('weight')}bias"
    bias = next((each.tensor.name for each in block.stacked if each.tensor.name == own), "")
    return RouterPlace(
        block.layer,
        logical.logical_name(weight.name),
        logical.logical_name(bias) if bias else "",
        (weight.shape[0], weight.shape[1]),
    )


def _misfits(routers: Sequence[RouterPlace], merged: Source, model: Source) -> Iterator[Problem]:
    logical = LogicalTensors(model)
    for router in routers:
        place = logical.find(router.weight)
        shape = None if place is None else place.shape
        if shape != router.shape:
            own = "has none" if shape is None else f"has {shape[0]} experts and inputs of {shape[-1]}"
            what = f"the router of layer {router.layer} of {merged.name} has {router.shape[0]} experts and "
            what += f"inputs of {router.shape[1]}, and this model {own}."
            yield Problem(model.name, what, "Name models with the experts that were merged.")
            return
