"""Kernels that take bfloat16 as it is stored, and give it as it will be stored: a whole tile in one call.

Most merges are of bfloat16 into bfloat16. Going through a tile piece by piece, calls back and forth take
longer there than the arithmetic; and each of them asks for the lock that all of a worker's threads share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from raymerge.methods.method import Settings


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run of elements of one logical tensor, from every input, in bfloat16 and on the processor."""

    words: NDArray[np.uint16]
    """Memory that holds the inputs."""
    places: NDArray[np.int64]
    """Where in it each input begins, ``[inputs]``; the base first where there is one."""
    count: int
    """Elements of the run."""
    start: int
    """Index of the first element within the logical tensor."""

    def part(self, first: int, count: int) -> Stored:
        """Some of the elements."""
        return replace(self, places=self.places + first, count=count, start=self.start + first)


@dataclass(frozen=True, slots=True)
class AnchoredSum:
    """``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` of the sources v, in this order, each step rounded."""

    coefficients: tuple[float, ...]
    """c, one for each source; that of the anchor does not count."""
    anchor: int
    """a."""
    excess: float
    """e; 0 for nothing of that kind."""


@runtime_checkable
class AnchoredKernel(Protocol):
    """What a kernel has besides when its result is such a sum, so that others may compute it."""

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        """The sum that ``apply`` gives, bit for bit; None where these settings ask for something else."""


@runtime_checkable
class StoredKernel(Protocol):
    """What a kernel has beside ``observe`` and ``apply`` when it can do the same to stored elements.

    Bits are the same either way. Deltas are made of the base, which comes first, where the method takes them.
    """

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """Take in a tile; False, and nothing done, where these settings or this pass ask for pieces."""

    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: NDArray[np.uint16]) -> bool:
        """Write the result's elements into ``out`` ``[count]``, rounded; False as above. What is possible
        is so for all parts of a tensor, and shows with a part of no elements."""
