"""Arcee fusion: take over from a source the elements that matter most, judged by how far they moved and by
how much their row's softmax changed; keep the base elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import reference
from raymerge.methods.combine import on_base
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, BaseUse, Method
from raymerge.methods.reduce import PIECE, chunk_length, folded, row_batches
from raymerge.methods.selection import HISTOGRAM_BYTES, MagnitudeSelection

_SMALLEST_PROBABILITY = 1e-8
_WHISKER = 1.5
# Elements; more than the widest vector instruction takes, in both directions of a loop's unrolling.
_ALIGNMENT = 64

_Quartiles: TypeAlias = tuple[MagnitudeSelection, MagnitudeSelection, MagnitudeSelection]


class ArceeFusionKernel(Kernel):
    """Takes the source's elements of importance ``median + 1.5 (Q3 - Q1)`` and more.

    The importance of an element is the size of its change times the Kullback-Leibler divergence between the
    softmax of its row in the source and in the base. The quartiles are those of the whole tensor."""

    def passes(self, settings: Settings) -> int:
        """Two, for the quartiles: a sample of runs, not of rows, could not locate them."""
        return 2

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Quartiles:

        def quantile(share: float) -> MagnitudeSelection:
            return MagnitudeSelection(num_elements - int(share * (num_elements - 1)))

        return quantile(0.25), quantile(0.5), quantile(0.75)

    def observe(self, state: _Quartiles, tile: Tile, settings: Settings, pass_index: int) -> None:
        importances = _importances(tile, settings.row_length)
        for quartile in state:
            quartile.observe(importances)

    def conclude(self, state: _Quartiles, settings: Settings, pass_index: int) -> bool:
        MagnitudeSelection.fetch(state)
        unfinished = [quartile.conclude() for quartile in state]
        return any(unfinished)

    def apply(self, tile: Tile, settings: Settings, state: _Quartiles) -> torch.Tensor:
        first, median, third = (quartile.threshold for quartile in state)
        taken = _importances(tile, settings.row_length).ge_(median + _WHISKER * (third - first))
        (source,) = tile.sources
        # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
        return on_base(taken.mul_(source - tile.require_base()), tile)


def _importances(tile: Tile, row_length: int) -> torch.Tensor:
    """Size of each element's change times its row's divergence, float32 ``[n]``, not negative."""
    base, (source,) = tile.require_base(), tile.sources
    importances = torch.sub(source, base).abs_()
    rows = importances.view(-1, row_length)
    bases, sources = base.view(-1, row_length), source.view(-1, row_length)
    width = -(-row_length // _ALIGNMENT) * _ALIGNMENT
    for batch in row_batches(rows.shape[0], width, base.numel(), base.device):
        divergences = _divergences(bases[batch], sources[batch], width)
        rows[batch].mul_(divergences.to(rows.dtype).unsqueeze(1))
    return importances


def _divergences(base: torch.Tensor, source: torch.Tensor, width: int) -> torch.Tensor:
    """Kullback-Leibler divergence of each row of ``source`` from the same row of ``base``, float64
    ``[rows]``.

    ``sum p log(p/q)``, with p and q of the same sum, is ``sum q ((1+u) log(1+u) - u)`` with u = (p-q)/q:
    terms that are not negative, and of the size of their sum. The plain terms would cancel, and leave of a
    small change only rounding. Rows are padded to ``width``; padding counts as equal in both."""
    q = _probabilities(base, width)
    u = _probabilities(source, width).sub_(q).div_(q)
    for change, weight in zip(_runs(u), _runs(q), strict=True):
        log = torch.log1p(change)
        change.mul_(log - 1.0).add_(log).mul_(weight)
    return _row_sums(u).clamp_min_(0.0)


def _probabilities(values: torch.Tensor, width: int) -> torch.Tensor:
    """Softmax of each row plus 1e-8, in float64, padded to ``width``."""
    rows, row_length = values.shape
    padded = torch.full((rows, width), -torch.inf, dtype=torch.float64, device=values.device)
    padded[:, :row_length].copy_(values).sub_(values.amax(dim=1, keepdim=True))
    for run in _runs(padded):
        run.exp_()
    return padded.div_(_row_sums(padded).unsqueeze(1)).add_(_SMALLEST_PROBABILITY)


def _runs(padded: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in runs that a library computes on one thread, each at an aligned address.

    Vectorised exponentials and logarithms need not round like the scalar ones for the rest of a run. So that
    neither tile nor thread count decides between the two, rows start at multiples of 64 elements and are
    padded to one."""
    longest = PIECE if padded.device.type == "cpu" else chunk_length(padded.numel(), padded.device)
    yield from torch.split(padded.view(-1), longest)


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Sum of each row of (even) padded length, folded in halves; ``values`` is not changed."""
    half = values.shape[1] // 2
    return folded(values[:, :half] + values[:, half:], dim=1)


_NEAR_IMPORTANCE = 2.0**-16
# The same of importances: a divergence of nearly equal rows is a small difference.


class _Reference:
    def __init__(self, tensor: reference.LogicalTensor) -> None:
        total = tensor.num_elements
        ranks = [total - math.floor(share * (total - 1)) for share in (0.25, 0.5, 0.75)]
        (cuts,) = reference.magnitudes_of_ranks(
            lambda: (_reference_importances(block, tensor.row_length)[None] for block in tensor.blocks()),
            [ranks],
        )
        first, median, third = (cut.threshold for cut in cuts)
        self._threshold = median + 1.5 * (third - first)
        self._row_length = tensor.row_length

    def __call__(self, block: reference.Block) -> reference.Expected:
        assert block.base is not None
        importances = _reference_importances(block, self._row_length)
        taken = importances >= self._threshold
        other = np.where(taken, block.base, block.sources[0])
        doubts = 0.0
        if block.doubts is not None:
            size = np.maximum(np.abs(block.sources[0] - block.base), 1e-30)
            doubts = importances * np.minimum(1.0, 8 * np.asarray(block.input_doubt) / size)
        is_open = np.abs(importances - self._threshold) <= _NEAR_IMPORTANCE * self._threshold + doubts
        places = np.flatnonzero(is_open)
        values = np.where(taken, block.sources[0], block.base)
        return reference.Expected(values, reference.doubt_of(block, 1.0), [(places, other[places])])


def _reference_importances(block: reference.Block, length: int) -> reference.Floats:
    assert block.base is not None
    base, source = block.base.reshape(-1, length), block.sources[0].reshape(-1, length)
    q, p = _softmax(base), _softmax(source)
    change = (p - q) / q
    # The terms of p log(p/q) without what cancels out over the row, as both sum to the same.
    divergence = np.maximum((q * ((1 + change) * np.log1p(change) - change)).sum(1), 0.0)
    sizes = np.abs(source - base).astype(np.float32) * divergence.astype(np.float32)[:, None]
    return np.asarray(sizes, dtype=np.float64).reshape(-1)


def _softmax(rows: reference.Floats) -> reference.Floats:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True) + 1e-8)


ARCEE_FUSION = Method(
    name="arcee_fusion",
    summary="The base, with the elements of one source whose change matters most.",
    access=Access.ROW,
    base=BaseUse.REQUIRED,
    kernel=ArceeFusionKernel(),
    reference=reference.Reference(_Reference, by_row=True),
    max_sources=1,
    scratch=7.0,
    state_bytes=3 * HISTOGRAM_BYTES,
)
