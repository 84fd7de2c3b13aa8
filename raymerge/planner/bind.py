"""Parameters: which number holds for which tensor.

Precedence, nearest first: the source's entry, its slice, its module, the recipe, the method's default. A filter
of a per-source parameter is matched against the name in that source, of a global one against the output's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymerge.errors import Problem
from raymerge.methods import Method, Parameter, Settings
from raymerge.planner.sources import Path_
from raymerge.planner.spans import Parameters, Span
from raymerge.recipes import Recipe, Scalar, Setting, did_you_mean, evaluate

Value = float | bool | int | None


class Binder:
    """Binds one span's parameters; settings that depend on no name or layer are computed once."""

    def __init__(self, recipe: Recipe, method: Method, span: Span) -> None:
        self._recipe = recipe
        self._method = method
        self._span = span
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
                return self._coerced(parameter, found, place)
        if parameter.required:
            tensor = f" for {name}" if name else ""
            raise BindError(
                Problem(
                    self._recipe.where(*place),
                    f"{self._subject(place)} has no value of '{parameter.name}'{tensor}, which "
                    f"{self._method.name} requires.",
                    f"Add '{parameter.name}' to its parameters, or to the parameters of the recipe.",
                )
            )
        return parameter.default

    def _coerced(self, parameter: Parameter, value: float, place: Path_) -> Value:
        try:
            return parameter.coerce(value)
        except ValueError as error:
            raise BindError(
                Problem(self._recipe.where(*place), f"{error}.", "Correct the value.")
            ) from error

    def _subject(self, place: Path_) -> str:
        for member in self._span.members:
            if member.path == place:
                return f"source {_entry_model(self._recipe, place)}"
        return "this merge"


class BindError(ValueError):
    """One parameter cannot be bound; carries the problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def check_parameter_names(recipe: Recipe, method: Method) -> list[Problem]:
    """Every parameter that the recipe writes must be one of the method's, at a level where it counts."""
    problems: list[Problem] = []
    for path, parameters, is_entry in _written(recipe):
        for name in parameters:
            problems.extend(_name_problem(recipe, method, (*path, "parameters", name), name, is_entry=is_entry))
    return problems


def _name_problem(
    recipe: Recipe, method: Method, path: Path_, name: str, *, is_entry: bool
) -> list[Problem]:
    parameter = method.parameter(name)
    where = recipe.where(*path)
    if parameter is None:
        known = [p.name for p in method.parameters]
        hint = did_you_mean(name, known)
        listed = f"{method.name} has: {', '.join(known)}." if known else f"{method.name} has no parameters."
        return [
            Problem(where, f"'{name}' is not a parameter of {method.name}.", f"{hint} {listed}".strip())
        ]
    if is_entry and parameter.scope == "global":
        return [
            Problem(
                where,
                f"'{name}' is one value per tensor, so it has no meaning under a single model.",
                "Move it to the parameters of the slice or of the recipe.",
            )
        ]
    return []


def _written(recipe: Recipe) -> list[tuple[Path_, Parameters, bool]]:
    """Every ``parameters`` block with its path and whether it belongs to one source's entry."""
    blocks: list[tuple[Path_, Mapping[str, Setting], bool]] = [((), recipe.parameters, False)]
    blocks += [(("models", i), entry.parameters, True) for i, entry in enumerate(recipe.models or ())]
    pieces: list[tuple[Path_, Sequence[object]]] = [((), recipe.slices or ())]
    for name, module in (recipe.modules or {}).items():
        blocks.append((("modules", name), module.parameters, False))
        blocks += [
            (("modules", name, "models", i), entry.parameters, True)
            for i, entry in enumerate(module.models or ())
        ]
        pieces.append((("modules", name), module.slices or ()))
    for prefix, slices in pieces:
        for i, piece in enumerate(slices):
            blocks.append(((*prefix, "slices", i), piece.parameters, False))  # type: ignore[attr-defined]
            blocks += [
                ((*prefix, "slices", i, "sources", j), entry.parameters, True)
                for j, entry in enumerate(piece.sources)  # type: ignore[attr-defined]
            ]
    return blocks


def _entry_model(recipe: Recipe, path: Path_) -> str:
    """The model named by the entry at a path, as text."""
    node: object = recipe
    for key in path:
        node = node[key] if isinstance(node, tuple | list | Mapping) else getattr(node, str(key))  # type: ignore[index]
    return str(getattr(node, "model", node))

