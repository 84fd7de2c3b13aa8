"""Build a plan: recipe and opened sources in, every output byte decided, every problem found."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raymerge.architectures import Role
from raymerge.errors import PlanError, Problem
from raymerge.methods import Method, find_method, methods
from raymerge.planner.align import Aligner, modules_of
from raymerge.planner.bind import check_parameter_names, written_parameters
from raymerge.planner.check import check_plan
from raymerge.planner.config import plan_config
from raymerge.planner.dispositions import Disposition, Fate, Rule
from raymerge.planner.expressions import Output
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.outputs import OutputBuilder
from raymerge.planner.plan import FORMAT, Plan, expression_to_json, make_plan
from raymerge.planner.segments import cut_segments, place_rows, place_shards
from raymerge.planner.sources import Source, model_references
from raymerge.planner.spans import Section, SpanBuilder
from raymerge.planner.tables import make_tables
from raymerge.planner.ties import settle_tie, with_heads
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
    with _collector_paused():
        return _proved(_built(recipe, sources, version))


def _built(recipe: Recipe, sources: Sequence[Source], version: str) -> Plan:
    method = _method(recipe)
    sections = _sections(recipe, method, sources)
    logical = [LogicalTensors(source) for source in sources]
    donor = donor_of(recipe, sources)
    aligner = Aligner(sections, sources, logical, donor=donor)
    builder = OutputBuilder(recipe, method, sources, logical)
    outputs = _outputs(builder, aligner, sections, sources, donor=sources[donor])
    tie = settle_tie(outputs, sections, sources, builder.fates, donor=sources[donor])
    findings = builder.findings
    _settle_rest(recipe, aligner, builder, sources, logical, sections)
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


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes millions of small objects and no cycles: looking for some takes a third of its time."""
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()


def _proved(plan: Plan) -> Plan:
    """The plan, if it does not contradict itself. That it does is no fault of the user's."""
    problems = check_plan(plan)
    if problems:
        raise RuntimeError("raymerge made a plan that contradicts itself:\n" + "\n".join(map(str, problems)))
    return plan


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
    problems += _module_names(recipe, sources)
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
            f"{source.name} is of another family ({source.model_type}: {', '.join(source.architectures)}) "
            f"than {lead.name} ({lead.model_type}: {', '.join(lead.architectures)}).",
            "Merge models of one architecture. If the tensors really are the same, say so with "
            f"'model: {{model: {source.reference.path}, override_architecture: "
            f"{next(iter(lead.architectures), '')}}}'.",
        )
        for source in sources
        if source.architectures != lead.architectures
        or (source.model_type != lead.model_type and not source.reference.override_architecture)
    ]


def _module_names(recipe: Recipe, sources: Sequence[Source]) -> list[Problem]:
    if not recipe.modules:
        return []
    known = sorted({module for source in sources for module in modules_of(source).values()})
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
    builder: OutputBuilder,
    aligner: Aligner,
    sections: Sequence[Section],
    sources: Sequence[Source],
    *,
    donor: Source,
) -> tuple[Output, ...]:
    """Every output that can be made, each name once."""
    made: dict[str, Output] = {}
    for aligned in with_heads(aligner.outputs(), sections, sources, donor=donor):
        output = builder.output(aligned)
        if output is not None and made.setdefault(output.name, output) is not output:
            builder.findings.tensor(
                ("twice",),
                where="plan",
                what="{count} tensors would be made twice",
                remedy="Name each module or slice once.",
                example=output.name,
            )
    return tuple(made.values())


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
    lead = sources[donor_of(recipe, sources)].name
    for source, name in list(builder.fates.unsettled()):
        rule = _rule(recipe, aligner, source, name, used=used, role=logical[source].part(name))
        if rule is not None:
            builder.fates.settle(source, name, Fate(Disposition.DROPPED, rule))
            continue
        builder.findings.tensor(
            ("extra", sources[source].name),
            where=sources[source].name,
            what=f"{{count}} of its tensors have no place in the output, since {lead} lacks them",
            remedy="Use a checkpoint without them, make this model the base, or say 'extra_tensors: drop' in "
            "the recipe to leave them out.",
            example=name,
        )


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
        "num_tensors": len(checkpoint.tensors),
        "files": [[file.key, file.nbytes, file.header_digest] for file in checkpoint.files],
    }


def _notes(
    recipe: Recipe, method: Method, sources: Sequence[Source], sections: Sequence[Section]
) -> list[str]:
    notes = [f"{source.name}: {note}" for source in sources for note in source.checkpoint.notes]
    donor = sources[donor_of(recipe, sources)].name
    notes.append(f"config, tokenizer and companion files come from {donor}")
    notes += [
        f"'{parameter.name}' has no effect on {method.name} and is accepted for compatibility"
        for parameter in method.parameters
        if not parameter.effective and parameter.name in written_parameters(recipe)
    ]
    if sections[0].module is not None:
        named = ", ".join(str(section.module) for section in sections)
        notes.append(f"modules named in the recipe: {named}; all others are copied from {donor}")
    return notes
