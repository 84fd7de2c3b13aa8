"""The ``experts`` map: what becomes of the experts of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainSerializer

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault, FaultError, kind, show
from raymerge.documents.fields import between
from raymerge.documents.suggest import did_you_mean
from raymerge.recipes.entry import Entry, Reference, Text
from raymerge.recipes.expert_ids import (
    ExpertGroups,
    ExpertIds,
    PerLayer,
    plain_per_layer,
    read_groups,
    read_id,
    read_ids,
    read_per_layer,
)

_CHANGES = ("keep", "drop", "merge", "add", "dense")
_MIXTURES = ("mean", "concatenated")
_SCORED = ("drop", "merge")
_BUILT = "Experts of a mixture that is to be built are a list: experts: [{source_model: PATH}, ...]."


def _read_dense(value: object) -> int | str:
    if isinstance(value, str) and value in _MIXTURES:
        return value
    try:
        return read_id(value)
    except FaultError:
        remedy = f"{did_you_mean(str(value), _MIXTURES)} Write mean, concatenated or the number of an expert."
        raise FaultError(Fault((), f"{show(value)} is not known here.", remedy.lstrip())) from None


def _read_drop(value: object) -> int:
    if isinstance(value, (list, tuple, Mapping)):
        what = f"{show(value)} is {kind(value)}; 'drop' is how many experts go, those with the lowest scores."
        raise FaultError(Fault((), what, "Write a number, or list below 'keep' the experts that stay."))
    return between(1)(value)


_Kept = Annotated[
    PerLayer[ExpertIds], by(partial(read_per_layer, read_ids)), PlainSerializer(plain_per_layer)
]
_Merged = Annotated[
    PerLayer[ExpertGroups], by(partial(read_per_layer, read_groups)), PlainSerializer(plain_per_layer)
]


class AddedExpert(Entry):
    """Experts of another model, behind those that are there."""

    shape: ClassVar[str] = "a map like {model: PATH, experts: [0, 1]}"
    advice: ClassVar[Mapping[str, str]] = {"source_model": "Here the key is 'model'."}

    model: Reference
    """A mixture of experts of the same shapes; or a dense model, whose feed-forward layers become one."""
    experts: Annotated[ExpertIds, by(read_ids), PlainSerializer(list)] | None = None
    """Which of its experts, in this order; None for all of them."""
    row_of: Annotated[int, by(read_id)] | None = None
    """Number of the base's expert whose router row and biases are copied; None for those of ``model``, which
    a dense one does not have."""


class ExpertChange(Entry):
    """What becomes of the experts; exactly one of keep, drop, merge, add and dense."""

    shape: ClassVar[str] = "a map like {keep: [0, 1, 5]}"
    advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("source_model", "positive_prompts"), _BUILT)

    keep: _Kept | None = None
    """Experts that stay, in the order of their new numbers."""
    drop: Annotated[int, by(_read_drop)] | None = None
    """How many experts of each layer go, those with the lowest ``scores``."""
    merge: _Merged | None = None
    """Groups of experts that become one each: their mean, weighted by ``scores`` where there are some."""
    add: tuple[AddedExpert, ...] = ()
    """Experts that are added, in this order."""
    dense: Annotated[int | Literal["mean", "concatenated"], by(_read_dense)] | None = None
    """Makes the model dense: of one expert, of the ``mean`` of all, or of all side by side."""
    of: Annotated[ExpertIds, by(read_ids), PlainSerializer(list)] | None = None
    """Which experts ``dense: mean`` and ``dense: concatenated`` take; None for all of them."""
    scores: Text | None = None
    """How much each expert counts: ``weights`` for the size of its weights, or the path of a file."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """One change, with scores and a choice of experts where it can use them."""
        given = [key for key in _CHANGES if data.get(key) is not None and (key != "add" or data[key])]
        listed = ", ".join(_CHANGES)
        if not given:
            is_empty = data.get("add") is not None
            what = "'add' is empty." if is_empty else "nothing says what becomes of the experts."
            yield Fault(("add",) if is_empty else (), what, f"Fill one of: {listed}.")
            return
        if len(given) > 1:
            both = " and ".join(f"'{key}'" for key in given)
            remedy = f"Keep one of: {listed}. One merge may follow another as a second document of the file."
            yield Fault((given[1],), f"{both} are both given.", remedy)
        yield from _misplaced(data, given)


def _misplaced(data: Mapping[str, Any], given: Sequence[str]) -> Iterable[Fault]:
    if "drop" in given and data.get("scores") is None:
        what = "'drop' needs 'scores' to know which experts go."
        yield Fault(("drop",), what, "Add 'scores: weights' or 'scores: FILE', or write 'keep'.")
    if data.get("scores") is not None and not {*given} & {*_SCORED}:
        what = f"'scores' has no meaning beside '{given[0]}'."
        yield Fault(("scores",), what, "Remove it, or write 'drop' or 'merge'.")
    # A dense that is neither is told by its own reader.
    is_one = data.get("dense") is None or isinstance(data["dense"], int)
    if data.get("of") is not None and is_one:
        what = "'of' chooses the experts of 'dense: mean' and 'dense: concatenated' only."
        yield Fault(("of",), what, "Remove it, or write 'dense: mean' or 'dense: concatenated'.")
