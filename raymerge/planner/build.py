"""Build a plan: recipe and opened sources in, every output byte decided, every problem found."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raymerge.architectures import Role, module_of
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.layout import FileLayout
from raymerge.checkpoints.source import natural_key
from raymerge.errors import PlanError, Problem
from raymerge.methods import Method, find_method, methods
from raymerge.planner.align import Aligner, modules_of
from raymerge.planner.bind import check_parameter_names
from raymerge.planner.check import check_plan
from raymerge.planner.config import plan_config
from raymerge.planner.config_fields import vocabulary_size, with_fields
from raymerge.planner.consistency import config_problems
from raymerge.planner.dispositions import Disposition, Fate, Rule
from raymerge.planner.expressions import Output
from raymerge.planner.families import other_families, other_meanings
from raymerge.planner.findings import Findings
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.notes import adapter_notes, base_notes, recipe_notes
from raymerge.planner.outputs import OutputBuilder
from raymerge.planner.plan import FORMAT, Plan, expression_to_json, make_plan
from raymerge.planner.segments import cut_segments, place_rows, place_shards
from raymerge.planner.sources import Holding, Path_, Source, holdings, model_references
from raymerge.planner.spans import Section, SpanBuilder
from raymerge.planner.stacking import check_stacks
from raymerge.planner.supplies import Supplies
from raymerge.planner.tables import make_tables
from raymerge.planner.ties import settle_tie, with_heads
from raymerge.planner.treatments import OWN, Treatments, check_rule_sources
from raymerge.planner.vocabularies import plan_tokenizer
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
    method, ruled = _methods(recipe)
    donor = donor_of(recipe, sources)
    findings = Findings()
    treatments = Treatments(recipe, method, ruled, sources, findings)
    sections = _sections(recipe, (method, *ruled), sources, treatments, findings)
    logical = [LogicalTensors(source) for source in sources]
    aligner = Aligner(sections, sources, logical, donor=donor)
    supplies = Supplies(sources, logical)
    for laid in supplies.adapters.values():
        for problem in laid.problems():
            findings.add(problem)
    tokenizer, problems = plan_tokenizer(recipe, supplies, donor=donor)
    for problem in problems:
        findings.add(problem)
    builder = OutputBuilder(recipe, treatments, supplies, findings, vocabulary=tokenizer.vocabulary)
    by_token = tokenizer.vocabulary is not None
    check_stacks(sections, aligner.placed, donor=donor, findings=findings, by_token=by_token)
    outputs = _outputs(recipe, builder, aligner, sections, sources)
    treatments.report_unused()
    tie = settle_tie(outputs, sections, sources, builder.fates, donor=sources[donor])
    _settle_rest(recipe, aligner, builder, supplies, sections)
    config, objections = plan_config(recipe, sources[donor], sources, logical, sections, outputs, tie)
    for objection in objections:
        findings.add(objection)
    resized = builder.embeddings.settle(outputs, sources[donor])
    config = with_fields(config, tokenizer.config or vocabulary_size(config, resized) if resized else {})
    shards = place_shards(outputs, recipe.shard_size)
    for problem in _disagreements(shards, config, sources[donor]) if findings.is_empty else ():
        findings.add(problem)
    rows = place_rows(outputs, shards)
    tables, expressions = make_tables(
        outputs, shards, rows, cut_segments(rows), builder.fates.rows(), tokenizer.files
    )
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "raymerge": version,
        "recipe": json.loads(canonical(recipe)),
        "recipe_text": recipe.text,
        "method": method.name,
        "rules": [each.name for each in ruled],
        "seed": recipe.seed,
        "duplicates": recipe.duplicates,
        "sources": [_fingerprint(holding) for holding in holdings(sources)],
        "donor": donor,
        "expressions": [expression_to_json(expression) for expression in expressions],
        "config": config,
        "left_out": list(tokenizer.left_out),
        "tie": {"head": tie.head, "embedding": tie.embedding, "tied": tie.tied, "reason": tie.reason},
        "notes": [
            *recipe_notes(recipe, (method, *ruled), sources, sections, donor=donor),
            *base_notes(treatments, sections, sources),
            *tokenizer.notes,
            *adapter_notes(supplies, builder.fates),
        ],
    }
    return make_plan(manifest, tables, findings.problems())


def _disagreements(
    shards: Sequence[tuple[str, FileLayout]], config: Mapping[str, Any], donor: Source
) -> Iterator[Problem]:
    """Where the output's config and tensors would disagree; what no rule changed came from the donor."""
    tensors = {
        tensor.name: StoredTensor(tensor.name, tensor.dtype, tensor.shape, key, tensor.offset, tensor.nbytes)
        for key, layout in shards
        for tensor in layout.tensors
    }
    ordered = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
    yield from config_problems(replace(donor.checkpoint, config=config, tensors=ordered))


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


def _methods(recipe: Recipe) -> tuple[Method, tuple[Method, ...]]:
    """The recipe's own method, and that of each of its rules.

    Raises:
        PlanError: with every name that is no method's.
    """
    problems: list[Problem] = []
    own = _named(recipe, recipe.merge_method, ("merge_method",), problems)
    ruled = [
        _named(recipe, rule.merge_method or recipe.merge_method, ("methods", index, "merge_method"), problems)
        for index, rule in enumerate(recipe.methods)
    ]
    found = [method for method in ruled if method is not None]
    if own is None or problems:
        raise PlanError(problems)
    return own, tuple(found)


def _named(recipe: Recipe, name: str, path: Path_, problems: list[Problem]) -> Method | None:
    method = find_method(name)
    if method is None:
        known = list(methods())
        hint = did_you_mean(name, known)
        problems.append(
            Problem(
                recipe.where(*path),
                f"there is no merge_method '{name}'.",
                f"{hint} raymerge has: {', '.join(known)}.".strip(),
            )
        )
    return method


def _sections(
    recipe: Recipe,
    chosen: Sequence[Method],
    sources: Sequence[Source],
    treatments: Treatments,
    findings: Findings,
) -> tuple[Section, ...]:
    """The sections; ``findings`` receives what is wrong with the recipe but leaves a plan to show.

    Raises:
        PlanError: there are no sections to plan, or the models have nothing in common; with all problems.
    """
    donor = sources[donor_of(recipe, sources)]
    spans = SpanBuilder(recipe, chosen, sources)
    sections = spans.sections()
    bare = [*other_families(recipe, sources, donor=donor), *spans.problems, *_module_names(recipe, sources)]
    if not recipe.methods:
        # With rules, what the recipe's own method cannot do matters only for tensors that no rule takes.
        unfit = [treatments.by(span, OWN) for section in sections for span in section.spans]
        bare += findings.problems() if None in unfit else ()
    problems = [
        *check_parameter_names(recipe, chosen[0], chosen[1:]),
        *check_rule_sources(recipe),
        *other_meanings(recipe, sections, sources, donor=donor),
        *_no_base_to_copy(recipe, sections, sources),
    ]
    if bare:
        raise PlanError([*bare, *problems])
    for problem in problems:
        findings.add(problem)
    return sections


def _no_base_to_copy(recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source]) -> list[Problem]:
    """Refuse to keep the base's tensors where no base is merged from which they could be kept."""
    bases = {recipe.base_model, *(piece.base_model for piece in recipe.slices)} - {None}
    bases |= {piece.base_model for module in recipe.modules.values() for piece in module.slices}
    leads = [sources[span.lead.source] for section in sections for span in section.spans]
    if recipe.missing_tensors != "copy_base" or all(lead.reference in bases for lead in leads):
        return []
    return [
        Problem(
            recipe.where("missing_tensors"),
            "'copy_base' keeps the base's tensors, and "
            + ("some slices do not take the base_model." if bases - {None} else "there is no base_model."),
            "Name the base_model, among the sources of every slice too, or remove 'missing_tensors'.",
        )
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
    recipe: Recipe,
    builder: OutputBuilder,
    aligner: Aligner,
    sections: Sequence[Section],
    sources: Sequence[Source],
) -> tuple[Output, ...]:
    """Every output that can be made, each name once."""
    made: dict[str, Output] = {}
    donor = sources[donor_of(recipe, sources)]
    has_base = recipe.base_model is not None
    for aligned in with_heads(aligner.outputs(), sections, sources, donor=donor, has_base=has_base):
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
    supplies: Supplies,
    sections: Sequence[Section],
) -> None:
    """Give every tensor that no output used its rule, or report it."""
    used = {member.source for section in sections for span in section.spans for member in span.members}
    models = {laid.store: index for index, laid in supplies.adapters.items()}
    lead = supplies.sources[donor_of(recipe, supplies.sources)].name
    for store, name in list(builder.fates.unsettled()):
        source, changed = store, name
        if store in models:
            source = models[store]
            changed = supplies.adapters[source].changed_by(name) or ""
            if not changed:
                continue  # That it has no tensor to go to is said already.
        role = supplies.logical[source].part(changed)
        rule = _rule(recipe, aligner, source, changed, used=used, role=role)
        if store in models and rule is Rule.OUTSIDE_MODULES:
            _check_named(recipe, supplies, source, changed, builder.findings)
        if rule is not None:
            builder.fates.settle(store, name, Fate(Disposition.DROPPED, rule))
            continue
        builder.findings.tensor(
            ("extra", supplies.sources[source].name),
            where=supplies.sources[source].name,
            what=f"{{count}} of its tensors have no place in the output, since {lead} lacks them",
            remedy="Use a checkpoint without them, make this model the base, or say 'extra_tensors: drop' in "
            "the recipe to leave them out.",
            example=name,
        )


def _check_named(recipe: Recipe, supplies: Supplies, source: int, changed: str, findings: Findings) -> None:
    """Refuse to leave out an adapter's change because the recipe does not name the module that it is in."""
    model = supplies.sources[source]
    module = module_of(changed, model.checkpoint.config, model.stacks)
    if module in recipe.modules:
        return
    findings.tensor(
        ("unnamed module", model.name, module),
        where=supplies.adapters[source].adapter.name,
        what=f"{{count}} tensors that it changes are in the module '{module}' of {model.name}, which the "
        "recipe does not name, so that the changes would be left out",
        remedy=f"Name '{module}' below 'modules' too, make {model.name} the base_model, or use an adapter "
        "without these changes.",
        example=changed,
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


def _fingerprint(holding: Holding) -> dict[str, Any]:
    """What tells one checkpoint, or adapter, from another without reading its weights."""
    return {
        "name": holding.name,
        "num_tensors": len(holding.tensors),
        "files": [[file.key, file.nbytes, file.header_digest] for file in holding.files],
    }
