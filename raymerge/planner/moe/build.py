"""A mixture of experts built from dense models: trunk, experts, and routers that a stage makes.

The trunk is an ordinary merge: the base as it is, or any method over any models (Branch-Train-MiX, arXiv
2403.07816). Its feed-forward layers give way to experts, each of which is the feed-forward of one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from raymerge.architectures import Role
from raymerge.architectures.moe_names import router_name, shared_gate_name, trunk_name
from raymerge.checkpoints.source import natural_key
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Fate, Rule
from raymerge.merge_plan.expressions import Output, Part, Read, Row, conversion_expression, copy_expression
from raymerge.merge_plan.plan import Plan
from raymerge.methods import methods
from raymerge.planner.collector import collector_paused
from raymerge.planner.config.fields import output_config, vocabulary_size, with_fields
from raymerge.planner.inputs.sources import Source, holdings
from raymerge.planner.inputs.stages import Prepared, Stage
from raymerge.planner.moe.expert_rows import repeated_rows
from raymerge.planner.moe.gates import gate_stage, router_tensor, shared_gate_tensor
from raymerge.planner.moe.moe_experts import MoeExperts
from raymerge.planner.moe.moe_tokenizer import named_tokenizer
from raymerge.planner.moe.moe_trunk import trunk_outputs
from raymerge.planner.moe.shape import MoeShape, shape_of
from raymerge.planner.outputs.finish import Decided, finish_plan
from raymerge.planner.outputs.plan_context import Workshop, open_workshop
from raymerge.planner.outputs.ties import settle_tie
from raymerge.recipes import MoeRecipe, Recipe
from raymerge.recipes.trunk import trunk_recipe


def moe_stages(recipe: MoeRecipe, sources: Sequence[Source], *, version: str) -> tuple[Stage, ...]:
    """What has to be made of weights before a mixture can be built: its router rows.

    Raises:
        PlanError: no family of mixtures of experts fits the models, or a file of prompts cannot be read.
    """
    return (gate_stage(recipe, shape_of(recipe, sources), version=version),)


def build_moe_plan(recipe: MoeRecipe, sources: Sequence[Source], *, version: str) -> Plan:
    """The plan of a mixture of experts over opened sources; it carries its problems.

    Args:
        recipe: what is asked.
        sources: its distinct models, opened; ``prepared`` of the base has the result of ``moe_stages``.
        version: raymerge's version, kept in the manifest.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    with collector_paused():
        return _built(recipe, sources, version)


def moe_trunk(recipe: MoeRecipe) -> Recipe:
    """The merge that makes everything but the experts."""
    return trunk_recipe(recipe, _per_model(recipe))


def _built(recipe: MoeRecipe, sources: Sequence[Source], version: str) -> Plan:
    shape = shape_of(recipe, sources)
    shop = open_workshop(moe_trunk(recipe), sources)
    experts = MoeExperts(recipe, shape, shop)
    trunk = trunk_outputs(shop, shape)
    tie = settle_tie(trunk, shop.sections, sources, shop.builder.fates, donor=shape.base)
    outputs = (*trunk, *experts.outputs(), *_prepared_outputs(recipe, shape, shop))
    _settle_rest(shop, shape)
    resized = shop.builder.embeddings.settle(trunk, shape.base)
    config = output_config(shape.config, tie=tie.tied)
    config = with_fields(config, vocabulary_size(config, resized) if resized else {})
    tokenizer = named_tokenizer(shop.tokenizer, shape.base, shape.target)
    return finish_plan(
        Decided(
            recipe=recipe,
            sources=tuple(sources),
            donor=shop.donor,
            method=f"building a {shape.target.title}, trunk by {shop.method.name}",
            rules=tuple(each.name for each in shop.ruled),
            outputs=_in_layers(outputs),
            fates=shop.builder.fates,
            findings=shop.findings,
            config=config,
            tie=tie,
            tokenizer=tokenizer,
            notes=(*shape.notes(recipe), *shop.notes(trunk), *tokenizer.notes),
        ),
        version=version,
    )


def _per_model(recipe: MoeRecipe) -> frozenset[str]:
    """Parameters of the trunk's method of which each model has its own."""
    method = methods().get(recipe.trunk.merge_method) if recipe.trunk is not None else None
    return (
        frozenset(each.name for each in method.parameters if each.scope == "source")
        if method
        else frozenset()
    )


def _prepared_outputs(recipe: MoeRecipe, shape: MoeShape, shop: Workshop) -> Iterator[Output]:
    """Routers, gates of shared experts and constants, read from what the stage made."""
    store, prepared = _prepared(shop)
    rows = len(shape.experts) // recipe.granularity
    for layer in range(shape.num_layers):
        name = router_name(shape.target, layer, recipe.layout)
        read = _whole(shop, store, prepared, router_tensor(layer), name)
        size = (rows * recipe.granularity, shape.hidden_size)
        if recipe.granularity > 1:
            read = repeated_rows(read, rows, shape.hidden_size, times=recipe.granularity)
        yield _converted(name, size, read, shape.dtype)
        gate = shared_gate_name(shape.target, layer)
        if shape.shared_have_gates and gate is not None:
            read = _whole(shop, store, prepared, shared_gate_tensor(layer), gate)
            yield _converted(gate, (len(shape.shared), shape.hidden_size), read, shape.dtype)
    for each in shape.constants:
        read = _whole(shop, store, prepared, each.name, each.name)
        part = Part(each.name, each.shape, None)
        row = Row(prod(each.shape), copy_expression(each.dtype), (part,), (read,))
        yield Output(each.name, each.dtype, each.shape, (row,), True)


def _prepared(shop: Workshop) -> tuple[int, Prepared]:
    """The stage's result with its index among the holdings."""
    found = [
        (i, each) for i, each in enumerate(holdings(shop.supplies.sources)) if isinstance(each, Prepared)
    ]
    return found[0]


def _whole(shop: Workshop, store: int, prepared: Prepared, name: str, output: str) -> Read:
    tensor = prepared.tensors[name]
    shop.builder.fates.settle(store, name, Fate(Disposition.CONVERTED, Rule.STAGE, output))
    return Read(0, store, tensor.key, tensor.offset, tensor.nbytes, tensor.dtype, None)


def _converted(name: str, shape: tuple[int, ...], read: Read, dtype: DType) -> Output:
    is_copy = read.assembly is None and read.dtype is dtype
    expression = copy_expression(dtype) if is_copy else conversion_expression(dtype)
    row = Row(prod(shape), expression, (Part(name, shape, None),), (read,))
    return Output(name, dtype, shape, (row,), True)


def _settle_rest(shop: Workshop, shape: MoeShape) -> None:
    """Give every tensor that nothing used its rule."""
    fates, supplies, base = shop.builder.fates, shop.supplies, shape.base.name
    models = {laid.store: index for index, laid in supplies.adapters.items()}
    mixed = {member.source for section in shop.sections for span in section.spans for member in span.members}
    for store, name in list(fates.unsettled()):
        source = models.get(store, store)
        if source >= len(supplies.sources):
            continue
        changed = (supplies.adapters[source].changed_by(name) or "") if store in models else name
        if changed in shape.dense[source].values() or trunk_name(shape.target, changed) is None:
            fates.settle(store, name, Fate(Disposition.DROPPED, Rule.REPLACED_BY_EXPERTS))
        elif source not in mixed:
            fates.settle(store, name, Fate(Disposition.DROPPED, Rule.ONLY_EXPERTS_TAKEN))
        elif supplies.logical[source].part(changed) is Role.BUFFER:
            fates.settle(store, name, Fate(Disposition.DROPPED, Rule.RECOMPUTED_BUFFER))
        else:
            shop.findings.tensor(
                ("extra", supplies.sources[source].name),
                where=supplies.sources[source].name,
                what=f"{{count}} of its tensors have no place in the output, since {base} lacks them",
                remedy="Leave this model out of the trunk, or use a checkpoint without them.",
                example=name,
            )


def _in_layers(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The outputs in the order of a checkpoint: layer by layer, each name's numbers as numbers."""
    return tuple(sorted(outputs, key=lambda output: natural_key(output.name)))
