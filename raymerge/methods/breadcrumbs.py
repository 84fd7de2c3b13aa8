"""Model breadcrumbs: of each delta keep what is neither among the largest elements, nor among the smallest
(arXiv 2312.06795), then add what is kept (breadcrumbs) or what agrees with the elected sign
(breadcrumbs_ties)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from raymerge.methods.kernel import Settings
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.reference import Reference
from raymerge.methods.selection import HISTOGRAM_BYTES
from raymerge.methods.task_arithmetic import delta_parameters
from raymerge.methods.trim import TrimmedReference, TrimmingKernel, take_sample


@dataclass(frozen=True, slots=True)
class BreadcrumbsKernel(TrimmingKernel):
    """Keeps of each delta the ``floor(density * N)`` elements that follow in magnitude on the ``floor(gamma *
    N)`` largest; fewer outliers go where that would be more elements than there are.

    Elements that tie at either end are chosen by one hash of their index, as in ties, so that a tie across
    both ends still keeps the right share."""

    elect: bool
    name = "breadcrumbs"
    num_thresholds = 2

    def ranks(self, settings: Settings, source: int, num_elements: int) -> tuple[int, int]:
        density, gamma = (settings.per_source(name)[source] for name in ("density", "gamma"))
        num_kept, outliers = math.floor(density * num_elements), math.floor(gamma * num_elements)
        upper = min(num_kept + outliers, num_elements)
        return upper, upper - num_kept


_WEIGHT, _DENSITY, *_OTHERS = delta_parameters(normalize=False, rescale=False)
_GAMMA = Parameter.fraction(
    "gamma", "fraction of the delta's elements, the largest ones, that is dropped", 0.01
)


BREADCRUMBS = Method(
    name="breadcrumbs",
    summary="The base plus the sum of the deltas without their largest and smallest elements.",
    paper="2312.06795",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=BreadcrumbsKernel(elect=False),
    reference=Reference(partial(TrimmedReference, name="breadcrumbs", elects=False)),
    parameters=(_WEIGHT, _DENSITY, _GAMMA, *_OTHERS),
    scratch=4.5,
    state_bytes=2 * HISTOGRAM_BYTES,
    sampler=take_sample,
)

BREADCRUMBS_TIES = replace(
    BREADCRUMBS,
    name="breadcrumbs_ties",
    summary="The base plus the deltas without their largest and smallest elements, where their signs agree "
    "with the majority.",
    kernel=BreadcrumbsKernel(elect=True),
    reference=Reference(partial(TrimmedReference, name="breadcrumbs", elects=True)),
    scratch=5.5,
)
