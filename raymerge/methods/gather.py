"""The statistics of one logical tensor, from as many passes over its tiles as its kernel asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from raymerge.methods.method import SAMPLE_LENGTH, SAMPLE_RUNS, Method, Settings, Tile
from raymerge.methods.stored import Stored, StoredKernel


@dataclass(frozen=True, slots=True)
class StoredTile:
    """A tile as it is stored, for a kernel that can take it so, and piece by piece for one that cannot."""

    stored: Stored
    """Its elements, as they are stored."""
    pieces: Callable[[], Iterable[Tile]]
    """Called where they are wanted in float32."""


def sample_runs(num_elements: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each run of a sample; none of a tensor that is no longer than a sample.

    Where they lie depends on the tensor's length alone, so that what is made of them does too.
    """
    if num_elements <= SAMPLE_RUNS * SAMPLE_LENGTH:
        return ()
    last = num_elements - SAMPLE_LENGTH
    return tuple((run * last // (SAMPLE_RUNS - 1), SAMPLE_LENGTH) for run in range(SAMPLE_RUNS))


def sample_of(whole: Tile) -> Tile:
    """The sample of a tensor that is one tile."""
    runs = [slice(first, first + length) for first, length in sample_runs(whole.sources.shape[1])]
    base = None if whole.base is None else torch.cat([whole.base[run] for run in runs])
    return Tile(base, torch.cat([whole.sources[:, run] for run in runs], dim=1), 0)


def gather(
    method: Method,
    settings: Settings,
    num_elements: int,
    device: torch.device,
    *,
    tiles: Callable[[], Iterable[Tile | StoredTile]],
    sample: Callable[[], Tile] | None,
) -> Any:
    """The state that ``apply`` needs; None, and nothing looked at, for a method that asks for no pass.

    Args:
        method: whose kernel it is.
        settings: what it was told.
        num_elements: elements of the logical tensor.
        device: where its tiles are.
        tiles: called for each pass; all tiles of the tensor, in order.
        sample: the tensor's ``sample_runs`` in one tile; called only for a method that takes a sample, of a
            tensor that has one. None where a sample cannot be had.
    """
    kernel = method.kernel
    usual = kernel.passes(settings)
    if not usual:
        return None
    state = kernel.begin(settings, num_elements, device)
    if sample is not None and method.sampler is not None and sample_runs(num_elements):
        method.sampler(state, sample(), settings)
    stored = kernel if isinstance(kernel, StoredKernel) else None
    index, wants_more = 0, False
    while index < usual or wants_more:
        for tile in tiles():
            if isinstance(tile, Tile):
                kernel.observe(state, tile, settings, index)
            elif stored is None or not stored.observe_stored(state, tile.stored, settings, index):
                for piece in tile.pieces():
                    kernel.observe(state, piece, settings, index)
        wants_more = kernel.conclude(state, settings, index)
        index += 1
    return state
