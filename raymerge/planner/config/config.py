"""The output's ``config.json``, decided with the plan: dtype, tie flag, every field that counts layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymerge.architectures import Role, restack_config
from raymerge.architectures.depth import Parent, count_mtp_layers
from raymerge.architectures.roles import TIE_KEY
from raymerge.architectures.sections import sections, text_section
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Output
from raymerge.planner.config.quantised import quantisation_config, without_tables
from raymerge.planner.inputs.consistency import declared_dtype
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.align import Section, Span
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes import Recipe

VOCABULARY_KEY = "vocab_size"

_LAYERS_KEY = "vocab_size_per_layer_input"
# The rows of embeddings that each layer has of its own, as many as the embedding's or fewer.

_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    donor: Mapping[str, Any], *, dtype: DType | None = None, tie: bool | None = None
) -> dict[str, Any]:
    """A copy of the donor's config with the output's dtype and tie; None leaves a field unchanged.

    A field is written wherever the donor has it, at the top and in the text section; one that the donor lacks
    is added at the top. Equal to ``donor`` when nothing changes, so that its file can be copied.
    """
    result = copy.deepcopy(dict(donor))
    if dtype is not None:
        _set(result, _DTYPE_KEYS, config_name(dtype))
    if tie is not None:
        _set(result, (TIE_KEY,), tie)
    return result


def with_fields(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with fields changed or added, by dotted path; sections on the way must be there."""
    result = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section[name]
        section[key] = value
    return result


def vocabulary_size(config: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, section in sections(config):
        found |= {".".join((*path, key)): n for key, n in row_counts(section, num_rows).items()}
    return found


def row_counts(section: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    if section.get(VOCABULARY_KEY, num_rows) == num_rows:
        return {}
    own = section[VOCABULARY_KEY]
    return {key: num_rows for key in (VOCABULARY_KEY, _LAYERS_KEY) if section.get(key, num_rows) == own}


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """``config.json`` text: fields in the given order, indented by two."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _set(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    places = [(section, key) for _, section in sections(config) for key in keys if key in section]
    for section, key in places or [(config, keys[0])]:
        section[key] = value


def plan_config(
    recipe: Recipe,
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
    outputs: Sequence[Output],
    tied: bool | None,
) -> tuple[dict[str, Any], list[Problem]]:
    """The output's config, and what no config can express of this merge; raw tensor files have none."""
    if donor.checkpoint.is_raw:
        return {}, []
    config, problems = _of_sections(recipe, donor, sources, logical, sections, read=dict)
    objections: list[Problem] = []
    if problems:
        # Tables of quantisation that differ are no matter where the output's is a new one, or none.
        bare, rest = _of_sections(recipe, donor, sources, logical, sections, read=without_tables)
        objections = [each for each in problems if each not in rest]
        config, problems = (bare, rest) if objections else (config, problems)
    config = _with_mtp_count(config, donor, sources, sections, outputs)
    where, is_common = recipe.where("out_format"), not objections
    config, mixed = quantisation_config(config, donor, sources, outputs, where=where, is_common=is_common)
    problems += [*objections, mixed] if mixed is not None else []
    dtype = _main_output(outputs)
    wanted = recipe.out_dtype or recipe.dtype
    changed = wanted is not None or dtype is not main_dtype(donor.checkpoint)
    return output_config(config, dtype=stated_dtype(config, dtype, changed=changed), tie=tied), problems


def stated_dtype(config: Mapping[str, Any], dtype: DType, *, changed: bool) -> DType | None:
    """The dtype that the config must state; None where it states it already, or is silent and nothing
    changed.

    A donor whose config names another dtype than its tensors have is corrected.
    """
    said = None if config.get("quantization_config") else declared_dtype(config)
    return dtype if changed or said not in (None, config_name(dtype)) else None


def _of_sections(
    recipe: Recipe,
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
    *,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> tuple[Mapping[str, Any], list[Problem]]:
    config = read(donor.checkpoint.config)
    problems: list[Problem] = []
    for section in sections:
        if section.is_whole and not _is_foreign(section, donor, sources):
            continue
        config, sentences = _restacked(config, donor, sources, logical, section, read)
        path = ("slices",) if section.module is None else ("modules", section.module)
        remedy = "Choose slices that keep the pattern, or models whose configs agree."
        problems += [Problem(recipe.where(*path), sentence, remedy) for sentence in sentences]
    return config, problems


def _is_foreign(section: Section, donor: Source, sources: Sequence[Source]) -> bool:
    """Whether an unstacked module has layers of another model than the config's."""
    lead = sources[section.spans[0].lead.source]
    return lead.index != donor.index and None not in (
        lead.layer_stack(section.module),
        donor.layer_stack(section.module),
    )


def _restacked(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    section: Section,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    stack = donor.layer_stack(section.module)
    origins = [
        (sources[span.lead.source], n) for span in section.spans for n in _taken(span, sources, section)
    ]
    layers = [layer for _, layer in origins]
    if stack is None or not stack.is_main:
        same = stack is not None and layers == list(range(stack.num_layers))
        what = f"config.json cannot be told of other layers in '{section.module}' yet."
        return config, () if same else (what,)
    leads = {lead.index: lead for lead, _ in origins}
    parents = {index: Parent(lead.name, read(lead.checkpoint.config)) for index, lead in leads.items()}
    sparse = {index: _expert_layers(logical[index], lead, section) for index, lead in leads.items()}
    dense = [layer not in sparse[lead.index] for lead, layer in origins]
    return restack_config(
        config,
        layers,
        parents=[parents[lead.index] for lead, _ in origins],
        dense=None if all(dense) else dense,
    )


def _taken(span: Span, sources: Sequence[Source], section: Section) -> range:
    stack = sources[span.lead.source].layer_stack(section.module)
    whole = stack.num_layers if stack is not None else 0
    first = span.lead.first_layer
    return range(first, first + (whole if span.num_layers is None else span.num_layers))


def _expert_layers(logical: LogicalTensors, source: Source, section: Section) -> frozenset[int]:
    stack = source.layer_stack(section.module)
    prefix = stack.prefix if stack is not None else ""
    return frozenset(
        info.layer
        for info in logical.infos.values()
        if info.layer is not None and info.stack == prefix and info.part in (Role.EXPERT, Role.ROUTER)
    )


def _with_mtp_count(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    sections: Sequence[Section],
    outputs: Sequence[Output],
) -> Mapping[str, Any]:
    """The config with the number of multi-token-prediction layers that the merge writes.

    A number that the donor's own tensors contradict stays where the merge writes as many layers as they are.
    """
    section = next((each for each in sections if each.module in (None, "default", "text_decoder")), None)
    own = donor.layer_stack(None)
    if section is None or own is None:
        return config
    leads = [sources[span.lead.source] for span in section.spans]
    stacks = [stack for lead in leads if (stack := lead.layer_stack(None)) is not None]
    total = sum(span.num_layers or 0 for span in section.spans)
    num_layers = stacks[0].num_layers if section.is_whole and stacks else total
    names = [output.name for output in outputs]
    written = count_mtp_layers(names, {own.prefix, *(s.prefix for s in stacks)}, num_layers, donor.rules)
    stored = count_mtp_layers(donor.checkpoint.tensors, {own.prefix}, own.num_layers, donor.rules)
    if written is None or written == stored:
        return config
    return _counted(config, written, keys=donor.rules.depth.mtp_counts, lead=leads[-1])


def _counted(config: Mapping[str, Any], number: int, *, keys: Sequence[str], lead: Source) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    text = text_section(result)
    places = [(section, key) for section in (result, text) for key in keys if key in section]
    theirs = [(text, key) for key in keys if key in text_section(lead.checkpoint.config)]
    for section, key in places or theirs:
        section[key] = number
    return result


def _main_output(outputs: Sequence[Output]) -> DType:
    totals: dict[DType, int] = {}
    for output in outputs:
        if output.dtype.is_mergeable:
            totals[output.dtype] = totals.get(output.dtype, 0) + sum(row.nbytes for row in output.rows)
    return max(totals, key=lambda dtype: totals[dtype], default=DType.F32)
