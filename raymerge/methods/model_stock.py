"""Model Stock: as far from the base towards the sources' mean as the angle between the deltas asks for
(arXiv 2403.19522)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from raymerge.methods.gram import Coefficients, DeltaCombinationKernel, Gram
from raymerge.methods.method import (
    Access,
    BaseUse,
    Kernel,
    KernelBySettings,
    Method,
    Parameter,
    Settings,
    SinglePass,
    Takes,
    Tile,
)
from raymerge.methods.rows import row_batches, row_products
from raymerge.methods.task_arithmetic import on_base

_POLE = 1e-6

Product: TypeAlias = Callable[[int, int], torch.Tensor]
"""The inner products of two sources' deltas, float64 ``[rows]``."""


class ModelStockKernel(KernelBySettings):
    """``B + t * mean d_i`` with ``t = N c / (1 + (N - 1) c)``, c the mean cosine of all pairs of N deltas.

    A delta of zeros has cosine 0 with any other. The divisor is never negative; where it is within 1e-6 of 0
    the deltas all but cancel each other, and t is 0. Under ``filter_wise`` each row has a t of its own.
    """

    def chosen(self, settings: Settings) -> Kernel:
        """One for each kind of vectors."""
        return _kernel(settings)


class _Whole(DeltaCombinationKernel):
    """One t for the tensor."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        """``t / N`` for each delta."""

        def product(left: int, right: int) -> torch.Tensor:
            return torch.tensor([gram.product(left, right)], dtype=torch.float64)

        return (float(_share(product, gram.size)) / gram.size,) * gram.size


class _Rows(SinglePass):
    """A t for each row."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Some rows after the other, so that rows of few elements need no more memory."""
        length, merged = settings.row_length, torch.empty_like(tile.sources[0])
        for rows in row_batches(merged.numel() // length, length, merged.numel(), merged.device):
            run = slice(rows.start * length, rows.stop * length)
            part = merged[run]
            deltas = [delta[run] for delta in tile.sources]
            part.copy_(deltas[0])
            for delta in deltas[1:]:
                part.add_(delta)
            part.view(-1, length).mul_(_factors(deltas, length).unsqueeze(1))
        return on_base(merged, tile)


def _factors(deltas: list[torch.Tensor], row_length: int) -> torch.Tensor:
    """``t / N`` of each row, float32."""

    def product(left: int, right: int) -> torch.Tensor:
        return row_products(deltas[left], deltas[right], row_length)

    return _share(product, len(deltas)).div_(len(deltas)).float()


def _share(product: Product, count: int) -> torch.Tensor:
    """t, float64 ``[rows]``; only additions, products, quotients and roots, which are rounded correctly, so
    that a row's neighbours cannot change it."""
    norms = [product(index, index).sqrt_() for index in range(count)]
    total = torch.zeros_like(norms[0])
    for left, right in itertools.combinations(range(count), 2):
        lengths = norms[left] * norms[right]
        lengths.add_(lengths == 0)
        total.add_(product(left, right).div_(lengths).clamp_(-1.0, 1.0))
    average = total.div_(math.comb(count, 2))
    divisor = 1.0 + (count - 1) * average
    ratio = (count * average).div_(divisor)
    return ratio.masked_fill_(divisor < _POLE, 0.0)


_WHOLE, _ROWS = _Whole(), _Rows()


def _kernel(settings: Settings) -> Kernel:
    """What the settings ask for; a vector is one row, and that is the whole tensor."""
    return _ROWS if settings.flag("filter_wise") and len(settings.shape) > 1 else _WHOLE


def _access(settings: Settings) -> Access:
    return Access.ROW if _kernel(settings) is _ROWS else Access.TENSOR


MODEL_STOCK = Method(
    name="model_stock",
    summary="The base moved towards the mean of the sources, the farther the better the deltas agree.",
    paper="2403.19522",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=ModelStockKernel(),
    parameters=(
        Parameter(
            "filter_wise", "bool", "global", "an angle for each row, not one for the tensor", default=False
        ),
    ),
    min_sources=2,
    scratch=3.0,
    scratch_per_source=0.5,
    access_of=_access,
)
