"""Build a plan: recipe and opened sources in, every output byte decided, every problem found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.architectures import Role
from raymerge.errors import PlanError, Problem
from raymerge.methods import Method, find_method, methods
from raymerge.planner.align import Aligned, Aligner
from raymerge.planner.bind import check_parameter_names
from raymerge.planner.config import plan_config
from raymerge.planner.dispositions import Disposition, Fate, Fates, Rule
from raymerge.planner.expressions import Output
from raymerge.planner.findings import Findings
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.outputs import OutputBuilder
from raymerge.planner.segments import cut_segments, place_rows, place_shards
from raymerge.planner.sources import Source, model_references
from raymerge.planner.spans import Section, SpanBuilder
from raymerge.planner.tables import FORMAT, Plan, expression_to_json, make_plan, make_tables
from raymerge.planner.ties import TieDecision, settle_tie, stores_own_head, with_heads
from raymerge.recipes import Recipe, canonical, did_you_mean


def build_plan(recipe: Recipe, sources: Sequence[Source], *, version: str) -> Plan:
    """The plan of a recipe over opened sources.

    The plan is returned with its problems, so that it can be shown; ``Plan.require`` refuses them.

    Args:
        recipe: what is asked.
        sources: the recipe's distinct models, opened, in recipe order.
        version: raymerge's version, kept in the manifest.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    method = _method(recipe)
    sections = _sections(recipe, method, sources)
    logical = [LogicalTensors(source) for source in sources]
    aligner = Aligner(sections, sources, logical)
    builder = OutputBuilder(recipe, method, sources, logical)
    outputs, tie = _outputs(builder, aligner, sections, sources)
    findings = builder.findings
    _one_producer(outputs, findings)
    _settle_rest(recipe, aligner, builder, sources, logical, sections)
    donor = donor_of(recipe, sources)
    config, objections = plan_config(recipe, sources[donor], sources, logical, sections, outputs, tie)
    for objection in objections:
        findings.add(objection)
    shards = place_shards(outputs, recipe.shard_size)
    rows = place_rows(outputs, shards)
    tables, expressions = make_tables(outputs, shards, rows, cut_segments(rows), builder.fates.rows())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "raymerge": version,
        "recipe": json.loads(canonical(recipe)),
        "recipe_text": recipe.text,
        "method": method.name,
        "seed": recipe.seed,
        "duplicates": recipe.duplicates,
        "sources": [_fingerprint(source) for source in sources],
        "donor": donor,
        "expressions": [expression_to_json(expression) for expression in expressions],
        "config": config,
        "tie": {"head": tie.head, "embedding": tie.embedding, "tied": tie.tied, "reason": tie.reason},
        "notes": _notes(recipe, method, sources, sections),
    }
    return make_plan(manifest, tables, findings.problems())


def donor_of(recipe: Recipe, sources: Sequence[Source]) -> int:
    """Index of the source that gives config, tokenizer and companion files: the base, or the first listed."""
    wanted = recipe.base_model or next(reference for _, reference in model_references(recipe))
    return next(source.index for source in sources if source.reference == wanted)


def _method(recipe: Recipe) -> Method:
    method = find_method(recipe.merge_method)
    if method is not None:
        return method
    known = list(methods())
    hint = did_you_mean(recipe.merge_method, known)
    raise PlanError(
        Problem(
            recipe.where("merge_method"),
            f"there is no merge_method '{recipe.merge_method}'.",
            f"{hint} raymerge has: {', '.join(known)}.".strip(),
        )
    )


def _sections(recipe: Recipe, method: Method, sources: Sequence[Source]) -> tuple[Section, ...]:
    """The sections, or every reason at once why there are none."""
    problems = [*_not_yet(recipe), *_families(recipe, sources)]
    spans = SpanBuilder(recipe, method, sources)
    sections = spans.sections()
    problems += spans.problems
    problems += check_parameter_names(recipe, method)
    problems += _module_names(recipe, sections, sources)
    if problems:
        raise PlanError(problems)
    return sections


def _not_yet(recipe: Recipe) -> list[Problem]:
    """Parts of the recipe language that are read but not carried out yet."""
    wanted = {
        "tokenizer_source": recipe.tokenizer_source,
        "tokenizer": recipe.tokenizer,
        "chat_template": recipe.chat_template,
    }
    return [
        Problem(
            recipe.where(key),
            f"'{key}' asks for a new tokenizer, and raymerge does not build tokenizers yet.",
            "Remove it to copy the base's tokenizer byte for byte.",
        )
        for key, value in wanted.items()
        if value is not None
    ]


def _families(recipe: Recipe, sources: Sequence[Source]) -> list[Problem]:
    lead = sources[donor_of(recipe, sources)]
    places = {reference: path for path, reference in model_references(recipe)}
    return [
        Problem(
            recipe.where(*places[source.reference]),
            f"{source.name} is of another family ({source.model_type}: {', '.join(source.architectures)}) than "
            f"{lead.name} ({lead.model_type}: {', '.join(lead.architectures)}).",
            "Merge models of one architecture. If the tensors really are the same, say so with "
            f"'model: {{model: {source.reference.path}, override_architecture: "
            f"{next(iter(lead.architectures), '')}}}'.",
        )
        for source in sources
        if source.architectures != lead.architectures
        or (source.model_type != lead.model_type and not source.reference.override_architecture)
    ]


def _module_names(
    recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source]
) -> list[Problem]:
    if not recipe.modules or not sections:
        return []
    logical = [LogicalTensors(source) for source in sources]
    aligner = Aligner(sections, sources, logical)
    known = sorted({module for source in sources for module in aligner.modules(source.index).values()})
    return [
        Problem(
            recipe.where("modules", name),
            f"the models have no module '{name}'.",
            f"{did_you_mean(name, known)} They have: {', '.join(known)}.".strip(),
        )
        for name in recipe.modules
        if name not in known
    ]


def _outputs(
    builder: OutputBuilder, aligner: Aligner, sections: Sequence[Section], sources: Sequence[Source]
) -> tuple[tuple[Output, ...], TieDecision]:
    aligned: list[Aligned] = list(with_heads(list(aligner.outputs()), sections, sources))
    made = [output for output in map(builder.output, aligned) if output is not None]
    return tuple(made), settle_tie(made, sections, sources, builder.fates)


def _one_producer(outputs: Sequence[Output], findings: Findings) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            findings.tensor(
                ("twice",),
                where="plan",
                what="{count} tensors would be made twice",
                remedy="Name each module or slice once.",
                example=output.name,
            )
        seen.add(output.name)


def _settle_rest(
    recipe: Recipe,
    aligner: Aligner,
    builder: OutputBuilder,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
) -> None:
    """Give every tensor that no output used its rule, or report it."""
    used = {member.source for section in sections for span in section.spans for member in span.everyone()}
    for source, name in list(builder.fates.unsettled()):
        rule = _rule(recipe, aligner, source, name, used=used, role=logical[source].part(name))
        if rule is not None:
            builder.fates.settle(source, name, Fate(Disposition.DROPPED, rule))
            continue
        if _has_finding(builder, sources[source], name):
            continue
        builder.findings.tensor(
            ("extra", sources[source].name),
            where=sources[source].name,
            what=f"{{count}} of its tensors have no place in the output, since "
            f"{sources[donor_of(recipe, sources)].name} lacks them",
            remedy="Use a checkpoint without them, make this model the base, or say 'extra_tensors: drop' in the "
            "recipe to leave them out.",
            example=name,
        )


def _has_finding(builder: OutputBuilder, source: Source, name: str) -> bool:
    """A stored head that takes part in a cut tie is reported where the tie is settled."""
    return source.pair is not None and name == source.pair.head and not stores_own_head(source)


def _rule(
    recipe: Recipe, aligner: Aligner, source: int, name: str, *, used: set[int], role: Role
) -> Rule | None:
    if source not in used:
        return Rule.CONFIG_ONLY
    if not aligner.expects(source, name):
        return Rule.OUTSIDE_MODULES if recipe.modules else Rule.OUTSIDE_SLICES
    if role is Role.BUFFER:
        return Rule.RECOMPUTED_BUFFER
    return Rule.EXTRA_DROPPED if recipe.extra_tensors == "drop" else None


def _fingerprint(source: Source) -> dict[str, Any]:
    """What tells one checkpoint from another without reading its weights."""
    checkpoint = source.checkpoint
    return {
        "name": source.name,
        "files": [[file.key, file.nbytes, file.header_digest] for file in checkpoint.files],
    }


def _notes(
    recipe: Recipe, method: Method, sources: Sequence[Source], sections: Sequence[Section]
) -> list[str]:
    notes = [f"{source.name}: {note}" for source in sources for note in source.checkpoint.notes]
    donor = sources[donor_of(recipe, sources)].name
    notes.append(f"config, tokenizer and companion files come from {donor}")
    written: Mapping[str, object] = recipe.parameters
    notes += [
        f"'{name}' has no effect on {method.name} and is accepted for compatibility"
        for name in written
        if (parameter := method.parameter(name)) is not None and not parameter.effective
    ]
    if sections and sections[0].module is not None:
        named = ", ".join(str(section.module) for section in sections)
        notes.append(f"modules named in the recipe: {named}; all others are copied from {donor}")
    return notes
