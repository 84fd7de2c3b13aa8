"""One expert of a mixture that is built from dense models, and what tells the router when to choose it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault, FaultError, show
from raymerge.documents.fields import between, read_fraction, read_integer, read_number
from raymerge.recipes.entry import Entry, Reference, Text

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

TEXT_GATES = ("router_input", "centroid", "ridge")
"""Gate modes that learn from every token, so that a file of text is worth reading."""

# Without a run of the base there is nothing to see held-out prompts with.
_GATES_WITHOUT_A_RUN = RANDOM_GATES | {"cheap_embed"}

_WITHOUT_NEGATIVES = ("centroid", "ridge")

_RANDOM_REMEDY = "write gate_mode: random."

_MOST_COPIES = 4096


def _read_deviation(value: object) -> float:
    """A standard deviation: 0 or more."""
    number = read_number(value)
    if number < 0:
        what = f"{show(value)} is below 0, and is a standard deviation."
        raise FaultError(Fault((), what, "Write 0 or more, like 0.01."))
    return number


class Expert(Entry):
    """One expert: the feed-forward layers of a dense model."""

    shape: ClassVar[str] = "a map like {source_model: PATH, positive_prompts: [TEXT]}"
    advice: ClassVar[Mapping[str, str]] = {
        "model": "An expert's model is its 'source_model'.",
        "revision": "A revision stands behind the name of its model, as in 'source_model: PATH@REVISION'.",
    }

    source_model: Reference
    """The source."""
    positive_prompts: tuple[Text, ...] = ()
    """Texts for which the router should choose this expert."""
    negative_prompts: tuple[Text, ...] = ()
    """Texts for which it should not."""
    prompt_file: Text | None = None
    """Path of a text file whose words stand for this expert, relative to the current directory."""
    held_out_prompts: tuple[Text, ...] = ()
    """Texts of this expert's kind that only the report of the gates uses."""
    copies: Annotated[int, by(between(1, _MOST_COPIES))] = 1
    """How many experts, one after the other, are made of the source."""
    noise_scale: Annotated[float, by(_read_deviation)] | None = None
    """Standard deviation of noise added to the expert's weights."""
    residual_scale: Annotated[float, by(read_number)] | None = None
    """Factor on the expert's down projection."""
    reinit_fraction: Annotated[float, by(read_fraction)] | None = None
    """Share of the expert's neurons that are drawn anew (Drop-Upcycling, arXiv 2502.19261)."""


def enough_experts(experts: Sequence[object], wanted: int, place: str) -> Iterable[Fault]:
    """That there are experts, and as many as each token is given.

    Args:
        experts: what the user wrote below ``experts``, unchecked.
        wanted: experts per token.
        place: key of the recipe to blame where there are too few.
    """
    if not experts:
        what = "'experts' is empty."
        yield Fault(("experts",), what, "Add {source_model: PATH, positive_prompts: [TEXT]}.")
        return
    copies = [_copies(expert) for expert in experts]
    number = sum(each for each in copies if each is not None)
    if None in copies or number >= wanted:
        return  # Copies that are no number are told by the field's own reader.
    what = f"experts_per_token is {wanted}, but 'experts' has only {number}: {_names(experts)}."
    yield Fault((place,), what, f"Add experts, or write experts_per_token: {number}.")


def routed_faults(experts: Sequence[object], gate: GateMode) -> Iterable[Fault]:
    """What the router needs to know of each routed expert and does not, or must not know."""
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
    """What has no place at a shared expert; ``gate`` is None where the recipe's own is not known."""
    for index, expert in enumerate(experts):
        if gate is not None:
            yield from _foreign_prompts(("shared_experts", index), expert, gate)
        if _copies(expert) not in (1, None):
            what = "'copies' of a shared expert would all see every token."
            remedy = "Remove it; 'residual_scale' makes a shared expert count for more."
            yield Fault(("shared_experts", index, "copies"), what, remedy)


def _foreign_prompts(path: tuple[str, int], expert: object, gate: GateMode) -> Iterable[Fault]:
    """Prompts that this gate has no use for."""
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
    """Texts without repetitions in an order of their own: neither makes a difference to a router."""
    is_list = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
    return sorted(set(texts)) if isinstance(texts, (list, tuple)) and is_list else texts


def _copies(expert: object) -> int | None:
    """How many experts this one stands for; None where that is no number."""
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
    return ", ".join(f"{index} ({_name(expert)}){_times(expert)}" for index, expert in enumerate(experts))


def _times(expert: object) -> str:
    copies = _copies(expert)
    return "" if copies in (1, None) else f" x {copies}"


def _name(expert: object) -> str:
    source = _get(expert, "source_model")
    return "no source_model" if source is None else str(source)
