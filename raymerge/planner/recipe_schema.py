"""JSON Schema of recipes: what their readers declare, with the methods and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from raymerge.documents.grammar import NUMBER, TEXT, WHOLE_NUMBER, Grammar, any_of, filled, given, or_empty
from raymerge.documents.json_schema import DIALECT, definitions, reference
from raymerge.methods import Method, Parameter, methods
from raymerge.methods.method import BaseUse
from raymerge.recipes.average import GIVEN_ELSEWHERE
from raymerge.recipes.axes import AXES_GRAMMAR
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import MARK, PROMPTS, SWEEP_KEYS, VARIABLE
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.schema import Recipe
from raymerge.recipes.search import MARK_GRAMMAR
from raymerge.recipes.settings import setting_grammar
from raymerge.recipes.windows import WINDOWS_GRAMMAR

_KINDS = (Recipe, MoeRecipe, ExpertSetRecipe)
_AVERAGE = "AverageRecipe"
_KEYS: Grammar = {"sweep": AXES_GRAMMAR, "outputs": TEXT}
"""Keys that a recipe of any kind may have beside its own."""
_VARIABLE = {"description": "A value of a sweep's axis", "type": "string", "pattern": f"^{VARIABLE.pattern}$"}
_NONE: Grammar = {"maxItems": 0}
_NUMBERS: dict[str, Grammar] = {
    "float": NUMBER,
    "int": {**WHOLE_NUMBER, "type": ["integer", "boolean", "string"]},
    "bool": {"enum": [False, True, 0, 1, "0", "1"]},
}


def recipe_schema(search: Grammar) -> dict[str, Any]:
    """``search``: what may stand below that key."""
    defs = definitions(*_KINDS)
    defs = {name: _open_to_variables(each) for name, each in defs.items()}
    defs |= {"Variable": _VARIABLE, "Mark": MARK_GRAMMAR, "Search": search}
    _name_methods(defs)
    # mergekit has this name for what 'experts' says.
    defs[MoeRecipe.__name__]["properties"]["merge_method"] = {"const": "moe"}
    defs[_AVERAGE] = _average(defs[Recipe.__name__])
    for name in (*(kind.__name__ for kind in _KINDS), _AVERAGE):
        defs[name]["properties"] |= {key: or_empty(each) for key, each in _KEYS.items()}
        defs[name]["properties"][MARK] = reference("Search")
        defs[name]["patternProperties"] = {"^x-": True}
    defs |= {"NoVariable": _no_variable(), "NoMark": _no_mark()}
    return {
        "$schema": DIALECT,
        "title": "raymerge recipe",
        **_kind_of_document(),
        "allOf": [
            {"if": {"not": given("sweep")}, "then": reference("NoVariable")},
            {"if": {"not": _is_marked()}, "then": reference("NoMark")},
            {"not": {"allOf": [_is_marked(), any_of(*map(given, _KEYS))]}},
            {"if": given("outputs"), "then": any_of(*map(given, SWEEP_KEYS))},
        ],
        "$defs": dict(sorted(defs.items())),
    }


def _kind_of_document() -> Grammar:
    """As ``recipes.load`` tells the kinds apart."""
    is_map: Grammar = {"required": ["experts"], "properties": {"experts": {"type": "object"}}}
    is_built = any_of({"required": ["experts"]}, {"required": ["gate_mode"]})
    average = _choice({"required": ["checkpoints"]}, _AVERAGE, reference(Recipe.__name__))
    return _choice(is_map, ExpertSetRecipe.__name__, _choice(is_built, MoeRecipe.__name__, average))


def _choice(condition: Grammar, name: str, other: Grammar) -> Grammar:
    return {"if": condition, "then": reference(name), "else": other}


def _average(recipe: Grammar) -> Grammar:
    """Of a recipe with ``checkpoints``, which stand for its models."""
    properties = {key: each for key, each in recipe["properties"].items() if key not in GIVEN_ELSEWHERE}
    properties |= {"merge_method": {"const": "linear"}, "checkpoints": WINDOWS_GRAMMAR}
    follows = {"properties": {"parameters": {"properties": dict.fromkeys(("weight", "normalize"), False)}}}
    return {**recipe, "properties": properties, "required": ["checkpoints"], "allOf": [follows]}


# Variables of sweeps and marks of searches ---------------------------------------------------------

_HOLDERS = ("properties", "patternProperties")
_HELD = ("items", "additionalProperties")
_LISTED = ("anyOf", "prefixItems")


def _open_to_variables(schema: Any) -> Any:
    """The schema with a mark wherever a scalar may stand, and a variable where that is more than any text."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for key in schema:
        if key in _HOLDERS:
            changed[key] = {name: _open_to_variables(each) for name, each in schema[key].items()}
        elif key in _HELD:
            changed[key] = _open_to_variables(schema[key])
        elif key in _LISTED:
            changed[key] = [_open_to_variables(each) for each in schema[key]]
    others = _instead_of(schema)
    if not others:
        return changed
    about = {key: changed.pop(key) for key in ("description", "default") if key in changed}
    return {**about, **any_of(changed, *map(reference, others))}


def _instead_of(schema: Grammar) -> tuple[str, ...]:
    """What may stand in the place of a scalar; nothing in that of anything else."""
    kinds = schema.get("type", [])
    scalars = {kinds} if isinstance(kinds, str) else {*kinds}
    scalars -= {"object", "array", "null"}
    if scalars == {"string"} and not schema.keys() & {"pattern", "enum"}:
        # A variable is a text too.
        return ("Mark",)
    return ("Variable", "Mark") if scalars or "enum" in schema else ()


def _no_variable() -> Grammar:
    """Documents without a variable, but for prompts, which may be any text."""
    each = reference("NoVariable")
    prompts = dict.fromkeys(PROMPTS, True)
    not_one: Grammar = {"type": "string", "pattern": _VARIABLE["pattern"]}
    return {"not": not_one, "items": each, "properties": prompts, "additionalProperties": each}


def _is_marked() -> Grammar:
    return {"required": [MARK]}


def _no_mark() -> Grammar:
    each = reference("NoMark")
    no_map: Grammar = {"not": {"type": "object", **_is_marked()}}
    return {**no_map, "items": each, "additionalProperties": each}


# Methods -------------------------------------------------------------------------------------------


def _name_methods(defs: dict[str, Grammar]) -> None:
    """Add names of methods and parameters, and what each method demands, to the schemas of what has them."""
    known = methods().values()
    names = ({"const": each.name, "description": each.summary} for each in known)
    defs["Method"] = any_of(*names, reference("Variable"), reference("Mark"))
    defs["Parameters"] = {"type": "object", "properties": _all_parameters(), "additionalProperties": False}
    for schema in [*defs.values()]:
        properties = schema.get("properties", {})
        for key, name in (("merge_method", "Method"), ("parameters", "Parameters")):
            if key in properties:
                named = reference(name)
                properties[key] = named if key in schema["required"] else or_empty(named)
    for method in known:
        defs |= {_setting_of(each): _settings(each) for each in method.parameters}
        defs[f"{method.name}_parameters"] = {
            "properties": {each.name: reference(_setting_of(each)) for each in method.parameters}
        }
        defs[_parts(method)] = _part_grammar(method)
        defs |= _needs(method)
    is_alone: Grammar = {"not": filled("methods")}
    _demand(defs[Recipe.__name__], lambda each: [_parts(each), *_needs(each)], is_alone)
    _demand(defs["Trunk"], lambda each: [_parts(each)], is_alone)
    _demand(defs["MethodRule"], lambda each: [_parts(each)], {})


def _demand(schema: Grammar, of_method: Callable[[Method], Iterable[str]], condition: Grammar) -> None:
    """What each method demands of a map that names it, by names of definitions."""
    for method in methods().values():
        demands = {"allOf": [reference(name) for name in of_method(method)]}
        schema.setdefault("allOf", []).append({"if": {**_names(method), **condition}, "then": demands})


def _names(method: Method) -> Grammar:
    return {"required": ["merge_method"], "properties": {"merge_method": {"const": method.name}}}


def _all_parameters() -> dict[str, Grammar]:
    """A parameter that other methods have is accepted beside every method, without effect."""
    docs: dict[str, dict[str, list[str]]] = {}
    for method in methods().values():
        for each in method.parameters:
            docs.setdefault(each.name, {}).setdefault(each.doc, []).append(method.name)
    return {
        name: {
            "description": ". ".join(f"{doc} ({', '.join(takers)})" for doc, takers in by_doc.items()),
            **reference("Setting"),
        }
        for name, by_doc in docs.items()
    }


def _setting_of(parameter: Parameter) -> str:
    limits = (f"{limit:.17g}" for limit in (parameter.minimum, parameter.maximum) if limit is not None)
    return "_".join(("setting", parameter.kind, *limits))


def _settings(parameter: Parameter) -> Grammar:
    limits = {"minimum": parameter.minimum, "maximum": parameter.maximum}
    given_limits = {name: limit for name, limit in limits.items() if limit is not None}
    grammar: Grammar = setting_grammar({**_NUMBERS[parameter.kind], **given_limits})
    opened: Grammar = _open_to_variables(grammar)
    return opened


def _parts(method: Method) -> str:
    return f"{method.name}_parts"


def _part_grammar(method: Method) -> Grammar:
    """Recipes and their parts: the ranges of parameters, and that no model has what is one value for all."""
    own = reference(f"{method.name}_parameters")
    shared = [each.name for each in method.parameters if each.scope == "global" and each.effective]
    of_one = {"properties": {"parameters": {**own, "properties": dict.fromkeys(shared, False)}}}
    return {"properties": {"parameters": own, **_within({"items": of_one}, _parts(method))}}


def _within(models: Grammar, name: str) -> Grammar:
    """Lists of models in a part of a recipe; and the parts in it, by the name of their definition."""
    part = reference(name)
    deeper = {"slices": {"items": part}, "modules": {"additionalProperties": part}}
    return {"models": models, "sources": models, **deeper}


def _needs(method: Method) -> dict[str, Grammar]:
    """What has to stand in a recipe, or else in each of its parts: definitions by name."""
    needs: dict[str, Grammar] = {}
    for each in (each for each in method.parameters if each.required):
        holder: Grammar = {"required": ["parameters"], "properties": {"parameters": given(each.name)}}
        if each.scope == "global":
            models, name = _NONE, f"{each.name}_given"
        elif method.base is BaseUse.UNUSED:
            models, name = {"items": holder}, f"{each.name}_of_each"
        else:
            # The base may be listed, and needs none.
            models = {"contains": {"not": holder}, "minContains": 0, "maxContains": 1}
            name = f"{each.name}_of_each_but_the_base"
        needs[name] = any_of(holder, {"properties": _within(models, name)})
    if method.base is BaseUse.REQUIRED:
        name = "base_given"
        needs[name] = any_of(given("base_model"), {"properties": _within(_NONE, name)})
    return needs
