"""Two checkpoints, compared: tensors byte by byte and by numbers, config, companions.

Every tensor is read in blocks and once; where bytes differ late in a large tensor, what lies before is read
again for its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from math import lcm, sqrt
from typing import Any

import torch

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.expressions import Read
from raymerge.methods import Elements
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore
from raymerge.verifier.pairing import Numbers, Pair, Side, pairs_of
from raymerge.verifier.stored import Reader, elements_of

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


_BLOCK_NBYTES = 4 << 20
_ABSENT = "absent"


class Status(StrEnum):
    """How a tensor or file of two checkpoints compares."""

    EQUAL = "equal"
    """Every byte is equal."""
    SAME_NUMBERS = "same_numbers"
    """It is stored otherwise, and every number is equal."""
    DIFFERENT = "different"
    """Numbers differ, or shapes, or bytes that are no numbers."""
    ONLY_A = "only_a"
    """The second has none."""
    ONLY_B = "only_b"
    """The first has none."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """One tensor. Errors are None where there is nothing to compare by numbers."""

    name: str
    """Its name; of experts in two layouts, that of one matrix of one expert."""
    role: str
    """What it does in the model."""
    status: Status
    """How it compares."""
    stored_a: str
    """Dtype or format and shape in the first; "" where it has none."""
    stored_b: str
    """The same in the second."""
    relative_error: float | None = None
    """Norm of the difference as a part of the norm of the first."""
    max_abs_error: float | None = None
    """The largest difference."""
    cosine: float | None = None
    """Cosine of the angle between both."""
    num_not_finite: int = 0
    """Elements that are NaN or infinite in one of them, and in no other figure."""


@dataclass(frozen=True, slots=True)
class ComparedRole:
    """The tensors of one role."""

    role: str
    """The role."""
    counts: Mapping[str, int]
    """Tensors by ``Status``."""
    relative_error: float | None
    """Of all tensors that were compared by numbers, as if they were one."""
    max_abs_error: float | None
    """The largest difference in any."""
    cosine: float | None
    """Of all as if they were one."""
    worst: str
    """The tensor with the largest relative error; "" where none has one."""


@dataclass(frozen=True, slots=True)
class ComparedField:
    """A field of the config that differs, by its dotted path."""

    path: str
    """Keys that lead to it."""
    a: str
    """Its value in the first, as text, or ``absent``."""
    b: str
    """The same in the second."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that two checkpoints differ in."""

    a: str
    """The first."""
    b: str
    """The second."""
    roles: tuple[ComparedRole, ...]
    """Every role that one of them has, in the order of the first."""
    tensors: tuple[ComparedTensor, ...]
    """Tensors that are not equal byte by byte."""
    config: tuple[ComparedField, ...]
    """Fields of config.json that differ."""
    companions: Mapping[str, str]
    """``Status`` of every companion file: tokenizer, code, licence."""

    @property
    def is_equal(self) -> bool:
        """Whether both are the same model byte by byte; how it is cut into files does not matter."""
        same = all(status == Status.EQUAL for status in self.companions.values())
        return same and not self.tensors and not self.config

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"equal": self.is_equal, **asdict(self)}


def compare_checkpoints(first: Checkpoint, second: Checkpoint, *, threads: int) -> Comparison:
    """Compare two checkpoints; memory is a few blocks for each thread, whatever their size.

    Args:
        first: one of them, local.
        second: the other.
        threads: how many tensors are compared at once.

    Raises:
        CheckpointError: codes and scales of one of them do not go together, or a file cannot be read.
    """
    a, b = Side(first), Side(second)
    with open_store(first.root) as store_a, open_store(second.root) as store_b:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(partial(_compared, a=store_a, b=store_b), pairs_of(a, b)))
        companions = dict(_companions(first, second, store_a, store_b))
    return Comparison(
        a=first.name,
        b=second.name,
        roles=tuple(_roles(found)),
        tensors=tuple(tensor for tensor, _ in found if tensor.status is not Status.EQUAL),
        config=tuple(_fields(first.config, second.config)),
        companions=companions,
    )


def _compared(pair: Pair, *, a: ReadStore, b: ReadStore) -> tuple[ComparedTensor, Sums | None]:
    """One tensor, and its sums where it was compared by numbers."""
    tensor = ComparedTensor(pair.name, pair.role, Status.EQUAL, pair.stored_a, pair.stored_b)
    if not pair.stored_a or not pair.stored_b:
        return _as(tensor, Status.ONLY_A if pair.stored_a else Status.ONLY_B), None
    if pair.bytes and all(_same_bytes(one, other, a, b) for one, other in pair.bytes):
        return tensor, None
    if not pair.numbers:
        return _as(tensor, Status.DIFFERENT), None
    sums = Sums()
    for numbers in pair.numbers:
        sums.add(sums_of(numbers, a, b))
    status = Status.DIFFERENT if sums.num_differing else Status.SAME_NUMBERS
    return _as(
        tensor,
        status,
        relative_error=sums.relative_error,
        max_abs_error=sums.largest,
        cosine=sums.cosine,
        num_not_finite=sums.num_not_finite,
    ), sums


def _as(tensor: ComparedTensor, status: Status, **figures: Any) -> ComparedTensor:
    return ComparedTensor(tensor.name, tensor.role, status, tensor.stored_a, tensor.stored_b, **figures)


def _same_bytes(one: StoredTensor, other: StoredTensor, a: ReadStore, b: ReadStore) -> bool:
    return _same_ranges(a, one.key, one.offset, b, other.key, other.offset, one.nbytes)


def _same_ranges(
    a: ReadStore, key_a: str, offset_a: int, b: ReadStore, key_b: str, offset_b: int, nbytes: int
) -> bool:
    for done in range(0, nbytes, _BLOCK_NBYTES):
        count = min(_BLOCK_NBYTES, nbytes - done)
        if a.read(key_a, offset_a + done, count) != b.read(key_b, offset_b + done, count):
            return False
    return True


def _roles(found: Sequence[tuple[ComparedTensor, Sums | None]]) -> Iterator[ComparedRole]:
    by_role: dict[str, list[tuple[ComparedTensor, Sums | None]]] = {}
    for each in found:
        by_role.setdefault(each[0].role, []).append(each)
    for role, members in by_role.items():
        sums, tensors = Sums(), [tensor for tensor, _ in members]
        compared = [own for _, own in members if own is not None]
        for own in compared:
            sums.add(own)
        counts = {status.value: sum(tensor.status is status for tensor in tensors) for status in Status}
        yield ComparedRole(
            role=role,
            counts={status: count for status, count in counts.items() if count},
            relative_error=sums.relative_error if compared else None,
            max_abs_error=sums.largest if compared else None,
            cosine=sums.cosine if compared else None,
            worst=max(tensors, key=lambda tensor: tensor.relative_error or 0.0).name if sums.largest else "",
        )


def _fields(a: Mapping[str, Any], b: Mapping[str, Any], path: str = "") -> Iterator[ComparedField]:
    for key in dict.fromkeys((*a, *b)):
        one, other = a.get(key, _ABSENT), b.get(key, _ABSENT)
        place = f"{path}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _fields(one, other, f"{place}.")
        elif (key in a) != (key in b) or _canonical(one) != _canonical(other):
            yield ComparedField(place, str(one), str(other))


def _canonical(value: Any) -> str:
    """A value of a config as the JSON that it is: to Python, true is 1."""
    return json.dumps(value, sort_keys=True)


def _companions(
    first: Checkpoint, second: Checkpoint, a: ReadStore, b: ReadStore
) -> Iterator[tuple[str, str]]:
    for key in sorted({*first.companions, *second.companions}):
        if key not in first.companions or key not in second.companions:
            yield key, (Status.ONLY_A if key in first.companions else Status.ONLY_B).value
            continue
        one, other = a.info(key), b.info(key)
        size = None if one is None or other is None or one.nbytes != other.nbytes else one.nbytes
        is_equal = size is not None and _same_ranges(a, key, 0, b, key, 0, size)
        yield key, (Status.EQUAL if is_equal else Status.DIFFERENT).value
