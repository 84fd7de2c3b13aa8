"""The base moved towards one source: all the way where they are near, by a fixed step elsewhere."""

from __future__ import annotations

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import Access, BaseUse, Method, Parameter
from raymerge.methods.reference import Block, Expected, LogicalTensor, doubt_of, elementwise

_LEAST = 1e-6


class NearswapKernel(StoredKernel):
    """``B + s (T - B)`` with ``s = t / max(|T - B|, 1e-6)``, cut off at 0 and 1."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Computed from the nearer end, so that s = 0 and s = 1 give base and source to the last bit."""
        return swap_near(tile.require_base(), tile.sources[0], settings.number("t"))

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        loops.combine.swap_near(out, stored.input(0), stored.input(1), settings.number("t"), _LEAST)


def swap_near(base: torch.Tensor, source: torch.Tensor, t: float) -> torch.Tensor:
    if not base.is_cpu:
        return swap_near_in_torch(base, source, t)
    out = torch.empty(base.numel(), dtype=torch.float32)
    loops.combine.swap_near(out.numpy(), base.numpy(), source.numpy(), t, _LEAST)
    return out


def swap_near_in_torch(base: torch.Tensor, source: torch.Tensor, t: float) -> torch.Tensor:
    change = source - base
    share = change.abs().clamp_min_(_LEAST)
    torch.div(torch.full_like(share[:1], t), share, out=share).clamp_(0.0, 1.0)
    swapped = share >= 0.5
    change.mul_(share.neg_().add_(swapped))
    # Subtracted, and as 0.0 rather than -0.0: no difference must not turn -0.0 into 0.0.
    return torch.where(swapped, source, base).sub_(change.add_(0.0))


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    assert block.base is not None
    change = block.sources[0] - block.base
    share = np.clip(tensor.settings.number("t") / np.maximum(np.abs(change), 1e-6), 0.0, 1.0)
    return Expected(block.base + share * change, doubt_of(block, 1.0))


NEARSWAP = Method(
    name="nearswap",
    summary="The source where it is within t of the base, elsewhere the base moved by t towards it.",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    kernel=NearswapKernel(),
    reference=elementwise(_reference),
    parameters=(
        Parameter("t", "float", "global", "difference up to which the source counts", required=True),
    ),
    max_sources=1,
    scratch=2.5,
)
