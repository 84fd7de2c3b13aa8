"""LiNeS: deltas scaled up linearly with the depth of their layer, then added (arXiv 2410.17146)."""

from __future__ import annotations

from raymerge.deferred import torch
from raymerge.methods.combine import stored_sum_on_base, sum_on_base
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes, delta_weight
from raymerge.methods.reference import Block, Expected, LogicalTensor, combination, elementwise


class LinesKernel(StoredKernel):
    """Shallow layers stay near the base, deep ones take their deltas: ``alpha + beta * t`` at position t."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return sum_on_base(tile, settings.per_source("weight"), _scale(settings))

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        stored_sum_on_base(stored, settings.per_source("weight"), out, _scale(settings))


def _scale(settings: Settings) -> float:
    """The factor at the tensor's position.

    Defaults are the paper's: a merge of K models starts at ``alpha = 1/K``; a single model ends at its full
    delta, ``beta = 1 - alpha``."""
    alpha, beta = settings.values["alpha"], settings.values["beta"]
    first = 1.0 / len(settings.sources) if alpha is None else float(alpha)
    return first + (1.0 - first if beta is None else float(beta)) * settings.position


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    settings = tensor.settings
    alpha, beta = settings.values["alpha"], settings.values["beta"]
    first = 1.0 / len(settings.sources) if alpha is None else float(alpha)
    factor = first + (1.0 - first if beta is None else float(beta)) * settings.position
    return combination(block, [factor * weight for weight in settings.per_source("weight")])


LINES = Method(
    name="lines",
    summary="The base plus the weighted sum of the deltas, scaled up with the depth of the layer.",
    paper="2410.17146",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=LinesKernel(),
    reference=elementwise(_reference),
    parameters=(
        delta_weight(),
        Parameter(
            "alpha",
            "float",
            "global",
            "factor on the merged delta in the first layer and outside layers; none: 1 / number of sources",
        ),
        Parameter(
            "beta",
            "float",
            "global",
            "by how much the last layer's factor exceeds the first's; none: 1 - alpha",
        ),
    ),
    positional=True,
)
