"""DELLA: drop delta elements at random, small ones rather than large ones, and rescale the rest by one over
their chance (arXiv 2406.11617), then add what agrees with the elected sign (della) or all (della_linear)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, SinglePass, Takes, Tile
from raymerge.methods.random import keep_by
from raymerge.methods.reduce import chunks
from raymerge.methods.task_arithmetic import delta_parameters, merge_deltas


@dataclass(frozen=True, slots=True)
class DellaKernel(SinglePass):
    """Keeps an element with a chance that grows evenly with the rank of its magnitude in its row, from
    density - epsilon to density + epsilon; what is kept counts one over its chance under ``rescale``, so that
    the expected delta is the whole one.

    Equal magnitudes are ranked by index. A row of one element is kept with a chance of density. Density 0
    leaves nothing of a delta, density 1 everything.
    """

    elect: bool
    """Whether the terms must agree with the sign of their sum."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """Base plus lambda times the (elected) sum of the thinned deltas."""
        weights = settings.per_source("weight")
        # An election asks for each term twice, and the ranking of a row takes longer than all the rest.
        ready = tuple(
            _write_factors(tile, settings, index, torch.empty_like(delta))
            for index, delta in enumerate(tile.sources)
            if self.elect
        )

        def term(index: int, out: torch.Tensor) -> None:
            if ready:
                out.copy_(ready[index])
            else:
                _write_factors(tile, settings, index, out)
            # A product, not a choice: NaN must reach the result even where dropped.
            out.mul_(tile.sources[index]).mul_(weights[index])

        return merge_deltas(tile, settings, term, elect=self.elect)


def _write_factors(tile: Tile, settings: Settings, index: int, out: torch.Tensor) -> torch.Tensor:
    """Write what each element of a delta is multiplied by into ``out``, 0 where it is dropped."""
    density = settings.per_source("density")[index]
    if density <= 0 or density >= 1:
        return out.fill_(density)
    epsilon = settings.per_source("epsilon")[index] if settings.row_length > 1 else 0.0
    step = 2.0 * epsilon / max(1, settings.row_length - 1)
    ranks = out.view(torch.int32)
    _write_ranks(tile.sources[index], ranks, settings.row_length)
    for chunk in chunks(out.numel(), out.device):
        chances = ranks[chunk].double().mul_(step).add_(density - epsilon)
        kept = keep_by(settings.keys[index], tile.start + chunk.start, chances)
        # Comparison and division are done before the ranks, which lie in the same memory, are overwritten.
        out[chunk] = kept / chances if settings.flag("rescale") else kept
    return out


def _write_ranks(delta: torch.Tensor, ranks: torch.Tensor, row_length: int) -> None:
    """Write the rank of each element's magnitude within its row, from 0 for the smallest."""
    magnitudes = torch.abs(delta, out=ranks.view(torch.float32)).view(-1, row_length)
    order = torch.sort(magnitudes, dim=1, stable=True).indices
    places = torch.arange(row_length, dtype=torch.int32, device=delta.device)
    ranks.view(-1, row_length).scatter_(1, order, places.expand_as(order))


def _chances_fit(settings: Settings) -> str | None:
    """No chance may lie outside 0 to 1; density 0 and density 1 need none."""
    for density, epsilon in zip(settings.per_source("density"), settings.per_source("epsilon"), strict=True):
        if 0 < density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
            return (
                f"density {density:g} and epsilon {epsilon:g} give chances from {density - epsilon:g} to "
                f"{density + epsilon:g}, which must lie between 0 and 1"
            )
    return None


def _parameters(*, normalize: bool) -> tuple[Parameter, ...]:
    """Those of the family, and how far the chances of a row spread."""
    weight, density, *others = delta_parameters(normalize=normalize, rescale=True)
    doc = "how far a row's chances spread below and above its density"
    epsilon = Parameter("epsilon", "float", "source", doc, default=0.15, minimum=0.0, maximum=1.0)
    return weight, density, epsilon, *others


DELLA = Method(
    name="della",
    summary="The base plus randomly thinned, rescaled deltas that favour large elements, where their signs "
    "agree with the majority.",
    paper="2406.11617",
    access=Access.ROW,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DellaKernel(elect=True),
    parameters=_parameters(normalize=True),
    # Sorting one long row: values, 8-byte indices, and as much again that torch's allocator does not see.
    scratch=4.5,
    scratch_per_source=1.0,
    random=True,
    check=_chances_fit,
)

DELLA_LINEAR = Method(
    name="della_linear",
    summary="The base plus the sum of randomly thinned, rescaled deltas that favour large elements.",
    paper="2406.11617",
    access=Access.ROW,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DellaKernel(elect=False),
    parameters=_parameters(normalize=False),
    scratch=6.5,
    random=True,
    check=_chances_fit,
)
