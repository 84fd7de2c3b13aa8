"""What a merge makes: recipe and opened sources in, every output decided, every problem found, a plan out."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from raymerge.architectures.roles import module_finder
from raymerge.architectures.rules import Role, quantisation_tables, rules_of
from raymerge.checkpoints.header import FileLayout, StoredTensor, TensorSpec
from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import part_name
from raymerge.checkpoints.source import Checkpoint, as_numbers, has_same_layout
from raymerge.documents.fields import did_you_mean
from raymerge.errors import Findings, PlanError, Problem, UserError
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import Output, QuantisedOutput
from raymerge.merge_plan.plan import FORMAT, Plan, encoding_to_json, expression_to_json, make_plan
from raymerge.merge_plan.segments import Segment, cut_segments, place_ops, place_shards
from raymerge.merge_plan.tables import OpTables, disposition_table, op_tables, other_tables
from raymerge.methods import Method
from raymerge.planner.config import beside_config, plan_config, vocabulary_size, with_fields
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.sources import Source, fingerprint, holdings, model_references
from raymerge.planner.matching.align import Aligned, Aligner, Section, SpanBuilder, modules_of
from raymerge.planner.matching.compatibility import (
    ConfigComparison,
    adapter_notes,
    base_notes,
    check_stacks,
    other_families,
    recipe_notes,
    router_notes,
)
from raymerge.planner.matching.input_resolver import InputResolver, open_inputs
from raymerge.planner.matching.method_assignment import OWN, MethodAssignment
from raymerge.planner.outputs.embeddings_and_heads import TieDecision, settle_tie, with_heads
from raymerge.planner.outputs.layout import DecidedLayout, decide_layout
from raymerge.planner.outputs.loaders import loader_notes
from raymerge.planner.outputs.outputs import OutputBuilder
from raymerge.planner.outputs.scale_groups import join_scales, joined_notes, several_formats
from raymerge.planner.parameter_check import CheckedRecipe, check_recipe
from raymerge.planner.tokenizer.files import TokenizerChanges
from raymerge.planner.tokenizer.vocabulary import VocabularyPlan, plan_tokenizer
from raymerge.recipes.load import canonical
from raymerge.recipes.order import AnyRecipe
from raymerge.recipes.schema import Recipe


def stored_outputs(outputs: Sequence[Output]) -> tuple[Output, ...]:
    return tuple(each for output in outputs for each in _stored(output))


def stored_dispositions(
    dispositions: Dispositions, packed: Mapping[str, QuantisedOutput]
) -> Iterator[tuple[int, str, Disposition]]:
    """The disposition of every source tensor, with the stored output that is made of it.

    ``packed`` are the outputs of codes with scales: of such a one it is the part of the tensor's kind, or
    else the codes."""
    if not packed:
        return dispositions.entries()
    return (
        (source, name, _stored_disposition(dispositions, source, name, disposition, packed))
        for source, name, disposition in dispositions.entries()
    )


def _stored_disposition(
    dispositions: Dispositions,
    source: int,
    name: str,
    disposition: Disposition,
    packed: Mapping[str, QuantisedOutput],
) -> Disposition:
    use, rule, output = disposition
    made = packed.get(output)
    if made is None:
        return disposition
    alike = part_name(dispositions.whole(source, name), name, output)
    is_part = alike == made.codes or alike == made.scales or alike in made.names
    return Disposition(use, rule, alike if is_part else made.codes)


def _stored(output: Output) -> Iterator[Output]:
    packed = output.packed
    if packed is None:
        yield output
        return
    # That numbers are finite is seen before they are encoded: codes of four bits could not tell.
    quant_spec = packed.quant_spec
    yield Output(
        packed.codes,
        quant_spec.format.code_dtype,
        quant_spec.codes_shape,
        output.ops,
        False,
        joined=packed.joined,
    )
    if packed.scales:
        shape = quant_spec.scales_shape
        yield Output(packed.scales, quant_spec.scale_dtype, shape, (), False, scales_of=packed.codes)
    if packed.tensor_scale is not None:
        yield Output(*packed.tensor_scale, (), False, scales_of=packed.codes, made="tensor_scale")
    if packed.zero_points and quant_spec.format.zero_points is not None:
        shape = quant_spec.zero_points_shape
        dtype = quant_spec.format.zero_points
        yield Output(packed.zero_points, dtype, shape, (), False, scales_of=packed.codes, made="zero_points")
    yield from packed.others


class Unused(NamedTuple):
    store: int
    source: int
    """Its model, for an adapter's tensor that below it; ``store`` for a stage's."""
    name: str


Unplaced = tuple[str, str]
"""Problem of tensors without a place in the output, with ``{count}``, and the remedy."""


def settle_unused(
    resolver: InputResolver,
    dispositions: Dispositions,
    findings: Findings,
    rule_of: Callable[[Unused], Rule | Unplaced | None],
    example_of: Callable[[Unused], str] = attrgetter("name"),
) -> None:
    """Give every unused tensor the rule by which it is left out, or report it.

    None of ``rule_of``: it is reported elsewhere. ``example_of`` is what a report says of one."""
    models = {laid.store: index for index, laid in resolver.adapters.items()}
    for store, name in list(dispositions.unsettled()):
        source = models.get(store, store)
        changed = name if source == store else resolver.adapters[source].changed_by(name) or ""
        rule = rule_of(Unused(store, source, changed))
        if isinstance(rule, Rule):
            dispositions.settle(store, name, Disposition(Use.DROPPED, rule))
        elif rule is not None:
            where = resolver.sources[source].name
            what, remedy = rule
            example = example_of(Unused(store, source, name))
            findings.tensor(where, what, remedy, example=example)


_KEPT = "head and embedding are kept as they are"


@dataclass(frozen=True, slots=True)
class Decided:
    recipe: AnyRecipe
    sources: tuple[Source, ...]
    donor: int
    method: str
    outputs: tuple[Output, ...]
    dispositions: Dispositions
    findings: Findings
    config: Mapping[str, Any]
    notes: tuple[str, ...]
    rules: tuple[str, ...] = ()
    tie: TieDecision = field(default_factory=lambda: TieDecision("", "", None, _KEPT))
    tokenizer: TokenizerChanges = field(default_factory=TokenizerChanges)
    layout: DecidedLayout | None = None
    """None for safetensors."""


def finish_plan(decided: Decided, *, version: str) -> Plan:
    donor, outputs = decided.sources[decided.donor].checkpoint, stored_outputs(decided.outputs)
    beside = beside_config(donor, decided.config)
    manifest = _manifest(decided, version, beside.left_out)
    packed = {each.name: each.packed for each in decided.outputs if each.packed is not None}
    dispositions = disposition_table(stored_dispositions(decided.dispositions, packed))
    # What was decided takes about as much memory as the ops and their tables, which are made without it.
    del packed
    weights = _known_weights(donor, outputs, decided.config)
    donor = replace(donor, tensors={}, packs=None, as_stored=None)
    decided = replace(decided, outputs=(), sources=(), dispositions=Dispositions(()))
    made, shards, segments = _made(decided, outputs, donor, weights)
    del outputs
    of_layout = {} if decided.layout is None else decided.layout.written
    others = other_tables(shards, segments, {**decided.tokenizer.files, **beside.files, **of_layout})
    manifest |= _numbered(made)
    tables = {**made.tables, **others, "dispositions": dispositions}
    plan = make_plan(manifest, tables, decided.findings.problems())
    del decided, shards
    pa.default_memory_pool().release_unused()
    if problems := check_plan(plan):
        raise RuntimeError("raymerge made a plan that contradicts itself:\n" + "\n".join(map(str, problems)))
    return plan


def _known_weights(
    donor: Checkpoint, outputs: Sequence[Output], config: Mapping[str, Any]
) -> QuantisedWeights | None:
    """What is known of codes in the output, where they are stored and declared as in the donor."""
    packs = donor.packs
    if packs is None or quantisation_tables(config) != quantisation_tables(donor.config):
        return None
    specs = {each.name: TensorSpec(each.name, each.dtype, each.shape) for each in outputs}
    is_stored_so = has_same_layout(donor.stored, specs)
    return replace(packs, tensors={}, members={}, unknown={}) if is_stored_so else None


def _made(
    decided: Decided, outputs: Sequence[Output], donor: Checkpoint, weights: QuantisedWeights | None
) -> tuple[OpTables, Sequence[tuple[str, FileLayout]], Sequence[Segment]]:
    """The tables of what is made, its shards, and its segments."""
    findings = decided.findings
    shard_size = decided.recipe.shard_size if decided.layout is None else 0
    shards = place_shards(outputs, shard_size, donor.components)
    if findings.is_empty:
        findings.extend(config_problems(_planned(outputs, shards, decided.config, donor), weights))
    ops = place_ops(outputs, shards)
    return op_tables(outputs, shards, ops), shards, cut_segments(ops)


def _manifest(decided: Decided, version: str, left_out: Iterable[str]) -> dict[str, Any]:
    """All entries but those of ``_numbered``."""
    recipe, tie = decided.recipe, decided.tie
    return {
        "format": FORMAT,
        "raymerge": version,
        "recipe": json.loads(canonical(recipe)),
        "recipe_text": recipe.text,
        "method": decided.method,
        "rules": list(decided.rules),
        "seed": recipe.seed,
        "duplicates": recipe.duplicates,
        "sources": [fingerprint(holding) for holding in holdings(decided.sources)],
        "donor": decided.donor,
        "config": dict(decided.config),
        "left_out": [*decided.tokenizer.left_out, *left_out],
        "tie": {"head": tie.head, "embedding": tie.embedding, "tied": tie.tied, "reason": tie.reason},
        "notes": [*recipe.notes, *decided.notes, *loader_notes(decided.outputs, rules_of(decided.config))],
        **({} if decided.layout is None else {"layout": decided.layout.to_json()}),
    }


def _numbered(made: OpTables) -> dict[str, Any]:
    return {
        "expressions": [expression_to_json(expression) for expression in made.expressions],
        "encodings": [encoding_to_json(encoding) for encoding in made.encodings],
    }


def _planned(
    outputs: Sequence[Output],
    shards: Sequence[tuple[str, FileLayout]],
    config: Mapping[str, Any],
    donor: Checkpoint,
) -> Checkpoint:
    stored = {tensor.name: tensor for key, layout in shards for tensor in layout.stored(key)}
    tensors = {output.name: stored[output.name] for output in outputs}
    return replace(donor, config=config, tensors=tensors, shapes={}, hf_quant_config={})


def with_numbers(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources with each packed tensor as one.

    Raises:
        PlanError: codes and scales, or they and the config, contradict each other."""
    converted: list[Source] = []
    failures: list[UserError] = []
    for source in sources:
        try:
            numbers = as_numbers(source.checkpoint, _quantised(source, converted))
        except UserError as error:
            failures.append(error)
        else:
            converted.append(replace(source, checkpoint=numbers))
    if failures:
        raise PlanError(problem for error in failures for problem in error.problems) from failures[0]
    return tuple(converted)


def _quantised(source: Source, before: Sequence[Source]) -> QuantisedWeights:
    """What of a source is stored as codes, which sources of one layout have in common."""
    checkpoint = source.checkpoint
    for other in (each.checkpoint for each in before):
        has_tables = _tables(other) == _tables(checkpoint) and other.is_raw == checkpoint.is_raw
        if has_tables and other.packs is not None and has_same_layout(other.stored, checkpoint.tensors):
            return other.packs
    return quantised_tensors(checkpoint)


def _tables(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Everything beside names, dtypes and shapes that codes are known by."""
    beside = checkpoint.hf_quant_config, checkpoint.shapes
    return rules_of(checkpoint.config), quantisation_tables(checkpoint.config), *beside


def decide_merge(recipe: Recipe, sources: Sequence[Source]) -> Decided:
    """Decide the plan of a merge.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show."""
    sources = with_numbers(sources)
    context = open_plan_context(recipe, sources)
    builder, findings, sections = context.builder, context.findings, context.sections
    tokenizer, donor = context.tokenizer, sources[context.donor]
    by_token = isinstance(tokenizer, VocabularyPlan)
    check_stacks(sections, context.aligner.placed, donor=context.donor, findings=findings, by_token=by_token)
    made, joined = join_scales(_outputs(context), builder, donor.rules)
    outputs = builder.scales.join(made, donor.rules)
    context.assignments.report_unused()
    builder.formats.report_unused()
    tie = settle_tie(outputs, sections, sources, builder.dispositions, donor=donor)
    rule_of = partial(_rule_of_unused, context, context.merged)
    settle_unused(context.resolver, builder.dispositions, findings, rule_of, NameSuggestions(context))
    config, objections = plan_config(
        recipe, donor, sources, context.resolver.logical, sections, outputs, tie.tied
    )
    findings.extend(objections)
    if not quantisation_tables(config):
        outputs = builder.scales.without_table(outputs, donor.index)
    resized = builder.embeddings.settle(outputs, donor)
    config = with_fields(config, tokenizer.config or vocabulary_size(config, resized) if resized else {})
    layout, misfits = decide_layout(recipe, sources, stored_outputs(outputs))
    findings.extend(misfits)
    if layout is not None and recipe.training_state == "keep":
        builder.dispositions.copy_state(layout.source)
    return Decided(
        recipe=recipe,
        sources=tuple(sources),
        donor=context.donor,
        method=context.method.name,
        rules=tuple(each.name for each in context.ruled),
        outputs=outputs,
        dispositions=builder.dispositions,
        findings=findings,
        config=config,
        tie=tie,
        tokenizer=tokenizer,
        notes=(
            *context.notes(outputs),
            *joined_notes(joined, sources),
            *several_formats(outputs, donor),
            *(() if layout is None else (layout.note,)),
        ),
        layout=layout,
    )


def _outputs(context: PlanContext) -> dict[str, Output]:
    made: dict[str, Output] = {}
    for aligned in context.aligned():
        output = context.builder.output(aligned)
        if output is not None and made.setdefault(output.name, output) is not output:
            context.findings.tensor(
                "plan",
                "{count} tensors would be made twice",
                "Name each module or slice once.",
                example=output.name,
            )
    return made


def _rule_of_unused(context: PlanContext, merged: Collection[int], unused: Unused) -> Rule | Unplaced | None:
    recipe, resolver, source = context.recipe, context.resolver, unused.source
    if source >= len(resolver.sources):
        return Rule.NOT_CHOSEN
    if not unused.name:
        return None  # That an adapter's tensor has none to go to is said already.
    if source not in merged:
        if resolver.sources[source].reference == recipe.layout:
            return Rule.LAYOUT_ONLY
        return Rule.MADE_ROWS_OF if resolver.is_donor_matrix(source, unused.name) else Rule.CONFIG_ONLY
    if not context.aligner.expects(source, unused.name):
        if not recipe.modules:
            return Rule.OUTSIDE_SLICES
        if unused.store != source:
            _check_named(recipe, resolver, source, unused.name, context.findings)
        return Rule.OUTSIDE_MODULES
    if resolver.logical[source].part(unused.name) is Role.BUFFER:
        return Rule.RECOMPUTED_BUFFER
    if recipe.extra_tensors == "drop":
        return Rule.EXTRA_DROPPED
    lead = resolver.sources[context.donor].name
    return (
        f"{{count}} of its tensors have no place in the output, since {lead} lacks them",
        "Use a checkpoint without them, make this model the base, or say 'extra_tensors: drop' in the recipe "
        "to leave them out.",
    )


_Kind = tuple[tuple[str, ...], tuple[int, ...]]


class NameSuggestions:
    """What a report says of an unused tensor: also the donor's that it may be by another name. That is one of
    the same shape, in a layer of the same number, that its source lacks; of several the one most alike."""

    def __init__(self, context: PlanContext) -> None:
        self._resolver = context.resolver
        self._donor = context.donor
        self._lacking: dict[int, Mapping[_Kind, Sequence[str]]] = {}

    def __call__(self, unused: Unused) -> str:
        source, name = unused.source, unused.name
        stored = self._resolver.logical[source].stored(name)
        if stored is None:
            return name
        if source not in self._lacking:
            self._lacking[source] = self._lacked(source)
        words = set(name.split("."))
        others = self._lacking[source].get(_kind(name, stored), ())
        nearest = max(others, key=lambda other: len(words & set(other.split("."))), default=None)
        return name if nearest is None else f"{name} (perhaps {nearest} by another name)"

    def _lacked(self, source: int) -> Mapping[_Kind, Sequence[str]]:
        lead = self._resolver.logical[self._donor]
        lacked: dict[_Kind, list[str]] = {}
        for name, tensor in self._resolver.sources[self._donor].checkpoint.tensors.items():
            if self._resolver.find(source, name, lead.member_names(name)[0]) is None:
                lacked.setdefault(_kind(name, tensor), []).append(name)
        return lacked


def _kind(name: str, tensor: StoredTensor) -> _Kind:
    return tuple(word for word in name.split(".") if word.isdecimal()), tensor.shape


def _check_named(
    recipe: Recipe, resolver: InputResolver, source: int, changed: str, findings: Findings
) -> None:
    """Refuse to drop an adapter's change because the recipe does not name the module that it is in."""
    model = resolver.sources[source]
    module = module_finder(model.checkpoint.config, model.stacks)(changed)
    if module in recipe.modules:
        return
    findings.tensor(
        resolver.adapters[source].adapter.name,
        f"{{count}} tensors that it changes are in the module '{module}' of {model.name}, which the "
        "recipe does not name, so that the changes would be left out",
        f"Name '{module}' below 'modules' too, make {model.name} the base_model, or use an adapter "
        "without these changes.",
        example=changed,
    )


@dataclass(frozen=True, slots=True)
class PlanContext:
    recipe: Recipe
    method: Method
    ruled: tuple[Method, ...]
    donor: int
    sections: tuple[Section, ...]
    assignments: MethodAssignment
    aligner: Aligner
    resolver: InputResolver
    tokenizer: TokenizerChanges
    builder: OutputBuilder

    @property
    def findings(self) -> Findings:
        return self.builder.findings

    @property
    def merged(self) -> frozenset[int]:
        """Sources that are merged, without those that only give a tokenizer."""
        spans = (span for section in self.sections for span in section.spans)
        return frozenset(member.source for span in spans for member in span.members)

    def aligned(self) -> tuple[Aligned, ...]:
        sources, has_base = self.resolver.sources, self.recipe.base_model is not None
        outputs = tuple(self.aligner.outputs())
        return tuple(
            with_heads(outputs, self.sections, sources, donor=sources[self.donor], has_base=has_base)
        )

    def notes(self, outputs: Sequence[Output]) -> tuple[str, ...]:
        chosen, sources = (self.method, *self.ruled), self.resolver.sources
        return (
            *router_notes(self.recipe, outputs, self.resolver.logical[self.donor], sources[self.donor]),
            *recipe_notes(self.recipe, chosen, sources, self.sections, sources[self.donor]),
            *self.builder.selectors.notes(),
            *dict.fromkeys(base_notes(self.assignments, self.sections, sources)),
            *self.tokenizer.notes,
            *self.builder.scales.notes(outputs),
            *self.builder.routing_tables.notes(),
            *self.builder.notes(),
            *adapter_notes(self.resolver, self.builder.dispositions),
        )


def open_plan_context(recipe: Recipe, sources: Sequence[Source]) -> PlanContext:
    """Open the plan context; sources that are not among the recipe's models take no part.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show."""
    checked = check_recipe(recipe)
    recipe, method, ruled = checked.recipe, checked.own, checked.ruled
    donor = donor_of(recipe, sources)
    findings = Findings()
    assignments = MethodAssignment(recipe, method, ruled, sources, findings, router_rule=checked.router_rule)
    sections = _sections(checked, sources, assignments, findings)
    resolver = open_inputs(sources, findings)
    tokenizer = plan_tokenizer(recipe, resolver, findings, donor=donor)
    vocabulary = tokenizer if isinstance(tokenizer, VocabularyPlan) else None
    return PlanContext(
        recipe=recipe,
        method=method,
        ruled=ruled,
        donor=donor,
        sections=sections,
        assignments=assignments,
        aligner=Aligner(sections, sources, resolver.logical, donor=donor),
        resolver=resolver,
        tokenizer=tokenizer,
        builder=OutputBuilder(recipe, assignments, resolver, findings, vocabulary=vocabulary),
    )


def donor_of(recipe: Recipe, sources: Sequence[Source]) -> int:
    """Index of the source that gives config, tokenizer and companion files: the base, or the first listed."""
    donor = recipe.base_model or model_references(recipe)[0][1]
    return next(source.index for source in sources if source.reference == donor)


def _sections(
    checked: CheckedRecipe, sources: Sequence[Source], assignments: MethodAssignment, findings: Findings
) -> tuple[Section, ...]:
    """The sections; ``findings`` receives problems that leave a plan to show.

    Raises:
        PlanError: there are no sections to plan, or the models have nothing in common; with all problems."""
    recipe = checked.recipe
    donor = sources[donor_of(recipe, sources)]
    spans = SpanBuilder(recipe, (checked.own, *checked.ruled), sources)
    sections = spans.sections()
    bare = [*other_families(recipe, sources, donor=donor), *spans.problems, *_module_names(recipe, sources)]
    if not recipe.methods:
        # With rules, what the recipe's own method cannot do matters only for tensors that no rule takes.
        unfit = [assignments.by(span, OWN) for section in sections for span in section.spans]
        bare += findings.problems() if None in unfit else ()
    problems = [
        *checked.problems,
        *ConfigComparison(sections, sources, donor).problems(recipe),
        *_no_base_to_copy(recipe, sections, sources),
    ]
    if bare:
        raise PlanError([*bare, *problems])
    findings.extend(problems)
    return sections


def _no_base_to_copy(recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source]) -> list[Problem]:
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
