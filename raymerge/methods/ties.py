"""TIES: trim each delta to its largest elements, elect a sign, add what agrees (arXiv 2306.01708)."""

from __future__ import annotations

import math
from functools import partial

from raymerge.methods.kernel import Settings
from raymerge.methods.method import Access, BaseUse, Method, Takes
from raymerge.methods.reference import Reference
from raymerge.methods.selection import HISTOGRAM_BYTES
from raymerge.methods.task_arithmetic import delta_parameters
from raymerge.methods.trim import TrimmedReference, TrimmingKernel, take_sample


class TiesKernel(TrimmingKernel):
    """Keeps of each delta the ``k = floor(density * N)`` elements of largest magnitude, and at least one.

    Deltas of 16-bit checkpoints take few distinct values: about one element in 150 ties with the k-th. Those
    stay, by a hash of their index, whose share makes k. So each element decides for itself, and no part of
    the tensor is favoured, as an order by index would.

    Density 0 keeps nothing (but infinity and NaN, which must reach the result), 1 everything."""

    name = "ties"
    elect = True
    num_thresholds = 1

    def ranks(self, settings: Settings, source: int, num_elements: int) -> tuple[int, int]:
        density = settings.per_source("density")[source]
        return max(math.floor(density * num_elements), int(density > 0)), 0


TIES = Method(
    name="ties",
    summary="The base plus the largest elements of each delta, where their signs agree with the majority.",
    paper="2306.01708",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=TiesKernel(),
    reference=Reference(partial(TrimmedReference, name="ties", elects=True)),
    parameters=delta_parameters(normalize=True, rescale=False),
    scratch=5.5,
    state_bytes=HISTOGRAM_BYTES,
    sampler=take_sample,
)
