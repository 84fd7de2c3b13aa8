"""Weighted sum or mean (model soups, arXiv 2203.05482)."""

from __future__ import annotations

import math
from dataclasses import replace

from raymerge.deferred import torch
from raymerge.methods import combine
from raymerge.methods.kernel import AnchoredSum, Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Block, Expected, LogicalTensor, combination, elementwise

_NORMALIZE = "normalize"


class LinearKernel(StoredKernel):
    """``sum w_i T_i``, divided by ``sum w_i`` under ``normalize``."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Normalised in float64. A mean is added up as changes to one source, so that equal sources keep
        their bits."""
        coefficients = combine.shares(settings, normalize=_NORMALIZE)
        if settings.flag(_NORMALIZE):
            return combine.combine(tile.sources, coefficients, None)
        return combine.sum_of_products(tile.sources, coefficients)

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        is_mean = settings.flag(_NORMALIZE)
        return combine.anchored_sum(combine.shares(settings, normalize=_NORMALIZE)) if is_mean else None

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        write = combine.combine_stored if settings.flag(_NORMALIZE) else combine.stored_sum_of_products
        write(stored, combine.shares(settings, normalize=_NORMALIZE), out)


def _check(settings: Settings) -> str | None:
    return combine.check_shares(settings, normalize=_NORMALIZE)


def _identity(settings: Settings) -> int | None:
    """One source counts as itself: a mean of one, or a sum with weight 1."""
    alone = len(settings.sources) == 1 and _check(settings) is None
    return 0 if alone and combine.shares(settings, normalize=_NORMALIZE) == (1.0,) else None


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    weights = tensor.settings.per_source("weight")
    total = math.fsum(weights) if tensor.settings.flag(_NORMALIZE) else 1.0
    return combination(block, [weight / total for weight in weights])


LINEAR = Method(
    name="linear",
    summary="Weighted mean of the sources, or their weighted sum.",
    paper="2203.05482",
    access=Access.ELEMENT,
    kernel=LinearKernel(),
    reference=elementwise(_reference),
    parameters=(
        Parameter("weight", "float", "source", "coefficient of the source", required=True),
        Parameter.switch(_NORMALIZE, "divide by the sum of the weights", default=True),
    ),
    check=_check,
    identity=_identity,
)

MEAN = replace(
    LINEAR,
    parameters=(
        Parameter("weight", "float", "source", "share of the source", 1.0),
        Parameter.switch(_NORMALIZE, "divide by the sum of the weights", default=True),
    ),
)
"""In place of a method, for a tensor that it has nothing to go by for."""
