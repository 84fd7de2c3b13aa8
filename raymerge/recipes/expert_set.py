"""A recipe that changes the experts of one checkpoint, or makes a dense model of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import PlainSerializer

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    between,
    by,
    did_you_mean,
    kind,
    read_integer,
    read_list,
    refusal,
    show,
    unexpected,
)
from raymerge.documents.grammar import WHOLE_NUMBER, Grammar, accepts, any_of, exactly_one, list_of
from raymerge.recipes.calibration import Calibrate
from raymerge.recipes.entry import DEFAULT_SHARD_SIZE, Document, Entry, MergeDType, Reference, ShardSize, Text
from raymerge.recipes.schema import FLAG_ADVICE, Duplicates, PickledWeights, Seed

ExpertIds: TypeAlias = tuple[int, ...]

ExpertGroups: TypeAlias = tuple[ExpertIds, ...]

T = TypeVar("T", bound=Sequence[object])

_LIST = "Write numbers of experts, like [0, 2, 3]."
_ONE_LENGTH = "Make all equally long: the config has one number of experts for all layers."
_GROUPS = "Write groups of experts, like [[0, 1], [2, 3]]."


@dataclass(frozen=True, slots=True)
class PerLayer(Generic[T]):
    everywhere: T | None
    by_layer: tuple[tuple[int, T], ...] = ()
    """Rising layer numbers with their values, all of one length."""

    @property
    def num_experts(self) -> int:
        return len(self.by_layer[0][1] if self.everywhere is None else self.everywhere)

    def entries(self) -> Iterator[tuple[tuple[str, ...], T]]:
        """Each value, with the key of its layer; without one where it holds for all layers."""
        if self.everywhere is not None:
            yield (), self.everywhere
        yield from (((str(layer),), value) for layer, value in self.by_layer)

    def at(self, layer: int) -> T | None:
        return self.everywhere if self.everywhere is not None else dict(self.by_layer).get(layer)


_ID: Grammar = {**WHOLE_NUMBER, "minimum": 0}
_IDS = list_of(_ID)


def _per_layer(grammar: Grammar) -> Grammar:
    by_layer = {
        "type": "object",
        "propertyNames": {"pattern": r"^[0-9]+$"},
        "additionalProperties": grammar,
        "minProperties": 1,
    }
    return any_of(grammar, by_layer)


@accepts(_ID)
def read_id(value: object) -> int:
    return _read_number(value, "expert")


@accepts(_IDS)
def read_ids(value: object) -> ExpertIds:
    if not isinstance(value, (list, tuple)):
        raise unexpected(value, "a list of experts", _LIST)
    ids = read_list(read_id, value, _LIST)
    _refuse_repeated([((index,), expert) for index, expert in enumerate(ids)])
    return ids


def read_groups(value: object) -> ExpertGroups:
    if not isinstance(value, (list, tuple)):
        raise unexpected(value, "groups of experts", _GROUPS)
    groups = read_list(read_ids, value, _GROUPS)
    _refuse_repeated([((number, i), e) for number, group in enumerate(groups) for i, e in enumerate(group)])
    return groups


def read_per_layer(read: Callable[[object], T], value: object) -> PerLayer[T]:
    if isinstance(value, PerLayer):
        return value
    if not isinstance(value, Mapping):
        return PerLayer(read(value))
    if not value:
        raise refusal("the map is empty.", "Write a list for each layer, or one for all.")
    faults: list[Fault] = []
    by_layer: dict[int, T] = {}
    for key, part in value.items():
        layer = attempt(partial(_read_number, noun="layer"), key, (str(key),), faults)
        listed = attempt(read, part, (str(key),), faults)
        if layer is None or listed is None:
            continue
        if layer in by_layer:
            faults.append(Fault((str(key),), f"layer '{layer}' was given before.", "Remove one of the two."))
        first, other = next(iter(by_layer.items()), (layer, listed))
        if len(other) != len(listed):
            what = f"the list of layer '{layer}' is {len(listed)} long, that of layer '{first}' {len(other)}."
            faults.append(Fault((str(key),), what, _ONE_LENGTH))
        by_layer.setdefault(layer, listed)
    if faults:
        raise FaultError(faults)
    return PerLayer(None, tuple(sorted(by_layer.items(), key=lambda pair: pair[0])))


def plain_per_layer(change: PerLayer[Any]) -> object:
    if change.everywhere is not None:
        return _plain(change.everywhere)
    return {str(layer): _plain(listed) for layer, listed in change.by_layer}


def _refuse_repeated(placed: Sequence[tuple[tuple[int, ...], int]]) -> None:
    seen: set[int] = set()
    again: list[tuple[tuple[int, ...], int]] = []
    for path, expert in placed:
        if expert in seen:
            again.append((path, expert))
        seen.add(expert)
    if again:
        once = "Name each expert once."
        raise FaultError(Fault(path, f"expert {expert} was listed before.", once) for path, expert in again)


def _read_number(value: object, noun: str) -> int:
    try:
        number = read_integer(value)
    except FaultError:
        remedy = f"Write a whole number; {noun}s count from 0."
        raise unexpected(value, f"the number of one {noun}", remedy) from None
    if number < 0:
        raise refusal(f"{number} is below {noun} 0.", f"{noun.capitalize()}s count from 0.")
    return number


def _plain(listed: Sequence[object]) -> list[object]:
    return [_plain(item) if isinstance(item, tuple) else item for item in listed]


_CHANGES = ("keep", "drop", "merge", "add", "dense")
_MIXTURES = ("mean", "concatenated")
_SCORED = ("drop", "merge")
SALIENCY = "saliency"
_BUILT = "Experts of a mixture that is to be built are a list: experts: [{source_model: PATH}, ...]."


@accepts(any_of({"enum": [*_MIXTURES]}, _ID))
def _read_dense(value: object) -> int | str:
    if isinstance(value, str) and value in _MIXTURES:
        return value
    try:
        return read_id(value)
    except FaultError:
        remedy = f"{did_you_mean(str(value), _MIXTURES)} Write mean, concatenated or the number of an expert."
        raise refusal(f"{show(value)} is not known here.", remedy.lstrip()) from None


@accepts({**WHOLE_NUMBER, "minimum": 1})
def _read_drop(value: object) -> int:
    if isinstance(value, (list, tuple, Mapping)):
        what = f"{show(value)} is {kind(value)}; 'drop' is how many experts go, those with the lowest scores."
        raise refusal(what, "Write a number, or list below 'keep' the experts that stay.")
    return between(1)(value)


_Kept = Annotated[
    PerLayer[ExpertIds],
    by(accepts(_per_layer(_IDS))(partial(read_per_layer, read_ids))),
    PlainSerializer(plain_per_layer),
]
_Merged = Annotated[
    PerLayer[ExpertGroups],
    by(accepts(_per_layer(list_of(_IDS)))(partial(read_per_layer, read_groups))),
    PlainSerializer(plain_per_layer),
]


class AddedExpert(Entry):
    shape: ClassVar[str] = "a map like {model: PATH, experts: [0, 1]}"
    advice: ClassVar[Mapping[str, str]] = {"source_model": "Here the key is 'model'."}

    model: Reference
    """A mixture of the same shapes; or a dense model, whose feed-forward layers become one expert."""
    experts: Annotated[ExpertIds, by(read_ids), PlainSerializer(list)] | None = None
    row_of: Annotated[int, by(read_id)] | None = None
    """The base's expert whose router row and biases are copied; None for those of ``model``, which a dense
    one lacks."""


class ExpertChange(Entry):
    """Exactly one of keep, drop, merge, add and dense."""

    shape: ClassVar[str] = "a map like {keep: [0, 1, 5]}"
    advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("source_model", "positive_prompts"), _BUILT)

    keep: _Kept | None = None
    drop: Annotated[int, by(_read_drop)] | None = None
    merge: _Merged | None = None
    """Groups of experts that become one each: their mean, weighted by ``scores`` if given."""
    add: tuple[AddedExpert, ...] = ()
    dense: Annotated[int | Literal["mean", "concatenated"], by(_read_dense)] | None = None
    """Dense model from one expert, the ``mean``, or all side by side."""
    of: Annotated[ExpertIds, by(read_ids), PlainSerializer(list)] | None = None
    """Experts for ``dense: mean`` and ``dense: concatenated``; None for all."""
    scores: Text | None = None
    """Weight of each expert: ``weights`` for its norm, ``saliency`` for what it does with the texts of
    ``calibrate``, or the path of a file or of statistics."""

    grammar: ClassVar[Grammar] = exactly_one(*_CHANGES)

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
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
        remedy = (
            "Add 'scores: weights', 'scores: FILE', or 'scores: saliency' with 'calibrate'; or write 'keep'."
        )
        yield Fault(("drop",), what, remedy)
    if data.get("scores") is not None and not {*given} & {*_SCORED}:
        what = f"'scores' has no meaning beside '{given[0]}'."
        yield Fault(("scores",), what, "Remove it, or write 'drop' or 'merge'.")
    # A dense that is neither is told by its own reader.
    is_one = data.get("dense") is None or isinstance(data["dense"], int)
    if data.get("of") is not None and is_one:
        what = "'of' chooses the experts of 'dense: mean' and 'dense: concatenated' only."
        yield Fault(("of",), what, "Remove it, or write 'dense: mean' or 'dense: concatenated'.")


_NOT_BUILT = (
    "A map of 'experts' changes the experts of one checkpoint. To build a mixture of experts, write a list: "
    "experts: [{source_model: PATH}, ...]."
)
_NOT_MERGED = (
    "A map of 'experts' changes the experts of one checkpoint, 'base_model'. To merge first, put that merge "
    "into a document of its own before this one, give it a name, and name it as base_model."
)


class ExpertSetRecipe(Document):
    shape: ClassVar[str] = "a map like {base_model: PATH, experts: {keep: [0, 1, 5]}}"
    advice: ClassVar[Mapping[str, str]] = {
        **FLAG_ADVICE,
        "model": "Here the key is 'base_model'.",
        **dict.fromkeys(("gate_mode", "shared_experts", "experts_per_token", "architecture"), _NOT_BUILT),
        **dict.fromkeys(("merge_method", "models", "slices", "parameters"), _NOT_MERGED),
    }

    base_model: Reference
    experts: ExpertChange
    calibrate: Calibrate | None = None
    """What the model is run on for ``scores: saliency``."""
    dtype: MergeDType | None = None
    seed: Seed = 0
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    duplicates: Duplicates = "keep"
    pickled_weights: PickledWeights = "read"

    @property
    def is_measured(self) -> bool:
        """Whether experts are chosen by what the model does with texts, which a stage finds out."""
        return self.experts.scores == SALIENCY

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        change, calibrate = data.get("experts"), data.get("calibrate")
        scores = change.get("scores") if isinstance(change, Mapping) else getattr(change, "scores", None)
        if scores == SALIENCY and calibrate is None:
            what = "'scores: saliency' is measured on texts, and none are named."
            remedy = (
                "Add 'calibrate: {texts: [FILE]}', or name what 'raymerge calibrate' made: 'scores: DIR'."
            )
            yield Fault(("experts", "scores"), what, remedy)
        if scores != SALIENCY and calibrate is not None:
            what = "nothing of this recipe is measured on texts."
            yield Fault(("calibrate",), what, "Write 'scores: saliency' below 'experts', or remove it.")
