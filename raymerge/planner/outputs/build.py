"""What a merge makes: recipe and opened sources in, every output decided, every problem found.

Servers join q, k and v, and gate and up. In NVFP4 each has a scale of the matrix, and servers take one of
them for all, so they must be equal. FP8 with one scale per matrix needs no such thing: servers encode it anew
under the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from raymerge.architectures import Role, Rules, joined_matrix, module_of
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4
from raymerge.checkpoints.source import as_numbers
from raymerge.errors import PlanError, UserError
from raymerge.merge_plan.dispositions import Rule
from raymerge.merge_plan.expressions import Output
from raymerge.planner.config.config import plan_config, vocabulary_size, with_fields
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.align import Aligner
from raymerge.planner.matching.compatibility import check_stacks
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.outputs.embeddings import settle_tie
from raymerge.planner.outputs.finish import Decided, Unplaced, Unused, settle_unused
from raymerge.planner.outputs.outputs import OutputBuilder
from raymerge.planner.outputs.plan_context import PlanContext, open_plan_context
from raymerge.recipes import Recipe


def with_numbers(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources with each packed tensor as one.

    Raises:
        PlanError: codes and scales, or they and the config, contradict each other.
    """
    found: list[Source] = []
    failures: list[UserError] = []
    for source in sources:
        try:
            numbers = as_numbers(source.checkpoint, quantised_tensors(source.checkpoint))
        except UserError as error:
            failures.append(error)
        else:
            found.append(replace(source, checkpoint=numbers))
    if failures:
        raise PlanError(problem for error in failures for problem in error.problems) from failures[0]
    return tuple(found)


_SHARED = frozenset({NVFP4})
"""Formats of which servers take one tensor scale for all that they join."""


def with_joined(outputs: Mapping[str, Output], builder: OutputBuilder, rules: Rules) -> tuple[Output, ...]:
    """The outputs, with those that are to share a scale marked.

    A joined group that one source gives unchanged stays a copy. Else copies are encoded too: their source's
    scale need not be that of the others.
    """
    groups: dict[str, list[str]] = {}
    for output in outputs.values():
        joined = joined_matrix(output.name, rules) if _is_alone(output) else None
        if joined is not None:
            groups.setdefault(joined, []).append(output.name)
    found = dict(outputs)
    for joined, names in groups.items():
        if len(names) > 1 and not _are_copies(outputs[name] for name in names):
            for name in names:
                found[name] = _marked(outputs[name], joined, builder)
    return tuple(found.values())


def _is_alone(output: Output) -> bool:
    packed = output.packed
    return packed is not None and packed.packing.format in _SHARED and packed.packing.num_matrices == 1


def _are_copies(outputs: Iterable[Output]) -> bool:
    rows = [row for output in outputs for row in output.rows]
    return all(row.expression.is_copy for row in rows) and len({row.reads[0].source for row in rows}) == 1


def _marked(output: Output, joined: str, builder: OutputBuilder) -> Output:
    if all(row.expression.is_copy for row in output.rows):
        output = builder.made_anew(output.name) or output
    packed = output.packed
    return output if packed is None else output._replace(packed=replace(packed, joined=joined))


def decide_merge(recipe: Recipe, sources: Sequence[Source]) -> Decided:
    """Decide the plan of a merge.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    sources = with_numbers(sources)
    context = open_plan_context(recipe, sources)
    builder, findings, sections, tokenizer = (
        context.builder,
        context.findings,
        context.sections,
        context.tokenizer,
    )
    donor = sources[context.donor]
    by_token = tokenizer.vocabulary is not None
    check_stacks(sections, context.aligner.placed, donor=context.donor, findings=findings, by_token=by_token)
    outputs = builder.scales.join(with_joined(_outputs(context), builder, donor.rules), donor.rules)
    context.assignments.report_unused()
    builder.report_unused()
    tie = settle_tie(outputs, sections, sources, builder.fates, donor=donor)
    rule_of = partial(_rule_of_unused, context, context.merged)
    settle_unused(context.resolver, builder.fates, findings, rule_of)
    config, objections = plan_config(
        recipe, donor, sources, context.resolver.logical, sections, outputs, tie.tied
    )
    for objection in objections:
        findings.add(objection)
    resized = builder.embeddings.settle(outputs, donor)
    config = with_fields(config, tokenizer.config or vocabulary_size(config, resized) if resized else {})
    return Decided(
        recipe=recipe,
        sources=tuple(sources),
        donor=context.donor,
        method=context.method.name,
        rules=tuple(each.name for each in context.ruled),
        outputs=outputs,
        fates=builder.fates,
        findings=findings,
        config=config,
        tie=tie,
        tokenizer=tokenizer,
        notes=context.notes(outputs),
    )


def _outputs(context: PlanContext) -> dict[str, Output]:
    made: dict[str, Output] = {}
    for aligned in context.aligned():
        output = context.builder.output(aligned)
        if output is not None and made.setdefault(output.name, output) is not output:
            context.findings.tensor(
                ("twice",),
                where="plan",
                what="{count} tensors would be made twice",
                remedy="Name each module or slice once.",
                example=output.name,
            )
    return made


def _rule_of_unused(context: PlanContext, merged: Collection[int], unused: Unused) -> Rule | Unplaced | None:
    recipe, resolver = context.recipe, context.resolver
    source, is_adapter = unused.source, unused.store != unused.source
    if source >= len(resolver.sources):
        return Rule.NOT_CHOSEN
    if not unused.name:
        return None  # That an adapter's tensor has none to go to is said already.
    role = resolver.logical[source].part(unused.name)
    rule = _rule(recipe, context.aligner, source, unused.name, merged=merged, role=role)
    if is_adapter and rule is Rule.OUTSIDE_MODULES:
        _check_named(recipe, resolver, source, unused.name, context.findings)
    lead = resolver.sources[context.donor].name
    return rule or (
        f"{{count}} of its tensors have no place in the output, since {lead} lacks them",
        "Use a checkpoint without them, make this model the base, or say 'extra_tensors: drop' in the recipe "
        "to leave them out.",
    )


def _check_named(
    recipe: Recipe, resolver: InputResolver, source: int, changed: str, findings: Findings
) -> None:
    """Refuse to drop an adapter's change because the recipe does not name the module that it is in."""
    model = resolver.sources[source]
    module = module_of(changed, model.checkpoint.config, model.stacks)
    if module in recipe.modules:
        return
    findings.tensor(
        ("unnamed module", model.name, module),
        where=resolver.adapters[source].adapter.name,
        what=f"{{count}} tensors that it changes are in the module '{module}' of {model.name}, which the "
        "recipe does not name, so that the changes would be left out",
        remedy=f"Name '{module}' below 'modules' too, make {model.name} the base_model, or use an adapter "
        "without these changes.",
        example=changed,
    )


def _rule(
    recipe: Recipe, aligner: Aligner, source: int, name: str, *, merged: Collection[int], role: Role
) -> Rule | None:
    if source not in merged:
        return Rule.CONFIG_ONLY
    if not aligner.expects(source, name):
        return Rule.OUTSIDE_MODULES if recipe.modules else Rule.OUTSIDE_SLICES
    if role is Role.BUFFER:
        return Rule.RECOMPUTED_BUFFER
    return Rule.EXTRA_DROPPED if recipe.extra_tensors == "drop" else None
