"""DARE: drop delta elements at random and rescale the rest by 1/density (arXiv 2311.03099), then add
them (dare_linear) or add what agrees with the elected sign (dare_ties)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops, reference
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import Access, BaseUse, Method, Takes
from raymerge.methods.random import chance_of, keep_factors, key_words, limit_of
from raymerge.methods.task_arithmetic import compiled_sum, delta_parameters, merge_factors
from raymerge.methods.trim import SelectedMerge


@dataclass(frozen=True, slots=True)
class DareKernel(StoredKernel):
    """Keeps each delta element with probability density; kept elements count 1/density times under
    ``rescale``, which preserves the expected delta. Density 0 leaves nothing of a delta."""

    elect: bool

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        if tile.sources.device.type == "cpu":
            return _for_loops(settings, elect=self.elect).apply(tile)
        return merge_factors(tile, settings, _factors(tile, settings), elect=self.elect)

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        _for_loops(settings, elect=self.elect).apply_stored(stored, out)


def _for_loops(settings: Settings, *, elect: bool) -> SelectedMerge:
    chances = loops.elect.Chances(
        words=np.array([key_words(key) for key in settings.keys]),
        limits=np.array([limit_of(density) for density in settings.per_source("density")]),
        factors=np.array(_gains(settings), np.float32),
    )
    return SelectedMerge(
        loops.elect.Selection(loops.elect.AT_RANDOM, loops.elect.NO_THRESHOLDS, chances),
        compiled_sum(settings, elect=elect),
    )


def _factors(tile: Tile, settings: Settings) -> torch.Tensor:
    factors = torch.empty(tile.sources.shape, dtype=torch.float32, device=tile.sources.device)
    densities = settings.per_source("density")
    for row, key, density, gain in zip(factors, settings.keys, densities, _gains(settings), strict=True):
        keep_factors(key, tile.start, density, gain, out=row)
    return factors


def _gains(settings: Settings) -> tuple[float, ...]:
    """Factor on the kept elements of each delta: one over the share actually kept, which for a tiny density
    is more than the density."""
    chances = tuple(chance_of(density) for density in settings.per_source("density"))
    return tuple(1.0 / chance if settings.flag("rescale") and chance else 1.0 for chance in chances)


def _reference(
    tensor: reference.LogicalTensor, block: reference.Block, *, elects: bool
) -> reference.Expected:
    settings = tensor.settings
    factors = np.empty(block.sources.shape)
    for source, density in enumerate(settings.per_source("density")):
        limit = reference.number_limit(density)
        gain = reference.NUMBERS / limit if settings.flag("rescale") and limit else 1.0
        factors[source] = gain * (reference.element_numbers(settings.keys[source], block.indices) < limit)
    return reference.merge_terms(
        block, reference.Sparsified(factors, factors), reference.family_sum(settings, elects=elects)
    )


DARE_LINEAR = Method(
    name="dare_linear",
    summary="The base plus the sum of randomly thinned, rescaled deltas.",
    paper="2311.03099",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DareKernel(elect=False),
    reference=reference.elementwise(partial(_reference, elects=False)),
    parameters=delta_parameters(normalize=False, rescale=True),
    scratch=2.0,
    scratch_per_source=1.0,
    random=True,
)

DARE_TIES = replace(
    DARE_LINEAR,
    name="dare_ties",
    summary="The base plus randomly thinned, rescaled deltas, where their signs agree with the majority.",
    kernel=DareKernel(elect=True),
    reference=reference.elementwise(partial(_reference, elects=True)),
    scratch=3.0,
)
