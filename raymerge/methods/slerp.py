"""Interpolation along the arc (Shoemake: Animating rotation with quaternion curves, SIGGRAPH 1985) between
two tensors as vectors (slerp), or between two deltas, as WARP merges policies (slerp_delta; arXiv
2406.16768)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops, reference
from raymerge.methods.combine import Coefficients, arc_coefficients, excess_of, on_arc, points_of_arcs
from raymerge.methods.gram import DeltaCombinationKernel, Gram
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import LAMBDA, Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.reduce import PieceSums

_PARALLEL = 0.9995


@dataclass(slots=True)
class _Arc:
    device: torch.device
    sums: PieceSums = field(default_factory=lambda: PieceSums(3))
    """Inner products base base, base source, source source over the tiles seen so far."""
    from_base: bool = True
    """Whether the base is the nearer end; set, like the next, after the pass."""
    factors: torch.Tensor | None = None

    def cosine(self) -> float:
        """A zero vector counts as orthogonal to all others."""
        base_base, base_source, source_source = self.sums.totals.tolist()
        norms = math.sqrt(base_base) * math.sqrt(source_source)
        return base_source / norms if norms else 0.0


class SlerpKernel(StoredKernel):
    """``sin((1-t)a)/sin(a) B + sin(ta)/sin(a) T`` with a the angle between B and T; ``(1-t)B + tT`` where
    they are all but parallel (or opposite)."""

    concludes_each = True

    def observed(self, settings: Settings) -> Hashable:
        return ()

    def passes(self, settings: Settings) -> int:
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Arc:
        return _Arc(device)

    def observe(self, state: _Arc, tile: Tile, settings: Settings, pass_index: int) -> None:
        state.sums.add_pair(tile.require_base(), tile.sources[0])

    def observe_stored(self, state: _Arc, stored: Stored, settings: Settings, pass_index: int) -> None:
        loops.sums.add_pair(state.sums.totals, stored.input(0), stored.input(1))

    def conclude(self, state: _Arc, settings: Settings, pass_index: int) -> bool:
        """Coefficients of the unnormalised tensors, in float64."""
        of_base, of_source = _coefficients(state.cosine(), settings.number("t"))
        state.from_base = abs(of_base) >= abs(of_source)
        of_other, excess = of_source if state.from_base else of_base, excess_of((of_base, of_source))
        state.factors = torch.tensor([[excess], [of_other]], dtype=torch.float32, device=state.device)
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Arc) -> torch.Tensor:
        assert state.factors is not None
        base, source = tile.require_base(), tile.sources[0]
        start, other = (base, source) if state.from_base else (source, base)
        return points_of_arcs(start, other, None, state.factors)

    def apply_stored(self, stored: Stored, settings: Settings, state: _Arc, out: Words) -> None:
        assert state.factors is not None
        start, other = (stored.input(index if state.from_base else 1 - index) for index in (0, 1))
        loops.combine.arcs(out, start, other, stored.words[:0], state.factors.numpy())


def _coefficients(cosine: float, t: float) -> tuple[float, float]:
    return (1.0 - t, t) if abs(cosine) > _PARALLEL else on_arc(cosine, t)


def _reference(tensor: reference.LogicalTensor) -> Callable[[reference.Block], reference.Expected]:
    t = tensor.settings.number("t")
    gram = reference.inner_products(
        tensor, lambda block: np.stack([reference.base_of(block), block.sources[0]])
    )
    norms = math.sqrt(gram[0, 0]) * math.sqrt(gram[1, 1])
    cosine = gram[0, 1] / norms if norms else 0.0
    arc, line = (reference.exact_arc(cosine, t) if abs(cosine) < 1 else (1 - t, t)), (1 - t, t)
    if abs(abs(cosine) - 0.9995) < 1e-9:
        return _OnBase(arc, line)
    return _OnBase(line if abs(cosine) > 0.9995 else arc)


class _OnBase:
    def __init__(self, pair: tuple[float, float], also: tuple[float, float] | None = None) -> None:
        self._pair, self._also = pair, also

    def __call__(self, block: reference.Block) -> reference.Expected:
        doubts = None
        if block.doubts is not None:
            own = np.zeros(block.sources.shape[1]) if block.base_doubt is None else block.base_doubt
            doubts = np.stack([own, block.doubts[0]])
        both = reference.Block(
            block.start, None, np.stack([reference.base_of(block), block.sources[0]]), doubts
        )
        return reference.Combined(self._pair, also=self._also)(both)


SLERP = Method(
    name="slerp",
    summary="Spherical interpolation from the base to one source.",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    kernel=SlerpKernel(),
    reference=reference.Reference(_reference),
    parameters=(Parameter("t", "float", "global", "0 gives the base, 1 gives the source", required=True),),
    max_sources=1,
)


class SlerpDeltaKernel(DeltaCombinationKernel):
    """``B + lambda * slerp(d_1, d_2; t)``, each delta of the tensor taken as one long vector."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        factor = settings.number("lambda")
        first, second = arc_coefficients(
            gram.product(0, 0), gram.product(0, 1), gram.product(1, 1), t=settings.number("t")
        )
        return factor * first, factor * second


def _delta_reference(tensor: reference.LogicalTensor) -> reference.Combined:
    settings = tensor.settings
    gram = reference.inner_products(tensor, lambda block: block.sources)
    pair = reference.arc_pair(gram[0, 0], gram[0, 1], gram[1, 1], settings.number("t"))
    return reference.Combined([settings.number("lambda") * each for each in pair])


SLERP_DELTA = Method(
    name="slerp_delta",
    summary="The base plus the spherical interpolation from one delta to another.",
    paper="2406.16768",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=SlerpDeltaKernel(),
    reference=reference.Reference(_delta_reference),
    parameters=(
        Parameter("t", "float", "global", "0 gives the first delta, 1 gives the second", required=True),
        LAMBDA,
    ),
    min_sources=2,
    max_sources=2,
)
