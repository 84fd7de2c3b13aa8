"""The statistics of one logical tensor, from as many passes over its tiles as its kernel asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from raymerge.methods.kernel import Settings, Stored, Tile
from raymerge.methods.method import Method

SAMPLE_RUNS, SAMPLE_LENGTH = 256, 512
"""A sample of a tensor: so many runs of so many elements at most, evenly spread over it."""

# A sample is one element of so many, in runs of no fewer elements than that.
_ONE_IN, _SHORTEST_RUN = 16, 64


@dataclass(frozen=True, slots=True)
class StoredTile:
    """A tile as it is stored, for a kernel that can take it so, and piece by piece for one that cannot."""

    stored: Stored
    pieces: Callable[[], Iterable[Tile]]
    """Called where they are wanted in float32."""


def sample_runs(num_elements: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each run of a sample; none of a tensor that is no longer than the longest.

    Where they lie depends on the tensor's length alone, so that what is made of them does too.
    """
    if num_elements <= SAMPLE_RUNS * SAMPLE_LENGTH:
        return ()
    step, length = _spacing(num_elements)
    return tuple((run * step, length) for run in range(SAMPLE_RUNS))


def _spacing(num_elements: int) -> tuple[int, int]:
    """Elements from the beginning of one run to that of the next, and of a run.

    What is seen of a small tensor is less, since taking it in should not take longer than it spares.
    """
    length = min(SAMPLE_LENGTH, max(_SHORTEST_RUN, num_elements // (_ONE_IN * SAMPLE_RUNS)))
    return (num_elements - length) // (SAMPLE_RUNS - 1), length


def sampled(values: torch.Tensor, num_elements: int) -> torch.Tensor:
    """The sample of a tensor ``[.., n]``, or of its bytes; run after run."""
    step, length = (each * (values.shape[-1] // num_elements) for each in _spacing(num_elements))
    return values.unfold(-1, length, step)[..., :SAMPLE_RUNS, :].flatten(-2)


def sample_of(whole: Tile) -> Tile:
    """The sample of a tensor that is one tile."""
    num_elements = whole.sources.shape[1]
    base = None if whole.base is None else sampled(whole.base, num_elements)
    return Tile(base, sampled(whole.sources, num_elements), 0)


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
    index, wants_more = 0, False
    while index < usual or wants_more:
        for tile in tiles():
            if isinstance(tile, Tile):
                kernel.observe(state, tile, settings, index)
            elif not kernel.observe_stored(state, tile.stored, settings, index):
                for piece in tile.pieces():
                    kernel.observe(state, piece, settings, index)
        wants_more = kernel.conclude(state, settings, index)
        index += 1
    return state
