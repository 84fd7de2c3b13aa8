"""Numbers of experts in a recipe: a list, groups, and either of them layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from raymerge.documents.faults import Fault, FaultError, attempt, kind, read_each, show
from raymerge.documents.fields import read_integer

ExpertIds: TypeAlias = tuple[int, ...]
"""Numbers of experts, from 0."""

ExpertGroups: TypeAlias = tuple[ExpertIds, ...]
"""Experts that become one, group by group."""

T = TypeVar("T", bound=Sequence[object])

_LIST = "Write numbers of experts, like [0, 2, 3]."
_GROUPS = "Write groups of experts, like [[0, 1], [2, 3]]."


@dataclass(frozen=True, slots=True)
class PerLayer(Generic[T]):
    """What a recipe says of every layer that has experts: once for all, or layer by layer."""

    everywhere: T | None
    """What holds in every layer; None where ``by_layer`` has it."""
    by_layer: tuple[tuple[int, T], ...] = ()
    """Numbers of layers, rising, each with what holds there; every one has as many items."""

    @property
    def num_experts(self) -> int:
        """How many experts each layer is left with."""
        return len(self.by_layer[0][1] if self.everywhere is None else self.everywhere)

    def at(self, layer: int) -> T | None:
        """What holds in a layer; None if the recipe goes layer by layer and leaves this one out."""
        return self.everywhere if self.everywhere is not None else dict(self.by_layer).get(layer)


def read_id(value: object) -> int:
    """The number of one expert.

    Raises:
        FaultError: it is no whole number, or below 0.
    """
    return _read_number(value, "expert")


def read_ids(value: object) -> ExpertIds:
    """Numbers of experts, in the order given.

    Raises:
        FaultError: every item that is no number or was there before; no list, or an empty one.
    """
    if not isinstance(value, (list, tuple)):
        raise FaultError(Fault((), f"{show(value)} is {kind(value)}; expected a list of experts.", _LIST))
    if not value:
        raise FaultError(Fault((), "the list is empty.", _LIST))
    ids = read_each(read_id, value)
    _refuse_repeated([((index,), expert) for index, expert in enumerate(ids)])
    return ids


def read_groups(value: object) -> ExpertGroups:
    """Groups of experts, in the order given.

    Raises:
        FaultError: every group that is none, and every expert that is in two.
    """
    if not isinstance(value, (list, tuple)):
        raise FaultError(Fault((), f"{show(value)} is {kind(value)}; expected groups of experts.", _GROUPS))
    if not value:
        raise FaultError(Fault((), "the list is empty.", _GROUPS))
    groups = read_each(read_ids, value)
    placed = [
        ((number, index), expert) for number, group in enumerate(groups) for index, expert in enumerate(group)
    ]
    _refuse_repeated(placed)
    return groups


def read_per_layer(read: Callable[[object], T], value: object) -> PerLayer[T]:
    """One list for all layers, or a map from layers to lists of one length.

    Raises:
        FaultError: all that is wrong with any of them.
    """
    if isinstance(value, PerLayer):
        return value
    if not isinstance(value, Mapping):
        return PerLayer(read(value))
    if not value:
        raise FaultError(Fault((), "the map is empty.", "Write a list for each layer, or one for all."))
    faults: list[Fault] = []
    found: dict[int, T] = {}
    for key, part in value.items():
        layer = attempt(_read_layer, key, (str(key),), faults)
        listed = attempt(read, part, (str(key),), faults)
        if layer is None or listed is None:
            continue
        if layer in found:
            faults.append(Fault((str(key),), f"layer '{layer}' was given before.", "Remove one of the two."))
        faults += _as_long(str(key), layer, listed, found)
        found.setdefault(layer, listed)
    if faults:
        raise FaultError(faults)
    return PerLayer(None, tuple(sorted(found.items(), key=lambda pair: pair[0])))


def plain_per_layer(change: PerLayer[Any]) -> object:
    """The lists as a recipe writes them."""
    if change.everywhere is not None:
        return _plain(change.everywhere)
    return {str(layer): _plain(listed) for layer, listed in change.by_layer}


def _as_long(key: str, layer: int, listed: Sequence[object], found: Mapping[int, T]) -> Iterable[Fault]:
    first = next(iter(found), None)
    if first is not None and len(found[first]) != len(listed):
        what = (
            f"the list of layer '{layer}' is {len(listed)} long, that of layer '{first}' {len(found[first])}."
        )
        yield Fault(
            (key,), what, "Make all equally long: the config has one number of experts for all layers."
        )


def _refuse_repeated(placed: Sequence[tuple[tuple[int, ...], int]]) -> None:
    seen: set[int] = set()
    faults: list[Fault] = []
    for path, expert in placed:
        if expert in seen:
            faults.append(Fault(path, f"expert {expert} was listed before.", "Name each expert once."))
        seen.add(expert)
    if faults:
        raise FaultError(faults)


def _read_layer(value: object) -> int:
    return _read_number(value, "layer")


def _read_number(value: object, noun: str) -> int:
    try:
        number = read_integer(value)
    except FaultError:
        what = f"{show(value)} is {kind(value)}; expected the number of one {noun}."
        raise FaultError(Fault((), what, f"Write a whole number; {noun}s count from 0.")) from None
    if number < 0:
        raise FaultError(Fault((), f"{number} is below {noun} 0.", f"{noun.capitalize()}s count from 0."))
    return number


def _plain(listed: Sequence[object]) -> list[object]:
    return [_plain(item) if isinstance(item, tuple) else item for item in listed]
