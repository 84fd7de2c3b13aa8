"""By which method each tensor is made, and from whom: the recipe's own, or that of a rule.

The names and the layout of the output are decided by spans alone. A rule of ``methods`` changes what is
computed for the tensors that it matches, never what they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raymerge.architectures import Role
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.expressions import Output
from raymerge.methods import BaseUse, Method, Takes
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import Path_, model_references
from raymerge.planner.matching.layer_map import UNLISTED, Member, Parameters, Span, averaged_in
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes import MethodRule, ModelReference, Recipe, Subject

OWN = -1
"""Number of the rule where no rule speaks: the recipe's own ``merge_method``."""


@dataclass(frozen=True, slots=True)
class AssignedMethod:
    """How the tensors of one span are made that one rule, or none, speaks of."""

    method: Method
    """What is computed."""
    members: tuple[Member, ...]
    """What is merged, in recipe order, the base excluded where the method takes deltas or a base."""
    base: Member | None
    """The base, where the method uses one."""
    rule_parameters: Parameters
    """Parameters of the rule, which hold before all others."""
    scopes: tuple[Parameters, ...]
    """Parameters of the slice, the module and the recipe, nearest first."""
    rule: int
    """Number of the rule, or OWN."""
    path: Path_
    """Its place in the recipe, for messages."""
    unchanged_by: str = ""
    """Name of a method of deltas that has no source beside the base, which is therefore the result."""

    def everyone(self) -> tuple[Member, ...]:
        """Base first, then the members."""
        return (self.base, *self.members) if self.base is not None else self.members


class MethodAssignment:
    """Finds the assignment of each tensor, and what is wrong with the rules."""

    def __init__(
        self,
        recipe: Recipe,
        own: Method,
        ruled: Sequence[Method],
        sources: Sequence[Source],
        findings: Findings,
        *,
        router_rule: int | None = None,
    ) -> None:
        """
        Args:
            recipe: what is asked.
            own: its ``merge_method``.
            ruled: the method of each of its rules.
            sources: its models.
            findings: receives what is wrong.
            router_rule: the rule that stands for ``router``, if one does.
        """
        self._router_rule = router_rule
        self._recipe = recipe
        self._methods: Mapping[int, Method] = {OWN: own, **dict(enumerate(ruled))}
        self._sources = sources
        self._findings = findings
        self._made: dict[tuple[Path_, int], AssignedMethod | None] = {}
        self._spoken: set[int] = set()

    def of(self, span: Span, subject: Subject) -> AssignedMethod | None:
        """The assignment of one output tensor, or None with a finding.

        Args:
            span: the span it belongs to.
            subject: the output tensor.
        """
        rules = self._matching(subject)
        if len(rules) > 1:
            self._ambiguous(subject, rules)
            return None
        return self.by(span, rules[0] if rules else OWN)

    def by(self, span: Span, rule: int) -> AssignedMethod | None:
        """The assignment of a span by one rule, or by the recipe's own method; None with a finding."""
        key = (span.path, rule)
        if key not in self._made:
            self._made[key] = self._make(span, rule)
        return self._made[key]

    def made(self, span: Span) -> AssignedMethod | None:
        """The assignment of a span by the recipe's own method, where some tensor asked for it."""
        return self._made.get((span.path, OWN))

    def report_unused(self, replaced: Sequence[Subject] = ()) -> None:
        """Report every rule that spoke of no tensor: most likely it is misspelled.

        Args:
            replaced: tensors that experts take the place of, so that no rule could make them.
        """
        for index in range(len(self._recipe.methods)):
            if index not in self._spoken:
                self._findings.add(self._unused(index, replaced))

    def _unused(self, rule: int, replaced: Sequence[Subject]) -> Problem:
        place = self._recipe.where(*self._rule_path(rule))
        selector = self._recipe.methods[rule].selector
        lost = next((each.name for each in replaced if selector.matches(each)), None)
        if lost is not None:
            what = (
                f"this rule matches only feed-forward tensors, such as {lost}, and experts take their place."
            )
            remedy = (
                "Remove it, or have it match tensors of the trunk: attention, norms, embeddings, the head."
            )
            return Problem(place, what, remedy)
        if rule == self._router_rule:
            what = "'router' says where routers come from, but these models have none."
            return Problem(place, what, "Remove it: it is for mixtures of experts.")
        return Problem(
            place,
            "this rule matches no tensor of the output.",
            "Correct its filter, glob, role or layers ('raymerge inspect MODEL' lists names and "
            "roles; a head that is tied to the embedding is no tensor of its own), or remove it.",
        )

    def _rule_path(self, rule: int) -> Path_:
        return ("router",) if rule == self._router_rule else ("methods", rule)

    def _matching(self, subject: Subject) -> list[int]:
        rules = [index for index, rule in enumerate(self._recipe.methods) if rule.selector.matches(subject)]
        self._spoken.update(rules)
        return rules

    def _ambiguous(self, subject: Subject, rules: Sequence[int]) -> None:
        first, second = (self._recipe.where(*self._rule_path(index)) for index in rules[:2])
        self._findings.tensor(
            ("ambiguous", *map(str, rules)),
            where=second,
            what=f"{{count}} tensors are matched by this rule and by the one at {first} as well, and nothing "
            "says which holds",
            remedy="Narrow one of the two, so that each tensor is matched once.",
            example=subject.name,
        )

    def _make(self, span: Span, rule: int) -> AssignedMethod | None:
        method = self._methods[rule]
        path = span.path if rule == OWN else self._rule_path(rule)
        if method.base is BaseUse.REQUIRED and span.base is None:
            self._base_missing(method, span, path)
            return None
        base = span.base if method.base is not BaseUse.UNUSED else None
        taking_part = self._taking_part(method, span, rule)
        if taking_part is None:
            return None
        rest = [member for member in taking_part if not _is_base(member, base)]
        if base is not None and not rest and method.takes is Takes.DELTAS:
            alone = replace(base, parameters={})
            return AssignedMethod(PASSTHROUGH, (alone,), None, {}, (), rule, path, unchanged_by=method.name)
        if not self._count_fits(method, rest, path):
            return None
        parameters = {} if rule == OWN else self._recipe.methods[rule].parameters
        return AssignedMethod(method, tuple(rest), base, parameters, span.scopes, rule, path)

    def _taking_part(self, method: Method, span: Span, rule: int) -> list[Member] | None:
        """Who takes part, in the order in which the rule names them; None with a finding."""
        wanted = self._recipe.methods[rule].sources if rule != OWN else ()
        if not wanted:
            # An unlisted base may be here for the sake of another method.
            counts = method.base is not BaseUse.UNUSED or averaged_in(method, span.scopes)
            return [member for member in span.members if counts or member.path != UNLISTED]
        found: list[Member] = []
        for position, reference in enumerate(wanted):
            own = [m for m in span.members if self._sources[m.source].reference == reference]
            if rule == self._router_rule:
                own = own[:1]  # However often the model is listed, its router is one.
            if not own:
                own_path = self._rule_path(rule)
                self._absent(
                    reference, span, own_path if len(own_path) == 1 else (*own_path, "sources", position)
                )
                return None
            found += own
        return found

    def _absent(self, reference: ModelReference, span: Span, path: Path_) -> None:
        self._findings.add(
            Problem(
                self._recipe.where(*path),
                f"{reference} takes no part in what is at {self._recipe.where(*span.path)}, and the rule "
                "matches tensors of that.",
                "Narrow the rule by 'layers', or add the model to those sources.",
            )
        )

    def _base_missing(self, method: Method, span: Span, path: Path_) -> None:
        base = span.base_named
        if base is None:
            place = ("merge_method",) if path == span.path else path
            what = f"merge_method {method.name} needs a base_model and the recipe names none."
            remedy = self._base_to_name(method, span)
        else:
            place = path
            what = (
                f"base_model {base} is not among the sources of this slice, and {method.name} needs it there."
            )
            remedy = f"Add '- model: {base}' with its layer_range to the slice's sources."
            if method.takes is Takes.WEIGHTS and len(span.members) > (method.max_sources or 1):
                first = self._sources[span.members[0].source].reference
                remedy = (
                    f"Write 'base_model: {first}' in this slice, or list {base} in place of a source of it."
                )
        self._findings.add(Problem(self._recipe.where(*place), what, remedy))

    def _base_to_name(self, method: Method, span: Span) -> str:
        """What to write for a base that is not named: one of the models, or what they were trained from."""
        first = self._sources[span.members[0].source].reference
        if method.takes is Takes.WEIGHTS:
            most = method.max_sources
            remedy = f"Add 'base_model: {first}', or name another of the models: {method.name} starts from it"
            is_too_many = most is not None and len(span.members) > most + 1
            return f"{remedy}, and takes {most} beside it, no more." if is_too_many else f"{remedy}."
        remedy = "Add a line such as 'base_model: PATH' with the model that the others were trained from"
        if span.num_layers is None:
            return f"{remedy}."
        return f"{remedy}, and list it with its layer_range among the sources of each slice."

    def _count_fits(self, method: Method, members: Sequence[Member], path: Path_) -> bool:
        least, most = method.min_sources, method.max_sources
        if least <= len(members) and (most is None or len(members) <= most):
            return True
        wanted = (
            str(least) if least == most else f"at least {least}" if most is None else f"{least} to {most}"
        )
        beside = " beside the base" if method.base is not BaseUse.UNUSED else ""
        remedy = "Add or remove models, or choose another merge_method."
        if path[0] == "methods":
            remedy = "Say with 'sources: [...]' in the rule which of the recipe's models take part."
        self._findings.add(
            Problem(
                self._recipe.where(*path),
                f"{method.name} takes {wanted} model(s){beside}, but {len(members)} are listed here.",
                remedy,
            )
        )
        return False


def check_rule_sources(recipe: Recipe) -> list[Problem]:
    """A problem for each source of a rule that the recipe does not merge, or that is named twice."""
    known = list(dict.fromkeys(reference for _, reference in model_references(recipe)))
    twice = [
        Problem(
            recipe.where("methods", index, "sources", position),
            f"{reference} is named twice in this rule.",
            "Name it once; a model that the recipe lists twice takes part as often as it is listed.",
        )
        for index, rule in enumerate(recipe.methods)
        for position, reference in enumerate(rule.sources)
        if reference in rule.sources[:position]
    ]
    return twice + [
        Problem(
            recipe.where("methods", index, "sources", position),
            f"{reference} is not one of the models that the recipe merges.",
            f"Name one of: {', '.join(map(str, known))}.",
        )
        for index, rule in enumerate(recipe.methods)
        for position, reference in enumerate(rule.sources)
        if reference not in known
    ]


def _is_base(member: Member, base: Member | None) -> bool:
    return base is not None and (member.source, member.first_layer) == (base.source, base.first_layer)


ROUTER_ROLES = (Role.ROUTER.value, Role.ROUTER_BIAS.value)
"""Roles of the tensors that the policy speaks of."""


def with_router_rule(recipe: Recipe) -> tuple[Recipe, int | None]:
    """The recipe with its ``router`` as one more rule, and that rule's number; itself for ``merge``.

    Raises:
        PlanError: the model named is not one that the recipe merges.
    """
    if recipe.router == "merge":
        return recipe, None
    wanted = recipe.base_model if recipe.router == "base" else recipe.router
    if wanted is None:
        what = "'router: base' keeps the base's routers, and there is no base_model."
        raise PlanError(Problem(recipe.where("router"), what, "Name the base_model, or one of the models."))
    known = list(dict.fromkeys(reference for _, reference in model_references(recipe)))
    if wanted not in known:
        what = f"{wanted} is not one of the models that the recipe merges."
        remedy = f"Name one of: {', '.join(map(str, known))}; or write merge, or base."
        raise PlanError(Problem(recipe.where("router"), what, remedy))
    rule = MethodRule(role=ROUTER_ROLES, merge_method="passthrough", sources=(wanted,))
    return recipe.model_copy(update={"methods": (*recipe.methods, rule)}), len(recipe.methods)


def router_notes(recipe: Recipe, outputs: Sequence[Output], logical: LogicalTensors) -> Iterator[str]:
    """Where routers come from, if there are any.

    Args:
        recipe: with its ``router``.
        outputs: what is written.
        logical: tensors of the model whose names the output takes.
    """
    infos = logical.infos
    if not any(o.name in infos and infos[o.name].part in ROUTER_ROLES for o in outputs):
        return
    if recipe.router == "merge":
        by = "as 'methods' and merge_method say" if recipe.methods else f"by {recipe.merge_method}"
        yield f"routers are merged {by} (router: merge)"
    else:
        chosen = recipe.base_model if recipe.router == "base" else recipe.router
        yield f"routers and their biases are those of {chosen} (router: {recipe.router})"
