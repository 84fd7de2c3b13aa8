"""Float64 results of merge methods, for audits and tests.

Numpy alone, and written anew from docs/methods.md: shares neither torch nor compiled loops with the kernels.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.methods.kernel import Settings

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

DOUBT = 2.0**-20
"""Relative error that some float32 operations may make: sixteen roundings."""

_MAX_BLOCK = 1 << 18
"""Larger blocks are no faster."""


class Elements(Protocol):
    """The elements of one logical tensor, in its row-major order."""

    @property
    def held(self) -> int:
        """Bytes of memory that it takes beside the current run."""

    def read(self, start: int, stop: int) -> tuple[Floats, Floats | None]:
        """Elements ``[n]``, and by how much each may differ from float32 arithmetic's; None where exact."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of elements of one logical tensor, from every input, in float64."""

    start: int
    base: Floats | None
    sources: Floats
    """``[N, n]``: weights, or deltas rounded to float32, as a merge takes them."""
    doubts: Floats | None
    """``[N, n]``: by how much the sources may differ from a merge's; None where exact."""
    base_doubt: Floats | None = None

    @property
    def indices(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + self.sources.shape[1], dtype=np.int64)

    @property
    def largest(self) -> Floats:
        largest = np.abs(self.sources).max(0, initial=0.0)
        return largest if self.base is None else np.asarray(np.maximum(largest, np.abs(self.base)))

    @property
    def input_doubt(self) -> Floats | float:
        doubt: Floats | float = 0.0 if self.doubts is None else self.doubts.max(0)
        return doubt if self.base_doubt is None else np.maximum(doubt, self.base_doubt)


@dataclass(slots=True)
class Expected:
    """The expected value of a run of elements."""

    values: Floats
    doubt: Floats
    """``[n]``: by how much float32 arithmetic may differ before rounding to the stored dtype. Infinite where
    unknown."""
    others: list[tuple[NDArray[np.int64], Floats]] = field(default_factory=list)
    """Other values that elements, by index in the run, may have: they lie so near a threshold that float32
    arithmetic may see them on its other side."""


class LogicalTensor:
    """A logical tensor that can be read a block at a time."""

    def __init__(
        self,
        inputs: Sequence[Elements],
        settings: Settings,
        *,
        has_base: bool,
        takes_deltas: bool,
        budget: int,
    ) -> None:
        """``inputs`` has the base first where there is one; ``room`` is the memory in bytes that a pass may
        take."""
        self.settings = settings
        self.num_elements = math.prod(settings.shape)
        self.num_sources = len(inputs) - has_base
        self.room = budget
        self._inputs = inputs
        self._has_base = has_base
        self._takes_deltas = takes_deltas

    @property
    def row_length(self) -> int:
        return self.settings.row_length

    @property
    def held(self) -> int:
        return sum(each.held for each in self._inputs)

    def block(self, start: int, stop: int) -> Block:
        inputs = [each.read(start, stop) for each in self._inputs]
        values = np.stack([value for value, _ in inputs])
        is_exact = all(doubt is None for _, doubt in inputs)
        doubts = None
        if not is_exact:
            doubts = np.stack([np.zeros_like(value) if doubt is None else doubt for value, doubt in inputs])
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
        """Elements that fit in memory at once."""
        most = max(1, min(_MAX_BLOCK, self.room // self._element_bytes))
        return max(1, most // self.row_length) * self.row_length if whole_rows else most

    @property
    def needed(self) -> int:
        """Bytes of memory for the whole tensor at once."""
        return self.num_elements * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        """Bytes of an element in memory: inputs as stored and in float64, and intermediates."""
        return 8 * (6 * len(self._inputs) + 20)


class Undecided(Exception):  # noqa: N818 - says why there is no answer, and is no error of anybody
    """The expected result depends on rounding."""


@dataclass(frozen=True, slots=True)
class Reference:
    """How a method's result is recomputed in float64, from the paper's formula."""

    prepare: Callable[[LogicalTensor], Callable[[Block], Expected]]
    """Reads what the formula needs of the whole tensor, and returns the formula of its blocks. Raises
    Undecided where the result depends on rounding."""
    by_row: bool = False
    whole: bool = False
    """Whether it needs a whole matrix at once (never a vector)."""

    def holds_whole(self, settings: Settings) -> bool:
        return self.whole and len(settings.shape) > 1


def elementwise(formula: Callable[[LogicalTensor, Block], Expected]) -> Reference:
    """The reference of a formula that needs nothing of the rest of the tensor."""
    return Reference(partial(partial, formula))


def doubt_of(block: Block, coefficients: Floats | float) -> Floats:
    """Error bound of a sum of products of inputs; ``coefficients`` is the sum of their magnitudes, per
    element or for all."""
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    return np.asarray((1.0 + coefficients) * (roundings * block.largest + block.input_doubt))


def combination(block: Block, coefficients: Sequence[float] | Floats, *, origin: bool = False) -> Expected:
    """``sum c T``; on the base ``B + sum c d``, or with ``origin`` ``B + sum c (T - B)``; coefficients
    ``[N]`` or ``[N, n]``."""
    each = np.asarray(coefficients, dtype=np.float64)
    each = each[:, None] if each.ndim == 1 else each
    if block.base is None:
        values = (each * block.sources).sum(0)
    else:
        sources = block.sources - block.base if origin else block.sources
        values = block.base + (each * sources).sum(0)
    return Expected(values, doubt_of(block, np.abs(each).sum(0)))


def total_weight(settings: Settings) -> float:
    if not settings.flag("normalize"):
        return 1.0
    total = math.fsum(settings.per_source("weight"))
    return total if abs(total) >= 1e-8 else 1.0


# SplitMix64's finaliser with key material before each of its rounds.
_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST, _SECOND = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_HALF = np.uint64((1 << 32) - 1)
NUMBERS = 1 << 32
"""Number of values that an element's number has."""


def hashes(key: int, words: Indices) -> NDArray[np.uint64]:
    """The 64-bit hash of each index under a key, without the last xor, which serves its low bits."""
    second = hashlib.blake2b(
        (key % (1 << 64)).to_bytes(8, "little"), digest_size=8, person=b"raymerge word"
    ).digest()
    mixed = words.astype(np.uint64) * _WEYL + np.uint64(key % (1 << 64))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST + np.uint64(int.from_bytes(second, "little"))
    return (mixed ^ (mixed >> np.uint64(27))) * _SECOND


def element_numbers(key: int, indices: Indices) -> Indices:
    """The number of each element, from 0 to 2**32 - 1: one half of the hash of its pair."""
    words = hashes(key, indices >> 1)
    words ^= words >> np.uint64(31)
    return np.where(indices & 1, words >> np.uint64(32), words & _HALF).astype(np.int64)


def number_limit(density: float) -> int:
    """An element stays if its number is below this."""
    return min(NUMBERS, max(0, math.ceil(density * NUMBERS)))


def normal_numbers(key: int, indices: Indices) -> Floats:
    """Normal numbers: the inverse of the distribution function at 52 bits of the hash."""
    # Here, since it takes some tenths of a second of every command, and few draw anything.
    from scipy.special import ndtri

    signed = hashes(key, indices).view(np.int64) >> 12
    return np.asarray(ndtri((signed + 0.5) * 2.0**-52 + 0.5))


_HIGH = 16
_BINS = 1 << _HIGH


@dataclass(frozen=True, slots=True)
class RankThreshold:
    threshold: float
    """The smallest magnitude among the largest; infinite where none is."""
    limit: int = NUMBERS
    """Of elements of exactly that magnitude those stay whose number is below this."""
    key: int = 0

    def keeps(self, magnitudes: Floats, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_kept = magnitudes >= self.threshold
        if self.limit < NUMBERS:
            tied = np.flatnonzero(magnitudes == self.threshold)
            is_kept[tied] = element_numbers(self.key, indices[tied]) < self.limit
        return is_kept


NOTHING = RankThreshold(math.inf)


def magnitudes_of_ranks(
    runs: Callable[[], Iterator[Floats]], ranks: Sequence[Sequence[int]]
) -> list[list[RankThreshold]]:
    """The magnitude of each rank (from 1, the largest; 0 keeps nothing) among non-negative float32 numbers,
    for each kind, and which share of its equals counts.

    Exact, by the bits of float32 numbers, which order as these do: first their upper halves are counted, then
    the lower ones within the upper half found. ``runs`` is called twice for all numbers, ``[kinds, n]``."""
    upper = np.zeros((len(ranks), _BINS), dtype=np.int64)
    for run in runs():
        for counts, values in zip(upper, run, strict=True):
            counts += np.bincount(_bits(values) >> _HIGH, minlength=_BINS)
    higher = np.cumsum(upper[:, ::-1], axis=1)[:, ::-1] - upper
    thresholds = [
        [int(np.flatnonzero(above + counts >= rank)[-1]) if rank else -1 for rank in own]
        for own, above, counts in zip(ranks, higher, upper, strict=True)
    ]
    lower = [{high: np.zeros(_BINS, dtype=np.int64) for high in own if high >= 0} for own in thresholds]
    for run in runs():
        for own, values in zip(lower, run, strict=True):
            bits = _bits(values)
            for high, counts in own.items():
                counts += np.bincount(bits[bits >> _HIGH == high] & (_BINS - 1), minlength=_BINS)
    return [
        [
            _threshold(high, int(higher[kind, high]), lower[kind][high], rank) if rank else NOTHING
            for high, rank in zip(thresholds[kind], own, strict=True)
        ]
        for kind, own in enumerate(ranks)
    ]


def _threshold(high: int, above: int, counts: NDArray[np.int64], rank: int) -> RankThreshold:
    higher = above + np.append(np.cumsum(counts[::-1])[::-1][1:], 0)
    low = int(np.flatnonzero(higher + counts >= rank)[-1])
    threshold = float(np.array([high << _HIGH | low], dtype=np.uint32).view(np.float32)[0])
    return RankThreshold(threshold, number_limit((rank - int(higher[low])) / int(counts[low])))


def _bits(values: Floats) -> NDArray[np.int64]:
    return values.astype(np.float32).view(np.uint32).astype(np.int64)


def merge_terms(block: Block, sparsified: Sparsified, how: TermSum) -> Expected:
    """The base plus the merged delta, with all values that it may have."""
    assert block.base is not None
    everything = np.arange(block.sources.shape[1])
    values, magnitude = _merged(block, sparsified.factors, how, everything, 0, None)
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    doubt = roundings * (np.abs(block.base) + magnitude)
    if block.doubts is not None:
        gains = np.abs(sparsified.factors).max(0) * np.abs(how.coefficients * how.factor).sum()
        doubt += block.input_doubt * (1.0 + gains)
    expected = Expected(values, doubt)
    _add_others(expected, block, sparsified, how)
    return expected


_MOST_SIDES = 64
# Combinations of what may fall either way that are tried; beyond that an element is not judged.


@dataclass(frozen=True, slots=True)
class Sparsified:
    factors: Floats
    """``[N, n]``: 0 where an element is dropped."""
    others: Floats
    """The same on the other side of a threshold that the element is near; else equal."""

    def picked(self, places: NDArray[np.int64]) -> Sparsified:
        return Sparsified(self.factors[:, places], self.others[:, places])


@dataclass(frozen=True, slots=True)
class TermSum:
    coefficients: Floats
    shares: Floats
    """``[N]``: what each term adds to the divisor."""
    votes: Floats
    """``[N]``: factors of the terms when signs are elected."""
    factor: float
    elects: bool
    divides: bool


def _add_others(expected: Expected, block: Block, sparsified: Sparsified, how: TermSum) -> None:
    """Add other possible values of elements near a threshold, or with a tied vote."""
    is_near = sparsified.factors != sparsified.others
    free = _free_signs(block, sparsified, how)
    flips = is_near | free
    drawn = _drawn(block, sparsified, how) if how.elects else np.zeros(flips.shape[1], dtype=bool)
    places = np.flatnonzero(flips.any(0) | drawn)
    if not len(places):
        return
    few, own = sparsified.picked(places), flips[:, places]
    which = np.flatnonzero(own.any(1))
    signs: tuple[int, ...] = (0, 1, -1) if how.elects else (0,)
    if len(signs) << len(which) > _MOST_SIDES:
        expected.doubt[places] = np.inf
        return
    for sides in itertools.product((False, True), repeat=len(which)):
        turned = np.zeros(own.shape, dtype=bool)
        turned[which] = own[which] & np.array(sides, dtype=bool)[:, None]
        factors = np.where(turned, few.others, few.factors)
        for sign in signs:
            values, _ = _merged(block, factors, how, places, sign, turned & free[:, places])
            if sign:
                # An election can only be turned where it was a draw.
                values = np.where(drawn[places] | own.any(0), values, expected.values[places])
            expected.others.append((places, values))


def _merged(
    block: Block, factors: Floats, how: TermSum, places: NDArray[np.int64], sign: int, free: Flags | None
) -> tuple[Floats, Floats]:
    """The result of the elements at ``places``, and the magnitude of what was added up. ``factors`` is ``[N,
    places]``; ``sign`` the elected one, 0 for the vote's; ``free`` terms count with either sign."""
    assert block.base is not None
    sparsified = factors * block.sources[:, places]
    terms = how.coefficients[:, None] * sparsified
    counts = np.ones(terms.shape, dtype=bool)
    if how.elects:
        vote = (how.votes[:, None] * sparsified).sum(0)
        elected = np.where(vote < 0, -1.0, 1.0) if sign == 0 else np.full(vote.shape, float(sign))
        counts = np.sign(terms) == elected
        counts = counts if free is None else counts ^ free
    delta = np.where(counts, terms, 0.0).sum(0)
    size = np.abs(np.where(counts, terms, 0.0)).sum(0)
    if how.divides:
        divisor = np.where(counts, how.shares[:, None], 0.0).sum(0)
        largest = np.where(counts, np.abs(how.shares)[:, None], 0.0).sum(0)
        # What rounding leaves of weights that cancel out is 0.
        divisor = np.where(np.abs(divisor) <= 2.0**-22 * largest, 1.0, divisor)
        delta, size = delta / divisor, size / np.abs(divisor)
        size *= np.where(largest > 0, np.maximum(1.0, largest / np.abs(divisor)), 1.0)
    return block.base[places] + how.factor * delta, np.abs(how.factor) * size


def _drawn(block: Block, sparsified: Sparsified, how: TermSum) -> Flags:
    """Where rounding, or doubts of inputs, may change the vote."""
    terms = how.votes[:, None] * sparsified.factors * block.sources
    size = np.abs(terms).sum(0)
    doubt = DOUBT * size
    if block.doubts is not None:
        doubt = doubt + (np.abs(how.votes[:, None] * sparsified.factors) * block.doubts).sum(0)
    return np.asarray((np.abs(terms.sum(0)) <= doubt) & ((np.abs(terms) > 0).sum(0) > 1))


def _free_signs(block: Block, sparsified: Sparsified, how: TermSum) -> Flags:
    """Terms whose sign is uncertain; none where inputs are exact."""
    if block.doubts is None or not how.elects:
        return np.zeros(block.sources.shape, dtype=bool)
    return np.asarray((np.abs(block.sources) <= block.doubts) & (sparsified.factors != 0))


def family_sum(settings: Settings, *, elects: bool) -> TermSum:
    weights = np.array(settings.per_source("weight"), dtype=np.float64)
    factor = settings.number("lambda") / (1.0 if elects else total_weight(settings))
    return TermSum(weights, weights, weights, factor, elects, elects and settings.flag("normalize"))


class Combined:
    """A combination by coefficients from inner products over the tensor."""

    def __init__(
        self, coefficients: Sequence[float], *, origin: bool = False, also: Sequence[float] | None = None
    ) -> None:
        """``origin``: sources are weights whose differences to the base are taken. ``also``: other
        coefficients that they may be, where rounding decides."""
        self._coefficients, self._origin, self._also = coefficients, origin, also

    def __call__(self, block: Block) -> Expected:
        expected = combination(block, self._coefficients, origin=self._origin)
        if self._also is not None:
            other = combination(block, self._also, origin=self._origin)
            expected.others.append((np.arange(len(other.values)), other.values))
        return expected


def arc_pair(first: float, mixed: float, second: float, t: float) -> tuple[float, float]:
    """Slerp coefficients of two vectors from their inner products."""
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = max(-1.0, min(1.0, mixed / norms)) if norms else 0.0
    if math.sqrt((1.0 - cosine) * (1.0 + cosine)) < 1e-7:
        return 1.0 - t, t
    return exact_arc(cosine, t)


def exact_arc(cosine: float, t: float) -> tuple[float, float]:
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def inner_products(tensor: LogicalTensor, vectors: Callable[[Block], Floats]) -> Floats:
    """Inner products of all pairs of vectors over the tensor."""
    total: Floats | None = None
    for block in tensor.blocks():
        own = vectors(block)
        product = own @ own.T
        total = product if total is None else total + product
    return np.zeros((tensor.num_sources,) * 2) if total is None else total


def base_of(block: Block) -> Floats:
    assert block.base is not None
    return block.base


def differences(block: Block) -> Floats:
    """The sources, or their differences to the base where there is one."""
    return block.sources if block.base is None else block.sources - block.base


def norm_of(gram: Floats, coefficients: Floats) -> float:
    return math.sqrt(max(0.0, float(coefficients @ gram @ coefficients)))
