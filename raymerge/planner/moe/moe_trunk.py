"""The trunk of a mixture of experts: every output but the experts and their routers."""

from __future__ import annotations

from collections.abc import Iterator

from raymerge.architectures.moe_names import trunk_name
from raymerge.merge_plan.expressions import Output
from raymerge.planner.matching.align import Aligned
from raymerge.planner.moe.shape import MoeShape
from raymerge.planner.outputs.bound_output import choose, output_subject, output_subjects
from raymerge.planner.outputs.plan_context import Workshop
from raymerge.planner.tokenizer.sources import compare_vocabularies
from raymerge.recipes import Subject


def trunk_outputs(shop: Workshop, shape: MoeShape) -> tuple[Output, ...]:
    """Everything but feed-forward layers, under the names that the family has; findings say what is wrong."""
    replaced: list[Subject] = []
    made = tuple(_outputs(shop, shape, replaced))
    shop.treatments.report_unused(replaced)
    return made


def _outputs(shop: Workshop, shape: MoeShape, replaced: list[Subject]) -> Iterator[Output]:
    dense = set(shape.dense[shape.base.index].values())
    for aligned in shop.aligned():
        name = trunk_name(shape.target, aligned.output)
        if aligned.lead in dense or name is None:
            replaced.append(output_subject(aligned, shop.supplies.logical))
            continue
        _check_vocabulary(shop, shape, aligned)
        output = shop.builder.output(aligned)
        if output is not None:
            yield output._replace(name=name)


def _check_vocabulary(shop: Workshop, shape: MoeShape, aligned: Aligned) -> None:
    """Refuse other vocabularies than the base's: a mixture has no keys that bring them together.

    The builder counts such tensors by the same key, and the first words about it stay.
    """
    pair, base = shape.base.pair, shape.base
    if pair is None or aligned.lead not in (pair.embedding, pair.head):
        return
    treatment = shop.treatments.of(aligned.span, output_subjects(aligned, shop.supplies.logical)[0])
    own = shop.supplies.stored(base.index, aligned.lead)
    if treatment is None or own is None:
        return
    for member, name in choose(aligned, treatment).members():
        found = shop.supplies.stored(member.source, name)
        if found is None or found[1].shape[0] == own[1].shape[0] or found[1].shape[1:] != own[1].shape[1:]:
            continue
        source = shop.supplies.sources[member.source]
        shop.findings.tensor(
            ("vocabulary", source.name),
            where=source.name,
            what=f"{{count}} of its tensors have {found[1].shape[0]} rows, one for each token, where "
            f"{base.name} has {own[1].shape[0]}"
            f"{compare_vocabularies(shop.supplies, member.source, base.index)}",
            remedy="Leave it out of the trunk's 'models', which are all experts where none are listed; or "
            "merge the trunk in a recipe of its own before this one, with a 'tokenizer_source', and name its "
            "result as base_model.",
            example=name,
        )
