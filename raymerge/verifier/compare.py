"""Two checkpoints compared: tensors byte by byte and by numbers, config, companions.

Each tensor is read in blocks, once; where bytes first differ late in a large tensor, the part before is
read again for its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from math import lcm, prod, sqrt
from typing import Any

import numpy as np

from raymerge.architectures.roles import stacks
from raymerge.architectures.rules import rules_of
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, as_numbers
from raymerge.checkpoints.views import View
from raymerge.merge_plan.expressions import Read
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import ResolvedInput
from raymerge.planner.matching.logical import LogicalTensors, Place
from raymerge.recipes.entry import ModelReference
from raymerge.storage.store import ReadStore
from raymerge.verifier.numbers import WHOLE, Floats
from raymerge.verifier.stored import Reader, elements_of

_RUN = 1 << 20
_LARGEST_RUN = 1 << 24


@dataclass(slots=True)
class Sums:
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    squared_errors: float = 0.0
    largest: float = 0.0
    num_differing: int = 0
    num_not_finite: int = 0
    """Elements that are NaN or infinite in either; they enter nothing but the two counts."""

    def add(self, other: Sums) -> None:
        for name in self.__slots__:
            own, added = getattr(self, name), getattr(other, name)
            setattr(self, name, max(own, added) if name == "largest" else own + added)

    @property
    def relative_error(self) -> float | None:
        """Norm of the difference over the norm of the first; None where only that is zero."""
        if self.squares_a == 0:
            return 0.0 if self.squared_errors == 0 else None
        return sqrt(self.squared_errors / self.squares_a)

    @property
    def cosine(self) -> float | None:
        """Of the angle between both; None where one is zero."""
        if self.squares_a == 0 or self.squares_b == 0:
            return None
        return max(-1.0, min(1.0, self.products / sqrt(self.squares_a) / sqrt(self.squares_b)))


def sums_of(numbers: Numbers, a: ReadStore, b: ReadStore) -> Sums:
    sums = Sums()
    first, second = (
        elements_of(read, Reader([store]), exact=True) for read, store in ((numbers.a, a), (numbers.b, b))
    )
    for start, stop in _runs(numbers):
        sums.add(_of_run(first.read(start, stop)[0], second.read(start, stop)[0]))
    return sums


def _runs(numbers: Numbers) -> Iterator[tuple[int, int]]:
    """Runs that begin at scale rows of codes, so that none is read twice."""
    units = [1 if each.scales is None else each.scales.unit for each in (numbers.a, numbers.b)]
    unit = lcm(*units) if lcm(*units) <= _LARGEST_RUN else max(units)
    step = -(-_RUN // unit) * unit
    yield from (
        (start, min(start + step, numbers.num_elements)) for start in range(0, numbers.num_elements, step)
    )


def _of_run(a: Floats, b: Floats) -> Sums:
    is_usable = np.isfinite(a) & np.isfinite(b)
    num_not_finite = len(a) - int(np.count_nonzero(is_usable))
    num_differing = int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
    if num_not_finite:
        a, b = np.where(is_usable, a, 0.0), np.where(is_usable, b, 0.0)
    apart = a - b
    return Sums(
        squares_a=_dot(a, a),
        squares_b=_dot(b, b),
        products=_dot(a, b),
        squared_errors=_dot(apart, apart),
        largest=float(np.abs(apart).max(initial=0.0)),
        num_differing=num_differing,
        num_not_finite=num_not_finite,
    )


def _dot(a: Floats, b: Floats) -> float:
    # Not by BLAS, whose rounding hangs on the number of threads.
    return float((a * b).sum())


_BLOCK_NBYTES = 4 << 20
_ABSENT = "absent"


class Status(StrEnum):
    EQUAL = "equal"
    SAME_NUMBERS = "same_numbers"
    """Stored differently, with equal numbers."""
    DIFFERENT = "different"
    ONLY_A = "only_a"
    ONLY_B = "only_b"


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """Errors are None where there are no numbers to compare."""

    name: str
    """For experts in two layouts, the name of one matrix of one expert."""
    role: str
    status: Status
    stored_a: str
    stored_b: str
    relative_error: float | None = None
    max_abs_error: float | None = None
    cosine: float | None = None
    num_not_finite: int = 0
    """Elements that are NaN or infinite in either; not in any other figure."""


@dataclass(frozen=True, slots=True)
class ComparedRole:
    role: str
    counts: Mapping[str, int]
    relative_error: float | None
    max_abs_error: float | None
    cosine: float | None
    worst: str
    """Name of the tensor with the largest relative error; "" if none has one."""


@dataclass(frozen=True, slots=True)
class ComparedField:
    path: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    a: str
    b: str
    roles: tuple[ComparedRole, ...]
    tensors: tuple[ComparedTensor, ...]
    config: tuple[ComparedField, ...]
    companions: Mapping[str, str]
    """``Status`` of every companion file: tokenizer, code, licence."""

    @property
    def is_equal(self) -> bool:
        """Whether both are the same model byte by byte, however it is split into files."""
        same = all(status == Status.EQUAL for status in self.companions.values())
        return same and not self.tensors and not self.config

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.is_equal, **asdict(self)}


def compare_checkpoints(first: Checkpoint, second: Checkpoint, *, threads: int) -> Comparison:
    """Compare in memory of a few blocks for each thread, whatever the size. Raises CheckpointError if codes
    and scales of one do not fit together, or a file cannot be read."""
    a, b = Side(first), Side(second)
    with first.open() as store_a, second.open() as store_b:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(partial(_compared, a=store_a, b=store_b), pairs_of(a, b)))
        companions = dict(_companions(first, second, store_a, store_b))
    return Comparison(
        a=first.name,
        b=second.name,
        roles=tuple(_roles(results)),
        tensors=tuple(tensor for tensor, _ in results if tensor.status is not Status.EQUAL),
        config=tuple(_fields(first.config, second.config)),
        companions=companions,
    )


def _compared(pair: Pair, *, a: ReadStore, b: ReadStore) -> tuple[ComparedTensor, Sums | None]:
    tensor = pair.tensor
    are_bytes_equal = pair.bytes and all(
        _same_ranges(a, one.key, one.offset, b, other.key, other.offset, one.nbytes)
        for one, other in pair.bytes
    )
    if are_bytes_equal or tensor.status is not Status.EQUAL:
        return tensor, None
    if not pair.numbers:
        return replace(tensor, status=Status.DIFFERENT), None
    sums = Sums()
    for numbers in pair.numbers:
        sums.add(sums_of(numbers, a, b))
    status = Status.DIFFERENT if sums.num_differing else Status.SAME_NUMBERS
    if pair.numbers[0].a.dtype in WHOLE:
        # How far apart numbers of experts are means nothing.
        return replace(tensor, status=status), None
    compared = replace(
        tensor,
        status=status,
        relative_error=sums.relative_error,
        max_abs_error=sums.largest,
        cosine=sums.cosine,
        num_not_finite=sums.num_not_finite,
    )
    return compared, sums


def _same_ranges(
    a: ReadStore, key_a: str, offset_a: int, b: ReadStore, key_b: str, offset_b: int, nbytes: int
) -> bool:
    for done in range(0, nbytes, _BLOCK_NBYTES):
        count = min(_BLOCK_NBYTES, nbytes - done)
        if a.read(key_a, offset_a + done, count) != b.read(key_b, offset_b + done, count):
            return False
    return True


def _roles(results: Sequence[tuple[ComparedTensor, Sums | None]]) -> Iterator[ComparedRole]:
    by_role: dict[str, list[tuple[ComparedTensor, Sums | None]]] = {}
    for each in results:
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
    """JSON of a config's value: Python equates true and 1."""
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


@dataclass(frozen=True, slots=True)
class Numbers:
    a: Read
    b: Read
    num_elements: int


@dataclass(frozen=True, slots=True)
class Pair:
    tensor: ComparedTensor
    """Not compared yet: of status ``EQUAL`` if both have it."""
    bytes: tuple[tuple[StoredTensor, StoredTensor], ...] = ()
    """Stored tensors compared byte by byte; empty where they are stored in two ways."""
    numbers: tuple[Numbers, ...] = ()


class Side:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = as_numbers(checkpoint, quantised_tensors(checkpoint))
        self.tensors = self.checkpoint.tensors
        self.logical = LogicalTensors(
            Source(
                index=0,
                reference=ModelReference(checkpoint.root),
                checkpoint=self.checkpoint,
                adapter=None,
                rules=rules_of(checkpoint.config),
                stacks=stacks(self.checkpoint.tensors, checkpoint.config),
                pair=None,
                stored_head_is_embedding=False,
            )
        )

    def parts(self, name: str) -> tuple[StoredTensor, ...]:
        return tuple(self.checkpoint.stored[part] for part in self.checkpoint.parts(name))

    def stored_as(self, name: str, part: str = "") -> str:
        """Dtype or format and shape of a tensor; of a part of it with the tensor's name."""
        quant_spec, tensor = self.logical.quant_spec(name), self.tensors[name]
        form = f"{tensor.dtype.value if quant_spec is None else quant_spec.format.word} {list(tensor.shape)}"
        return form if part in ("", name) else f"{form} in {name}"

    def role(self, name: str) -> str:
        return self.logical.infos[name].role.value

    def members(self, name: str) -> Mapping[str, Place]:
        """Logical tensors in a stored one; none where the fusion is unknown."""
        return {
            logical: place for block in self.logical.blocks(name) or () for logical, place in block.members
        }


def pairs_of(a: Side, b: Side) -> Iterator[Pair]:
    """Every tensor of both, once: equal names, names that differ by layout, and the rest."""
    left_a, left_b = [], [name for name in b.tensors if name not in a.tensors]
    for name in a.tensors:
        if name not in b.tensors:
            left_a.append(name)
        else:
            yield _named_alike(a, b, name)
    yield from _named_otherwise(a, b, left_a, left_b)


def _named_alike(a: Side, b: Side, name: str) -> Pair:
    stored = a.parts(name), b.parts(name)
    forms = [[(each.dtype, each.shape) for each in parts] for parts in stored]
    is_same_form = forms[0] == forms[1] and a.logical.quant_spec(name) == b.logical.quant_spec(name)
    tensor = ComparedTensor(name, a.role(name), Status.EQUAL, a.stored_as(name), b.stored_as(name))
    return Pair(tensor, tuple(zip(*stored, strict=True)) if is_same_form else (), _numbers(a, b, name))


def _numbers(a: Side, b: Side, name: str) -> tuple[Numbers, ...]:
    """How a common tensor is compared by numbers; empty where its parts are unknown."""
    first, second = a.tensors[name], b.tensors[name]
    if first.dtype.is_mergeable and second.dtype.is_mergeable and first.shape == second.shape:
        return (_between(a.logical.whole(first), b.logical.whole(second)),)
    places, others = a.members(name), b.members(name)
    if places.keys() != others.keys():
        return ()
    pairs = [(place, others[logical]) for logical, place in places.items()]
    return tuple(_between(*pair) for pair in pairs) if all(_is_comparable(*pair) for pair in pairs) else ()


def _is_comparable(a: Place, b: Place) -> bool:
    """Whether both hold numbers of one shape, with rows in one order or in the canonical one and another; or
    whole numbers of two dtypes, as tables of experts."""
    if {a.tensor.dtype, b.tensor.dtype} <= WHOLE and a.tensor.dtype is not b.tensor.dtype:
        is_whole = all(
            (each.shape, each.scales, each.view) == (each.tensor.shape, None, None) for each in (a, b)
        )
        return is_whole and a.shape == b.shape
    if a.shape != b.shape or not a.has_rows_of(b):
        return False
    return all(each.tensor.dtype.is_mergeable or each.scales is not None for each in (a, b))


def _are_integers_alike(a: Place, b: Place) -> bool:
    """Whether both are whole stored tensors of one dtype without scales, as tables of integers are."""
    forms = {(each.tensor.dtype, each.tensor.shape, each.shape, each.scales, each.view) for each in (a, b)}
    return forms == {(a.tensor.dtype, a.shape, a.shape, None, None)}


def _between(a: Place, b: Place) -> Numbers:
    first, second = (ResolvedInput(0, each).read(0) for each in (a, b))
    # In the canonical order where one is; rows of unknown heads as they are stored.
    if min(a.half_split_heads, b.half_split_heads) == 0:
        first, second = _interleaved(first, a), _interleaved(second, b)
    return Numbers(first, second, prod(a.shape))


def _interleaved(read: Read, place: Place) -> Read:
    """A read whose rows of each head take turns, where a whole tensor holds them in two halves."""
    if place.half_split_heads == 0:
        return read
    assert place.view is None
    columns = prod(place.shape[1:])
    half = place.shape[0] // place.half_split_heads // 2
    shape, strides = (
        (place.half_split_heads, half, 2, columns),
        (2 * half * columns, columns, half * columns, 1),
    )
    return read._replace(view=View(0, shape, strides))


def _named_otherwise(a: Side, b: Side, left_a: list[str], left_b: list[str]) -> Iterator[Pair]:
    """Tensors whose names only one has: matrices of experts in another layout, or unmatched."""
    places_a, places_b = _places(a, left_a), _places(b, left_b)
    common = [
        name
        for name, (_, place) in places_a.items()
        if name in places_b
        and (_is_comparable(place, places_b[name][1]) or _are_integers_alike(place, places_b[name][1]))
    ]
    for name in common:
        (stored_a, place_a), (stored_b, place_b) = places_a[name], places_b[name]
        forms = a.stored_as(stored_a, name), b.stored_as(stored_b, name)
        tensor = ComparedTensor(name, a.role(stored_a), Status.EQUAL, *forms)
        if _is_comparable(place_a, place_b):
            yield Pair(tensor, numbers=(_between(place_a, place_b),))
        else:
            yield Pair(tensor, bytes=((place_a.tensor, place_b.tensor),))
    for name, role, form in _alone(a, left_a, places_a, common):
        yield Pair(ComparedTensor(name, role, Status.ONLY_A, form, ""))
    for name, role, form in _alone(b, left_b, places_b, common):
        yield Pair(ComparedTensor(name, role, Status.ONLY_B, "", form))


def _alone(
    side: Side, left: list[str], places: Mapping[str, tuple[str, Place]], common: list[str]
) -> Iterator[tuple[str, str, str]]:
    """Name, role and form of unmatched tensors: whole ones, or single matrices where others match."""
    matched = set(common)
    shared = {places[name][0] for name in common}
    yield from ((name, side.role(name), side.stored_as(name)) for name in left if name not in shared)
    for name, (stored, _) in places.items():
        if stored in shared and name not in matched:
            yield name, side.role(stored), side.stored_as(stored, name)


def _places(side: Side, names: list[str]) -> dict[str, tuple[str, Place]]:
    return {logical: (name, place) for name in names for logical, place in side.members(name).items()}
