"""Checks a recipe's methods and parameters before any model is opened: unknown names and bad values.

Each problem is reported once. To let planning go on and find the rest, a misspelled parameter is then taken
for the most similar one, and an impossible value is replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raymerge.architectures.rules import Role
from raymerge.documents.fields import FieldPath, closest, did_you_mean
from raymerge.errors import PlanError, Problem
from raymerge.methods import Method, Parameter, is_parameter, methods
from raymerge.planner.inputs.sources import model_references
from raymerge.planner.matching.align import Parameters
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import MissingMethod
from raymerge.recipes.router_repair import REPAIR, RouterRepair
from raymerge.recipes.schema import MethodRule, ModelEntry, ModuleEntry, OutputSlice, Recipe, SliceSource
from raymerge.recipes.settings import Conditional, Gradient, Scalar, Setting

_Entry = TypeVar("_Entry", Recipe, MethodRule, ModelEntry, OutputSlice, SliceSource, ModuleEntry)
_HOLDERS: Mapping[type, Sequence[str]] = {
    Recipe: ("methods", "models", "slices", "modules"),
    ModuleEntry: ("models", "slices"),
    OutputSlice: ("sources",),
}
# Fields whose entries have parameters too.
Change = Callable[[FieldPath, Parameters], Parameters]


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    recipe: Recipe
    own: Method
    ruled: tuple[Method, ...]
    router_rule: int | None
    problems: tuple[Problem, ...]


def check_recipe(recipe: Recipe) -> CheckedRecipe:
    """The recipe with its methods, and problems of names and values of parameters. Raises PlanError: an
    unknown method, or an impossible ``router``; with all problems."""
    problems: list[Problem] = []
    router_rule = None
    try:
        recipe, router_rule = with_router_rule(recipe)
    except PlanError as error:
        problems += error.problems
    own = _named(recipe, recipe.merge_method, ("merge_method",), problems)
    ruled = tuple(
        method
        for index, rule in enumerate(recipe.methods)
        if (method := _named(recipe, rule.merge_method or recipe.merge_method, ("methods", index), problems))
    )
    rest = list(_rule_source_problems(recipe))
    if own is None or problems:
        raise PlanError([*problems, *_known_to_none(recipe), *_wrong_values(recipe, None, ()), *rest])
    for path, parameters, is_entry in written_blocks(recipe):
        chosen = methods_at(path, own, ruled)  # A rule's parameters are its method's alone.
        for name in parameters:
            where = recipe.where(*path, "parameters", name)
            rest += _name_problems(where, chosen, name, is_entry=is_entry)
    recipe = _with_names_meant(recipe, own, ruled)
    rest += _wrong_values(recipe, own, ruled)
    return CheckedRecipe(_with_sound_values(recipe, own, ruled), own, ruled, router_rule, tuple(rest))


def neutral_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe with a method that takes any models, to find these models' problems whatever the method.

    None where the method does not combine tensors of several models."""
    own = methods().get(recipe.merge_method)
    if own is not None and own.max_sources == 1:
        return None
    method = "linear" if recipe.base_model is None else "task_arithmetic"
    plain = _with_parameters(recipe, lambda path, _: {"weight": Scalar(1.0)} if not path else {})
    return plain.model_copy(update={"merge_method": method, "methods": (), "router": "merge", "align": None})


def _named(recipe: Recipe, name: str, path: FieldPath, problems: list[Problem]) -> Method | None:
    method = methods().get(name)
    if method is None and not isinstance(name, MissingMethod):
        rule = path[:1] == ("methods",)
        if rule and recipe.methods[int(path[1])].merge_method is None:
            return None  # It is the recipe's own.
        where = recipe.where(*path, "merge_method") if rule else recipe.where(*path)
        remedy = f"{did_you_mean(name, methods())} raymerge has: {', '.join(methods())}.".strip()
        problems.append(Problem(where, f"there is no merge_method '{name}'.", remedy))
    return method


def _known_to_none(recipe: Recipe) -> Iterator[Problem]:
    known = list(dict.fromkeys(p.name for each in methods().values() for p in each.parameters))
    for path, parameters, _ in written_blocks(recipe):
        for name in parameters:
            if not is_parameter(name):
                what = f"'{name}' is not a parameter of any method."
                hint = did_you_mean(name, known) or "'raymerge methods' lists what each method takes."
                yield Problem(recipe.where(*path, "parameters", name), what, hint)


def _wrong_values(recipe: Recipe, own: Method | None, ruled: Sequence[Method]) -> Iterator[Problem]:
    references = {path[:-1]: reference for path, reference in model_references(recipe)}
    for path, parameters, is_entry in written_blocks(recipe):
        if is_entry and references.get(path) == recipe.base_model:
            continue  # Most methods take nothing from the base's own entry; binding says what one needs.
        for name, setting in parameters.items():
            known = _parameters(path, name, own, ruled)
            for steps, number in _numbers(setting):
                if not math.isnan(number) and (error := _objection(known, number)):
                    where = recipe.where(*path, "parameters", name, *steps)
                    yield Problem(where, f"{error}.", "Correct the value.")


def _parameters(path: FieldPath, name: str, own: Method | None, ruled: Sequence[Method]) -> list[Parameter]:
    chosen = list(methods().values()) if own is None else methods_at(path, own, ruled)
    return [parameter for method in chosen if (parameter := method.parameter(name)) is not None]


def _objection(known: Sequence[Parameter], number: float) -> str:
    errors: list[str] = []
    for parameter in known:
        try:
            parameter.coerce(number)
        except ValueError as refused:
            errors.append(str(refused))
    return errors[0] if errors and len(errors) == len(known) else ""


def _numbers(setting: Setting) -> Iterator[tuple[FieldPath, float]]:
    match setting:
        case Scalar(value):
            yield (), value
        case Gradient(values):
            yield from (((index,), value) for index, value in enumerate(values))
        case Conditional(choices):
            for index, choice in enumerate(choices):
                for steps, number in _numbers(choice.value):
                    yield (index, "value", *steps), number


def _with_names_meant(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> Recipe:
    """The recipe with each unknown parameter renamed to the most similar known one, if there is one.

    One value per tensor that is written at a single model is taken for the recipe's. Correct names override
    corrected ones."""
    moved: dict[str, Setting] = {}

    def renamed(path: FieldPath, parameters: Parameters) -> Parameters:
        chosen = methods_at(path, own, ruled)
        known = [parameter.name for method in chosen for parameter in method.parameters]
        right = {name: each for name, each in parameters.items() if is_parameter(name)}
        narrow = {each.name for method in chosen for each in method.parameters if each.scope != "global"}
        if _is_entry(path):
            moved.update({name: right[name] for name in right if name in known and name not in narrow})
        if len(right) == len(parameters):
            return parameters
        wrong = [name for name in parameters if name not in right]
        meant = {closest(name, known) or name: parameters[name] for name in wrong}
        return {**meant, **right}

    recipe = _with_parameters(recipe, renamed)
    return recipe.model_copy(update={"parameters": {**moved, **recipe.parameters}})


def _with_sound_values(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> Recipe:
    def sound(path: FieldPath, parameters: Parameters) -> Parameters:
        values: dict[str, Setting] = {}
        for name, setting in parameters.items():
            known = _parameters(path, name, own, ruled)
            wrong = any(math.isnan(number) or _objection(known, number) for _, number in _numbers(setting))
            if not wrong:
                values[name] = setting
            elif any(parameter.required for parameter in known):
                tried = (n for p in known for n in (0.5, 1.0, p.minimum, p.maximum) if n is not None)
                values[name] = Scalar(next(n for n in tried if not _objection(known, n)))
        return values

    return _with_parameters(recipe, sound)


def _with_parameters(entry: _Entry, change: Change, path: FieldPath = ()) -> _Entry:
    """A recipe, or the part of it at ``path``, with every block of parameters changed."""
    update: dict[str, Any] = {"parameters": change(path, entry.parameters)}
    for key in _HOLDERS.get(type(entry), ()):
        held: Any = getattr(entry, key)
        pairs = held.items() if isinstance(held, Mapping) else enumerate(held)
        update[key] = {name: _with_parameters(each, change, (*path, key, name)) for name, each in pairs}
        if not isinstance(held, Mapping):
            update[key] = tuple(update[key].values())
    return entry.model_copy(update=update)


def ineffective_parameters(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> list[str]:
    """A note for each parameter of the recipe that has no effect under the methods there.

    mergekit ignores what its method does not have, and many recipes bring parameters of another one."""
    notes: dict[str, None] = {}
    for path, parameters, _ in written_blocks(recipe):
        chosen = methods_at(path, own, ruled)
        for name in parameters:
            if is_parameter(name) and not _takers(chosen, name):
                notes[_without_effect(chosen, name)] = None
    return list(notes)


def methods_at(path: FieldPath, own: Method, ruled: Sequence[Method]) -> list[Method]:
    return [ruled[int(path[1])]] if path[:1] == ("methods",) else list(dict.fromkeys([own, *ruled]))


def _takers(chosen: Sequence[Method], name: str) -> list[Parameter]:
    parameters = (method.parameter(name) for method in chosen)
    return [parameter for parameter in parameters if parameter is not None and parameter.effective]


def _without_effect(chosen: Sequence[Method], name: str) -> str:
    known = [p.name for method in chosen for p in method.parameters if p.effective]
    is_theirs = any(method.parameter(name) is not None for method in chosen)
    guess = "" if is_theirs else did_you_mean(name, known).lower()
    note = f"'{name}' has no effect on {_called(chosen)} and is accepted for compatibility"
    return f"{note}; {guess}" if guess else note


def written_settings(recipe: Recipe) -> Iterator[tuple[FieldPath, Setting]]:
    for path, parameters, _ in written_blocks(recipe):
        for name, setting in parameters.items():
            yield (*path, "parameters", name), setting


def _name_problems(where: str, chosen: Sequence[Method], name: str, *, is_entry: bool) -> Iterator[Problem]:
    if not is_parameter(name):
        known = list(dict.fromkeys(p.name for method in chosen for p in method.parameters))
        has = "has" if len(chosen) == 1 else "have"
        listed = f"{has}: {', '.join(known)}." if known else f"{has} no parameters."
        remedy = f"{did_you_mean(name, known)} {_called(chosen)} {listed}".strip()
        yield Problem(where, f"'{name}' is not a parameter of {_called(chosen)}.", remedy)
        return
    takers = _takers(chosen, name)
    if is_entry and takers and all(parameter.scope == "global" for parameter in takers):
        what = f"'{name}' is one value per tensor, so it has no meaning under a single model."
        yield Problem(where, what, "Move it to the parameters of the slice or of the recipe.")


def _called(chosen: Sequence[Method]) -> str:
    return " or ".join(method.name for method in chosen)


def written_blocks(recipe: Recipe) -> list[tuple[FieldPath, Parameters, bool]]:
    """Every ``parameters`` block with its path and whether it belongs to one source's entry."""
    blocks: list[tuple[FieldPath, Parameters, bool]] = []

    def note(path: FieldPath, parameters: Parameters) -> Parameters:
        blocks.append((path, parameters, _is_entry(path)))
        return parameters

    _with_parameters(recipe, note)
    return blocks


def _is_entry(path: FieldPath) -> bool:
    return path[-2:-1] in (("models",), ("sources",))


def _merged_models(recipe: Recipe) -> list[ModelReference]:
    return list(dict.fromkeys([reference for _, reference in model_references(recipe)]))


def _rule_source_problems(recipe: Recipe) -> Iterator[Problem]:
    known = _merged_models(recipe)
    once = "Name it once; a model that the recipe lists twice takes part as often as it is listed."
    for index, rule in enumerate(recipe.methods):
        for position, reference in enumerate(rule.sources):
            where = recipe.where("methods", index, "sources", position)
            if reference in rule.sources[:position]:
                yield Problem(where, f"{reference} is named twice in this rule.", once)
            if reference not in known:
                yield _not_merged(where, reference, known)


def _not_merged(
    where: str, reference: ModelReference, known: Sequence[ModelReference], more: str = ""
) -> Problem:
    what = f"{reference} is not one of the models that the recipe merges."
    return Problem(where, what, f"Name one of: {', '.join(map(str, known))}{more}.")


ROUTER_ROLES = (Role.ROUTER.value, Role.ROUTER_BIAS.value)


def with_router_rule(recipe: Recipe) -> tuple[Recipe, int | None]:
    """The recipe with its ``router`` as one more rule, and that rule's number; itself for ``merge``. Raises
    PlanError: the model named is not one that the recipe merges."""
    if isinstance(recipe.router, RouterRepair) or recipe.router == "merge" or recipe.router == REPAIR:
        return recipe, None
    router_model = recipe.base_model if recipe.router == "base" else recipe.router
    if router_model is None:
        what = "'router: base' keeps the base's routers, and there is no base_model."
        raise PlanError(Problem(recipe.where("router"), what, "Name the base_model, or one of the models."))
    known = _merged_models(recipe)
    if router_model not in known:
        raise PlanError(_not_merged(recipe.where("router"), router_model, known, "; or write merge, or base"))
    rule = MethodRule(role=ROUTER_ROLES, merge_method="passthrough", sources=(router_model,))
    return recipe.model_copy(update={"methods": (*recipe.methods, rule)}), len(recipe.methods)
