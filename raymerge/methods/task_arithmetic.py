"""The base plus a sum of weighted deltas (arXiv 2212.04089), and the arithmetic that its family shares:
weighting, sign election, normalising and lambda."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.combine import on_base, stored_sum_on_base, sum_on_base
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import INT8_MASK, LAMBDA, Access, BaseUse, Method, Parameter, Takes, delta_weight
from raymerge.methods.reduce import flat
from raymerge.methods.reference import Block, Expected, LogicalTensor, combination, elementwise, total_weight

_ZERO_WEIGHT = 1e-8

Term: TypeAlias = "Callable[[int, torch.Tensor], None]"
"""Writes the weighted, sparsified delta of one source (by index) into float32 ``[n]``."""


def merge_deltas(tile: Tile, settings: Settings, term: Term, *, elect: bool) -> torch.Tensor:
    """``B + lambda * D``, with D the sum of the terms, or of those that agree with the elected sign.

    Under ``normalize`` D is divided by the weights that went into it. Terms are computed more than once
    rather than kept, so that memory does not grow with the number of sources."""
    factor = settings.number("lambda")
    merged = sum_of_terms(tile, term)
    if elect:
        weights = settings.per_source("weight")
        merged = agreeing_sum(merged, term, weights, normalize=settings.flag("normalize"))
    else:
        factor /= _total_weight(settings)
    return on_base(merged if factor == 1.0 else merged.mul_(factor), tile)


def merge_factors(tile: Tile, settings: Settings, factors: torch.Tensor, *, elect: bool) -> torch.Tensor:
    """``merge_deltas`` of the terms ``factor * delta * weight``, each product rounded, in one loop on the
    CPU. ``factors`` is float32 ``[N, n]`` with contiguous rows, not negative, 0 where an element is
    dropped."""
    if tile.sources.device.type != "cpu":
        return merge_factors_in_torch(tile, settings, factors, elect=elect)
    base = tile.require_base()
    out = torch.empty_like(base)
    how = compiled_sum(settings, elect=elect)
    loops.elect.merge_factors(base.numpy(), rows_of(tile.sources), rows_of(factors), how, out.numpy())
    return out


def merge_factors_in_torch(
    tile: Tile, settings: Settings, factors: torch.Tensor, *, elect: bool
) -> torch.Tensor:
    weights = settings.per_source("weight")

    def term(index: int, out: torch.Tensor) -> None:
        # A product, not a choice: NaN must reach the result even where dropped.
        torch.mul(factors[index], tile.sources[index], out=out).mul_(weights[index])

    return merge_deltas(tile, settings, term, elect=elect)


def rows_of(rows: torch.Tensor) -> loops.elect.Rows:
    """The rows of a matrix ``[N, n]`` on the CPU for the compiled loops, without a copy."""
    return loops.elect.Rows(flat(rows), rows.stride(0))


def compiled_sum(settings: Settings, gains: Sequence[float] = (), *, elect: bool) -> loops.elect.Sum:
    """``merge_deltas`` of terms delta times weight (times gain), for the compiled loops."""
    weights = settings.per_source("weight")
    factor = settings.number("lambda")
    return loops.elect.Sum(
        coefficients=np.array(
            [w * gain for w, gain in zip(weights, gains or (1.0,) * len(weights), strict=True)], np.float32
        ),
        shares=np.ones(len(weights), np.float32),
        weights=np.array(weights, np.float32),
        factor=np.float32(factor if elect else factor / _total_weight(settings)),
        elects=elect,
        divides=settings.flag("normalize"),
    )


def sum_of_terms(tile: Tile, term: Term) -> torch.Tensor:
    total = torch.empty_like(tile.sources[0])
    term(0, total)
    if len(tile.sources) > 1:
        delta = torch.empty_like(total)
        for index in range(1, len(tile.sources)):
            term(index, delta)
            total.add_(delta)
    return total


def _total_weight(settings: Settings) -> float:
    """Divisor under ``normalize``; weights that cancel out divide by 1."""
    if not settings.flag("normalize"):
        return 1.0
    total = math.fsum(settings.per_source("weight"))
    return total if abs(total) >= _ZERO_WEIGHT else 1.0


def agreeing_sum(
    votes: torch.Tensor, term: Term, weights: tuple[float, ...], *, normalize: bool
) -> torch.Tensor:
    """Sum of the terms that have the sign of ``votes``, float32 ``[n]``, overwritten; a vote of 0 counts as
    positive. ``normalize`` divides by the weights of those terms.

    Times the elected sign, an agreeing term is positive and any other is clamped to 0. Clamping lets NaN
    through, which a comparison of signs would drop."""
    sign = _elect_(votes)
    merged, delta = torch.zeros_like(sign), torch.empty_like(sign)
    divisor = torch.zeros_like(sign) if normalize else None
    for index, weight in enumerate(weights):
        term(index, delta)
        merged.add_(delta.mul_(sign).clamp_min_(0.0))
        if divisor is not None:
            divisor.add_(delta.sign_().mul_(weight))
    merged.mul_(sign)
    if divisor is not None:
        merged.div_(divisor.add_(delta.copy_(divisor).eq_(0.0)))
    return merged


def _elect_(total: torch.Tensor) -> torch.Tensor:
    """Overwrite the sums by -1 where they are negative and +1 elsewhere: comparisons in place, as 0.0 and
    1.0, are many times faster than boolean masks."""
    return total.lt_(0.0).mul_(-2.0).add_(1.0)


class TaskArithmeticKernel(StoredKernel):
    """Every delta whole, times its weight."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        factor = settings.number("lambda") / _total_weight(settings)
        return sum_on_base(tile, settings.per_source("weight"), factor)

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        factor = settings.number("lambda") / _total_weight(settings)
        stored_sum_on_base(stored, settings.per_source("weight"), out, factor)


def delta_parameters(*, normalize: bool, rescale: bool, sparsifies: bool = True) -> tuple[Parameter, ...]:
    """Parameters of the family; density has an effect where it ``sparsifies``."""
    return (
        delta_weight(),
        Parameter.fraction(
            "density", "fraction of the delta's elements that is kept", 1.0, effective=sparsifies
        ),
        Parameter.switch("normalize", "divide by the weights that went in", default=normalize),
        Parameter.switch(
            "rescale", "make up for the elements that were not kept", default=rescale, effective=sparsifies
        ),
        LAMBDA,
        INT8_MASK,
    )


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    settings = tensor.settings
    factor = settings.number("lambda") / total_weight(settings)
    return combination(block, [factor * weight for weight in settings.per_source("weight")])


TASK_ARITHMETIC = Method(
    name="task_arithmetic",
    summary="The base plus the weighted sum of the deltas.",
    paper="2212.04089",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=TaskArithmeticKernel(),
    reference=elementwise(_reference),
    parameters=delta_parameters(normalize=False, rescale=False, sparsifies=False),
)
