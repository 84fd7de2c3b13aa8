"""A recipe that builds a mixture of experts from dense models (mergekit-moe's YAML)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from raymerge.documents.fields import (
    Fault,
    FieldPath,
    between,
    by,
    choice_of,
    number_within,
    read_fraction,
    read_integer,
    read_number,
    read_switch,
)
from raymerge.documents.grammar import Grammar, any_of, filled
from raymerge.documents.positions import Places
from raymerge.recipes.entry import (
    DEFAULT_SHARD_SIZE,
    Document,
    Entry,
    MergeDType,
    Parameters,
    Reading,
    Reference,
    ShardSize,
    Text,
    misplaced_keys,
)
from raymerge.recipes.schema import (
    FLAG_ADVICE,
    Duplicates,
    MethodRule,
    ModelEntry,
    PickledWeights,
    Recipe,
    Seed,
    flag_advice,
)

RandomGate = Literal["random", "uniform_random"]
TextGate = Literal["router_input", "centroid", "ridge"]
"""Gate modes that learn from every token, so that a text file is useful."""
GateMode = Literal["hidden", "hidden_last", "hidden_avg", "cheap_embed", RandomGate, TextGate]
"""How router rows are made; all but the two random ones need prompts."""

RANDOM_GATES = frozenset(get_args(RandomGate))
TEXT_GATES = get_args(TextGate)

# Without a run of the base there is nothing to see held-out prompts with.
_GATES_WITHOUT_A_RUN = RANDOM_GATES | {"cheap_embed"}

_WITHOUT_NEGATIVES = ("centroid", "ridge")

_RANDOM_REMEDY = "write gate_mode: random."

_MOST_COPIES = 4096


_read_deviation = number_within(
    {"minimum": 0}, "is below 0, and is a standard deviation.", "Write 0 or more, like 0.01."
)


class Expert(Entry):
    shape: ClassVar[str] = "a map like {source_model: PATH, positive_prompts: [TEXT]}"
    advice: ClassVar[Mapping[str, str]] = {
        "model": "An expert's model is its 'source_model'.",
        "revision": "A revision stands behind the name of its model, as in 'source_model: PATH@REVISION'.",
    }

    source_model: Reference
    positive_prompts: tuple[Text, ...] = ()
    negative_prompts: tuple[Text, ...] = ()
    prompt_file: Text | None = None
    """Text file for this expert, relative to the current directory."""
    held_out_prompts: tuple[Text, ...] = ()
    """Texts that only the gate report uses."""
    copies: Annotated[int, by(between(1, _MOST_COPIES))] = 1
    noise_scale: Annotated[float, by(_read_deviation)] | None = None
    residual_scale: Annotated[float, by(read_number)] | None = None
    reinit_fraction: Annotated[float, by(read_fraction)] | None = None
    """Share of neurons drawn anew (Drop-Upcycling, arXiv 2502.19261)."""


def _enough_experts(data: Mapping[str, Any], experts: Sequence[object]) -> Iterable[Fault]:
    per_token = data.get("experts_per_token")
    try:
        needed = _DEFAULT_EXPERTS_PER_TOKEN if per_token is None else read_integer(per_token)
    except ValueError:
        return  # The field's own reader says so.
    if not experts:
        what = "'experts' is empty."
        yield Fault(("experts",), what, "Add {source_model: PATH, positive_prompts: [TEXT]}.")
        return
    copies = [_copies(expert) for expert in experts]
    number = sum(each for each in copies if each is not None)
    if None in copies or number >= needed:
        return  # Copies that are no number are told by the field's own reader.
    what = f"experts_per_token is {needed}, but 'experts' has only {number}: {_names(experts)}."
    place = "experts" if per_token is None else "experts_per_token"
    yield Fault((place,), what, f"Add experts, or write experts_per_token: {number}.")


def routed_faults(experts: Sequence[object], gate: GateMode) -> Iterable[Fault]:
    for index, expert in enumerate(experts):
        yield from _foreign_prompts(("experts", index), expert, gate)
        if gate not in RANDOM_GATES:
            yield from _prompted(index, expert, gate)
    prompts = [_prompts(expert) for expert in experts]
    is_told = gate not in RANDOM_GATES and len(prompts) > 1 and any(prompts[0])
    if is_told and all(each == prompts[0] for each in prompts):
        what = f"experts {_names(experts)} all have the same prompts; no router tells them apart."
        yield Fault(("experts",), what, f"Give each its own, or {_RANDOM_REMEDY}")


def shared_faults(experts: Sequence[object], gate: GateMode | None) -> Iterable[Fault]:
    """Keys that shared experts must not have; ``gate`` is None where unknown."""
    for index, expert in enumerate(experts):
        if gate is not None:
            yield from _foreign_prompts(("shared_experts", index), expert, gate)
        if _copies(expert) not in (1, None):
            what = "'copies' of a shared expert would all see every token."
            remedy = "Remove it; 'residual_scale' makes a shared expert count for more."
            yield Fault(("shared_experts", index, "copies"), what, remedy)


def _foreign_prompts(path: tuple[str, int], expert: object, gate: GateMode) -> Iterable[Fault]:
    if gate in _WITHOUT_NEGATIVES and _get(expert, "negative_prompts"):
        what = f"gate_mode {gate} learns what is not an expert's from the prompts of the others."
        yield Fault((*path, "negative_prompts"), what, "Remove 'negative_prompts'.")
    if gate not in TEXT_GATES and _get(expert, "prompt_file") is not None:
        what = f"gate_mode {gate} reads no 'prompt_file'."
        modes = ", ".join(TEXT_GATES)
        remedy = f"Write one of gate_mode: {modes}; or remove it"
        remedy += "." if gate in RANDOM_GATES else " and write positive_prompts."
        yield Fault((*path, "prompt_file"), what, remedy)
    if gate in _GATES_WITHOUT_A_RUN and _get(expert, "held_out_prompts"):
        what = f"gate_mode {gate} does not run the base, so no 'held_out_prompts' are routed."
        yield Fault((*path, "held_out_prompts"), what, "Remove them, or choose another gate_mode.")


def _prompted(index: int, expert: object, gate: GateMode) -> Iterable[Fault]:
    if not isinstance(expert, (Mapping, Expert)):
        return
    positive, _, file = _prompts(expert)
    if not positive and not file:
        what = f"expert {index} ({_name(expert)}) has no positive_prompts, which gate_mode {gate} needs."
        some = "some, or a prompt_file" if gate in TEXT_GATES else "some"
        yield Fault(("experts", index), what, f"Give it {some}, or {_RANDOM_REMEDY}")
    copies = _copies(expert)
    if copies is not None and copies > 1:
        what = f"the {copies} copies of expert {index} ({_name(expert)}) have the same prompts; no router "
        remedy = f"List the model again with prompts of its own, or {_RANDOM_REMEDY}"
        yield Fault(("experts", index, "copies"), f"{what}tells them apart.", remedy)


def _prompts(expert: object) -> tuple[Any, Any, Any]:
    keys = ("positive_prompts", "negative_prompts", "prompt_file")
    positive, negative, file = (_get(expert, key) or () for key in keys)
    return _distinct(positive), _distinct(negative), file


def _distinct(texts: object) -> object:
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return sorted(set(texts))
    return texts


def _copies(expert: object) -> int | None:
    copies = _get(expert, "copies")
    if copies is None:
        return 1
    try:
        return read_integer(copies)
    except ValueError:
        return None


def _get(expert: object, key: str) -> Any:
    return expert.get(key) if isinstance(expert, Mapping) else getattr(expert, key, None)


def _names(experts: Sequence[object]) -> str:
    copies = [_copies(expert) for expert in experts]
    times = ["" if each in (1, None) else f" x {each}" for each in copies]
    return ", ".join(f"{index} ({_name(expert)}){times[index]}" for index, expert in enumerate(experts))


def _name(expert: object) -> str:
    source = _get(expert, "source_model")
    return "no source_model" if source is None else str(source)


Layout = Annotated[Literal["hub", "fused"], by(choice_of("hub", "fused"))]

_DEFAULT_EXPERTS_PER_TOKEN = 2
_DEFAULT_GATE: GateMode = "hidden"

_ONE_LAYER = (
    "it is not needed here, since the base is run with one layer in memory at a time. Remove the key."
)
_FLAG_ADVICE: Mapping[str, str] = {
    **FLAG_ADVICE,
    **flag_advice(dict.fromkeys(("load_in_4bit", "load_in_8bit"), _ONE_LAYER)),
    "i_understand_this_is_not_useful_without_training": "In mergekit that is the flag of this name; here "
    "experts of one model are built without asking. Remove the key.",
}

_VOCABULARY_ADVICE = (
    "A mixture has the tokenizer and the vocabulary of its base_model. Merge vocabularies in a recipe of "
    "their own before this one, and name its result as base_model."
)

_LEAST_SCALE, _MOST_SCALE = 1e-6, 1e6


_read_scale = number_within(
    {"minimum": _LEAST_SCALE, "maximum": _MOST_SCALE},
    "is out of range.",
    f"Write a number from {_LEAST_SCALE:g} to {_MOST_SCALE:.0f}.",
)


_TRUNK_ADVICE = "Everything but the experts is merged by 'trunk: {merge_method: ..., models: [...]}'."


class Trunk(Entry):
    """How everything but the experts is made, instead of taken from the base (Branch-Train-MiX)."""

    shape: ClassVar[str] = "a map like {merge_method: linear, parameters: {weight: 1}}"

    merge_method: Text
    models: tuple[ModelEntry, ...] = ()
    parameters: Parameters = {}
    methods: tuple[MethodRule, ...] = ()


_PROMPT_GATES = tuple(each for each in get_args(GateMode) if each not in {*TEXT_GATES, *RANDOM_GATES})


def _prompted_grammar(gates: Sequence[str], prompts: Grammar) -> Grammar:
    """What every expert has in these gate modes."""
    chosen: Grammar = {"properties": {"gate_mode": {"enum": [*gates]}}}
    if _DEFAULT_GATE not in gates:
        chosen["required"] = ["gate_mode"]
    return {"if": chosen, "then": {"properties": {"experts": {"items": prompts}}}}


class MoeRecipe(Document):
    shape: ClassVar[str] = "a map like {base_model: PATH, experts: [...]}"
    advice: ClassVar[Mapping[str, str]] = {
        **_FLAG_ADVICE,
        "merge_method": "A recipe with 'experts' builds a mixture of experts and has no method. "
        f"{_TRUNK_ADVICE}",
        **dict.fromkeys(("models", "methods", "parameters"), _TRUNK_ADVICE),
        **dict.fromkeys(("tokenizer", "tokenizer_source", "embedding_sizes"), _VOCABULARY_ADVICE),
        "pad_to_multiple_of": _VOCABULARY_ADVICE,
    }

    base_model: Reference
    """Gives config, tokenizer and everything but the feed-forward layers; runs the prompts."""
    experts: tuple[Expert, ...]
    gate_mode: Annotated[GateMode, by(choice_of(*get_args(GateMode)))] = _DEFAULT_GATE
    gate_scale: Annotated[float, by(_read_scale)] = 1.0
    """Factor on routed rows: above 1 the router is more decisive, below 1 less."""
    gate_ridge: Annotated[float, by(_read_scale)] = 0.1
    """Penalty of ``ridge``, as a share of the mean diagonal of the Gram matrix."""
    experts_per_token: Annotated[int, by(between(1))] = _DEFAULT_EXPERTS_PER_TOKEN
    """Experts per token, before ``granularity`` splits them."""
    shared_experts: tuple[Expert, ...] = ()
    granularity: Annotated[int, by(between(1))] = 1
    """Number of narrower experts that each routed expert is split into."""
    weight_scaling: Annotated[bool, by(read_switch)] = True
    """Whether split experts are scaled up to make up for the shared routing weight."""
    trunk: Trunk | None = None
    architecture: Text | None = None
    """Prefix of the output's architecture; None lets the sources decide."""
    layout: Layout = "hub"
    """``hub``: names as the family publishes them, mostly a tensor for each matrix of each expert; ``fused``:
    all experts of a layer in one tensor, as in transformers 5."""
    dtype: MergeDType | None = None
    seed: Seed = 0
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    duplicates: Duplicates = "keep"
    pickled_weights: PickledWeights = "read"

    grammar: ClassVar[Grammar] = {
        "allOf": [
            filled("experts"),
            _prompted_grammar(TEXT_GATES, any_of(filled("positive_prompts"), filled("prompt_file"))),
            _prompted_grammar(_PROMPT_GATES, filled("positive_prompts")),
        ]
    }

    @classmethod
    def ignored(cls, data: Mapping[str, Any], anchored: Collection[str]) -> dict[str, str]:
        notes = super().ignored(data, anchored)
        if data.get("merge_method") == "moe":
            notes["merge_method"] = (
                "'merge_method: moe' has no effect: 'experts' says that a mixture is built"
            )
        return notes

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        yield from misplaced_keys(cls, data)
        experts, shared = data.get("experts"), data.get("shared_experts")
        gate = _gate(data)
        if isinstance(experts, (list, tuple)):
            yield from _enough_experts(data, experts)
            if gate is not None:
                yield from routed_faults(experts, gate)
        if isinstance(shared, (list, tuple)):
            yield from shared_faults(shared, gate)
        if gate not in ("ridge", None) and data.get("gate_ridge") is not None:
            what = f"'gate_ridge' belongs to gate_mode ridge, and gate_mode is {gate}."
            yield Fault(("gate_ridge",), what, "Remove it, or write gate_mode: ridge.")


def _gate(data: Mapping[str, Any]) -> GateMode | None:
    gate = data.get("gate_mode")
    if gate is None:
        return _DEFAULT_GATE
    return cast(GateMode, gate) if isinstance(gate, str) and gate in get_args(GateMode) else None


_BASE = ("base_model",)
_TRUNK = ("trunk",)


def trunk_recipe(recipe: MoeRecipe, per_model: Collection[str]) -> Recipe:
    """The recipe of a mixture's trunk, with the positions of the mixture's recipe.

    ``per_model`` parameters are written at the models, so that an unlisted base gets none: it gives names, no
    weights."""
    sources = dict.fromkeys(expert.source_model for expert in recipe.experts)
    trunk = recipe.trunk or Trunk(merge_method="passthrough", models=(ModelEntry(model=recipe.base_model),))
    models = trunk.models or tuple(ModelEntry(model=source) for source in sources)
    parameters = trunk.parameters
    theirs = {name: value for name, value in parameters.items() if name in per_model}
    asked = {
        "merge_method": trunk.merge_method,
        "models": [m.model_copy(update={"parameters": {**theirs, **m.parameters}}) for m in models],
        "parameters": {name: value for name, value in parameters.items() if name not in per_model},
        "methods": trunk.methods,
        "base_model": recipe.base_model,
        "dtype": recipe.dtype,
        "seed": recipe.seed,
        "shard_size": recipe.shard_size,
        "duplicates": recipe.duplicates,
        "pickled_weights": recipe.pickled_weights,
    }
    written = recipe._reading.places
    places = _TrunkPlaces(written.name, written.marks, trunk=recipe.trunk, written=written)
    return Recipe.model_validate(asked, context=Reading(places, None))


@dataclass(frozen=True, slots=True)
class _TrunkPlaces(Places):
    trunk: Trunk | None = None
    written: Places = field(default_factory=lambda: Places("recipe"))

    def mark(self, path: FieldPath) -> tuple[int, int]:
        return self.written.mark(self._moved(path))

    def at(self, path: FieldPath) -> str:
        return self.written.at(self._moved(path))

    def _moved(self, path: FieldPath) -> FieldPath:
        is_models = path[:1] == ("models",)
        if self.trunk is None:
            return _BASE if is_models else path
        if path and path[0] not in Trunk.model_fields:
            return path
        if is_models and path[2:3] == ("parameters",) and not self._is_written(path):
            return (*_TRUNK, *path[2:])
        return _TRUNK if is_models and not self.trunk.models else (*_TRUNK, *path)

    def _is_written(self, path: FieldPath) -> bool:
        models = self.trunk.models if self.trunk is not None else ()
        entry = next((each for number, each in enumerate(models) if number == path[1]), None)
        return entry is not None and set(path[3:4]) <= entry.parameters.keys()
