"""A recipe that builds a mixture of experts from dense models (mergekit-moe's YAML)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from raymerge.recipes.entry import (
    DEFAULT_SHARD_SIZE,
    Document,
    Entry,
    MergeDType,
    Reference,
    ShardSize,
    Text,
    by,
)
from raymerge.recipes.faults import Fault
from raymerge.recipes.readers import between, choice_of, read_integer, read_number
from raymerge.recipes.schema import FLAG_ADVICE, Duplicates, Seed

GateMode = Literal[
    "hidden",
    "hidden_last",
    "hidden_avg",
    "cheap_embed",
    "random",
    "uniform_random",
    "router_input",
    "centroid",
    "ridge",
]
"""How the router's rows are made; all but the two random ones need prompts."""

RANDOM_GATES = frozenset({"random", "uniform_random"})
"""Gate modes that read no prompts."""

_DEFAULT_EXPERTS_PER_TOKEN = 2


class Expert(Entry):
    """One expert: the feed-forward layers of a dense model."""

    shape: ClassVar[str] = "a map like {source_model: PATH, positive_prompts: [TEXT]}"

    source_model: Reference
    """The source."""
    positive_prompts: tuple[Text, ...] = ()
    """Texts for which the router should choose this expert."""
    negative_prompts: tuple[Text, ...] = ()
    """Texts for which it should not."""
    noise_scale: Annotated[float, by(read_number)] | None = None
    """Standard deviation of noise added to the expert's weights."""
    residual_scale: Annotated[float, by(read_number)] | None = None
    """Factor on the expert's down projection."""


class MoeRecipe(Document):
    """A mixture of experts to build; building is not part of this version, reading and checking is."""

    shape: ClassVar[str] = "a map like {base_model: PATH, experts: [...]}"
    advice: ClassVar[Mapping[str, str]] = {
        **FLAG_ADVICE,
        "merge_method": "A recipe with 'experts' builds a mixture of experts and has no method. "
        "Remove one of the two keys.",
    }

    base_model: Reference
    """Gives everything but the feed-forward layers."""
    experts: tuple[Expert, ...]
    """The routed experts, in the order of the router's rows."""
    gate_mode: Annotated[GateMode, by(choice_of(*get_args(GateMode)))] = "hidden"
    """How the router's rows are made."""
    experts_per_token: Annotated[int, by(between(1))] = _DEFAULT_EXPERTS_PER_TOKEN
    """How many experts the router chooses for each token."""
    shared_experts: tuple[Expert, ...] = ()
    """Experts that every token goes through."""
    architecture: Text | None = None
    """Start of the name of the output's architecture; None lets the experts decide."""
    dtype: MergeDType | None = None
    """dtype of the output; None keeps the base's own."""
    seed: Seed = 0
    """Chooses noise and random router rows."""
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    """Bytes that one output file may have; 0 for a single file."""
    duplicates: Duplicates = "keep"
    """``keep``: each name has its own bytes; ``share``: equal ones may share storage."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Enough experts for each token, and prompts that tell them apart where the gate needs prompts."""
        experts = data.get("experts")
        if not isinstance(experts, (list, tuple)):
            return
        yield from _enough(experts, data.get("experts_per_token"))
        gate = data.get("gate_mode") or "hidden"
        if gate in get_args(GateMode) and gate not in RANDOM_GATES:
            yield from _prompted(experts, gate)


def _enough(experts: Sequence[object], per_token: object) -> Iterable[Fault]:
    try:
        wanted = _DEFAULT_EXPERTS_PER_TOKEN if per_token is None else read_integer(per_token)
    except ValueError:
        return  # The field's own reader says so.
    if not experts:
        yield Fault(
            ("experts",), "'experts' is empty.", "Add {source_model: PATH, positive_prompts: [TEXT]}."
        )
    if not experts or len(experts) >= wanted:
        return
    names = _names(experts)
    what = f"experts_per_token is {wanted}, but 'experts' has only {len(experts)}: {names}."
    remedy = f"Add experts, or write experts_per_token: {len(experts)}."
    yield Fault(("experts_per_token",) if per_token is not None else ("experts",), what, remedy)


def _prompted(experts: Sequence[object], gate: str) -> Iterable[Fault]:
    for index, expert in enumerate(experts):
        if isinstance(expert, (Mapping, Expert)) and not _get(expert, "positive_prompts"):
            what = f"expert {index} ({_name(expert)}) has no positive_prompts, which gate_mode {gate} needs."
            yield Fault(("experts", index), what, "Give it some, or write gate_mode: random.")
    prompts = [(_get(e, "positive_prompts"), _get(e, "negative_prompts")) for e in experts]
    if len(prompts) > 1 and prompts[0][0] and all(pair == prompts[0] for pair in prompts):
        what = f"experts {_names(experts)} all have the same prompts; no router tells them apart."
        yield Fault(("experts",), what, "Give each its own, or write gate_mode: random.")


def _get(expert: object, key: str) -> Any:
    return expert.get(key) if isinstance(expert, Mapping) else getattr(expert, key, None)


def _names(experts: Sequence[object]) -> str:
    return ", ".join(f"{index} ({_name(expert)})" for index, expert in enumerate(experts))


def _name(expert: object) -> str:
    source = _get(expert, "source_model")
    return "no source_model" if source is None else str(source)
