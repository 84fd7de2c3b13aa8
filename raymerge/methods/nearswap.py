"""The base moved towards one source: all the way where they are near, by a fixed step elsewhere."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import torch

from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, SinglePass, Takes, Tile

_LEAST = 1e-6


class NearswapKernel(SinglePass):
    """``B + s (T - B)`` with ``s = t / max(|T - B|, 1e-6)``, cut off at 0 and 1."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Counted from the nearer end, so that s = 0 and s = 1 give base and source to the last bit."""
        base, (source,) = tile.require_base(), tile.sources
        change = source - base
        share = change.abs().clamp_min_(_LEAST)
        torch.div(share.new_tensor(settings.number("t")), share, out=share).clamp_(0.0, 1.0)
        swapped = share >= 0.5
        change.mul_(share.neg_().add_(swapped))
        # Subtracted, and as 0.0 rather than -0.0: no difference must not turn -0.0 into 0.0.
        return torch.where(swapped, source, base).sub_(change.add_(0.0))


NEARSWAP = Method(
    name="nearswap",
    summary="The source where it is within t of the base, elsewhere the base moved by t towards it.",
    paper="-",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.WEIGHTS,
    kernel=NearswapKernel(),
    parameters=(
        Parameter("t", "float", "global", "difference up to which the source counts", required=True),
    ),
    max_sources=1,
    scratch=2.5,
)
