"""By which method each tensor is made, and from which sources: the recipe's own, or a rule's.

Spans alone decide names and layout of the output. A rule of ``methods`` changes what is computed for the
tensors that it matches, never their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raymerge.documents.fields import FieldPath
from raymerge.errors import Findings, Problem
from raymerge.methods import BaseUse, Method, Parameter, Settings, Takes, Value
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.align import UNLISTED, Aligned, Member, Parameters, Span, averaged_in
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.schema import Recipe
from raymerge.recipes.settings import Scalar, Setting, Subject, evaluate

OWN = -1
"""Number of the recipe's own ``merge_method``, where no rule matches."""


@dataclass(frozen=True, slots=True)
class AssignedMethod:
    method: Method
    members: tuple[Member, ...]
    """Merged sources in recipe order, without the base where the method takes deltas or a base."""
    base: Member | None
    rule_parameters: Parameters
    scopes: tuple[Parameters, ...]
    rule: int
    path: FieldPath
    unchanged_by: str = ""
    """A method of deltas without a source beside the base, which is therefore the result."""

    @property
    def everyone(self) -> tuple[Member, ...]:
        return self.members if self.base is None else (self.base, *self.members)


class MethodAssignment:
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
        self._router_rule = router_rule
        self._recipe = recipe
        self._methods: Mapping[int, Method] = {OWN: own, **dict(enumerate(ruled))}
        self._sources = sources
        self._findings = findings
        self._made: dict[tuple[FieldPath, int], AssignedMethod | None] = {}
        self._spoken: set[int] = set()

    def of(self, span: Span, subject: Subject) -> AssignedMethod | None:
        rules = [index for index, rule in enumerate(self._recipe.methods) if rule.selector.matches(subject)]
        self._spoken.update(rules)
        if len(rules) > 1:
            self._ambiguous(subject, rules)
            return None
        return self.by(span, rules[0] if rules else OWN)

    def by(self, span: Span, rule: int) -> AssignedMethod | None:
        key = (span.path, rule)
        if key not in self._made:
            self._made[key] = self._make(span, rule)
        return self._made[key]

    def made(self, span: Span) -> AssignedMethod | None:
        return self._made.get((span.path, OWN))

    def report_unused(self, replaced: Sequence[Subject] = ()) -> None:
        """Report every rule that matched no tensor: most likely it is misspelled.

        ``replaced`` are tensors that experts take the place of, so that no rule could make them."""
        silent = (index for index in range(len(self._recipe.methods)) if index not in self._spoken)
        self._findings.extend(self._unused(index, replaced) for index in silent)

    def _unused(self, rule: int, replaced: Sequence[Subject]) -> Problem:
        place = self._recipe.where(*self._rule_path(rule))
        selector = self._recipe.methods[rule].selector
        lost = next((each.name for each in replaced if selector.matches(each)), None)
        what = "this rule matches no tensor of the output."
        remedy = (
            "Correct its filter, glob, role or layers ('raymerge inspect MODEL' lists names and roles; a "
            "head that is tied to the embedding is no tensor of its own), or remove it."
        )
        if lost is not None:
            what = (
                f"this rule matches only feed-forward tensors, such as {lost}, and experts take their place."
            )
            remedy = (
                "Remove it, or have it match tensors of the trunk: attention, norms, embeddings, the head."
            )
        elif rule == self._router_rule:
            what = "'router' says where routers come from, but these models have none."
            remedy = "Remove it: it is for mixtures of experts."
        return Problem(place, what, remedy)

    def _rule_path(self, rule: int) -> FieldPath:
        return ("router",) if rule == self._router_rule else ("methods", rule)

    def _ambiguous(self, subject: Subject, rules: Sequence[int]) -> None:
        first, second = (self._recipe.where(*self._rule_path(index)) for index in rules[:2])
        self._findings.tensor(
            second,
            f"{{count}} tensors are matched by this rule and by the one at {first} as well, and nothing "
            "says which holds",
            "Narrow one of the two, so that each tensor is matched once.",
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
        place = None if base is None else (base.source, base.first_layer)
        rest = [member for member in taking_part if (member.source, member.first_layer) != place]
        if base is not None and not rest and method.takes is Takes.DELTAS:
            alone = replace(base, parameters={})
            return AssignedMethod(PASSTHROUGH, (alone,), None, {}, (), rule, path, unchanged_by=method.name)
        if not self._count_fits(method, rest, path):
            return None
        parameters = {} if rule == OWN else self._recipe.methods[rule].parameters
        return AssignedMethod(method, tuple(rest), base, parameters, span.scopes, rule, path)

    def _taking_part(self, method: Method, span: Span, rule: int) -> list[Member] | None:
        listed = self._recipe.methods[rule].sources if rule != OWN else ()
        if not listed:
            # An unlisted base may be here for the sake of another method.
            counts = method.base is not BaseUse.UNUSED or averaged_in(method, span.scopes)
            return [member for member in span.members if counts or member.path != UNLISTED]
        taking: list[Member] = []
        for position, reference in enumerate(listed):
            own = [m for m in span.members if self._sources[m.source].reference == reference]
            if rule == self._router_rule:
                own = own[:1]  # However often the model is listed, its router is one.
            if not own:
                path = ("router",) if rule == self._router_rule else ("methods", rule, "sources", position)
                there = f"what is at {self._recipe.where(*span.path)}"
                what = f"{reference} takes no part in {there}, and the rule matches tensors of that."
                remedy = "Narrow the rule by 'layers', or add the model to those sources."
                self._findings.add(self._recipe.where(*path), what, remedy)
                return None
            taking += own
        return taking

    def _base_missing(self, method: Method, span: Span, path: FieldPath) -> None:
        base, first = span.base_named, self._sources[span.members[0].source].reference
        if base is None:
            path = ("merge_method",) if path == span.path else path
            what = f"merge_method {method.name} needs a base_model and the recipe names none."
            remedy = self._base_to_name(method, span, first)
        else:
            is_not = f"base_model {base} is not among the sources of this slice"
            what = f"{is_not}, and {method.name} needs it there."
            remedy = f"Add '- model: {base}' with its layer_range to the slice's sources."
            if method.takes is Takes.WEIGHTS and len(span.members) > (method.max_sources or 1):
                remedy = (
                    f"Write 'base_model: {first}' in this slice, or list {base} in place of a source of it."
                )
        self._findings.add(self._recipe.where(*path), what, remedy)

    def _base_to_name(self, method: Method, span: Span, first: ModelReference) -> str:
        if method.takes is Takes.WEIGHTS:
            most = method.max_sources
            remedy = f"Add 'base_model: {first}', or name another of the models: {method.name} starts from it"
            is_too_many = most is not None and len(span.members) > most + 1
            return f"{remedy}, and takes {most} beside it, no more." if is_too_many else f"{remedy}."
        remedy = "Add a line such as 'base_model: PATH' with the model that the others were trained from"
        if span.num_layers is None:
            return f"{remedy}."
        return f"{remedy}, and list it with its layer_range among the sources of each slice."

    def _count_fits(self, method: Method, members: Sequence[Member], path: FieldPath) -> bool:
        least, most = method.min_sources, method.max_sources
        if least <= len(members) and (most is None or len(members) <= most):
            return True
        number = (
            str(least) if least == most else f"at least {least}" if most is None else f"{least} to {most}"
        )
        beside = " beside the base" if method.base is not BaseUse.UNUSED else ""
        what = f"{method.name} takes {number} model(s){beside}, but {len(members)} are listed here."
        remedy = "Add or remove models, or choose another merge_method."
        if path[0] == "methods":
            remedy = "Say with 'sources: [...]' in the rule which of the recipe's models take part."
        self._findings.add(self._recipe.where(*path), what, remedy)
        return False


NOTHING = Subject("", frozenset(), None)


class Binder:
    def __init__(self, recipe: Recipe, assignment: AssignedMethod, names: Sequence[str]) -> None:
        """``names``: of each source for messages, by its index.

        Raises:
            BindError: as ``settings``, where that depends on no tensor."""
        self._recipe = recipe
        self._method = assignment.method
        self._assignment = assignment
        self._names = {member.path: names[member.source] for member in assignment.members}
        nothing = [NOTHING] * len(assignment.members)
        scopes = [assignment.rule_parameters, *assignment.scopes, *(m.parameters for m in assignment.members)]
        plain = all(isinstance(setting, Scalar) for scope in scopes for setting in scope.values())
        is_constant = plain and not assignment.method.positional
        self.constant = self._compute(NOTHING, nothing, 0.0) if is_constant else None

    def settings(
        self, output: Subject, members: Sequence[Subject], t: float, *, depth: float = 0.0
    ) -> Settings:
        """Settings for one output tensor, from it and from the tensor in each member of the assignment.

        Gradients use ``t``, the position of its layer in the slice, positional methods ``depth``, that in the
        whole stack; both in [0, 1].

        Raises:
            BindError: a required parameter has no value here, or a value is out of bounds."""
        if self.constant is not None:
            return self.constant
        return replace(self._compute(output, members, t), position=depth if self._method.positional else 0.0)

    def _compute(self, output: Subject, members: Sequence[Subject], t: float) -> Settings:
        own = self._assignment
        values: dict[str, Value] = {}
        sources: list[dict[str, Value]] = [{} for _ in own.members]
        for parameter in self._method.parameters:
            name = parameter.name
            ruled, outer = own.rule_parameters.get(name), [scope.get(name) for scope in own.scopes]
            if parameter.scope == "global":
                values[name] = self._value(parameter, [ruled, *outer], output, t, place=own.path)
                continue
            for member, subject, source in zip(own.members, members, sources, strict=True):
                chain = [ruled, member.parameters.get(name), *outer]
                source[name] = self._value(parameter, chain, subject, t, place=member.path)
        # One for each input: statistics come behind all sources.
        statistics = [{}] * len(sources) if self._method.statistics else list[dict[str, Value]]()
        return Settings(values=values, sources=(*sources, *statistics))

    def _value(
        self,
        parameter: Parameter,
        chain: Sequence[Setting | None],
        subject: Subject,
        t: float,
        *,
        place: FieldPath,
    ) -> Value:
        for setting in chain:
            value = evaluate(setting, subject, t) if setting is not None else None
            if value is not None:
                return self._coerced(parameter, value, subject.name, place)
        if parameter.required:
            raise BindError(self._required(parameter, place), parameter.name, subject.name)
        return parameter.default

    def _coerced(self, parameter: Parameter, value: float, name: str, place: FieldPath) -> Value:
        try:
            return parameter.coerce(value)
        except ValueError as error:
            where = self._recipe.where(*place, "parameters", parameter.name)
            problem = Problem(where, f"{error}.", "Correct the value.")
            raise BindError(problem, parameter.name, name) from error

    def _required(self, parameter: Parameter, place: FieldPath) -> Problem:
        subject = f"source {self._names[place]}" if place in self._names else "this merge"
        return Problem(
            self._recipe.where(*place),
            f"{subject} has no value of '{parameter.name}', which {self._method.name} requires.",
            f"Add '{parameter.name}' to its parameters, or to the parameters of the recipe.",
        )


class BindError(ValueError):
    """One parameter cannot be bound; ``tensor`` is "" where it can be for none."""

    def __init__(self, problem: Problem, parameter: str, tensor: str) -> None:
        self.problem = problem
        self.parameter = parameter
        self.tensor = tensor
        super().__init__(str(problem))


class BoundOutput(NamedTuple):
    aligned: Aligned
    assignment: AssignedMethod
    members: tuple[tuple[Member, str], ...]


UNSCALED = Settings(values={}, sources=({"scale": None},))
"""Of a passthrough that changes nothing."""


def lead_alone(aligned: Aligned) -> BoundOutput:
    """The lead's tensor passed through, whatever the methods of the recipe."""
    lead = aligned.span.lead
    assignment = AssignedMethod(PASSTHROUGH, (lead,), None, {}, (), OWN, aligned.span.path)
    return BoundOutput(aligned, assignment, ((lead, aligned.lead),))


def choose(aligned: Aligned, assignment: AssignedMethod) -> BoundOutput:
    everyone = assignment.everyone
    if everyone == aligned.span.members:
        return BoundOutput(aligned, assignment, tuple(zip(everyone, aligned.names, strict=True)))
    names = {member.path: name for member, name in zip(aligned.span.members, aligned.names, strict=True)}
    return BoundOutput(aligned, assignment, tuple((member, names[member.path]) for member in everyone))
