"""The output's ``config.json``, decided with the plan: dtype, tie flag, every field that counts layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.architectures import Role, restack_config
from raymerge.architectures.sections import text_section
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.planner.config_fields import output_config
from raymerge.planner.expressions import Output
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.sources import Source
from raymerge.planner.spans import Section, Span
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
        if section.is_whole:
            continue
        config, sentences = _restacked(config, donor, sources, logical, section)
        path = ("slices",) if section.module is None else ("modules", section.module)
        remedy = "Choose slices that keep the pattern."
        problems += [Problem(recipe.where(*path), sentence, remedy) for sentence in sentences]
    dtype = _main_output(outputs)
    wanted = recipe.out_dtype or recipe.dtype
    changed = wanted is not None or dtype is not main_dtype(donor.checkpoint)
    return output_config(config, dtype=dtype if changed else None, tie=tie.tied), problems


def _restacked(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    section: Section,
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config for a section's layers, and what it cannot express."""
    stack = donor.layer_stack(section.module)
    leads = [(span, sources[span.lead.source]) for span in section.spans]
    layers = [layer for span, _ in leads for layer in _taken(span)]
    if stack is None or not stack.is_main:
        same = stack is not None and layers == list(range(stack.num_layers))
        what = f"config.json cannot be told of other layers in '{section.module}' yet."
        return config, () if same else (what,)
    sparse = {lead.index: _expert_layers(logical[lead.index], lead, section) for _, lead in leads}
    dense = [layer not in sparse[lead.index] for span, lead in leads for layer in _taken(span)]
    others = tuple(
        f"{lead.name} and {donor.name} have configs that list their layers one by one and differently, and "
        "such lists cannot be put together."
        for lead in {lead.index: lead for _, lead in leads}.values()
        if _layer_lists(lead, section) != _layer_lists(donor, section)
    )
    # Layers that only a deeper parent has are of no kind that the donor's config could list.
    known = [min(layer, stack.num_layers - 1) for layer in layers]
    restacked, sentences = restack_config(config, known, dense=None if all(dense) else dense)
    return restacked, (*others, *sentences)


def _taken(span: Span) -> range:
    return range(span.lead.first_layer, span.lead.first_layer + (span.num_layers or 0))


def _layer_lists(source: Source, section: Section) -> dict[str, list[Any]]:
    """Fields of a config with one entry a layer."""
    stack = source.layer_stack(section.module)
    depth = stack.num_layers if stack is not None else 0
    return {
        key: value
        for key, value in text_section(source.checkpoint.config).items()
        if isinstance(value, list)
        and len(value) == depth > 1
        and not source.rules.depth.not_per_layer.search(key)
    }


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
