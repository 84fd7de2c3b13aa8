"""Fisher merging (arXiv 2111.09832): each element from the sources whose data says most about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Block, Expected, Floats, LogicalTensor, combination, elementwise

_LEAST = 1e-6


class FisherKernel(Kernel):
    """``sum c_i T_i`` with ``c_i = w_i (F_i + e) / sum_j w_j (F_j + e)`` for each element, or with the
    roots of ``F + e`` under ``root``.

    The second half of the sources are the F. Added up as changes to the first source, so that equal sources
    keep their bits."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        count, weights = len(tile.sources) // 2, _weights(settings)
        first, statistics = tile.sources[0], tile.sources[count:]
        total, share, change = torch.zeros_like(first), torch.empty_like(first), torch.empty_like(first)

        def weighed(index: int) -> torch.Tensor:
            torch.add(statistics[index], settings.number("floor"), out=share)
            return (share.sqrt_() if settings.flag("root") else share).mul_(weights[index])

        for index in range(count):
            total.add_(weighed(index))
        merged = first.clone()
        for index in range(1, count):
            own = weighed(index).div_(total)
            merged.sub_(torch.sub(first, tile.sources[index], out=change).mul_(own).add_(0.0))
        # Infinity in F must reach the result, and 0.0 must not change its -0.0.
        return merged.sub_(torch.sub(total, total, out=share))


def _weights(settings: Settings) -> tuple[float, ...]:
    models = settings.sources[: len(settings.sources) // 2]
    return replace(settings, sources=models).per_source("weight")


def _check(settings: Settings) -> str | None:
    return None if any(_weights(settings)) else "all weights are 0, so that no source counts"


def _identity(settings: Settings) -> int | None:
    return 0 if len(_weights(settings)) == 1 else None


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    count = len(block.sources) // 2
    weights = np.array(_weights(tensor.settings))[:, None]
    information: Floats = block.sources[count:] + tensor.settings.number("floor")
    information = weights * (np.sqrt(information) if tensor.settings.flag("root") else information)
    doubts = None if block.doubts is None else block.doubts[:count]
    models = replace(block, sources=block.sources[:count], doubts=doubts)
    return combination(models, information / information.sum(0))


FISHER = Method(
    name="fisher",
    summary="The mean of the sources, each element weighted by what the source's data says about it.",
    paper="2111.09832",
    access=Access.ELEMENT,
    kernel=FisherKernel(),
    reference=elementwise(_reference),
    parameters=(
        Parameter("weight", "float", "source", "factor on the source's information", 1.0, minimum=0.0),
        Parameter(
            "floor",
            "float",
            "global",
            "information that is added to that of every element; a model's mean is 1",
            0.01,
            minimum=_LEAST,
        ),
        Parameter.switch("root", "weigh by the square root of the information", default=False),
    ),
    statistics="fisher",
    check=_check,
    identity=_identity,
    scratch=3.0,
)
