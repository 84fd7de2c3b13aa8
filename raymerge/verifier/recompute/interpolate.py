"""Combinations of whole tensors whose coefficients come from inner products, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from raymerge.methods import Settings
from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.combined import combination
from raymerge.verifier.recompute.tensor import Block, Expected, LogicalTensor

_Vectors = Callable[[Block], Floats]


class Combined:
    """A combination with coefficients that the inner products of a tensor's vectors give."""

    def __init__(
        self, coefficients: Sequence[float], *, origin: bool = False, also: Sequence[float] | None = None
    ) -> None:
        """
        Args:
            coefficients: one for each source.
            origin: whether sources are weights that differences to the base are taken of.
            also: what they may be as well, as a case is decided by rounding.
        """
        self._coefficients, self._origin, self._also = coefficients, origin, also

    def __call__(self, block: Block) -> Expected:
        found = combination(block, self._coefficients, origin=self._origin)
        if self._also is not None:
            other = combination(block, self._also, origin=self._origin)
            found.others.append((np.arange(len(other.values)), other.values))
        return found


def slerp(tensor: LogicalTensor) -> Callable[[Block], Expected]:
    """Along the arc from the base to the source, or the line where they are all but parallel."""
    t = tensor.settings.number("t")
    gram = _gram(tensor, lambda block: np.stack([_based(block), block.sources[0]]))
    norms = math.sqrt(gram[0, 0]) * math.sqrt(gram[1, 1])
    cosine = gram[0, 1] / norms if norms else 0.0
    arc, line = (_on_arc(cosine, t) if abs(cosine) < 1 else (1 - t, t)), (1 - t, t)
    if abs(abs(cosine) - 0.9995) < 1e-9:
        return _OnBase(arc, line)
    return _OnBase(line if abs(cosine) > 0.9995 else arc)


class _OnBase:
    """A combination of the base itself and one source."""

    def __init__(self, pair: tuple[float, float], also: tuple[float, float] | None = None) -> None:
        self._pair, self._also = pair, also

    def __call__(self, block: Block) -> Expected:
        doubts = (
            None if block.doubts is None else np.stack([_or_zeros(block.base_doubt, block), block.doubts[0]])
        )
        both = Block(block.start, None, np.stack([_based(block), block.sources[0]]), doubts)
        return Combined(self._pair, also=self._also)(both)


def _or_zeros(doubt: Floats | None, block: Block) -> Floats:
    return np.zeros(block.sources.shape[1]) if doubt is None else doubt


def nuslerp_whole(tensor: LogicalTensor) -> Combined:
    """One arc for the tensor, from source to source or from delta to delta."""
    gram = _gram(tensor, _differences)
    return Combined(arc(gram[0, 0], gram[0, 1], gram[1, 1], turn(tensor.settings)), origin=True)


def slerp_delta(tensor: LogicalTensor) -> Combined:
    """The arc between two deltas."""
    settings = tensor.settings
    gram = _gram(tensor, lambda block: block.sources)
    pair = arc(gram[0, 0], gram[0, 1], gram[1, 1], settings.number("t"))
    return Combined([settings.number("lambda") * each for each in pair])


def multislerp(tensor: LogicalTensor) -> Combined:
    """The mean direction at the mean norm."""
    settings = tensor.settings
    gram = _gram(tensor, _differences)
    weights = np.array(settings.per_source("weight"))
    if settings.flag("normalize_weights"):
        weights = weights / math.fsum(weights)
    if len(weights) == 1:
        return Combined([1.0], origin=True)
    norms, eps = np.sqrt(np.diag(gram)), settings.number("eps")
    counts = norms > eps * norms.max()
    mean = np.divide(weights, norms, out=np.zeros(len(weights)), where=counts)
    length = _norm(gram, mean)
    if length <= eps * np.abs(weights).sum():
        return Combined(weights.tolist(), origin=True)
    return Combined((mean * float(weights @ norms) / length).tolist(), origin=True)


def karcher(tensor: LogicalTensor) -> Combined:
    """The Karcher mean of the directions, at the mean norm."""
    settings = tensor.settings
    gram = _gram(tensor, lambda block: block.sources)
    norms, tol = np.sqrt(np.maximum(np.diag(gram), 0.0)), settings.number("tol")
    valid = np.flatnonzero(norms > tol * norms.max())
    count = len(norms)
    if not len(valid):
        return Combined([1.0 / count] * count)
    points = np.eye(count)[valid] / norms[valid, None]
    mean = points.mean(0)
    here = mean / _norm(gram, mean) if _norm(gram, mean) > tol else points[0]
    for _ in range(int(settings.number("max_iter"))):
        tangent = np.zeros(count)
        for point in points:
            cosine = float(np.clip(here @ gram @ point, -1.0, 1.0))
            angle = math.acos(cosine)
            if 0.0 < angle < math.pi - 1e-7 and angle >= tol:
                tangent += angle / math.sin(angle) * (point - cosine * here) / len(points)
        length = _norm(gram, tangent)
        if length <= tol:
            break
        here = here * math.cos(length) + tangent * (math.sin(length) / length)
        here = here / _norm(gram, here)
    return Combined((here * norms.mean()).tolist())


def geometric_median(tensor: LogicalTensor) -> Combined:
    """The point with the least sum of weighted distances: a source, or where Weiszfeld's method ends."""
    settings = tensor.settings
    # Distances from differences to the first source: of the tensors themselves little would be left of them.
    gram = np.zeros((tensor.num_sources, tensor.num_sources))
    gram[1:, 1:] = _gram(tensor, lambda block: block.sources[1:] - block.sources[0])
    weights = np.array(settings.per_source("weight"))
    spread = float(np.sqrt(np.diag(gram)).max())
    for index in range(len(weights)):
        here = np.eye(len(weights))[index]
        pulls, own = _pulls(gram, weights, here, spread)
        if own and _norm(gram, pulls - pulls.sum() * here) < own * (1.0 - 1e-9):
            return Combined(here.tolist())
    here = weights / weights.sum()
    for _ in range(int(settings.number("max_iter"))):
        pulls, own = _pulls(gram, weights, here, spread)
        there = pulls / pulls.sum()
        if own:
            held = min(1.0, own / _norm(gram, pulls - pulls.sum() * here))
            there = (1.0 - held) * there + held * here
        moved, here = _norm(gram, here - there), there
        if moved <= settings.number("tol") * spread:
            break
    return Combined(here.tolist())


def _pulls(gram: Floats, weights: Floats, here: Floats, spread: float) -> tuple[Floats, float]:
    """Weight over distance of each source, and the weight of those that lie here."""
    distances = np.array([_norm(gram, here - source) for source in np.eye(len(weights))])
    apart = distances > 1e-12 * spread
    pulls = np.divide(weights, distances, out=np.zeros(len(weights)), where=apart)
    return pulls, math.fsum(weights[~apart])


def model_stock(tensor: LogicalTensor) -> Callable[[Block], Expected]:
    """The base moved towards the mean of the sources, by the mean cosine of deltas: of the tensor or rows."""
    if tensor.settings.flag("filter_wise") and len(tensor.settings.shape) > 1:
        return lambda block: _stock_rows(block, tensor.row_length)
    gram = _gram(tensor, lambda block: block.sources)
    share = float(_stock_share(gram[:, :, None])[0]) / tensor.num_sources
    return Combined([share] * tensor.num_sources)


def _stock_rows(block: Block, length: int) -> Expected:
    rows = block.sources.reshape(len(block.sources), -1, length)
    share = _stock_share(np.einsum("arx,brx->abr", rows, rows)) / len(rows)
    return combination(block, np.broadcast_to(share.repeat(length), block.sources.shape))


def _stock_share(grams: Floats) -> Floats:
    """How far the base moves, from inner products ``[N, N, rows]``."""
    count = len(grams)
    norms = np.sqrt(np.einsum("aar->ar", grams))
    lengths = norms[:, None] * norms[None]
    cosines = np.divide(grams, lengths, out=np.zeros_like(grams), where=lengths > 0).clip(-1.0, 1.0)
    left, right = np.triu_indices(count, 1)
    average = cosines[left, right].mean(0)
    divisor = 1.0 + (count - 1) * average
    return np.where(divisor < 1e-6, 0.0, count * average / np.where(divisor < 1e-6, 1.0, divisor))


def arc(first: float, mixed: float, second: float, t: float) -> tuple[float, float]:
    """Coefficients of two vectors on the way from one to the other, from their inner products."""
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = max(-1.0, min(1.0, mixed / norms)) if norms else 0.0
    if math.sqrt((1.0 - cosine) * (1.0 + cosine)) < 1e-7:
        return 1.0 - t, t
    return _on_arc(cosine, t)


def _on_arc(cosine: float, t: float) -> tuple[float, float]:
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def turn(settings: Settings) -> float:
    """Part of the way from the first source of nuslerp to the second."""
    first, second = settings.per_source("weight")
    if abs(first + second) <= 1e-6 * (abs(first) + abs(second)):
        return 0.5
    return second / (first + second)


def _gram(tensor: LogicalTensor, vectors: _Vectors) -> Floats:
    """Inner products of all pairs of vectors over the tensor."""
    total: Floats | None = None
    for block in tensor.blocks():
        own = vectors(block)
        product = own @ own.T
        total = product if total is None else total + product
    return np.zeros((tensor.num_sources,) * 2) if total is None else total


def _based(block: Block) -> Floats:
    assert block.base is not None
    return block.base


def _differences(block: Block) -> Floats:
    """The sources, or their differences to the base where there is one."""
    return block.sources if block.base is None else block.sources - block.base


def _norm(gram: Floats, coefficients: Floats) -> float:
    return math.sqrt(max(0.0, float(coefficients @ gram @ coefficients)))


class NuslerpRows:
    """An arc for each run along the last dimension."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self._length, self._turn = tensor.row_length, turn(tensor.settings)

    def __call__(self, block: Block) -> Expected:
        pairs = _pairs(_sums(_vectors(block).reshape(2, -1, self._length), axis=2), self._turn)
        return combination(block, pairs.repeat(self._length, axis=1), origin=True)


class NuslerpColumns:
    """An arc for each run along the first dimension; of more than two, the tensor is read as a matrix."""

    def __init__(self, tensor: LogicalTensor) -> None:
        shape = tensor.settings.shape
        self._columns = max(1, tensor.num_elements // max(1, shape[0]))
        total = np.zeros((3, self._columns))
        for block in tensor.blocks():
            vectors, places = _vectors(block), block.indices % self._columns
            for index, (left, right) in enumerate(((0, 0), (0, 1), (1, 1))):
                products = vectors[left] * vectors[right]
                total[index] += np.bincount(places, products, minlength=self._columns)
        self._pairs = _pairs(total, turn(tensor.settings))

    def __call__(self, block: Block) -> Expected:
        return combination(block, self._pairs[:, block.indices % self._columns], origin=True)


def _vectors(block: Block) -> Floats:
    return block.sources if block.base is None else block.sources - block.base


def _sums(vectors: Floats, axis: int) -> Floats:
    """Inner products of two vectors with themselves and each other ``[3, vectors]``."""
    first, second = vectors
    products = (first * first, first * second, second * second)
    return np.stack([each.sum(axis - 1) for each in products])


def _pairs(sums: Floats, t: float) -> Floats:
    """Coefficients of both vectors of each arc ``[2, vectors]``."""
    found = [arc(first, mixed, second, t) for first, mixed, second in sums.T.tolist()]
    return np.array(found).reshape(-1, 2).T
