"""The arithmetic of a merge method: tensors in, a tensor out. No files, names, logging, clocks or ambient
randomness: parameters, random keys and shape come in ``Settings``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.deferred import torch

BLOCK = 65_536
"""Elements; every tile of a TENSOR method starts at a multiple of it within its logical tensor."""

ROW_GROUP = 16
"""Rows; tiles of a ROW method start at multiples of it, so that sums over rows are folded in groups that no
tiling cuts."""

Value: TypeAlias = float | bool | int | None
Words: TypeAlias = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Settings:
    values: Mapping[str, Value]
    """Global parameters by name, defaults filled in."""
    sources: tuple[Mapping[str, Value], ...]
    """Per-source parameters in recipe order, defaults filled in, without the base."""
    keys: tuple[int, ...] = ()
    """One 64-bit random key per source; empty unless the method is random."""
    shape: tuple[int, ...] = ()
    position: float = 0.0
    """Of a positional method: 0 at the first layer of the output, 1 at the last one, 0 outside layers."""
    numbers: tuple[int, ...] = ()
    """Of what renumbers: the new number of each old one."""

    @property
    def row_length(self) -> int:
        """Elements of a row: of the last dimension; 1 for a scalar and for rows without elements."""
        return max(1, self.shape[-1]) if self.shape else 1

    def number(self, name: str) -> float:
        return _number(self.values, name)

    def flag(self, name: str) -> bool:
        return bool(self.values[name])

    def without(self, *names: str) -> Settings:
        """These settings less some parameters, of all sources too."""

        def less(values: Mapping[str, Value]) -> Mapping[str, Value]:
            return {name: value for name, value in values.items() if name not in names}

        return replace(self, values=less(self.values), sources=tuple(map(less, self.sources)))

    def per_source(self, name: str) -> tuple[float, ...]:
        return tuple([_number(source, name) for source in self.sources])


def _number(values: Mapping[str, Value], name: str) -> float:
    value = values[name]
    if value is None:
        raise ValueError(f"{name} has no value")
    return float(value)


def _frozen(values: Mapping[str, Value]) -> Hashable:
    return tuple(sorted(values.items()))


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of elements of one logical tensor, from every input. Kernels never write to it."""

    base: torch.Tensor | None
    """float32 ``[n]``; None when the method uses no base."""
    sources: torch.Tensor
    """float32 ``[N, n]`` in recipe order, rows contiguous: weights, or deltas for ``Takes.DELTAS``."""
    start: int

    def require_base(self) -> torch.Tensor:
        if self.base is None:
            raise ValueError("this method needs the base's elements and the tile has none")
        return self.base


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run of elements of one logical tensor, from every input, as bfloat16 on the CPU."""

    words: Words
    places: NDArray[np.int64]
    """Offset of each input, ``[inputs]``; the base first where there is one."""
    count: int
    start: int
    marks: Words | None = None
    """Which elements each source keeps, ``[count]``, where several results are made of the same ones."""

    def input(self, index: int) -> Words:
        return self.words[self.places[index] :][: self.count]

    def origin(self, num_sources: int) -> tuple[Words, NDArray[np.int64]]:
        """The elements of the base (empty without one), and the offset of each source."""
        has_base = len(self.places) > num_sources
        return self.input(0) if has_base else self.words[:0], self.places[-num_sources:]

    def part(self, first: int, count: int) -> Stored:
        marks = None if self.marks is None else self.marks[first : first + count]
        return replace(self, places=self.places + first, count=count, start=self.start + first, marks=marks)


@dataclass(frozen=True, slots=True)
class AnchoredSum:
    """``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` of the sources v, in this order, each step rounded."""

    coefficients: tuple[float, ...]
    """c, one for each source; the anchor's is ignored."""
    anchor: int
    excess: float
    """e; 0 omits the term."""


class Kernel(ABC):
    """The arithmetic of a method. Stateless: statistics live in the state that ``begin`` makes.

    ``apply`` suffices. What follows serves a method that needs statistics of the whole tensor first."""

    concludes_each: ClassVar[bool] = False
    """Whether of settings that are observed alike each is concluded by itself, after the one pass, on a
    shallow copy of the state; otherwise one conclusion is for all."""

    def observed(self, settings: Settings) -> Hashable:
        """What the statistics depend on: settings with equal values of it share their passes."""
        return _frozen(settings.values), tuple(map(_frozen, settings.sources)), settings.position

    @abstractmethod
    def apply(self, tile: Tile, settings: Settings, state: Any) -> torch.Tensor:
        """The result for this tile, float32 ``[n]``, on its device; ``state`` is None without passes."""

    def passes(self, settings: Settings) -> int:
        """Statistics passes over the whole tensor that ``apply`` needs first; ``conclude`` may ask for
        more."""
        return 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Any:
        """The state of one tensor's statistics; called only when there are passes."""

    def observe(self, state: Any, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Add one tile; tiles come in order and cover the tensor exactly once per pass."""

    def conclude(self, state: Any, settings: Settings, pass_index: int) -> bool:
        """End a pass; True asks for one more than ``passes`` announced."""
        return False

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        """The sum that equals ``apply`` bit for bit, for others to compute; None where there is none."""
        return None


class StoredKernel(Kernel):
    """A kernel with faster ways to the same bits for bfloat16 as stored, which most merges read and write:
    converting a tile to float32 takes longer there than the arithmetic."""

    marks_at_once: ClassVar[int] = 0
    """Elements of a tile that ``marked`` takes; 0 where nothing is to be marked."""

    def marked(self, stored: Stored, settings: Settings, state: Any) -> Stored:
        """A tile with what ``apply_stored`` would find out for each of several settings that are observed
        alike."""
        return stored

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> None:
        """Add a whole tile, the base first."""

    @abstractmethod
    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: Words) -> None:
        """Write the rounded result into ``out`` ``[count]``."""
