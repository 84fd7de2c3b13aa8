"""DELLA: drop delta elements at random, small ones rather than large ones, and rescale the rest by one over
their chance (arXiv 2406.11617), then add what agrees with the elected sign (della) or all (della_linear)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import loops, reference
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.random import key_words, limits_of, write_numbers
from raymerge.methods.reduce import chunks
from raymerge.methods.task_arithmetic import compiled_sum, delta_parameters, merge_factors
from raymerge.methods.trim import inputs_of

# Of one long row: what becomes of each rank, places, room to sort them and counts, 8 bytes each, and what
# the first of these is made of.
_SCRATCH = 9.5
# The loop over stored elements has what becomes of each rank at hand for every delta.
_TABLE_BYTES = 8


@dataclass(frozen=True, slots=True)
class DellaKernel(StoredKernel):
    """Keeps an element with a probability that rises evenly with the rank of its magnitude in its row, from
    density - epsilon to density + epsilon; kept elements count one over it under ``rescale``, which preserves
    the expected delta.

    Equal magnitudes are ranked by index. A row of one element is kept with probability density. Density 0
    leaves nothing of a delta, density 1 everything."""

    elect: bool

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return merge_factors(tile, settings, _factors(tile, settings), elect=self.elect)

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: Words) -> None:
        if stored.count:
            how = compiled_sum(settings, elect=self.elect)
            loops.elect.merge_ranked_stored(inputs_of(stored), _ranked(settings), how, out)


def _ranked(settings: Settings) -> loops.elect.Ranked:
    spreads = _spreads(settings)
    needed = _tabled(spreads)
    tables = np.empty((len(needed), settings.row_length), np.int64)
    for table, spread in zip(tables, needed, strict=True):
        table[:] = _ranks(*spread, settings, torch.device("cpu")).numpy()
    return loops.elect.Ranked(
        words=np.array([key_words(key) for key in settings.keys]),
        tables=tables,
        chosen=np.array([needed.index(spread) if spread in needed else -1 for spread in spreads]),
        factors=np.array(settings.per_source("density"), np.float32),
    )


def _factors(tile: Tile, settings: Settings) -> torch.Tensor:
    """Factor of each element, float32 ``[N, n]``: 0 where dropped, one over its probability under
    ``rescale``."""
    factors = torch.empty(tile.sources.shape, dtype=torch.float32, device=tile.sources.device)
    spreads = _spreads(settings)
    for index, (density, _) in enumerate(spreads):
        if not 0 < density < 1:
            factors[index].fill_(density)
    for spread in _tabled(spreads):
        _sparsify_alike(tile, settings, spread, factors)
    return factors


def _sparsify_alike(
    tile: Tile, settings: Settings, spread: tuple[float, float], factors: torch.Tensor
) -> None:
    """Write the factors of the deltas of this density and epsilon. One table (as long as a row) lives at a
    time."""
    ranks = _ranks(*spread, settings, factors.device)
    for index, own in enumerate(_spreads(settings)):
        if own == spread:
            write_numbers(settings.keys[index], tile.start, out=factors[index].view(torch.int32))
            _sparsify(tile.sources[index], ranks, factors[index])


def _spreads(settings: Settings) -> list[tuple[float, float]]:
    return list(zip(settings.per_source("density"), settings.per_source("epsilon"), strict=True))


def _tabled(spreads: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return list(dict.fromkeys(spread for spread in spreads if 0 < spread[0] < 1))


def _ranks(density: float, epsilon: float, settings: Settings, device: torch.device) -> torch.Tensor:
    """What becomes of an element by its rank in a row: probabilities rise in even steps to density + epsilon.

    int64 ``[row length]``: the upper halves are the largest of ``random.write_numbers`` with which an element
    is kept, the lower ones the bits of its float32 factor."""
    length = settings.row_length
    spread = epsilon if length > 1 else 0.0
    step, rescales = 2.0 * spread / max(1, length - 1), settings.flag("rescale")
    ranks = torch.empty(length, dtype=torch.int64, device=device)
    for chunk in chunks(length, device):
        chances = torch.arange(chunk.start, chunk.stop, dtype=torch.float64, device=device).mul_(step)
        limits = limits_of(chances.add_(density - spread))
        lasts = ranks[chunk].copy_(limits).sub_(1 + 2**31).bitwise_left_shift_(32)
        factors = limits.reciprocal_().mul_(2.0**32) if rescales else limits.fill_(1.0)
        # The bits of a positive number are a positive one.
        lasts.bitwise_or_(factors.float().view(torch.int32))
    return ranks


def _sparsify(delta: torch.Tensor, ranks: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite the elements' numbers (``out`` as int32) with their factors, float32 ``[n]``."""
    if out.device.type == "cpu":
        loops.ranks.sparsify_rows(delta.numpy(), ranks.numpy(), out.numpy())
    else:
        _sparsify_in_torch(delta, ranks, out)


def _sparsify_in_torch(delta: torch.Tensor, ranks: torch.Tensor, out: torch.Tensor) -> None:
    rows = out.view(-1, len(ranks))
    lasts, factors = ranks.bitwise_right_shift(32), ranks.to(torch.int32).view(torch.float32)
    order = torch.sort(delta.abs().view_as(rows), dim=1, stable=True).indices
    mask = rows.view(torch.int32).gather(1, order).le_(lasts.to(torch.int32))
    rows.scatter_(1, order, mask.mul(factors))


def _chances_fit(settings: Settings) -> str | None:
    """Why a probability would lie outside 0 to 1; density 0 and density 1 need none."""
    for density, epsilon in _spreads(settings):
        if 0 < density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
            return (
                f"density {density:g} and epsilon {epsilon:g} give chances from {density - epsilon:g} to "
                f"{density + epsilon:g}, which must lie between 0 and 1"
            )
    return None


def _parameters(*, normalize: bool) -> tuple[Parameter, ...]:
    weight, density, *others = delta_parameters(normalize=normalize, rescale=True)
    doc = "how far a row's chances spread below and above its density"
    return weight, density, Parameter.fraction("epsilon", doc, 0.15), *others


_ENDS: tuple[tuple[int, Literal["right", "left"]], ...] = ((1, "right"), (-1, "left"))


def _reference(
    tensor: reference.LogicalTensor, block: reference.Block, *, elects: bool
) -> reference.Expected:
    settings = tensor.settings
    factors, others = np.empty((2, *block.sources.shape))
    shifts = np.zeros(block.sources.shape)
    how = reference.family_sum(settings, elects=elects)
    both = zip(settings.per_source("density"), settings.per_source("epsilon"), strict=True)
    for source, (density, epsilon) in enumerate(both):
        if not 0 < density < 1:
            factors[source] = others[source] = density
            continue
        doubts = None if block.doubts is None else block.doubts[source]
        numbers = reference.element_numbers(settings.keys[source], block.indices)
        ranks, spread = _reference_ranks(np.abs(block.sources[source]), doubts, settings.row_length)
        chances = _Chances(density, epsilon, settings)
        gains, is_kept = chances.gains(ranks), numbers < chances.limits(ranks)
        # The chances themselves are rounded, and two numbers apart at most.
        is_open = numbers >= chances.limits(ranks - spread) - 2
        is_open &= numbers < chances.limits(ranks + spread) + 2
        factors[source], others[source] = gains * is_kept, gains * np.where(is_open, ~is_kept, is_kept)
        shifts[source] = np.abs(chances.gains(ranks - spread) - gains)
    expected = reference.merge_terms(block, reference.Sparsified(factors, others), how)
    largest = np.abs(how.coefficients * how.factor)
    if how.divides:
        largest = largest / max(float(np.abs(how.shares).min()), 1e-30)
    expected.doubt += (largest[:, None] * shifts * np.abs(block.sources)).sum(0)
    return expected


class _Chances:
    def __init__(self, density: float, epsilon: float, settings: Settings) -> None:
        length = settings.row_length
        self._least = density - (epsilon if length > 1 else 0.0)
        self._step = 2.0 * epsilon / max(1, length - 1)
        self._rescales = settings.flag("rescale")

    def limits(self, ranks: reference.Floats) -> reference.Floats:
        return np.clip(np.ceil((self._least + self._step * ranks) * reference.NUMBERS), 0, reference.NUMBERS)

    def gains(self, ranks: reference.Floats) -> reference.Floats:
        if not self._rescales:
            return np.ones(ranks.shape)
        return reference.NUMBERS / np.maximum(self.limits(ranks), 1)


def _reference_ranks(
    magnitudes: reference.Floats, doubts: reference.Floats | None, length: int
) -> tuple[reference.Floats, reference.Floats]:
    """The rank of each element in its row from 0, equal ones by index; and by how much it may differ."""
    rows = magnitudes.reshape(-1, length)
    order = np.argsort(rows, axis=1, kind="stable")
    ranks = np.empty(rows.shape)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(length, dtype=np.float64), rows.shape), axis=1)
    spread = np.zeros(rows.shape)
    if doubts is not None:
        for row, near, out in zip(rows, 2 * doubts.reshape(-1, length), spread, strict=True):
            ordered = np.sort(row)
            ends = (np.searchsorted(ordered, row + sign * near, side) for sign, side in _ENDS)
            out[:] = np.subtract(*ends) - 1
    return ranks.reshape(-1), spread.reshape(-1)


DELLA = Method(
    name="della",
    summary="The base plus randomly thinned, rescaled deltas that favour large elements, where their signs "
    "agree with the majority.",
    paper="2406.11617",
    access=Access.ROW,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=DellaKernel(elect=True),
    reference=reference.Reference(partial(partial, partial(_reference, elects=True)), by_row=True),
    parameters=_parameters(normalize=True),
    scratch=_SCRATCH,
    scratch_per_source=1.0,
    state_bytes_per_column=_TABLE_BYTES,
    random=True,
    check=_chances_fit,
)

DELLA_LINEAR = replace(
    DELLA,
    name="della_linear",
    summary="The base plus the sum of randomly thinned, rescaled deltas that favour large elements.",
    kernel=DellaKernel(elect=False),
    reference=reference.Reference(partial(partial, partial(_reference, elects=False)), by_row=True),
    parameters=_parameters(normalize=False),
)
