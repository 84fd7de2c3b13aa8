"""What the outputs of a recipe are made with: its methods, spans, tensors and builders, opened once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.expressions import Output
from raymerge.methods import Method
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import model_references
from raymerge.planner.matching.align import Aligned, Aligner, Section, SpanBuilder, modules_of
from raymerge.planner.matching.compatibility import (
    adapter_notes,
    base_notes,
    other_families,
    other_meanings,
    recipe_notes,
    router_notes,
)
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import open_logical
from raymerge.planner.matching.method_assignment import OWN, MethodAssignment
from raymerge.planner.outputs.embeddings import with_heads
from raymerge.planner.outputs.outputs import OutputBuilder
from raymerge.planner.recipe_check import CheckedRecipe, check_recipe
from raymerge.planner.tokenizer.vocabulary import TokenizerChanges, plan_tokenizer
from raymerge.recipes import Recipe, did_you_mean


@dataclass(frozen=True, slots=True)
class PlanContext:
    recipe: Recipe
    """With ``router`` as a rule of its ``methods``."""
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

    def aligned(self) -> Iterator[Aligned]:
        sources = self.resolver.sources
        return with_heads(
            self.aligner.outputs(),
            self.sections,
            sources,
            donor=sources[self.donor],
            has_base=self.recipe.base_model is not None,
        )

    def notes(self, outputs: Sequence[Output]) -> tuple[str, ...]:
        chosen, sources = (self.method, *self.ruled), self.resolver.sources
        return (
            *router_notes(self.recipe, outputs, self.resolver.logical[self.donor]),
            *recipe_notes(self.recipe, chosen, sources, self.sections, donor=self.donor),
            *self.builder.notes(),
            *dict.fromkeys(base_notes(self.assignments, self.sections, sources)),
            *self.tokenizer.notes,
            *self.builder.scales.notes(outputs),
            *adapter_notes(self.resolver, self.builder.fates),
        )


def open_plan_context(recipe: Recipe, sources: Sequence[Source]) -> PlanContext:
    """Open the plan context; sources that are not among the recipe's models take no part.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show.
    """
    checked = check_recipe(recipe)
    recipe, method, ruled = checked.recipe, checked.own, checked.ruled
    donor = donor_of(recipe, sources)
    findings = Findings()
    assignments = MethodAssignment(recipe, method, ruled, sources, findings, router_rule=checked.router_rule)
    sections = _sections(checked, sources, assignments, findings)
    logical = open_logical(sources, findings)
    resolver = InputResolver(sources, logical)
    for laid in resolver.adapters.values():
        for problem in laid.problems():
            findings.add(problem)
    tokenizer, problems = plan_tokenizer(recipe, resolver, donor=donor)
    for problem in problems:
        findings.add(problem)
    return PlanContext(
        recipe=recipe,
        method=method,
        ruled=ruled,
        donor=donor,
        sections=sections,
        assignments=assignments,
        aligner=Aligner(sections, sources, logical, donor=donor),
        resolver=resolver,
        tokenizer=tokenizer,
        builder=OutputBuilder(recipe, assignments, resolver, findings, vocabulary=tokenizer.vocabulary),
    )


def donor_of(recipe: Recipe, sources: Sequence[Source]) -> int:
    """Index of the source that gives config, tokenizer and companion files: the base, or the first listed."""
    wanted = recipe.base_model or next(reference for _, reference in model_references(recipe))
    return next(source.index for source in sources if source.reference == wanted)


def _sections(
    checked: CheckedRecipe, sources: Sequence[Source], assignments: MethodAssignment, findings: Findings
) -> tuple[Section, ...]:
    """The sections; ``findings`` receives problems that leave a plan to show.

    Raises:
        PlanError: there are no sections to plan, or the models have nothing in common; with all problems.
    """
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
        *other_meanings(recipe, sections, sources, donor=donor),
        *_no_base_to_copy(recipe, sections, sources),
    ]
    if bare:
        raise PlanError([*bare, *problems])
    for problem in problems:
        findings.add(problem)
    return sections


def _no_base_to_copy(recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source]) -> list[Problem]:
    """Refuse to keep the base's tensors where no base is merged that has them."""
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
