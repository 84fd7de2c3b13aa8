"""The output's ``config.json``, decided with the plan: dtype, tie flag, and every field that counts layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.architectures import Role, restack_config
from raymerge.assemble.config import output_config
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.planner.expressions import Output
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.sources import Source
from raymerge.planner.spans import Section
from raymerge.planner.ties import TieDecision
from raymerge.recipes import Recipe


def plan_config(
    recipe: Recipe,
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
    outputs: Sequence[Output],
    tie: TieDecision,
) -> tuple[dict[str, Any], list[Problem]]:
    """The output's config, and what no config can say of this merge."""
    config: Mapping[str, Any] = donor.checkpoint.config
    problems: list[Problem] = []
    for section in sections:
        if not section.is_whole:
            config, found = _restacked(recipe, config, donor, sources, logical, section)
            problems += found
    dtype = _main_output(outputs)
    wanted = recipe.out_dtype or recipe.dtype
    changed = wanted is not None or dtype is not main_dtype(donor.checkpoint)
    return output_config(config, dtype=dtype if changed else None, tie=tie.tied), problems


def _restacked(
    recipe: Recipe,
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    section: Section,
) -> tuple[Mapping[str, Any], list[Problem]]:
    where = recipe.where("slices") if section.module is None else recipe.where("modules", section.module)
    depth = _depth(donor, section)
    layers: list[int] = []
    dense: list[bool] = []
    problems: list[Problem] = []
    for span in section.spans:
        lead = sources[span.lead.source]
        taken = range(span.lead.first_layer, span.lead.first_layer + (span.num_layers or 0))
        sparse = _expert_layers(logical[lead.index], lead, section)
        dense += [layer not in sparse for layer in taken]
        layers += [min(layer, depth - 1) for layer in taken] if depth else taken
        if _depth(lead, section) != depth and _lists_layers(lead, _depth(lead, section)):
            problems.append(
                Problem(
                    where,
                    f"{lead.name} and {donor.name} have different numbers of layers and configs that list them one "
                    "by one, and such lists cannot be put together.",
                    "Stack layers of models of one depth.",
                )
            )
    new, sentences = restack_config(config, layers, dense=None if all(dense) else dense)
    problems += [
        Problem(where, sentence, "Choose slices that keep the pattern.") for sentence in sentences
    ]
    return new, problems


def _depth(source: Source, section: Section) -> int:
    stack = source.layer_stack(section.module)
    return stack.num_layers if stack is not None else 0


def _lists_layers(source: Source, depth: int) -> bool:
    return any(
        isinstance(value, list) and len(value) == depth > 1 for value in source.checkpoint.config.values()
    )


def _expert_layers(logical: LogicalTensors, source: Source, section: Section) -> frozenset[int]:
    stack = source.layer_stack(section.module)
    prefix = stack.prefix if stack is not None else ""
    return frozenset(
        info.layer
        for info in logical.infos.values()
        if info.layer is not None and info.stack == prefix and info.part in (Role.EXPERT, Role.ROUTER)
    )


def _main_output(outputs: Sequence[Output]) -> DType:
    totals: dict[DType, int] = {}
    for output in outputs:
        if output.dtype.is_mergeable:
            totals[output.dtype] = totals.get(output.dtype, 0) + sum(row.nbytes for row in output.rows)
    return max(totals, key=lambda dtype: totals[dtype], default=DType.F32)
