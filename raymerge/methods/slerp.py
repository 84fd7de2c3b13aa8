"""Interpolation along the arc between two tensors (Shoemake: Animating rotation with quaternion curves,
SIGGRAPH 1985), each taken as one long vector."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from raymerge.methods.gram import combine
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, Takes, Tile
from raymerge.methods.reduce import add_products

_PARALLEL = 0.9995


@dataclass(slots=True)
class _Products:
    """Inner products of base and source over the tiles seen so far."""

    base_base: float = 0.0
    base_source: float = 0.0
    source_source: float = 0.0

    def cosine(self) -> float:
        """Cosine between the two; a vector of zeros stands at a right angle to all others."""
        norms = math.sqrt(self.base_base) * math.sqrt(self.source_source)
        return self.base_source / norms if norms else 0.0


class SlerpKernel:
    """``sin((1-t)a)/sin(a) B + sin(ta)/sin(a) T`` with a the angle between B and T; ``(1-t)B + tT`` where
    they are all but parallel (or opposite)."""

    def passes(self, settings: Settings) -> int:
        """One, for the angle."""
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Products:
        """Inner products of nothing."""
        return _Products()

    def observe(self, state: _Products, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Add the tile's inner products."""
        base, (source,) = tile.require_base(), tile.sources
        state.base_base = add_products(state.base_base, base, base)
        state.base_source = add_products(state.base_source, base, source)
        state.source_source = add_products(state.source_source, source, source)

    def conclude(self, state: _Products, settings: Settings, pass_index: int) -> bool:
        """The sums are ready as they are."""
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Products) -> torch.Tensor:
        """The two coefficients, computed once in float64, on the unnormalised tensors."""
        of_base, of_source = _coefficients(state.cosine(), settings.number("t"))
        return combine((tile.require_base(), *tile.sources), (of_base, of_source), None)


def _coefficients(cosine: float, t: float) -> tuple[float, float]:
    """Coefficients of base and source."""
    if abs(cosine) > _PARALLEL:
        return 1.0 - t, t
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


SLERP = Method(
    name="slerp",
    summary="Spherical interpolation from the base to one source.",
    paper="-",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.WEIGHTS,
    kernel=SlerpKernel(),
    parameters=(Parameter("t", "float", "global", "0 gives the base, 1 gives the source", required=True),),
    max_sources=1,
)
