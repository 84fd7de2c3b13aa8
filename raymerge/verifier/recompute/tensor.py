"""One logical tensor with its inputs, a block at a time, and what is expected of its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from raymerge.methods import Settings
from raymerge.verifier.numbers import Floats
from raymerge.verifier.stored import DOUBT, Elements

_LONGEST = 1 << 18
"""Elements of a block at most: longer ones are no faster."""

__all__ = ["DOUBT", "Block", "Expected", "LogicalTensor", "doubt_of"]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of elements of one logical tensor, from every input, in float64."""

    start: int
    """Index of its first element."""
    base: Floats | None
    """``[n]``; None without a base."""
    sources: Floats
    """``[N, n]``: weights, or deltas rounded to float32, as a merge takes them."""
    doubts: Floats | None
    """``[N, n]``: by how much the sources may differ from a merge's; None where they are equal."""
    base_doubt: Floats | None = None
    """``[n]``, the same of the base."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """Indices of its elements."""
        return np.arange(self.start, self.start + self.sources.shape[1], dtype=np.int64)

    @property
    def largest(self) -> Floats:
        """The largest magnitude of any input, for each element."""
        largest = np.abs(self.sources).max(0, initial=0.0)
        return largest if self.base is None else np.asarray(np.maximum(largest, np.abs(self.base)))

    @property
    def input_doubt(self) -> Floats | float:
        """The largest doubt of any input, for each element."""
        found: Floats | float = 0.0 if self.doubts is None else self.doubts.max(0)
        return found if self.base_doubt is None else np.maximum(found, self.base_doubt)


@dataclass(slots=True)
class Expected:
    """What a run of elements should be."""

    values: Floats
    """``[n]``."""
    doubt: Floats
    """``[n]``: how far float32 arithmetic may be from that before it is rounded to what is stored. Infinite
    where nothing can be said."""
    others: list[tuple[NDArray[np.int64], Floats]] = field(default_factory=list)
    """What some of them, by their places in the run, may be as well: they lie so near a threshold that
    float32 arithmetic may see them on its other side."""


class LogicalTensor:
    """A logical tensor that can be read a block at a time."""

    def __init__(
        self,
        inputs: Sequence[Elements],
        settings: Settings,
        *,
        has_base: bool,
        takes_deltas: bool,
        room: int,
    ) -> None:
        """
        Args:
            inputs: the base first where there is one.
            settings: parameters, keys and shape.
            has_base: whether there is one.
            takes_deltas: whether sources are differences to it.
            room: bytes of memory that a pass over the tensor may take.
        """
        self.settings = settings
        """Parameters, keys and shape."""
        self.num_elements = prod(settings.shape)
        """Its elements."""
        self.num_sources = len(inputs) - has_base
        """Sources, the base not counted."""
        self.room = room
        """Bytes of memory that a pass over it may take."""
        self._inputs = inputs
        self._has_base = has_base
        self._takes_deltas = takes_deltas

    @property
    def row_length(self) -> int:
        """Elements of a row."""
        return self.settings.row_length

    @property
    def held(self) -> int:
        """Bytes of memory that its inputs take beside the block in hand."""
        return sum(each.held for each in self._inputs)

    def block(self, start: int, stop: int) -> Block:
        """A run of elements."""
        found = [each.read(start, stop) for each in self._inputs]
        values = np.stack([value for value, _ in found])
        is_exact = all(doubt is None for _, doubt in found)
        doubts = None if is_exact else np.stack([_or_zeros(doubt, value) for value, doubt in found])
        if not self._has_base:
            return Block(start, None, values, doubts)
        base, sources = values[0], values[1:]
        if self._takes_deltas:
            # Part of the definition: arithmetic is float32, and begins with the difference.
            sources = (sources - base).astype(np.float32).astype(np.float64)
        if doubts is None:
            return Block(start, base, sources, None)
        own = doubts[1:] + doubts[0] if self._takes_deltas else doubts[1:]
        return Block(start, base, sources, own, doubts[0])

    def blocks(self) -> Iterator[Block]:
        """The whole tensor, in whole rows where these are not too long for the memory."""
        length = self.block_length(whole_rows=True)
        for start in range(0, self.num_elements, length):
            yield self.block(start, min(start + length, self.num_elements))

    def block_length(self, *, whole_rows: bool) -> int:
        """Elements that may be in hand at once."""
        most = max(1, min(_LONGEST, self.room // self._element_bytes))
        return max(1, most // self.row_length) * self.row_length if whole_rows else most

    @property
    def needed(self) -> int:
        """Bytes of memory that all of it would take at once."""
        return self.num_elements * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        """Bytes of an element in hand: inputs as stored and in float64, and what is computed of them."""
        return 8 * (6 * len(self._inputs) + 20)


def doubt_of(block: Block, coefficients: Floats | float) -> Floats:
    """By how much a sum of products of inputs may differ.

    Args:
        block: the inputs.
        coefficients: sum of the magnitudes of the coefficients, of all elements or of each.
    """
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    return np.asarray((1.0 + coefficients) * (roundings * block.largest + block.input_doubt))


def _or_zeros(doubt: Floats | None, like: Floats) -> Floats:
    return np.zeros_like(like) if doubt is None else doubt
