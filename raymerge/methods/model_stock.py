"""Model Stock: as far from the base towards the sources' mean as the angle between the deltas asks for
(arXiv 2403.19522)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raymerge.deferred import torch
from raymerge.methods import reference
from raymerge.methods.combine import Coefficients, sum_on_base
from raymerge.methods.gram import DeltaCombinationKernel, Gram, pair_index
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.reduce import row_grams

_POLE = 1e-6


class _Whole(DeltaCombinationKernel):
    """``B + t * mean d_i`` with ``t = N c / (1 + (N - 1) c)``, c the mean cosine of all pairs of N deltas.

    A delta of zeros has cosine 0 with any other. The divisor is never negative; within 1e-6 of 0 the deltas
    all but cancel each other, and t is 0."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        return (float(_share(gram.products, gram.size)[0]) / gram.size,) * gram.size


class _Rows(Kernel):
    """The same, with a t for each row."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """In batches of rows, where their products would take more memory than their elements."""
        length, count = settings.row_length, len(tile.sources)
        merged = torch.empty_like(tile.require_base())
        at_once = max(1, merged.numel() // (4 * count**2)) * length
        for begin in range(0, merged.numel(), at_once):
            run = slice(begin, min(begin + at_once, merged.numel()))
            part = Tile(tile.require_base()[run], tile.sources[:, run], 0)
            products = row_grams(part.sources, None, length)
            factors = torch.from_numpy(_share(products.cpu().numpy(), count) / count)
            merged[run] = sum_on_base(part, (1.0,) * count, factors.to(merged.device))
        return merged


def _share(products: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """t of each row from ``row_grams``.

    Only correctly rounded operations, so that a row's neighbours cannot change it."""
    with np.errstate(invalid="ignore"):
        norms = [np.sqrt(products[pair_index(index, index)]) for index in range(count)]
        total = np.zeros_like(norms[0])
        for left, right in itertools.combinations(range(count), 2):
            lengths = norms[left] * norms[right]
            cosine = products[pair_index(left, right)] / (lengths + (lengths == 0))
            total += np.minimum(1.0, np.maximum(-1.0, cosine))
        average = total / math.comb(count, 2)
        divisor = 1.0 + (count - 1) * average
        share = count * average / np.where(divisor < _POLE, 1.0, divisor)
        return np.where(divisor < _POLE, 0.0, share)


_WHOLE, _ROWS = _Whole(), _Rows()


def _kernel(settings: Settings) -> Kernel:
    return _ROWS if settings.flag("filter_wise") and len(settings.shape) > 1 else _WHOLE


def _access(settings: Settings) -> Access:
    return Access.ROW if _kernel(settings) is _ROWS else Access.TENSOR


def _reference(tensor: reference.LogicalTensor) -> Callable[[reference.Block], reference.Expected]:
    if tensor.settings.flag("filter_wise") and len(tensor.settings.shape) > 1:
        return lambda block: _stock_rows(block, tensor.row_length)
    gram = reference.inner_products(tensor, lambda block: block.sources)
    share = float(_stock_share(gram[:, :, None])[0]) / tensor.num_sources
    return reference.Combined([share] * tensor.num_sources)


def _stock_rows(block: reference.Block, length: int) -> reference.Expected:
    rows = block.sources.reshape(len(block.sources), -1, length)
    share = _stock_share(np.einsum("arx,brx->abr", rows, rows)) / len(rows)
    return reference.combination(block, np.broadcast_to(share.repeat(length), block.sources.shape))


def _stock_share(grams: reference.Floats) -> reference.Floats:
    count = len(grams)
    norms = np.sqrt(np.einsum("aar->ar", grams))
    lengths = norms[:, None] * norms[None]
    cosines = np.divide(grams, lengths, out=np.zeros_like(grams), where=lengths > 0).clip(-1.0, 1.0)
    left, right = np.triu_indices(count, 1)
    average = cosines[left, right].mean(0)
    divisor = 1.0 + (count - 1) * average
    return np.where(divisor < 1e-6, 0.0, count * average / np.where(divisor < 1e-6, 1.0, divisor))


MODEL_STOCK = Method(
    name="model_stock",
    summary="The base moved towards the mean of the sources, the farther the better the deltas agree.",
    paper="2403.19522",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=_WHOLE,
    reference=reference.Reference(_reference, by_row=True),
    parameters=(
        Parameter.switch("filter_wise", "an angle for each row, not one for the tensor", default=False),
    ),
    min_sources=2,
    scratch=3.0,
    scratch_per_source=0.5,
    access_of=_access,
    kernel_of=_kernel,
)
