"""The Karcher mean of the sources' directions on the sphere (arXiv 2603.04972; H. Karcher: Riemannian center
of mass and mollifier smoothing, 1977), at their mean norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raymerge.methods.combine import Coefficients
from raymerge.methods.gram import CombinationKernel, Gram
from raymerge.methods.kernel import Settings
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Combined, LogicalTensor, Reference, inner_products, norm_of

_OPPOSITE = 1e-7


class KarcherKernel(CombinationKernel):
    """``u * mean |T_i|`` with u the point of the sphere whose squared angles to all ``T_i / |T_i|`` sum to
    the least. All iterates are combinations of the sources, so the search runs on coefficients."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        """Zero sources have no direction but count in the mean norm."""
        norms, tol = gram.norms(), settings.number("tol")
        valid = [index for index, norm in enumerate(norms) if norm > tol * max(norms)]
        if not valid:
            return (1.0 / len(norms),) * len(norms)
        sphere = _Sphere(gram, [_unit(index, norms) for index in valid])
        mean = sphere.mean(int(settings.number("max_iter")), tol)
        scale = math.fsum(norms) / len(norms)
        return tuple(scale * part for part in mean)


class _Sphere:
    """Unit vectors among the combinations of some vectors; all are tuples of coefficients."""

    def __init__(self, gram: Gram, points: Sequence[Coefficients]) -> None:
        self._gram = gram
        self._points = points

    def mean(self, max_iter: int, tol: float) -> Coefficients:
        here = self._start(tol)
        for _ in range(max_iter):
            tangent = self._tangent(here, tol)
            length = self._gram.norm_of(tangent)
            if length <= tol:
                break
            here = self._unit(_mix(here, math.cos(length), tangent, math.sin(length) / length))
        return here

    def _start(self, tol: float) -> Coefficients:
        mean = tuple(math.fsum(parts) / len(self._points) for parts in zip(*self._points, strict=True))
        return self._unit(mean) if self._gram.norm_of(mean) > tol else self._points[0]

    def _tangent(self, here: Coefficients, tol: float) -> Coefficients:
        """Mean of the tangents from ``here`` to the points, each as long as its angle; the opposite point has
        none."""
        total: Coefficients = (0.0,) * len(here)
        for point in self._points:
            cosine = max(-1.0, min(1.0, self._gram.between(here, point)))
            angle = math.acos(cosine)
            if tol <= angle < math.pi - _OPPOSITE and angle > 0.0:
                stretch = angle / math.sin(angle) / len(self._points)
                total = _mix(total, 1.0, _mix(point, stretch, here, -stretch * cosine), 1.0)
        return total

    def _unit(self, vector: Coefficients) -> Coefficients:
        norm = self._gram.norm_of(vector)
        return tuple(part / norm for part in vector)


def _unit(index: int, norms: Sequence[float]) -> Coefficients:
    return tuple(1.0 / norm if index == other else 0.0 for other, norm in enumerate(norms))


def _mix(left: Coefficients, of_left: float, right: Coefficients, of_right: float) -> Coefficients:
    return tuple(of_left * a + of_right * b for a, b in zip(left, right, strict=True))


def _reference(tensor: LogicalTensor) -> Combined:
    settings = tensor.settings
    gram = inner_products(tensor, lambda block: block.sources)
    norms, tol = np.sqrt(np.maximum(np.diag(gram), 0.0)), settings.number("tol")
    valid = np.flatnonzero(norms > tol * norms.max())
    count = len(norms)
    if not len(valid):
        return Combined([1.0 / count] * count)
    points = np.eye(count)[valid] / norms[valid, None]
    mean = points.mean(0)
    here = mean / norm_of(gram, mean) if norm_of(gram, mean) > tol else points[0]
    for _ in range(int(settings.number("max_iter"))):
        tangent = np.zeros(count)
        for point in points:
            cosine = float(np.clip(here @ gram @ point, -1.0, 1.0))
            angle = math.acos(cosine)
            if 0.0 < angle < math.pi - 1e-7 and angle >= tol:
                tangent += angle / math.sin(angle) * (point - cosine * here) / len(points)
        length = norm_of(gram, tangent)
        if length <= tol:
            break
        here = here * math.cos(length) + tangent * (math.sin(length) / length)
        here = here / norm_of(gram, here)
    return Combined((here * norms.mean()).tolist())


KARCHER = Method(
    name="karcher",
    summary="The mean of the sources' directions on the sphere, at their mean norm.",
    paper="2603.04972",
    access=Access.TENSOR,
    kernel=KarcherKernel(),
    reference=Reference(_reference),
    parameters=(
        Parameter("max_iter", "int", "global", "most steps of the search", default=10, minimum=0),
        Parameter(
            "tol",
            "float",
            "global",
            "angle at which the search ends, and share of the largest norm that counts as no direction",
            default=1e-5,
            minimum=0.0,
        ),
    ),
)
