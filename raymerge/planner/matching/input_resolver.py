"""Where the numbers of a logical tensor come from: the bytes of a source, or of an adapter laid over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymerge.checkpoints.adapters import Factor
from raymerge.checkpoints.header import StoredTensor
from raymerge.merge_plan.expressions import Assembly, Product, Read, Term, assembled
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.logical import LogicalTensors, Place, whole_place
from raymerge.planner.matching.lora_overlay import LaidOver, is_transposed, tensors_of
from raymerge.planner.moe.expert_permutation import Reordered, aligned_tensors


def whole_read(store: int, tensor: StoredTensor) -> Read:
    """All of a stored tensor."""
    return Read(0, store, tensor.key, tensor.offset, tensor.nbytes, tensor.dtype, None)


class ResolvedInput(NamedTuple):
    """What one source gives for one logical tensor. A tuple, because there are as many as of ``Place``."""

    store: int
    """Index of the source, of the adapter, or of a stage's result, whose files hold the place."""
    place: Place
    """Where it is stored."""
    factor: Factor | None = None
    """The low-rank delta that an adapter adds to it."""
    adapter: int = -1
    """Index of the adapter that holds the factor; -1 without one."""
    origin: tuple[int, str] | None = None
    """The stored tensor whose numbers a stage has put into the place: index of the source, and name."""

    def holders(self) -> list[tuple[int, str]]:
        """Every stored tensor that it is made of: index of the source, adapter or result, and name."""
        found = [(self.store, self.place.tensor.name)]
        if self.origin is not None:
            found.append(self.origin)
        if self.factor is not None:
            found += [(self.adapter, tensor.name) for tensor in tensors_of(self.factor)]
        return found

    def term(self) -> Term:
        """The whole of it as something that rows can be taken from; a vector has rows of one element."""
        shape = self.place.shape
        return Term(self._plain(0), shape[0] if shape else 1, self._product())

    def read(self, part: int) -> Read:
        """The input of a part that is made of it."""
        product = self._product()
        if product is None:
            return self._plain(part)
        rows, columns = self.place.shape
        term = Term(self._plain(0), rows, product)
        return assembled(part, Assembly(rows, columns, (term,), ((0, 0, rows, 0),), rows))

    def _plain(self, part: int) -> Read:
        place, (_, dtype, shape, key, offset, nbytes) = self.place, self.place.tensor
        if place.shape is shape and place.scales is None:
            return Read(part, self.store, key, offset, nbytes, dtype, place.view)
        first, nbytes = offset + dtype.nbytes(place.start), dtype.nbytes(place.num_elements)
        return Read(part, self.store, key, first, nbytes, dtype, place.view, scales=place.scales)

    def _product(self) -> Product | None:
        factor = self.factor
        if factor is None:
            return None
        magnitude = None if factor.magnitude is None else whole_read(self.adapter, factor.magnitude)
        return Product(
            up=whole_read(self.adapter, factor.up),
            down=whole_read(self.adapter, factor.down),
            rank=factor.rank,
            scale=factor.scale,
            transposed=is_transposed(factor, self.place.shape),
            magnitude=magnitude,
        )


class InputResolver:
    """The stored tensors of all sources, adapters and results of stages included."""

    def __init__(self, sources: Sequence[Source], logical: Sequence[LogicalTensors]) -> None:
        self.sources = sources
        self.logical = logical
        self.adapters: Mapping[int, LaidOver] = _laid_over(sources, logical)
        """The adapter of each source that has one, by the source's index."""
        self.aligned: Mapping[int, Reordered] = aligned_tensors(
            sources, logical, len(sources) + len(self.adapters)
        )
        """What stages put in place of tensors of a source, by the source's index."""
        self.changed = frozenset([*self.adapters, *self.aligned])
        """Sources of which not every tensor is as it is stored."""

    def stored(self, source: int, name: str) -> tuple[int, StoredTensor] | None:
        """The stored tensor of that very name, with the index of what holds it."""
        own = self.logical[source].stored(name)
        if own is None:
            return None
        moved = self.aligned[source].replacement(name) if source in self.aligned else None
        if moved is not None:
            return self.aligned[source].store, moved
        replaced = self.adapters[source].replacement(name) if source in self.adapters else None
        return (self.adapters[source].store, replaced) if replaced is not None else (source, own)

    def is_changed(self, source: int, name: str) -> bool:
        """Whether an adapter adds to a stored tensor or to a part of it, or parts of it are replaced."""
        if source in self.aligned and self.aligned[source].touches(name):
            return True
        return source in self.adapters and self.adapters[source].touches(name)

    def holders(self, source: int, resolved: ResolvedInput) -> list[tuple[int, str]]:
        """Every stored tensor that an input of a source is made of, and what an adapter replaces whole."""
        replaced = self.replaced(source, resolved)
        return resolved.holders() if replaced is None else [*resolved.holders(), (source, replaced)]

    def replaced(self, source: int, resolved: ResolvedInput) -> str | None:
        """The stored tensor that an adapter replaces whole by what an input of a source is."""
        laid = self.adapters.get(source)
        if laid is None or resolved.store != laid.store:
            return None
        replaced = laid.changed_by(resolved.place.tensor.name)
        return replaced if replaced is not None and laid.is_all_replaced(replaced) else None

    def find(self, source: int, name: str, logical: str) -> ResolvedInput | None:
        """Where a source has a logical tensor.

        ``name`` is the stored tensor that is expected to hold it, ``logical`` its canonical name in that
        source.
        """
        tensors = self.logical[source]
        if source not in self.changed and name not in tensors.stacked:
            # The usual case, told quickly: nobody asks by what name the place is known.
            own = self.sources[source].checkpoint.tensors.get(name)
            if own is not None:
                return ResolvedInput(source, tensors.whole(own))
        found = self._place(source, name, logical)
        if found is None:
            return None
        called, place = found
        moved = self.aligned[source].find(called) if source in self.aligned else None
        if moved is not None:
            origin = source, place.tensor.name
            return ResolvedInput(self.aligned[source].store, whole_place(moved), origin=origin)
        laid = self.adapters.get(source)
        if laid is None:
            return ResolvedInput(source, place)
        factor = laid.factor(called)
        adapter = laid.store if factor is not None else -1
        replaced = laid.replaced(called)
        if replaced is None:
            return ResolvedInput(source, place, factor, adapter)
        return ResolvedInput(laid.store, whole_place(replaced), factor, adapter)

    def whole(self, source: int, name: str) -> ResolvedInput | None:
        """All of a stored tensor, whatever it holds; None where it is not stored, changed or replaced."""
        stored = self.stored(source, name)
        if stored is None or stored[0] != source or self.is_changed(source, name):
            return None
        return ResolvedInput(source, self.logical[source].whole(stored[1]))

    def _place(self, source: int, name: str, logical: str) -> tuple[str, Place] | None:
        """The logical tensor's own name in the source, and its place."""
        tensors = self.logical[source]
        stored = tensors.stored(name)
        if stored is not None:
            places = tensors.members(name)
            if places is None:
                return name, tensors.whole(stored)
            if len(places) == 1:
                return next(iter(places.items()))
            if logical in places:
                return logical, places[logical]
        found = tensors.find(logical)
        return (logical, found) if found is not None else None


def _laid_over(sources: Sequence[Source], logical: Sequence[LogicalTensors]) -> dict[int, LaidOver]:
    found: dict[int, LaidOver] = {}
    for source in sources:
        if source.adapter is not None:
            store = len(sources) + len(found)
            found[source.index] = LaidOver(source, source.adapter, store, logical[source.index])
    return found
