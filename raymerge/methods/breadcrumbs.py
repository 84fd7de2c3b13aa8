"""Model breadcrumbs: of each delta keep what is neither among the largest elements, nor among the smallest
(arXiv 2312.06795), then add what is kept (breadcrumbs) or what agrees with the elected sign
(breadcrumbs_ties)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, Takes, Tile
from raymerge.methods.reduce import chunks
from raymerge.methods.selection import HISTOGRAM_BYTES, MagnitudeSelection
from raymerge.methods.task_arithmetic import delta_parameters, merge_deltas
from raymerge.methods.trim import mark_largest_, tie_key

# Of a sum of magnitudes; what a subtraction leaves below it is rounding.
_ROUNDING = 2.0**-40


@dataclass(frozen=True, slots=True)
class _Band:
    """The magnitudes of one delta that stay: those of ``upper`` without those of ``outliers``."""

    outliers: MagnitudeSelection
    """The largest, which go."""
    upper: MagnitudeSelection
    """The largest and those that stay."""

    def gain(self) -> float:
        """Factor that gives the kept elements the L1 norm of the whole delta; 1 when nothing is kept."""
        whole, kept = self.upper.sum_all, self.upper.sum_kept - self.outliers.sum_kept
        return whole / kept if kept > whole * _ROUNDING else 1.0


_Bands: TypeAlias = tuple[_Band | None, ...]


@dataclass(frozen=True, slots=True)
class BreadcrumbsKernel:
    """Keeps of each delta ``floor(density * N)`` elements: those that follow in magnitude on the
    ``floor(gamma * N)`` largest.

    Where that would be more elements than there are, fewer outliers go. Elements that tie at either end
    are chosen by a hash of their index, as in ties; it is the same choice at both ends, so that a tie
    across both still keeps the right share.
    """

    elect: bool
    """Whether the terms must agree with the sign of their sum."""

    def passes(self, settings: Settings) -> int:
        """Two, for both thresholds; none when every delta is kept whole."""
        thinned = any(density < 1 for density in settings.per_source("density"))
        return MagnitudeSelection.passes if thinned else 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Bands:
        """One band for each source, None for those kept whole."""
        rescale = settings.flag("rescale")

        def selection(rank: int) -> MagnitudeSelection:
            return MagnitudeSelection(rank, device, with_sums=rescale)

        bands: list[_Band | None] = []
        for density, gamma in zip(settings.per_source("density"), settings.per_source("gamma"), strict=True):
            kept, outliers = math.floor(density * num_elements), math.floor(gamma * num_elements)
            upper = min(kept + outliers, num_elements)
            bands.append(_Band(selection(upper - kept), selection(upper)) if density < 1 else None)
        return tuple(bands)

    def observe(self, state: _Bands, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Count the magnitudes of the tile."""
        for band, delta in zip(state, tile.sources, strict=True):
            if band is not None:
                band.outliers.observe(delta, pass_index)
                band.upper.observe(delta, pass_index)

    def conclude(self, state: _Bands, settings: Settings, pass_index: int) -> bool:
        """End the pass of every selection."""
        for band in state:
            if band is not None:
                band.outliers.conclude(pass_index)
                band.upper.conclude(pass_index)
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Bands | None) -> torch.Tensor:
        """Base plus lambda times the (elected) sum of the thinned deltas."""
        weights = settings.per_source("weight")
        bands = state or (None,) * len(weights)

        def term(index: int, out: torch.Tensor) -> None:
            delta, band = tile.sources[index], bands[index]
            if band is None:
                torch.mul(delta, weights[index], out=out)
                return
            _mark_band(delta, band, out, key=tie_key("breadcrumbs", index), start=tile.start)
            # A product with the mask, not a choice by it: NaN must reach the result even where dropped.
            out.mul_(delta).mul_(weights[index] * band.gain())

        return merge_deltas(tile, settings, term, elect=self.elect)


def _mark_band(delta: torch.Tensor, band: _Band, out: torch.Tensor, *, key: int, start: int) -> None:
    """Write 1 into ``out`` where an element is kept and 0 elsewhere."""
    torch.abs(delta, out=out)
    mark_largest_(out, band.upper, key=key, start=start)
    for chunk in chunks(delta.numel(), delta.device):
        outliers = delta[chunk].abs()
        mark_largest_(outliers, band.outliers, key=key, start=start + chunk.start)
        out[chunk].sub_(outliers)


def _parameters() -> tuple[Parameter, ...]:
    """Those of the family, and how many outliers go."""
    weight, density, *others = delta_parameters(normalize=False, rescale=False)
    doc = "fraction of the delta's elements, the largest ones, that is dropped"
    gamma = Parameter("gamma", "float", "source", doc, default=0.01, minimum=0.0, maximum=1.0)
    return weight, density, gamma, *others


BREADCRUMBS = Method(
    name="breadcrumbs",
    summary="The base plus the sum of the deltas without their largest and smallest elements.",
    paper="2312.06795",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=BreadcrumbsKernel(elect=False),
    parameters=_parameters(),
    scratch=4.5,
    state_bytes=2 * HISTOGRAM_BYTES,
)

BREADCRUMBS_TIES = Method(
    name="breadcrumbs_ties",
    summary="The base plus the deltas without their largest and smallest elements, where their signs agree "
    "with the majority.",
    paper="2312.06795",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=BreadcrumbsKernel(elect=True),
    parameters=_parameters(),
    scratch=5.5,
    state_bytes=2 * HISTOGRAM_BYTES,
)
