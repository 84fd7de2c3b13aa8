"""A recipe that builds a mixture of experts from dense models (mergekit-moe's YAML)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault, FaultError
from raymerge.documents.fields import between, choice_of, read_integer, read_positive, read_switch
from raymerge.recipes.entry import (
    DEFAULT_SHARD_SIZE,
    Document,
    Entry,
    MergeDType,
    Parameters,
    Reference,
    ShardSize,
    Text,
    misplaced_keys,
)
from raymerge.recipes.moe_expert import Expert, GateMode, enough_experts, routed_faults, shared_faults
from raymerge.recipes.rule import MethodRule
from raymerge.recipes.schema import FLAG_ADVICE, Duplicates, ModelEntry, PickledWeights, Seed

Layout = Annotated[Literal["hub", "fused"], by(choice_of("hub", "fused"))]

_DEFAULT_EXPERTS_PER_TOKEN = 2
_DEFAULT_GATE: GateMode = "hidden"

_FLAG_ADVICE: Mapping[str, str] = {
    **FLAG_ADVICE,
    "i_understand_this_is_not_useful_without_training": "In mergekit that is the flag of this name; here "
    "experts of one model are built without asking. Remove the key.",
    "load_in_4bit": "In mergekit that is the flag --load-in-4bit; it is not needed here, since the base is "
    "run with one layer in memory at a time. Remove the key.",
    "load_in_8bit": "In mergekit that is the flag --load-in-8bit; it is not needed here, since the base is "
    "run with one layer in memory at a time. Remove the key.",
}

_VOCABULARY_ADVICE = (
    "A mixture has the tokenizer and the vocabulary of its base_model. Merge vocabularies in a recipe of "
    "their own before this one, and name its result as base_model."
)

_LEAST_SCALE, _MOST_SCALE = 1e-6, 1e6


def _read_scale(value: object) -> float:
    """A factor in the making of router rows that leaves them numbers."""
    number = read_positive(value)
    if not _LEAST_SCALE <= number <= _MOST_SCALE:
        what = f"{number:g} is out of range."
        raise FaultError(Fault((), what, f"Write a number from {_LEAST_SCALE:g} to {_MOST_SCALE:.0f}."))
    return number


_TRUNK_ADVICE = "Everything but the experts is merged by 'trunk: {merge_method: ..., models: [...]}'."


class Trunk(Entry):
    """How everything but the experts is made, where it is not the base's (Branch-Train-MiX)."""

    shape: ClassVar[str] = "a map like {merge_method: linear, parameters: {weight: 1}}"

    merge_method: Text
    """Name of the method; the planner knows which there are."""
    models: tuple[ModelEntry, ...] = ()
    """What is merged; empty for every distinct model among the experts, once."""
    parameters: Parameters = {}
    """Settings that hold wherever nothing nearer says otherwise."""
    methods: tuple[MethodRule, ...] = ()
    """Tensors that are made in another way; one that no rule speaks of is made by ``merge_method``."""


class MoeRecipe(Document):
    """A mixture of experts to build from dense models."""

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
    """The routed experts, in the order of the router's rows."""
    gate_mode: Annotated[GateMode, by(choice_of(*get_args(GateMode)))] = _DEFAULT_GATE
    """How the router's rows are made."""
    gate_scale: Annotated[float, by(_read_scale)] = 1.0
    """Factor on every routed row: above 1 the router is surer of its choices, below 1 less."""
    gate_ridge: Annotated[float, by(_read_scale)] = 0.1
    """Penalty of ``ridge``, as a share of the mean of the Gram matrix's diagonal."""
    experts_per_token: Annotated[int, by(between(1))] = _DEFAULT_EXPERTS_PER_TOKEN
    """How many experts the router chooses for each token, counted before ``granularity`` cuts them."""
    shared_experts: tuple[Expert, ...] = ()
    """Experts that every token goes through."""
    granularity: Annotated[int, by(between(1))] = 1
    """Into how many narrower ones each routed expert is cut, along its width."""
    weight_scaling: Annotated[bool, by(read_switch)] = True
    """Whether the pieces of cut experts are scaled up to make up for the routing weights that they share."""
    trunk: Trunk | None = None
    """How everything but the experts is merged; None takes it from the base."""
    architecture: Text | None = None
    """Start of the name of the output's architecture; None lets the sources decide."""
    layout: Layout = "hub"
    """``hub``: tensors as the family publishes them, mostly one for each matrix of each expert; ``fused``:
    all experts of a layer in one tensor, as transformers 5 writes them."""
    dtype: MergeDType | None = None
    """dtype of the output; None keeps the base's own."""
    seed: Seed = 0
    """Chooses noise, neurons drawn anew and random router rows."""
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    """Bytes that one output file may have; 0 for a single file."""
    duplicates: Duplicates = "keep"
    """``keep``: each name has its own bytes; ``share``: equal ones may share storage."""
    pickled_weights: PickledWeights = "read"
    """Pickled weights, where there are no safetensors: ``read`` without running code, or ``refuse``."""

    @classmethod
    def ignored(cls, data: Mapping[str, Any], anchored: Collection[str]) -> dict[str, str]:
        """As for all recipes, and what some write for the method."""
        notes = super().ignored(data, anchored)
        if data.get("merge_method") == "moe":
            notes["merge_method"] = (
                "'merge_method: moe' has no effect: 'experts' says that a mixture is built"
            )
        return notes

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Enough experts for each token, and prompts that the gate can use and that tell experts apart."""
        yield from misplaced_keys(cls, data)
        experts, shared = data.get("experts"), data.get("shared_experts")
        gate = _gate(data)
        if isinstance(experts, (list, tuple)):
            yield from _enough(data, experts)
            if gate is not None:
                yield from routed_faults(experts, gate)
        if isinstance(shared, (list, tuple)):
            yield from shared_faults(shared, gate)
        if gate not in ("ridge", None) and data.get("gate_ridge") is not None:
            what = f"'gate_ridge' belongs to gate_mode ridge, and gate_mode is {gate}."
            yield Fault(("gate_ridge",), what, "Remove it, or write gate_mode: ridge.")


def _gate(data: Mapping[str, Any]) -> GateMode | None:
    """The recipe's gate mode; None where it is none, which the field's own reader says."""
    gate = data.get("gate_mode")
    if gate is None:
        return _DEFAULT_GATE
    return cast(GateMode, gate) if isinstance(gate, str) and gate in get_args(GateMode) else None


def _enough(data: Mapping[str, Any], experts: list[object] | tuple[object, ...]) -> Iterable[Fault]:
    per_token = data.get("experts_per_token")
    try:
        wanted = _DEFAULT_EXPERTS_PER_TOKEN if per_token is None else read_integer(per_token)
    except ValueError:
        return  # The field's own reader says so.
    yield from enough_experts(experts, wanted, "experts" if per_token is None else "experts_per_token")
