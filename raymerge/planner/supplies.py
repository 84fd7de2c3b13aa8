"""Where the numbers of a logical tensor come from: the bytes of a source, or of an adapter laid over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymerge.checkpoints.adapters import Factor
from raymerge.checkpoints.header import StoredTensor
from raymerge.planner.adapted import LaidOver, is_transposed, tensors_of
from raymerge.planner.expressions import Assembly, Product, Read, Term, assembled
from raymerge.planner.logical import LogicalTensors, Place
from raymerge.planner.sources import Source


@dataclass(frozen=True, slots=True)
class Supply:
    """What one source gives for one logical tensor."""

    store: int
    """Index of the source, or of the adapter, whose files hold the place."""
    place: Place
    """Where it is stored."""
    factor: Factor | None = None
    """The low-rank delta that an adapter adds to it."""
    adapter: int = -1
    """Index of the adapter that holds the factor; -1 without one."""

    def holders(self) -> Iterator[tuple[int, str]]:
        """Every stored tensor that it is made of: index of the source or adapter, and name."""
        yield self.store, self.place.tensor.name
        if self.factor is not None:
            yield from ((self.adapter, tensor.name) for tensor in tensors_of(self.factor))

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
        place = self.place
        first = place.tensor.offset + place.tensor.dtype.nbytes(place.start)
        nbytes = place.tensor.dtype.nbytes(place.num_elements)
        return Read(part, self.store, place.tensor.key, first, nbytes, place.tensor.dtype, place.view)

    def _product(self) -> Product | None:
        factor = self.factor
        if factor is None:
            return None
        return Product(
            up=self._whole(factor.up),
            down=self._whole(factor.down),
            rank=factor.rank,
            scale=factor.scale,
            transposed=is_transposed(factor, self.place.shape),
            magnitude=self._whole(factor.magnitude) if factor.magnitude is not None else None,
        )

    def _whole(self, tensor: StoredTensor) -> Read:
        return Read(0, self.adapter, tensor.key, tensor.offset, tensor.nbytes, tensor.dtype, None)


class Supplies:
    """The stored tensors of all sources, adapters included."""

    def __init__(self, sources: Sequence[Source], logical: Sequence[LogicalTensors]) -> None:
        self.sources = sources
        """The recipe's models."""
        self.logical = logical
        """The logical tensors of each."""
        self.adapters: Mapping[int, LaidOver] = _laid_over(sources, logical)
        """The adapter of each source that has one, by the source's index."""

    def stored(self, source: int, name: str) -> tuple[int, StoredTensor] | None:
        """The stored tensor of that very name, with the index of the source or adapter that holds it."""
        own = self.logical[source].stored(name)
        if own is None:
            return None
        replaced = self.adapters[source].replacement(name) if source in self.adapters else None
        return (self.adapters[source].store, replaced) if replaced is not None else (source, own)

    def is_changed(self, source: int, name: str) -> bool:
        """Whether an adapter adds to a stored tensor or to a part of it, or replaces a part of it."""
        return source in self.adapters and self.adapters[source].touches(name)

    def holders(self, source: int, supply: Supply) -> Iterator[tuple[int, str]]:
        """Every stored tensor that a supply of a source is made of, and what an adapter replaces whole."""
        yield from supply.holders()
        laid = self.adapters.get(source)
        if laid is not None and supply.store == laid.store:
            replaced = laid.changed_by(supply.place.tensor.name)
            if replaced is not None and laid.is_all_replaced(replaced):
                yield source, replaced

    def find(self, source: int, name: str, logical: str) -> Supply | None:
        """Where a source has a logical tensor.

        Args:
            source: index of the source.
            name: the stored tensor that is expected to hold it.
            logical: its canonical name in that source.
        """
        found = self._place(source, name, logical)
        if found is None:
            return None
        called, place = found
        laid = self.adapters.get(source)
        if laid is None:
            return Supply(source, place)
        factor = laid.factor(called)
        adapter = laid.store if factor is not None else -1
        replaced = laid.replaced(called)
        if replaced is None:
            return Supply(source, place, factor, adapter)
        whole = Place(replaced, 0, replaced.num_elements, replaced.shape, None)
        return Supply(laid.store, whole, factor, adapter)

    def _place(self, source: int, name: str, logical: str) -> tuple[str, Place] | None:
        """The logical tensor's own name in the source, and its place."""
        tensors = self.logical[source]
        stored = tensors.stored(name)
        if stored is not None:
            own = tensors.blocks(name)
            if own is None:
                return name, Place(stored, 0, stored.num_elements, stored.shape, None)
            places = dict(member for block in own for member in block.members)
            if len(places) == 1:
                return next(iter(places.items()))
            if logical in places:
                return logical, places[logical]
        found = tensors.find(logical)
        return (logical, found) if found is not None else None


def _laid_over(sources: Sequence[Source], logical: Sequence[LogicalTensors]) -> dict[int, LaidOver]:
    """The adapters, numbered after the sources in the sources' order."""
    found: dict[int, LaidOver] = {}
    for source in sources:
        if source.adapter is not None:
            store = len(sources) + len(found)
            found[source.index] = LaidOver(source, source.adapter, store, logical[source.index])
    return found
