"""One source as it is, or scaled: what layer stacking is made of."""

from __future__ import annotations

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.reference import DOUBT, Block, Expected, LogicalTensor, elementwise


class PassthroughKernel(Kernel):
    """``scale * T``, or T itself."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Without a scale the result is an alias of the source."""
        source: torch.Tensor = tile.sources[0]
        if _identity(settings) is not None:
            return source
        (scale,) = settings.per_source("scale")
        return source * scale


def _identity(settings: Settings) -> int | None:
    (source,) = settings.sources
    return 0 if source.get("scale") in (None, 1) else None


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    scale = tensor.settings.sources[0].get("scale")
    factor = 1.0 if scale is None else float(scale)
    doubt = abs(factor) * (DOUBT * block.largest + block.input_doubt)
    return Expected(factor * block.sources[0], doubt)


PASSTHROUGH = Method(
    name="passthrough",
    summary="One source unchanged, or multiplied by a scale.",
    access=Access.ELEMENT,
    kernel=PassthroughKernel(),
    reference=elementwise(_reference),
    parameters=(Parameter("scale", "float", "source", "factor on every element"),),
    max_sources=1,
    scratch=0.0,
    identity=_identity,
)
