"""The arithmetic of a merge method: tensors in, a tensor out.

No files, names, logging, clocks or ambient randomness. What a kernel needs to know of a tensor beside its
elements (parameters, random keys, shape) comes in ``Settings``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 65_536
"""Elements; every tile of a TENSOR method starts at a multiple of it within its logical tensor."""

ROW_GROUP = 16
"""Rows; every tile of a ROW method starts at a multiple of it within its logical tensor, so that what is
summed over rows can be folded in groups that no tiling cuts."""

Value: TypeAlias = float | bool | int | None
Words: TypeAlias = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a kernel may depend on besides the elements."""

    values: Mapping[str, Value]
    """Global parameters by name, defaults filled in."""
    sources: tuple[Mapping[str, Value], ...]
    """Per-source parameters in recipe order, defaults filled in; the base is not among them."""
    keys: tuple[int, ...] = ()
    """One 64-bit random key per source; empty unless the method is random."""
    shape: tuple[int, ...] = ()
    position: float = 0.0
    """Of a positional method: 0 at the first layer of the output, 1 at the last one, 0 outside layers."""

    @property
    def row_length(self) -> int:
        """Elements of a row: of the last dimension; 1 for a scalar and for rows without elements."""
        return max(1, self.shape[-1]) if self.shape else 1

    def number(self, name: str) -> float:
        """A global parameter that has a value, as a float."""
        return _number(self.values, name)

    def flag(self, name: str) -> bool:
        return bool(self.values[name])

    def per_source(self, name: str) -> tuple[float, ...]:
        """A parameter of each source, as floats in recipe order."""
        return tuple(_number(source, name) for source in self.sources)


def _number(values: Mapping[str, Value], name: str) -> float:
    value = values[name]
    if value is None:
        raise ValueError(f"{name} has no value")
    return float(value)


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of elements of one logical tensor, from every input. Kernels never write into it."""

    base: torch.Tensor | None
    """float32 ``[n]``; None when the method uses no base."""
    sources: torch.Tensor
    """float32 ``[N, n]``, a row for each source in recipe order: weights, or deltas for ``Takes.DELTAS``. The
    elements of a row lie side by side."""
    start: int

    def require_base(self) -> torch.Tensor:
        """The base's elements.

        Raises:
            ValueError: the tile was made without a base.
        """
        if self.base is None:
            raise ValueError("this method needs the base's elements and the tile has none")
        return self.base


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run of elements of one logical tensor, from every input, in bfloat16 and on the processor."""

    words: Words
    """Memory that holds the inputs."""
    places: NDArray[np.int64]
    """Where in it each input begins, ``[inputs]``; the base first where there is one."""
    count: int
    start: int
    """Index of the first element within the logical tensor."""

    def input(self, index: int) -> Words:
        return self.words[self.places[index] :][: self.count]

    def origin(self, num_sources: int) -> tuple[Words, NDArray[np.int64]]:
        """The elements of the base where there is one, else nothing; and where each source begins."""
        has_base = len(self.places) > num_sources
        return self.input(0) if has_base else self.words[:0], self.places[-num_sources:]

    def part(self, first: int, count: int) -> Stored:
        return replace(self, places=self.places + first, count=count, start=self.start + first)


@dataclass(frozen=True, slots=True)
class AnchoredSum:
    """``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` of the sources v, in this order, each step rounded."""

    coefficients: tuple[float, ...]
    """c, one for each source; that of the anchor does not count."""
    anchor: int
    excess: float
    """e; 0 for nothing of that kind."""


class Kernel(ABC):
    """The arithmetic of a method. Stateless itself: statistics live in the state that ``begin`` makes.

    ``apply`` is all that a method needs. The next four are for one that has to know something of the whole
    tensor first. The others are faster ways to the same bits, for bfloat16 as it is stored: most merges are
    of bfloat16 into bfloat16, and going through a tile piece by piece takes longer there than the arithmetic.
    """

    @abstractmethod
    def apply(self, tile: Tile, settings: Settings, state: Any) -> torch.Tensor:
        """The result's elements for this tile, float32 ``[n]``, on the tile's device; ``state`` is None
        when there were no passes."""

    def passes(self, settings: Settings) -> int:
        """Statistics passes over the whole tensor that ``apply`` needs before it, as a rule."""
        return 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Any:
        """The state of one tensor's statistics; asked for only when there are passes."""

    def observe(self, state: Any, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Take in one tile; tiles come in order and cover the tensor exactly once per pass."""

    def conclude(self, state: Any, settings: Settings, pass_index: int) -> bool:
        """End a pass; whether one more is needed, beyond those that ``passes`` foresees."""
        return False

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """Take in a whole tile; False, and nothing done, where it has to come in pieces in float32.

        Deltas are made of the base, which comes first, where the method takes them.
        """
        return False

    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: Words) -> bool:
        """Write the result's elements into ``out`` ``[count]``, rounded; False as above. What is possible
        is so for all parts of a tensor, and shows with a part of no elements."""
        return False

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        """The sum that ``apply`` gives, bit for bit, so that others may compute it; None where it is none."""
        return None


class KernelBySettings(Kernel):
    """A kernel that is one of several, which the settings choose."""

    @abstractmethod
    def chosen(self, settings: Settings) -> Kernel: ...

    def apply(self, tile: Tile, settings: Settings, state: Any) -> torch.Tensor:
        return self.chosen(settings).apply(tile, settings, state)

    def passes(self, settings: Settings) -> int:
        return self.chosen(settings).passes(settings)

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Any:
        return self.chosen(settings).begin(settings, num_elements, device)

    def observe(self, state: Any, tile: Tile, settings: Settings, pass_index: int) -> None:
        self.chosen(settings).observe(state, tile, settings, pass_index)

    def conclude(self, state: Any, settings: Settings, pass_index: int) -> bool:
        return self.chosen(settings).conclude(state, settings, pass_index)

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> bool:
        return self.chosen(settings).observe_stored(state, stored, settings, pass_index)

    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: Words) -> bool:
        return self.chosen(settings).apply_stored(stored, settings, state, out)
