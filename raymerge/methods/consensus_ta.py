"""Consensus task arithmetic: only elements that several sources use are merged (arXiv 2405.07813)."""

from __future__ import annotations

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.combine import on_base, sum_of_products
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import LAMBDA, Access, BaseUse, Method, Parameter, Takes, delta_weight
from raymerge.methods.reference import DOUBT, Block, Expected, LogicalTensor, doubt_of, elementwise


class ConsensusKernel(Kernel):
    """Keeps the elements of the merged delta ``D = sum w d`` that at least ``consensus`` sources use: where
    their own term outweighs the rest, ``|w d| > mask_lambda * |D - w d|``.

    With weights of 1 this is the paper's mask for the sum of the task vectors. As in the paper, lambda has no
    part in the masks, so that it can be tuned without changing them."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        merged = sum_of_products(tile.sources, settings.per_source("weight"))
        mask = _uses(tile, settings, merged).ge_(settings.number("consensus"))
        # A product with the mask, not a choice by it: what is not finite must stay.
        return on_base(merged.mul_(mask).mul_(settings.number("lambda")), tile)


def _uses(tile: Tile, settings: Settings, merged: torch.Tensor) -> torch.Tensor:
    count = torch.zeros_like(merged)
    own, rest = torch.empty_like(merged), torch.empty_like(merged)
    limits = zip(settings.per_source("weight"), settings.per_source("mask_lambda"), strict=True)
    for delta, (weight, mask_lambda) in zip(tile.sources, limits, strict=True):
        torch.mul(delta, weight, out=own)
        torch.sub(merged, own, out=rest)
        count.add_(own.abs_().gt_(rest.abs_().mul_(mask_lambda)))
    return count


def _check(settings: Settings) -> str | None:
    needed, sources = int(settings.number("consensus")), len(settings.sources)
    if needed <= sources:
        return None
    return f"consensus is {needed}, but only {sources} of the sources merge here, so nothing would be kept"


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    assert block.base is not None
    settings = tensor.settings
    terms = np.array(settings.per_source("weight"))[:, None] * block.sources
    merged = terms.sum(0)
    limits = np.array(settings.per_source("mask_lambda"))[:, None] * np.abs(merged - terms)
    margin = np.abs(terms) - limits
    near = DOUBT * np.abs(terms).sum(0) + block.input_doubt * len(terms)
    needed = settings.number("consensus")
    factor = settings.number("lambda")
    surely, maybe = (margin > near).sum(0) >= needed, (margin >= -near).sum(0) >= needed
    doubt = doubt_of(block, abs(factor) * float(np.abs(settings.per_source("weight")).sum()))
    changed = block.base + factor * merged
    # Where nothing changes it does not matter who uses it.
    places = np.flatnonzero((surely != maybe) & (np.abs(factor * merged) > doubt))
    return Expected(np.where(surely, changed, block.base), doubt, [(places, changed[places])])


CONSENSUS_TA = Method(
    name="consensus_ta",
    summary="The base plus the sum of the deltas where several sources use the element.",
    paper="2405.07813",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=ConsensusKernel(),
    reference=elementwise(_reference),
    parameters=(
        delta_weight(1.0),
        Parameter(
            "mask_lambda",
            "float",
            "source",
            "how far the source's own term must outweigh the others' sum to count as use",
            default=0.4,
            minimum=0.0,
        ),
        Parameter("consensus", "int", "global", "sources that must use an element", default=2, minimum=0),
        LAMBDA,
    ),
    scratch=3.0,
    check=_check,
)
