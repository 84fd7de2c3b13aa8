"""How far two runs of numbers are apart, added up block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, sqrt

import torch

from raymerge.merge_plan.elements_part import torch_dtype
from raymerge.merge_plan.expressions import Read
from raymerge.storage.store import ReadStore
from raymerge.verifier.pairing import Numbers
from raymerge.verifier.reader import Reader
from raymerge.verifier.stored import Elements, elements_of

_RUN = 1 << 20
"""Elements that are compared at once: few megabytes of either, whatever the size of a tensor."""
_LARGEST_RUN = 1 << 24


@dataclass(slots=True)
class Sums:
    """What is added up over the elements of two tensors."""

    squares_a: float = 0.0
    """Squares of the first."""
    squares_b: float = 0.0
    """Squares of the second."""
    products: float = 0.0
    """Products of both."""
    squared_errors: float = 0.0
    """Squares of their differences."""
    largest: float = 0.0
    """The largest difference."""
    num_differing: int = 0
    """Elements that are not the same number."""
    num_not_finite: int = 0
    """Elements that are NaN or infinite in one of them; they are in nothing but the two counts."""

    def add(self, other: Sums) -> None:
        """Add what was found of other elements."""
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.products += other.products
        self.squared_errors += other.squared_errors
        self.largest = max(self.largest, other.largest)
        self.num_differing += other.num_differing
        self.num_not_finite += other.num_not_finite

    @property
    def relative_error(self) -> float | None:
        """Norm of the difference as a part of the norm of the first; None where only that is zero."""
        if self.squares_a == 0:
            return 0.0 if self.squared_errors == 0 else None
        return sqrt(self.squared_errors / self.squares_a)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both; None where one is zero."""
        if self.squares_a == 0 or self.squares_b == 0:
            return None
        return max(-1.0, min(1.0, self.products / sqrt(self.squares_a) / sqrt(self.squares_b)))


def sums_of(numbers: Numbers, a: ReadStore, b: ReadStore) -> Sums:
    """Compare one logical tensor of two checkpoints, which lie in these stores.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = Sums()
    first, second = _Side(numbers.a, a), _Side(numbers.b, b)
    for start, stop in _runs(numbers):
        found.add(_of_run(first.read(start, stop), second.read(start, stop)))
    return found


def _runs(numbers: Numbers) -> Iterator[tuple[int, int]]:
    """Runs that begin at bands of codes, so that none is read twice."""
    units = [1 if each.scales is None else each.scales.unit for each in (numbers.a, numbers.b)]
    unit = lcm(*units) if lcm(*units) <= _LARGEST_RUN else max(units)
    step = -(-_RUN // unit) * unit
    yield from (
        (start, min(start + step, numbers.num_elements)) for start in range(0, numbers.num_elements, step)
    )


class _Side:
    """The elements of one tensor, as torch tensors of float64."""

    def __init__(self, read: Read, store: ReadStore) -> None:
        self._read, self._store = read, store
        self._elements: Elements | None = None
        if read.view is not None or read.scales is not None:
            self._elements = elements_of(read, Reader([store]))

    def read(self, start: int, stop: int) -> torch.Tensor:
        if self._elements is not None:
            return torch.from_numpy(self._elements.read(start, stop)[0].copy()).double()
        dtype = self._read.dtype
        raw = bytearray(dtype.nbytes(stop - start))
        self._store.read_into(self._read.key, self._read.offset + dtype.nbytes(start), memoryview(raw))
        return torch.frombuffer(raw, dtype=torch_dtype(dtype)).double()


def _of_run(a: torch.Tensor, b: torch.Tensor) -> Sums:
    usable = torch.isfinite(a) & torch.isfinite(b)
    num_not_finite = a.numel() - int(usable.sum())
    num_differing = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    if num_not_finite:
        a, b = a.where(usable, 0.0), b.where(usable, 0.0)
    found = _sums(a, b)
    found.num_differing, found.num_not_finite = num_differing, num_not_finite
    return found


def _sums(a: torch.Tensor, b: torch.Tensor) -> Sums:
    # In float64: how a float32 sum of a million squares is rounded hangs on the number of threads.
    apart = a - b
    return Sums(
        squares_a=float(a.dot(a)),
        squares_b=float(b.dot(b)),
        products=float(a.dot(b)),
        squared_errors=float(apart.dot(apart)),
        largest=float(apart.abs().max()) if len(apart) else 0.0,
    )
