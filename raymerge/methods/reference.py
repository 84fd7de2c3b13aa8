"""The float64 side of a merge method: what audits and tests compare its results with.

Numpy alone, and written anew from docs/methods.md: neither torch nor compiled loops nor what kernels use.
First what a reference is given and gives, then what the references of several methods share.
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
"""Share of a magnitude that some float32 operations may lose: sixteen roundings."""

_MAX_BLOCK = 1 << 18
"""Elements of a block at most: longer ones are no faster."""


class Elements(Protocol):
    """The elements of one logical tensor, in its row-major order."""

    @property
    def held(self) -> int:
        """Bytes of memory that it takes beside the run in hand."""

    def read(self, start: int, stop: int) -> tuple[Floats, Floats | None]:
        """A run of elements ``[n]``, and by how much each may differ from what float32 arithmetic has there.

        None where they are float32 numbers, exactly.
        """


@dataclass(frozen=True, slots=True)
class Block:
    """A run of elements of one logical tensor, from every input, in float64."""

    start: int
    base: Floats | None
    sources: Floats
    """``[N, n]``: weights, or deltas rounded to float32, as a merge takes them."""
    doubts: Floats | None
    """``[N, n]``: by how much the sources may differ from a merge's; None where they are equal."""
    base_doubt: Floats | None = None
    """``[n]``, the same of the base."""

    @property
    def indices(self) -> NDArray[np.int64]:
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
    doubt: Floats
    """``[n]``: how far float32 arithmetic may be from that before it is rounded to what is stored. Infinite
    where nothing can be said."""
    others: list[tuple[NDArray[np.int64], Floats]] = field(default_factory=list)
    """What some of them, by their places in the run, may be as well: they lie so near a threshold that
    float32 arithmetic may see them on its other side."""


class LogicalTensor:
    """A logical tensor that can be read a block at a time."""

    def __init__(
        self, inputs: Sequence[Elements], settings: Settings, *, has_base: bool, takes_deltas: bool, room: int
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
        self.num_elements = math.prod(settings.shape)
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
        return self.settings.row_length

    @property
    def held(self) -> int:
        """Bytes of memory that its inputs take beside the block in hand."""
        return sum(each.held for each in self._inputs)

    def block(self, start: int, stop: int) -> Block:
        found = [each.read(start, stop) for each in self._inputs]
        values = np.stack([value for value, _ in found])
        is_exact = all(doubt is None for _, doubt in found)
        doubts = None
        if not is_exact:
            doubts = np.stack([np.zeros_like(value) if doubt is None else doubt for value, doubt in found])
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
        most = max(1, min(_MAX_BLOCK, self.room // self._element_bytes))
        return max(1, most // self.row_length) * self.row_length if whole_rows else most

    @property
    def needed(self) -> int:
        """Bytes of memory that all of it would take at once."""
        return self.num_elements * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        """Bytes of an element in hand: inputs as stored and in float64, and what is computed of them."""
        return 8 * (6 * len(self._inputs) + 20)


class Undecided(Exception):  # noqa: N818 - says why there is no answer, and is no error of anybody
    """What a tensor should be hangs on rounding."""


@dataclass(frozen=True, slots=True)
class Reference:
    """How a method's result is recomputed in float64, for audits and tests.

    Written from the paper's formula in numpy alone: it shares no arithmetic with the kernel.
    """

    prepare: Callable[[LogicalTensor], Callable[[Block], Expected]]
    """Looks at as much of the tensor as the formula has to know of it, and makes the formula of its blocks.
    Raises Undecided where the result hangs on rounding."""
    by_row: bool = False
    """Whether blocks must be whole rows."""
    whole: bool = False
    """Whether it holds a whole matrix at once; never a vector, which has nothing to be decomposed."""

    def holds_whole(self, settings: Settings) -> bool:
        """Whether it holds the whole tensor at once under these settings."""
        return self.whole and len(settings.shape) > 1


def elementwise(formula: Callable[[LogicalTensor, Block], Expected]) -> Reference:
    """The reference of a formula that needs to know nothing of the rest of the tensor."""
    return Reference(partial(partial, formula))


def doubt_of(block: Block, coefficients: Floats | float) -> Floats:
    """By how much a sum of products of inputs may differ.

    Args:
        block: the inputs.
        coefficients: sum of the magnitudes of the coefficients, of all elements or of each.
    """
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    return np.asarray((1.0 + coefficients) * (roundings * block.largest + block.input_doubt))


def combination(block: Block, coefficients: Sequence[float] | Floats, *, origin: bool = False) -> Expected:
    """``sum c T``; on the base ``B + sum c d``, or from the base as origin ``B + sum c (T - B)``.

    Args:
        block: the inputs.
        coefficients: one for each source, ``[N]`` or ``[N, n]``.
        origin: whether sources are weights that differences to the base are taken of.
    """
    each = np.asarray(coefficients, dtype=np.float64)
    each = each[:, None] if each.ndim == 1 else each
    if block.base is None:
        values = (each * block.sources).sum(0)
    else:
        sources = block.sources - block.base if origin else block.sources
        values = block.base + (each * sources).sum(0)
    return Expected(values, doubt_of(block, np.abs(each).sum(0)))


def total_weight(settings: Settings) -> float:
    """Divisor of a whole sum under ``normalize``."""
    if not settings.flag("normalize"):
        return 1.0
    total = math.fsum(settings.per_source("weight"))
    return total if abs(total) >= 1e-8 else 1.0


# SplitMix64's finaliser with key material before each of its rounds.
_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST, _SECOND = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_HALF = np.uint64((1 << 32) - 1)
NUMBERS = 1 << 32
"""How many values the number of an element may have."""


def hashes(key: int, words: Indices) -> NDArray[np.uint64]:
    """The 64-bit hash of each index under a key, before the last step that serves its low bits."""
    second = hashlib.blake2b(
        (key % (1 << 64)).to_bytes(8, "little"), digest_size=8, person=b"raymerge word"
    ).digest()
    found = words.astype(np.uint64) * _WEYL + np.uint64(key % (1 << 64))
    found = (found ^ (found >> np.uint64(30))) * _FIRST + np.uint64(int.from_bytes(second, "little"))
    return (found ^ (found >> np.uint64(27))) * _SECOND


def element_numbers(key: int, indices: Indices) -> Indices:
    """The number of each element, from 0 to 2**32 - 1: a half of the hash of its pair."""
    words = hashes(key, indices >> 1)
    words ^= words >> np.uint64(31)
    return np.where(indices & 1, words >> np.uint64(32), words & _HALF).astype(np.int64)


def number_limit(density: float) -> int:
    """What the number of an element must be below for it to stay."""
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
    """Which elements are among the largest."""

    threshold: float
    """The magnitude of the last of them; infinite where there are none."""
    limit: int = NUMBERS
    """Of elements of just that magnitude those stay whose number is below this."""
    key: int = 0

    def keeps(self, magnitudes: Floats, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept = magnitudes >= self.threshold
        if self.limit < NUMBERS:
            tied = np.flatnonzero(magnitudes == self.threshold)
            kept[tied] = element_numbers(self.key, indices[tied]) < self.limit
        return kept


NOTHING = RankThreshold(math.inf)


def magnitudes_of_ranks(
    runs: Callable[[], Iterator[Floats]], ranks: Sequence[Sequence[int]]
) -> list[list[RankThreshold]]:
    """The magnitude of each rank among non-negative float32 numbers, and which share of its equals counts.

    Exact, by the bits of float32 numbers, which order as these do: first their upper halves are counted, then
    the lower ones of those that have the upper half found.

    Args:
        runs: called twice for all numbers, in runs ``[kinds, n]``.
        ranks: of each kind, from 1, the largest; of 0 the cut keeps nothing.
    """
    upper = np.zeros((len(ranks), _BINS), dtype=np.int64)
    for run in runs():
        for counts, values in zip(upper, run, strict=True):
            counts += np.bincount(_bits(values) >> _HIGH, minlength=_BINS)
    higher = np.cumsum(upper[:, ::-1], axis=1)[:, ::-1] - upper
    found = [
        [int(np.flatnonzero(above + counts >= rank)[-1]) if rank else -1 for rank in own]
        for own, above, counts in zip(ranks, higher, upper, strict=True)
    ]
    lower = [{high: np.zeros(_BINS, dtype=np.int64) for high in own if high >= 0} for own in found]
    for run in runs():
        for own, values in zip(lower, run, strict=True):
            bits = _bits(values)
            for high, counts in own.items():
                counts += np.bincount(bits[bits >> _HIGH == high] & (_BINS - 1), minlength=_BINS)
    return [
        [
            _threshold(high, int(higher[kind, high]), lower[kind][high], rank) if rank else NOTHING
            for high, rank in zip(found[kind], own, strict=True)
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
    """The base plus the merged delta, with all that it may be."""
    assert block.base is not None
    everything = np.arange(block.sources.shape[1])
    values, magnitude = _merged(block, sparsified.factors, how, everything, 0, None)
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    doubt = roundings * (np.abs(block.base) + magnitude)
    if block.doubts is not None:
        gains = np.abs(sparsified.factors).max(0) * np.abs(how.coefficients * how.factor).sum()
        doubt += block.input_doubt * (1.0 + gains)
    found = Expected(values, doubt)
    _add_others(found, block, sparsified, how)
    return found


_MOST_SIDES = 64
# Combinations of what may fall either way that are tried; beyond that an element is not judged.


@dataclass(frozen=True, slots=True)
class Sparsified:
    """What each delta is multiplied by before it is weighted."""

    factors: Floats
    """``[N, n]``: 0 where an element is dropped."""
    others: Floats
    """The same on the other side of a threshold that the element is near; equal where it is not."""

    def picked(self, places: NDArray[np.int64]) -> Sparsified:
        return Sparsified(self.factors[:, places], self.others[:, places])


@dataclass(frozen=True, slots=True)
class TermSum:
    """How terms become a result."""

    coefficients: Floats
    """``[N]``: factors of the terms."""
    shares: Floats
    """``[N]``: what each term adds to the divisor."""
    votes: Floats
    """``[N]``: factors of the terms when signs are elected."""
    factor: float
    elects: bool
    """Whether only terms of the elected sign count."""
    divides: bool
    """Whether the sum is divided by the shares of the terms that count."""


def _add_others(found: Expected, block: Block, sparsified: Sparsified, how: TermSum) -> None:
    """Add what elements near a threshold, or in a draw of votes, may be as well."""
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
        found.doubt[places] = np.inf
        return
    for sides in itertools.product((False, True), repeat=len(which)):
        turned = np.zeros(own.shape, dtype=bool)
        turned[which] = own[which] & np.array(sides, dtype=bool)[:, None]
        factors = np.where(turned, few.others, few.factors)
        for sign in signs:
            values, _ = _merged(block, factors, how, places, sign, turned & free[:, places])
            if sign:
                # An election can only be turned where it was a draw.
                values = np.where(drawn[places] | own.any(0), values, found.values[places])
            found.others.append((places, values))


def _merged(
    block: Block, factors: Floats, how: TermSum, places: NDArray[np.int64], sign: int, free: Flags | None
) -> tuple[Floats, Floats]:
    """The result of some elements, and the magnitude of what was added up.

    Args:
        block: the inputs.
        factors: what deltas are multiplied by ``[N, places]``.
        how: how terms are added.
        places: of the elements.
        sign: the elected one; 0 for what the votes say.
        free: terms that count on the other side than their own sign says.
    """
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
    """Where rounding, or inputs, may turn the vote."""
    terms = how.votes[:, None] * sparsified.factors * block.sources
    size = np.abs(terms).sum(0)
    doubt = DOUBT * size
    if block.doubts is not None:
        doubt = doubt + (np.abs(how.votes[:, None] * sparsified.factors) * block.doubts).sum(0)
    return np.asarray((np.abs(terms.sum(0)) <= doubt) & ((np.abs(terms) > 0).sum(0) > 1))


def _free_signs(block: Block, sparsified: Sparsified, how: TermSum) -> Flags:
    """Terms whose own sign is open; none where inputs are exact."""
    if block.doubts is None or not how.elects:
        return np.zeros(block.sources.shape, dtype=bool)
    return np.asarray((np.abs(block.sources) <= block.doubts) & (sparsified.factors != 0))


def family_sum(settings: Settings, *, elects: bool) -> TermSum:
    """The sum of the task-arithmetic family."""
    weights = np.array(settings.per_source("weight"), dtype=np.float64)
    factor = settings.number("lambda") / (1.0 if elects else total_weight(settings))
    return TermSum(weights, weights, weights, factor, elects, elects and settings.flag("normalize"))


class Combined:
    """A combination with coefficients that the inner products of a tensor's vectors give."""

    def __init__(
        self, coefficients: Sequence[float], *, origin: bool = False, also: Sequence[float] | None = None
    ) -> None:
        """
        Args:
            coefficients: one for each source.
            origin: whether sources are weights that differences to the base are taken of.
            also: what they may be as well, as a case is decided by rounding.
        """
        self._coefficients, self._origin, self._also = coefficients, origin, also

    def __call__(self, block: Block) -> Expected:
        found = combination(block, self._coefficients, origin=self._origin)
        if self._also is not None:
            other = combination(block, self._also, origin=self._origin)
            found.others.append((np.arange(len(other.values)), other.values))
        return found


def arc_pair(first: float, mixed: float, second: float, t: float) -> tuple[float, float]:
    """Coefficients of two vectors on the way from one to the other, from their inner products."""
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
