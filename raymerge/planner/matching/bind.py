"""Parameters: which number holds for which tensor.

Precedence, nearest first: the rule that matches the tensor, the source's entry, the slice, the module, the
recipe, the method's default. The filters of a per-source parameter look at the tensor in that source, those
of a global one at the output's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raymerge.errors import Problem
from raymerge.methods import Method, Parameter, Settings, Value, is_parameter
from raymerge.planner.inputs.sources import Path_
from raymerge.planner.matching.layer_map import Parameters
from raymerge.planner.matching.method_assignment import AssignedMethod
from raymerge.recipes import ModelEntry, OutputSlice, Recipe, Scalar, Setting, Subject, did_you_mean, evaluate

NOTHING = Subject("", frozenset(), None)
"""What is asked about where no setting depends on a tensor."""


class Binder:
    """Binds one assignment's parameters; settings that depend on no name or layer are computed once."""

    def __init__(self, recipe: Recipe, assignment: AssignedMethod, names: Sequence[str]) -> None:
        """
        Args:
            recipe: what is asked.
            assignment: whose parameters are bound.
            names: what messages call each source, by its index.

        Raises:
            BindError: as ``settings``, where that depends on no tensor.
        """
        self._recipe = recipe
        self._method = assignment.method
        self._assignment = assignment
        self._names = {member.path: names[member.source] for member in assignment.members}
        nothing = [NOTHING] * len(assignment.members)
        self.constant = self._compute(NOTHING, nothing, 0.0) if self._is_constant() else None
        """The settings of every tensor, where they depend on none."""

    def settings(
        self, output: Subject, members: Sequence[Subject], t: float, *, depth: float = 0.0
    ) -> Settings:
        """Settings for one output tensor.

        Args:
            output: the output tensor.
            members: the tensor in each member of the assignment.
            t: position of its layer in the slice, in [0, 1], by which gradients go.
            depth: position in the whole stack, by which positional methods go.

        Raises:
            BindError: a required parameter has no value here, or a value is out of bounds.
        """
        if self.constant is not None:
            return self.constant
        return replace(self._compute(output, members, t), position=depth if self._method.positional else 0.0)

    def _is_constant(self) -> bool:
        scopes = [
            self._assignment.rule_parameters,
            *self._assignment.scopes,
            *(member.parameters for member in self._assignment.members),
        ]
        plain = all(isinstance(setting, Scalar) for scope in scopes for setting in scope.values())
        return plain and not self._method.positional

    def _compute(self, output: Subject, members: Sequence[Subject], t: float) -> Settings:
        values: dict[str, Value] = {}
        sources: list[dict[str, Value]] = [{} for _ in self._assignment.members]
        for parameter in self._method.parameters:
            ruled = self._assignment.rule_parameters.get(parameter.name)
            outer = [scope.get(parameter.name) for scope in self._assignment.scopes]
            if parameter.scope == "global":
                chain = [ruled, *outer]
                values[parameter.name] = self._value(parameter, chain, output, t, place=self._assignment.path)
                continue
            for position, member in enumerate(self._assignment.members):
                chain = [ruled, member.parameters.get(parameter.name), *outer]
                sources[position][parameter.name] = self._value(
                    parameter, chain, members[position], t, place=member.path
                )
        return Settings(values=values, sources=tuple(sources))

    def _value(
        self,
        parameter: Parameter,
        chain: Sequence[Setting | None],
        subject: Subject,
        t: float,
        *,
        place: Path_,
    ) -> Value:
        for setting in chain:
            found = evaluate(setting, subject, t) if setting is not None else None
            if found is not None:
                return self._coerced(parameter, found, subject.name, place)
        if parameter.required:
            raise BindError(self._required(parameter, place), parameter.name, subject.name)
        return parameter.default

    def _coerced(self, parameter: Parameter, value: float, name: str, place: Path_) -> Value:
        try:
            return parameter.coerce(value)
        except ValueError as error:
            where = self._recipe.where(*place, "parameters", parameter.name)
            problem = Problem(where, f"{error}.", "Correct the value.")
            raise BindError(problem, parameter.name, name) from error

    def _required(self, parameter: Parameter, place: Path_) -> Problem:
        subject = f"source {self._names[place]}" if place in self._names else "this merge"
        return Problem(
            self._recipe.where(*place),
            f"{subject} has no value of '{parameter.name}', which {self._method.name} requires.",
            f"Add '{parameter.name}' to its parameters, or to the parameters of the recipe.",
        )


class BindError(ValueError):
    """One parameter cannot be bound.

    Attributes:
        problem: what is wrong.
        parameter: name of the parameter.
        tensor: the tensor for which it cannot be bound; "" where it can be for none.
    """

    def __init__(self, problem: Problem, parameter: str, tensor: str) -> None:
        self.problem = problem
        self.parameter = parameter
        self.tensor = tensor
        super().__init__(str(problem))


def check_parameter_names(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> list[Problem]:
    """Every parameter must be known to some method, and one that has an effect must stand where it counts.

    Args:
        recipe: what is asked.
        own: its ``merge_method``.
        ruled: the method of each of its rules; a rule's parameters are its method's alone.
    """
    problems: list[Problem] = []
    for path, parameters, is_entry in written_blocks(recipe):
        chosen = methods_at(path, own, ruled)
        for name in parameters:
            place = (*path, "parameters", name)
            problems.extend(_name_problem(recipe, chosen, place, name, is_entry=is_entry))
    return problems


def ineffective_parameters(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> list[str]:
    """A note for each parameter that the recipe writes and that changes nothing under the methods there.

    mergekit ignores what its method does not have, and many recipes bring parameters of another one.

    Args:
        recipe: what is asked.
        own: its ``merge_method``.
        ruled: the method of each of its rules.
    """
    notes: dict[str, None] = {}
    for path, parameters, _ in written_blocks(recipe):
        chosen = methods_at(path, own, ruled)
        for name in parameters:
            if is_parameter(name) and not _takers(chosen, name):
                notes[_without_effect(chosen, name)] = None
    return list(notes)


def methods_at(path: Path_, own: Method, ruled: Sequence[Method]) -> list[Method]:
    """The methods that may take the parameters written at a place."""
    return [ruled[int(path[1])]] if path[:1] == ("methods",) else list(dict.fromkeys([own, *ruled]))


def _takers(chosen: Sequence[Method], name: str) -> list[Parameter]:
    """The parameters of that name, of the methods in which it has an effect."""
    found = (method.parameter(name) for method in chosen)
    return [parameter for parameter in found if parameter is not None and parameter.effective]


def _without_effect(chosen: Sequence[Method], name: str) -> str:
    known = [p.name for method in chosen for p in method.parameters if p.effective]
    is_theirs = any(method.parameter(name) is not None for method in chosen)
    guess = "" if is_theirs else did_you_mean(name, known).lower()
    note = f"'{name}' has no effect on {_called(chosen)} and is accepted for compatibility"
    return f"{note}; {guess}" if guess else note


def written_settings(recipe: Recipe) -> Iterator[tuple[Path_, Setting]]:
    """Every setting of a parameter with its place in the recipe."""
    for path, parameters, _ in written_blocks(recipe):
        for name, setting in parameters.items():
            yield (*path, "parameters", name), setting


def _name_problem(
    recipe: Recipe, chosen: Sequence[Method], path: Path_, name: str, *, is_entry: bool
) -> list[Problem]:
    where = recipe.where(*path)
    if not is_parameter(name):
        known = list(dict.fromkeys(p.name for method in chosen for p in method.parameters))
        has = "has" if len(chosen) == 1 else "have"
        listed = f"{has}: {', '.join(known)}." if known else f"{has} no parameters."
        remedy = f"{did_you_mean(name, known)} {_called(chosen)} {listed}".strip()
        return [Problem(where, f"'{name}' is not a parameter of {_called(chosen)}.", remedy)]
    takers = _takers(chosen, name)
    if is_entry and takers and all(parameter.scope == "global" for parameter in takers):
        return [
            Problem(
                where,
                f"'{name}' is one value per tensor, so it has no meaning under a single model.",
                "Move it to the parameters of the slice or of the recipe.",
            )
        ]
    return []


def _called(chosen: Sequence[Method]) -> str:
    return " or ".join(method.name for method in chosen)


def written_blocks(recipe: Recipe) -> Iterator[tuple[Path_, Parameters, bool]]:
    """Every ``parameters`` block with its path and whether it belongs to one source's entry."""
    yield (), recipe.parameters, False
    for index, rule in enumerate(recipe.methods):
        yield ("methods", index), rule.parameters, False
    yield from _entries((), recipe.models)
    yield from _slices((), recipe.slices)
    for name, module in recipe.modules.items():
        yield ("modules", name), module.parameters, False
        yield from _entries(("modules", name), module.models)
        yield from _slices(("modules", name), module.slices)


def _entries(path: Path_, entries: Sequence[ModelEntry]) -> Iterator[tuple[Path_, Parameters, bool]]:
    for index, entry in enumerate(entries):
        yield (*path, "models", index), entry.parameters, True


def _slices(path: Path_, slices: Sequence[OutputSlice]) -> Iterator[tuple[Path_, Parameters, bool]]:
    for position, piece in enumerate(slices):
        yield (*path, "slices", position), piece.parameters, False
        for index, entry in enumerate(piece.sources):
            yield (*path, "slices", position, "sources", index), entry.parameters, True
