"""DARE: drop delta elements at random and rescale the rest by 1/density (arXiv 2311.03099), then add
them (dare_linear) or add what agrees with the elected sign (dare_ties)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymerge.methods.method import Access, BaseUse, Method, Settings, SinglePass, Takes, Tile
from raymerge.methods.random import keep_mask
from raymerge.methods.task_arithmetic import delta_parameters, merge_deltas


@dataclass(frozen=True, slots=True)
class DareKernel(SinglePass):
    """Keeps each delta element with probability density; what is kept counts 1/density times under
    ``rescale``, so that the expected delta is the whole one. Density 0 leaves nothing of a delta."""

    elect: bool
    """Whether the terms must agree with the sign of their sum."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Base plus lambda times the (elected) sum of the thinned deltas."""
        masks = _masks(tile, settings)
        coefficients = _coefficients(settings)

        def term(index: int, out: torch.Tensor) -> None:
            delta, mask = tile.sources[index], masks[index]
            if mask is None:
                torch.mul(delta, coefficients[index], out=out)
                return
            # A product with the mask, not a choice by it: NaN must reach the result even where dropped.
            out.copy_(mask).mul_(delta).mul_(coefficients[index])

        return merge_deltas(tile, settings, term, elect=self.elect)


def _masks(tile: Tile, settings: Settings) -> tuple[torch.Tensor | None, ...]:
    """One mask for each source, made once since the election needs it twice; None where all is kept."""
    return tuple(
        keep_mask(key, tile.start, delta.numel(), density, delta.device) if density < 1 else None
        for key, delta, density in zip(
            settings.keys, tile.sources, settings.per_source("density"), strict=True
        )
    )


def _coefficients(settings: Settings) -> tuple[float, ...]:
    """Weights times the factor that makes up for dropped elements."""
    rescale = settings.flag("rescale")
    return tuple(
        weight / density if rescale and 0 < density < 1 else weight
        for weight, density in zip(settings.per_source("weight"), settings.per_source("density"), strict=True)
    )


DARE_LINEAR = Method(
    name="dare_linear",
    summary="The base plus the sum of randomly thinned, rescaled deltas.",
    paper="2311.03099",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DareKernel(elect=False),
    parameters=delta_parameters(normalize=False, rescale=True),
    scratch=1.0,
    scratch_per_source=0.25,
    random=True,
)

DARE_TIES = Method(
    name="dare_ties",
    summary="The base plus randomly thinned, rescaled deltas, where their signs agree with the majority.",
    paper="2311.03099",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DareKernel(elect=True),
    parameters=delta_parameters(normalize=False, rescale=True),
    scratch=3.0,
    scratch_per_source=0.25,
    random=True,
)
