"""RegMean and RegMean++ (arXiv 2212.09849, 2508.03121): the matrix nearest to all sources in what they give
for inputs of calibration texts."""

from __future__ import annotations

from raymerge.deferred import torch
from raymerge.methods import combine
from raymerge.methods.kernel import AnchoredSum, Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import Block, Expected, LogicalTensor, combination, elementwise


class RegMeanKernel(Kernel):
    """The mean of ``N W_i A_i``, with ``A_i = G_i (sum G_j)^-1`` of the inputs' Gram matrices G.

    The sources come multiplied; those without a Gram matrix come as they are, and give the plain mean."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return combine.combine(tile.sources, _shares(settings), None)

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        return combine.anchored_sum(_shares(settings))


def _shares(settings: Settings) -> list[float]:
    count = len(settings.sources)
    return [1.0 / count] * count


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    return combination(block, _shares(tensor.settings))


REGMEAN = Method(
    name="regmean",
    summary="The least-squares fit to what the sources give for calibration texts; the mean for the rest.",
    paper="2212.09849",
    # Each expert's matrix has inputs of its own: a stack is no one run of elements.
    access=Access.ROW,
    kernel=RegMeanKernel(),
    reference=elementwise(_reference),
    parameters=(
        Parameter.fraction(
            "alpha", "factor on what is off the diagonal of the Gram matrices", 0.5, scope="global"
        ),
        Parameter(
            "ridge", "float", "global", "added to the diagonals, as a share of their mean", 1e-6, minimum=1e-9
        ),
    ),
    min_sources=2,
    leaves_base=True,
)
