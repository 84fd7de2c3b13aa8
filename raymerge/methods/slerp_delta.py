"""Interpolation along the arc between two deltas, as WARP merges policies (arXiv 2406.16768)."""

from __future__ import annotations

from raymerge.methods.combine import Coefficients, arc_coefficients
from raymerge.methods.gram import DeltaCombinationKernel, Gram
from raymerge.methods.kernel import Settings
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.reference import Combined, LogicalTensor, Reference, arc_pair, inner_products


class SlerpDeltaKernel(DeltaCombinationKernel):
    """``B + lambda * slerp(d_1, d_2; t)``, each delta of the tensor taken as one long vector."""

    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        factor = settings.number("lambda")
        first, second = arc_coefficients(
            gram.product(0, 0), gram.product(0, 1), gram.product(1, 1), t=settings.number("t")
        )
        return factor * first, factor * second


def _reference(tensor: LogicalTensor) -> Combined:
    settings = tensor.settings
    gram = inner_products(tensor, lambda block: block.sources)
    pair = arc_pair(gram[0, 0], gram[0, 1], gram[1, 1], settings.number("t"))
    return Combined([settings.number("lambda") * each for each in pair])


SLERP_DELTA = Method(
    name="slerp_delta",
    summary="The base plus the spherical interpolation from one delta to another.",
    paper="2406.16768",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=SlerpDeltaKernel(),
    reference=Reference(_reference),
    parameters=(
        Parameter("t", "float", "global", "0 gives the first delta, 1 gives the second", required=True),
        Parameter("lambda", "float", "global", "factor on the merged delta", default=1.0),
    ),
    min_sources=2,
    max_sources=2,
)
