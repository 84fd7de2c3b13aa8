"""The methods that keep some elements of each delta: by size, by chance, by chances that hang on rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raymerge.methods import Settings, random_key
from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.combined import total_weight
from raymerge.verifier.recompute.random import NUMBERS, element_numbers, limit_of
from raymerge.verifier.recompute.sign_election import Sum, Thinned, merged, weighted
from raymerge.verifier.recompute.tensor import DOUBT, Block, Expected, LogicalTensor

_HIGH = 16
_BINS = 1 << _HIGH
_ENDS: tuple[tuple[int, Literal["right", "left"]], ...] = ((1, "right"), (-1, "left"))


@dataclass(frozen=True, slots=True)
class Cut:
    """Which elements are among the largest."""

    threshold: float
    """The magnitude of the last of them; infinite where there are none."""
    limit: int = NUMBERS
    """Of elements of just that magnitude those stay whose number is below this."""
    key: int = 0
    """Of their numbers."""

    def keeps(self, magnitudes: Floats, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether elements are among the largest."""
        kept = magnitudes >= self.threshold
        if self.limit < NUMBERS:
            tied = np.flatnonzero(magnitudes == self.threshold)
            kept[tied] = element_numbers(self.key, indices[tied]) < self.limit
        return kept


def magnitudes_of_ranks(
    runs: Callable[[], Iterator[Floats]], ranks: Sequence[Sequence[int]]
) -> list[list[Cut]]:
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
            _cut(high, int(higher[kind, high]), lower[kind][high], rank) if rank else Cut(math.inf)
            for high, rank in zip(found[kind], own, strict=True)
        ]
        for kind, own in enumerate(ranks)
    ]


def _cut(high: int, above: int, counts: NDArray[np.int64], rank: int) -> Cut:
    higher = above + np.append(np.cumsum(counts[::-1])[::-1][1:], 0)
    low = int(np.flatnonzero(higher + counts >= rank)[-1])
    threshold = float(np.array([high << _HIGH | low], dtype=np.uint32).view(np.float32)[0])
    return Cut(threshold, limit_of((rank - int(higher[low])) / int(counts[low])))


def _bits(values: Floats) -> NDArray[np.int64]:
    return values.astype(np.float32).view(np.uint32).astype(np.int64)


class Trimmed:
    """ties, breadcrumbs and breadcrumbs_ties: some of the largest elements of each delta stay."""

    def __init__(self, tensor: LogicalTensor, *, name: str, elects: bool) -> None:
        self._how = _family(tensor.settings, elects=elects)
        ranks = [_ranks_kept(tensor, name, source) for source in range(tensor.num_sources)]
        self._cuts: list[tuple[Cut, Cut] | None] = [None] * len(ranks)
        if any(own is not None for own in ranks):
            found = magnitudes_of_ranks(
                lambda: (np.abs(block.sources) for block in tensor.blocks()), [own or () for own in ranks]
            )
            for source, cuts in enumerate(found):
                key = random_key(0, name, source)
                kept = [Cut(cut.threshold, cut.limit, key) for cut in cuts]
                self._cuts[source] = (kept[0], kept[1]) if kept else None
        self._gains = [1.0] * len(ranks)
        if tensor.settings.flag("rescale"):
            self._gains = self._made_up(tensor)

    def __call__(self, block: Block) -> Expected:
        factors, others = np.zeros((2, *block.sources.shape))
        for source, cuts in enumerate(self._cuts):
            factors[source] = kept = self._kept(block, source) * self._gains[source]
            others[source] = kept
            if cuts is None or block.doubts is None:
                continue
            # Among inputs that differ, a whole tensor's order differs near every cut.
            size, near = np.abs(block.sources[source]), 2 * block.doubts[source]
            is_near = np.zeros(size.shape, dtype=bool)
            for cut in cuts:
                is_near |= np.abs(size - cut.threshold) <= near + DOUBT * min(cut.threshold, 1e30)
            others[source] = np.where(is_near, np.where(kept > 0, 0.0, self._gains[source]), kept)
        return merged(block, Thinned(factors, others), self._how)

    def _kept(self, block: Block, source: int) -> Floats:
        cuts = self._cuts[source]
        size = np.abs(block.sources[source])
        if cuts is None:
            return np.ones(size.shape)
        kept, outliers = (cut.keeps(size, block.indices) for cut in cuts)
        return (kept & ~outliers).astype(np.float64)

    def _made_up(self, tensor: LogicalTensor) -> list[float]:
        """What makes the L1 norm of what stays that of the delta, for each source."""
        whole, kept = np.zeros((2, tensor.num_sources))
        for block in tensor.blocks():
            sizes = np.abs(block.sources)
            whole += sizes.sum(1)
            for source, cuts in enumerate(self._cuts):
                # By shares of what ties, since each of them counts by its chance.
                of_each = 1.0 if cuts is None else _weights(cuts[0], sizes[source])
                of_each = of_each if cuts is None else of_each - _weights(cuts[1], sizes[source])
                kept[source] += float((sizes[source] * of_each).sum())
        both = zip(whole.tolist(), kept.tolist(), self._cuts, strict=True)
        return [w / k if cuts is not None and k > w * 2.0**-40 else 1.0 for w, k, cuts in both]


def _ranks_kept(tensor: LogicalTensor, name: str, source: int) -> tuple[int, int] | None:
    """How many elements of a delta are not among the smallest, and how many outliers; None for all of it."""
    settings, total = tensor.settings, tensor.num_elements
    density = settings.per_source("density")[source]
    if density >= 1:
        return None
    kept = math.floor(density * total)
    outliers = math.floor(settings.per_source("gamma")[source] * total) if name != "ties" else 0
    upper = min(kept + outliers, total)
    return upper, upper - kept


def _weights(cut: Cut, magnitudes: Floats) -> Floats:
    """1 above a cut, and the share that counts at it."""
    return np.where(magnitudes == cut.threshold, cut.limit / NUMBERS, magnitudes > cut.threshold)


def dare(tensor: LogicalTensor, block: Block, *, elects: bool) -> Expected:
    """Each element stays with the same chance."""
    settings = tensor.settings
    factors = np.empty(block.sources.shape)
    for source, density in enumerate(settings.per_source("density")):
        limit = limit_of(density)
        gain = NUMBERS / limit if settings.flag("rescale") and limit else 1.0
        factors[source] = gain * (element_numbers(settings.keys[source], block.indices) < limit)
    return merged(block, Thinned(factors, factors), _family(settings, elects=elects))


def della(tensor: LogicalTensor, block: Block, *, elects: bool) -> Expected:
    """Each element stays with a chance that grows with the rank of its magnitude in its row."""
    settings = tensor.settings
    factors, others = np.empty((2, *block.sources.shape))
    shifts = np.zeros(block.sources.shape)
    how = _family(settings, elects=elects)
    both = zip(settings.per_source("density"), settings.per_source("epsilon"), strict=True)
    for source, (density, epsilon) in enumerate(both):
        if not 0 < density < 1:
            factors[source] = others[source] = density
            continue
        doubts = None if block.doubts is None else block.doubts[source]
        numbers = element_numbers(settings.keys[source], block.indices)
        ranks, spread = _ranks(np.abs(block.sources[source]), doubts, settings.row_length)
        chances = _Chances(density, epsilon, settings)
        gains, kept = chances.gains(ranks), numbers < chances.limits(ranks)
        # The chances themselves are rounded, and two numbers apart at most.
        is_open = numbers >= chances.limits(ranks - spread) - 2
        is_open &= numbers < chances.limits(ranks + spread) + 2
        factors[source], others[source] = gains * kept, gains * np.where(is_open, ~kept, kept)
        shifts[source] = np.abs(chances.gains(ranks - spread) - gains)
    found = merged(block, Thinned(factors, others), how)
    largest = np.abs(how.coefficients * how.factor)
    if how.divides:
        largest = largest / max(float(np.abs(how.shares).min()), 1e-30)
    found.doubt += (largest[:, None] * shifts * np.abs(block.sources)).sum(0)
    return found


class _Chances:
    """The chances of one delta's elements by their ranks."""

    def __init__(self, density: float, epsilon: float, settings: Settings) -> None:
        length = settings.row_length
        self._least = density - (epsilon if length > 1 else 0.0)
        self._step = 2.0 * epsilon / max(1, length - 1)
        self._rescales = settings.flag("rescale")

    def limits(self, ranks: Floats) -> Floats:
        """What the numbers of elements must be below."""
        return np.clip(np.ceil((self._least + self._step * ranks) * NUMBERS), 0, NUMBERS)

    def gains(self, ranks: Floats) -> Floats:
        """What elements are multiplied by if they stay."""
        if not self._rescales:
            return np.ones(ranks.shape)
        return NUMBERS / np.maximum(self.limits(ranks), 1)


def _ranks(magnitudes: Floats, doubts: Floats | None, length: int) -> tuple[Floats, Floats]:
    """The rank of each element in its row from 0, equal ones by index; and by how many it may differ."""
    rows = magnitudes.reshape(-1, length)
    order = np.argsort(rows, axis=1, kind="stable")
    ranks = np.empty(rows.shape)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(length, dtype=np.float64), rows.shape), axis=1)
    spread = np.zeros(rows.shape)
    if doubts is not None:
        for row, near, out in zip(rows, 2 * doubts.reshape(-1, length), spread, strict=True):
            ordered = np.sort(row)
            ends = (np.searchsorted(ordered, row + sign * near, side) for sign, side in _ENDS)
            out[:] = np.subtract(*ends) - 1
    return ranks.reshape(-1), spread.reshape(-1)


def _family(settings: Settings, *, elects: bool) -> Sum:
    factor = settings.number("lambda") / (1.0 if elects else total_weight(settings))
    divides = elects and settings.flag("normalize")
    return weighted(settings.per_source("weight"), factor=factor, elects=elects, divides=divides)
