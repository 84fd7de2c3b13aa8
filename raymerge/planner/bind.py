"""Parameters: which number holds for which tensor.

Precedence, nearest first: the source's entry, its slice, its module, the recipe, the method's default. The
filters of a per-source parameter look at the name in that source, those of a global one at the output's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.errors import Problem
from raymerge.methods import Method, Parameter, Settings, Value
from raymerge.planner.sources import Path_, Source
from raymerge.planner.spans import Parameters, Span
from raymerge.recipes import ModelEntry, OutputSlice, Recipe, Scalar, Setting, did_you_mean, evaluate


class Binder:
    """Binds one span's parameters; settings that depend on no name or layer are computed once."""

    def __init__(self, recipe: Recipe, method: Method, span: Span, sources: Sequence[Source]) -> None:
        self._recipe = recipe
        self._method = method
        self._span = span
        self._names = {member.path: sources[member.source].name for member in span.members}
        self._constant = self._compute("", [""] * len(span.members), 0.0) if self._is_constant() else None

    def settings(self, output: str, names: Sequence[str], t: float) -> Settings:
        """Settings for one output tensor.

        Args:
            output: the output tensor's name.
            names: the tensor's name in each member of the span.
            t: layer position in [0, 1].

        Raises:
            BindError: a required parameter has no value here, or a value is out of bounds.
        """
        return self._constant if self._constant is not None else self._compute(output, names, t)

    def _is_constant(self) -> bool:
        scopes = [*self._span.scopes, *(member.parameters for member in self._span.members)]
        return all(isinstance(setting, Scalar) for scope in scopes for setting in scope.values())

    def _compute(self, output: str, names: Sequence[str], t: float) -> Settings:
        values: dict[str, Value] = {}
        sources: list[dict[str, Value]] = [{} for _ in self._span.members]
        for parameter in self._method.parameters:
            if parameter.scope == "global":
                chain = [scope.get(parameter.name) for scope in self._span.scopes]
                values[parameter.name] = self._value(parameter, chain, output, t, place=self._span.path)
                continue
            outer = [scope.get(parameter.name) for scope in self._span.scopes]
            for position, member in enumerate(self._span.members):
                chain = [member.parameters.get(parameter.name), *outer]
                sources[position][parameter.name] = self._value(
                    parameter, chain, names[position], t, place=member.path
                )
        return Settings(values=values, sources=tuple(sources))

    def _value(
        self, parameter: Parameter, chain: Sequence[Setting | None], name: str, t: float, *, place: Path_
    ) -> Value:
        for setting in chain:
            found = evaluate(setting, name, t) if setting is not None else None
            if found is not None:
                return self._coerced(parameter, found, name, place)
        if parameter.required:
            raise BindError(self._required(parameter, place), parameter.name, name)
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


def check_parameter_names(recipe: Recipe, method: Method) -> list[Problem]:
    """Every parameter that the recipe writes must be one of the method's, at a level where it counts."""
    problems: list[Problem] = []
    for path, parameters, is_entry in _written(recipe):
        for name in parameters:
            problems.extend(
                _name_problem(recipe, method, (*path, "parameters", name), name, is_entry=is_entry)
            )
    return problems


def written_parameters(recipe: Recipe) -> frozenset[str]:
    """Names of all parameters that the recipe writes, at any level."""
    return frozenset(name for _, parameters, _ in _written(recipe) for name in parameters)


def _name_problem(recipe: Recipe, method: Method, path: Path_, name: str, *, is_entry: bool) -> list[Problem]:
    parameter = method.parameter(name)
    where = recipe.where(*path)
    if parameter is None:
        known = [p.name for p in method.parameters]
        hint = did_you_mean(name, known)
        listed = f"{method.name} has: {', '.join(known)}." if known else f"{method.name} has no parameters."
        return [Problem(where, f"'{name}' is not a parameter of {method.name}.", f"{hint} {listed}".strip())]
    if is_entry and parameter.scope == "global":
        return [
            Problem(
                where,
                f"'{name}' is one value per tensor, so it has no meaning under a single model.",
                "Move it to the parameters of the slice or of the recipe.",
            )
        ]
    return []


def _written(recipe: Recipe) -> Iterator[tuple[Path_, Parameters, bool]]:
    """Every ``parameters`` block with its path and whether it belongs to one source's entry."""
    yield (), recipe.parameters, False
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
