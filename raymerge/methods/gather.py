"""The statistics of one logical tensor, from as many passes over its tiles as its kernel asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from raymerge.methods.kernel import Settings, Stored, Tile
from raymerge.methods.method import Method

SAMPLE_RUNS, SAMPLE_LENGTH = 256, 512
"""The largest sample of a tensor: runs, evenly spread, and elements of each."""

# A sample is one element of so many, in runs of no fewer elements than that.
_ONE_IN, _SHORTEST_RUN = 16, 64


@dataclass(frozen=True, slots=True)
class StoredTile:
    """A tile as stored, and as float32 pieces for kernels that need them."""

    stored: Stored
    pieces: Callable[[], Iterable[Tile]]


def sample_runs(num_elements: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each run of a sample; none for a tensor no longer than the largest sample.
    They depend on the tensor's length alone, and so do results."""
    if num_elements <= SAMPLE_RUNS * SAMPLE_LENGTH:
        return ()
    step, length = _spacing(num_elements)
    return tuple((run * step, length) for run in range(SAMPLE_RUNS))


def _spacing(num_elements: int) -> tuple[int, int]:
    """Elements from the start of one run to that of the next, and in a run. Small tensors have smaller
    samples, which must not cost more than they save."""
    length = min(SAMPLE_LENGTH, max(_SHORTEST_RUN, num_elements // (_ONE_IN * SAMPLE_RUNS)))
    return (num_elements - length) // (SAMPLE_RUNS - 1), length


def sampled(values: torch.Tensor, num_elements: int) -> torch.Tensor:
    step, length = (each * (values.shape[-1] // num_elements) for each in _spacing(num_elements))
    return values.unfold(-1, length, step)[..., :SAMPLE_RUNS, :].flatten(-2)


def sample_of(whole: Tile) -> Tile:
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
    """The state that ``apply`` needs; None for a method without passes.

    ``tiles`` is called for each pass and gives all tiles of the tensor in order. ``sample`` gives the
    tensor's ``sample_runs`` as one tile; it is called only for a method that takes a sample, of a tensor that
    has one. None where a sample cannot be had.
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
