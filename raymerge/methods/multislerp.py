"""The direction of the weighted mean direction of any number of tensors, at their weighted mean norm."""

from __future__ import annotations

import math

import numpy as np

from raymerge.methods import reference
from raymerge.methods.combine import Coefficients, check_shares, shares
from raymerge.methods.gram import CombinationKernel, Gram
from raymerge.methods.kernel import Settings
from raymerge.methods.method import Access, BaseUse, Method, Parameter

_NORMALIZE = "normalize_weights"


class MultislerpKernel(CombinationKernel):
    """``m / |m| * sum w_i |X_i|`` with ``m = sum w_i X_i / |X_i|``.

    mergekit then moves along the mean of the tangents at m; since m is the mean direction, that is 0 but for
    rounding."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        """The weights themselves where the directions cancel out."""
        weights, norms = shares(settings, normalize=_NORMALIZE), gram.norms()
        eps = settings.number("eps")
        if len(weights) == 1:
            return (1.0,)
        floor = eps * max(norms)
        mean = [w / norm if norm > floor else 0.0 for w, norm in zip(weights, norms, strict=True)]
        length = gram.norm_of(mean)
        if length <= eps * math.fsum(map(abs, weights)):
            return weights
        scale = math.fsum(w * norm for w, norm in zip(weights, norms, strict=True)) / length
        return tuple(share * scale for share in mean)


def _check(settings: Settings) -> str | None:
    """One source has full weight, whatever it is given."""
    return check_shares(settings, normalize=_NORMALIZE) if len(settings.sources) > 1 else None


def _identity(settings: Settings) -> int | None:
    return 0 if len(settings.sources) == 1 else None


def _reference(tensor: reference.LogicalTensor) -> reference.Combined:
    settings = tensor.settings
    gram = reference.inner_products(tensor, reference.differences)
    weights = np.array(settings.per_source("weight"))
    if settings.flag("normalize_weights"):
        weights = weights / math.fsum(weights)
    if len(weights) == 1:
        return reference.Combined([1.0], origin=True)
    norms, eps = np.sqrt(np.diag(gram)), settings.number("eps")
    counts = norms > eps * norms.max()
    mean = np.divide(weights, norms, out=np.zeros(len(weights)), where=counts)
    length = reference.norm_of(gram, mean)
    if length <= eps * np.abs(weights).sum():
        return reference.Combined(weights.tolist(), origin=True)
    return reference.Combined((mean * float(weights @ norms) / length).tolist(), origin=True)


MULTISLERP = Method(
    name="multislerp",
    summary="The mean direction of the sources (or of their deltas), at their mean norm.",
    access=Access.TENSOR,
    base=BaseUse.OPTIONAL,
    kernel=MultislerpKernel(),
    reference=reference.Reference(_reference),
    parameters=(
        Parameter("weight", "float", "source", "share of the source", required=True),
        Parameter.switch(_NORMALIZE, "divide by the sum of the weights", default=True),
        Parameter(
            "eps",
            "float",
            "global",
            "share of the largest norm, and of the weights, that counts as no direction",
            default=1e-8,
            minimum=0.0,
        ),
    ),
    scratch=3.0,
    check=_check,
    identity=_identity,
)
