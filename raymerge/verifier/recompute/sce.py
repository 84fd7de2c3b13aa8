"""sce and arcee_fusion: elements chosen by how much they vary or matter over a whole tensor."""

from __future__ import annotations

import math

import numpy as np

from raymerge.methods import random_key
from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.sign_election import Sum, Thinned, merged
from raymerge.verifier.recompute.sparsify import Cut, magnitudes_of_ranks
from raymerge.verifier.recompute.tensor import Block, Expected, LogicalTensor, doubt_of

_NEAR = 2.0**-21
# Of a threshold: what two ways to compute the same number may differ by, rounded to float32.
_NEAR_IMPORTANCE = 2.0**-16
# The same of importances: a divergence of nearly equal rows is a small difference.


class Sce:
    """The elements of largest variance over the sources, averaged by energy where signs agree."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self._tensor = tensor
        share = tensor.settings.number("select_topk")
        self._cut: Cut | None = None
        if share < 1:
            differing = sum(int(np.count_nonzero(_deviations(block))) for block in tensor.blocks())
            ((cut,),) = magnitudes_of_ranks(
                lambda: (_deviations(block)[None] for block in tensor.blocks()),
                [[math.floor(differing * share)]],
            )
            self._cut = Cut(cut.threshold, cut.limit, random_key(0, "sce", 0))
        squares = np.zeros(tensor.num_sources)
        open_squares = np.zeros(tensor.num_sources)
        for block in tensor.blocks():
            kept, other = self._selected(block)
            squares += (kept * block.sources**2).sum(1)
            open_squares += ((kept != other) * block.sources**2).sum(1)
        total = math.fsum(squares)
        self._shares = squares / total if total else np.full(len(squares), 1.0 / len(squares))
        # What may be selected otherwise moves shares by no more than its part of the squares.
        self._doubt = float(open_squares.sum() / total) if total else 0.0

    def __call__(self, block: Block) -> Expected:
        kept, other = self._selected(block)
        ones = np.ones(len(self._shares))
        how = Sum(self._shares, self._shares, ones, 1.0, elects=True, divides=True)
        size = block.sources.shape
        both = Thinned(np.broadcast_to(kept, size) * 1.0, np.broadcast_to(other, size) * 1.0)
        found = merged(block, both, how)
        least = float(self._shares[self._shares > 0].min(initial=1.0))
        found.doubt += min(1.0, self._doubt / least) * np.abs(block.sources).max(0)
        return found

    def _selected(self, block: Block) -> tuple[Floats, Floats]:
        """1 where an element is selected, and the same where that is open the other way."""
        if self._cut is None:
            ones = np.ones(block.sources.shape[1])
            return ones, ones
        spread, threshold = _deviations(block), self._cut.threshold
        kept = self._cut.keeps(spread, block.indices)
        if not math.isfinite(threshold):
            return kept.astype(np.float64), kept.astype(np.float64)
        doubts = 0.0 if block.doubts is None else 2 * block.doubts.max(0)
        is_open = np.abs(spread - threshold) <= _NEAR * threshold + doubts
        return kept.astype(np.float64), np.where(is_open, ~kept, kept).astype(np.float64)


def _deviations(block: Block) -> Floats:
    """The root of the summed squared distances from the mean, as float32 numbers; 0 where all are equal."""
    count = len(block.sources)
    total = block.sources.sum(0)
    squares = ((block.sources * count - total) ** 2).sum(0)
    return np.asarray((np.sqrt(squares) / count).astype(np.float32), dtype=np.float64)


class ArceeFusion:
    """The elements of one source of importance ``median + 1.5 (Q3 - Q1)`` and more."""

    def __init__(self, tensor: LogicalTensor) -> None:
        total = tensor.num_elements
        ranks = [total - math.floor(share * (total - 1)) for share in (0.25, 0.5, 0.75)]
        (cuts,) = magnitudes_of_ranks(
            lambda: (_importances(block, tensor.row_length)[None] for block in tensor.blocks()), [ranks]
        )
        first, median, third = (cut.threshold for cut in cuts)
        self._threshold = median + 1.5 * (third - first)
        self._row_length = tensor.row_length

    def __call__(self, block: Block) -> Expected:
        assert block.base is not None
        importances = _importances(block, self._row_length)
        taken = importances >= self._threshold
        other = np.where(taken, block.base, block.sources[0])
        doubts = 0.0
        if block.doubts is not None:
            size = np.maximum(np.abs(block.sources[0] - block.base), 1e-30)
            doubts = importances * np.minimum(1.0, 8 * np.asarray(block.input_doubt) / size)
        is_open = np.abs(importances - self._threshold) <= _NEAR_IMPORTANCE * self._threshold + doubts
        places = np.flatnonzero(is_open)
        values = np.where(taken, block.sources[0], block.base)
        return Expected(values, doubt_of(block, 1.0), [(places, other[places])])


def _importances(block: Block, length: int) -> Floats:
    """Size of the change of each element times the divergence of its row, as float32 numbers."""
    assert block.base is not None
    base, source = block.base.reshape(-1, length), block.sources[0].reshape(-1, length)
    q, p = _probabilities(base), _probabilities(source)
    change = (p - q) / q
    # The terms of p log(p/q) without what cancels out over the row, as both sum to the same.
    divergence = np.maximum((q * ((1 + change) * np.log1p(change) - change)).sum(1), 0.0)
    sizes = np.abs(source - base).astype(np.float32) * divergence.astype(np.float32)[:, None]
    return np.asarray(sizes, dtype=np.float64).reshape(-1)


def _probabilities(rows: Floats) -> Floats:
    """The softmax of each row, plus 1e-8."""
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True) + 1e-8)
