"""The point with the least sum of weighted distances to the sources, by Weiszfeld's method; where that hits a
source, as in Vardi, Zhang: The multivariate L1-median and associated data depth, PNAS 2000."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raymerge.deferred import torch
from raymerge.methods.combine import Coefficients, combine
from raymerge.methods.gram import Combination, CombinationKernel, Gram
from raymerge.methods.kernel import Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Combined, Floats, LogicalTensor, Reference, inner_products, norm_of

_COINCIDES = 1e-12
_CLEARLY = 1.0 - 1e-9


class GeometricMedianKernel(CombinationKernel):
    """Weiszfeld's iterates are means of the sources, so the search runs on their coefficients.

    Inner products are of differences to the first source: of the nearly equal tensors themselves, rounding
    would leave little of the distances."""

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Combination:
        return Combination(Gram(len(settings.sources) - 1))

    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        state.gram.add(tile.sources[1:], tile.sources[0])

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        points = _Points(gram, settings.per_source("weight"))
        best = points.best()
        if best is not None:
            return points.source(best)
        return points.median(int(settings.number("max_iter")), settings.number("tol"))

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        return combine(tile.sources, state.coefficients, None)


class _Points:
    """The sources, and means of them by coefficients that sum to 1."""

    def __init__(self, gram: Gram, weights: Sequence[float]) -> None:
        self._gram = gram
        self._weights = weights
        self._indices = range(len(weights))
        self._spread = max(gram.norms(), default=0.0)

    def source(self, index: int) -> Coefficients:
        return tuple(float(index == other) for other in self._indices)

    def best(self) -> int | None:
        """The source that is the median: the others' pull is less than its own weight."""
        for index in self._indices:
            pulls, own = self._pulls(self.source(index))
            if own and self._force(pulls, self.source(index)) < own * _CLEARLY:
                return index
        return None

    def median(self, max_iter: int, tol: float) -> Coefficients:
        """Weiszfeld's method from the mean, to a step below ``tol`` of the sources' spread."""
        total = math.fsum(self._weights)
        here: Coefficients = tuple(weight / total for weight in self._weights)
        for _ in range(max_iter):
            there = self._step(here)
            moved = self._distance(here, there)
            here = there
            if moved <= tol * self._spread:
                break
        return here

    def _step(self, here: Coefficients) -> Coefficients:
        """The mean by weights over distances; a source at this point holds back by its own weight."""
        pulls, own = self._pulls(here)
        total = math.fsum(pulls)
        there = tuple(pull / total for pull in pulls)
        if not own:
            return there
        held = min(1.0, own / self._force(pulls, here))
        return tuple((1.0 - held) * new + held * old for new, old in zip(there, here, strict=True))

    def _pulls(self, here: Coefficients) -> tuple[list[float], float]:
        distances = [self._distance(here, self.source(index)) for index in self._indices]
        apart = [distance > _COINCIDES * self._spread for distance in distances]
        each = list(zip(self._weights, distances, apart, strict=True))
        pulls = [weight / distance if away else 0.0 for weight, distance, away in each]
        return pulls, math.fsum(weight for weight, _, away in each if not away)

    def _force(self, pulls: Sequence[float], here: Coefficients) -> float:
        """Norm of the sum of unit vectors towards the sources, each times its weight."""
        total = math.fsum(pulls)
        return self._norm([pull - total * part for pull, part in zip(pulls, here, strict=True)])

    def _distance(self, left: Coefficients, right: Coefficients) -> float:
        return self._norm([a - b for a, b in zip(left, right, strict=True)])

    def _norm(self, difference: Sequence[float]) -> float:
        """The norm of a combination whose coefficients sum to 0 (the first source drops out)."""
        return self._gram.norm_of(difference[1:])


def _check(settings: Settings) -> str | None:
    if not any(settings.per_source("weight")):
        return "all weights are 0, so there is nothing to be near to"
    return None


def _identity(settings: Settings) -> int | None:
    return 0 if len(settings.sources) == 1 else None


def _reference(tensor: LogicalTensor) -> Combined:
    settings = tensor.settings
    # Distances from differences to the first source: of the tensors themselves little would be left of them.
    gram = np.zeros((tensor.num_sources, tensor.num_sources))
    gram[1:, 1:] = inner_products(tensor, lambda block: block.sources[1:] - block.sources[0])
    weights = np.array(settings.per_source("weight"))
    spread = float(np.sqrt(np.diag(gram)).max())
    for index in range(len(weights)):
        here = np.eye(len(weights))[index]
        pulls, own = _pulls(gram, weights, here, spread)
        if own and norm_of(gram, pulls - pulls.sum() * here) < own * (1.0 - 1e-9):
            return Combined(here.tolist())
    here = weights / weights.sum()
    for _ in range(int(settings.number("max_iter"))):
        pulls, own = _pulls(gram, weights, here, spread)
        there = pulls / pulls.sum()
        if own:
            held = min(1.0, own / norm_of(gram, pulls - pulls.sum() * here))
            there = (1.0 - held) * there + held * here
        moved, here = norm_of(gram, here - there), there
        if moved <= settings.number("tol") * spread:
            break
    return Combined(here.tolist())


def _pulls(gram: Floats, weights: Floats, here: Floats, spread: float) -> tuple[Floats, float]:
    distances = np.array([norm_of(gram, here - source) for source in np.eye(len(weights))])
    apart = distances > 1e-12 * spread
    pulls = np.divide(weights, distances, out=np.zeros(len(weights)), where=apart)
    return pulls, math.fsum(weights[~apart])


GEOMETRIC_MEDIAN = Method(
    name="geometric_median",
    summary="The point with the least sum of weighted distances to the sources.",
    access=Access.TENSOR,
    kernel=GeometricMedianKernel(),
    reference=Reference(_reference),
    parameters=(
        Parameter("weight", "float", "source", "factor on the source's distance", default=1.0, minimum=0.0),
        Parameter("max_iter", "int", "global", "most steps of the search", default=100, minimum=0),
        Parameter(
            "tol",
            "float",
            "global",
            "step, as a share of the sources' spread, at which the search ends",
            default=1e-7,
            minimum=0.0,
        ),
    ),
    scratch=3.0,
    check=_check,
    identity=_identity,
)
