"""Gathers, layer by layer, what router rows are made of while the base model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from raymerge.planner.inputs.stages import GateSpec
from raymerge.stages.router.accumulate import Accumulator, accumulator
from raymerge.stages.router.readings import Reading, Schedule

OnLayer: TypeAlias = Callable[[int, Mapping[str, torch.Tensor], torch.Tensor], None]
"""Takes a layer's number, its sums, and the router inputs that are kept, in the order of ``owners``."""


class Collector:
    """Sees every reading of a unit at every layer, and hands a layer on once it has seen all of them."""

    def __init__(
        self,
        spec: GateSpec,
        schedule: Schedule,
        readings: Sequence[Reading],
        *,
        device: torch.device,
        on_layer: OnLayer,
    ) -> None:
        """
        Args:
            spec: what is asked.
            schedule: what all units read.
            readings: those of this unit.
            device: where the sums are made.
            on_layer: is handed finished layers, in order.
        """
        self._spec = spec
        self._schedule = schedule
        self._readings = readings
        self._device = device
        self._on_layer = on_layer
        self._wanted = frozenset(spec.layers)
        self._current: int | None = None
        self._sums: Accumulator | None = None
        self._kept = torch.empty(len(owners(readings)), spec.hidden_size)
        self._num_kept = 0

    def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """One reading at one layer; as ``LayerVisitor.layer``."""
        if layer not in self._wanted:
            return
        if layer != self._current or self._sums is None:
            self.finish()
            self._current, self._num_kept = layer, 0
            self._sums = accumulator(self._spec.mode, self._schedule, self._spec.hidden_size, self._device)
        reading = self._readings[run]
        for use in reading.uses:
            self._sums.add(use, hidden, router_input)
        for _, positions in reading.kept:
            place = self._kept[self._num_kept : self._num_kept + len(positions)]
            place.copy_(router_input[list(positions)])
            self._num_kept += len(positions)

    def finish(self) -> None:
        """Hand on the layer in hand: the last one is over when the base has read all."""
        if self._sums is not None and self._current is not None:
            self._on_layer(self._current, self._sums.parts(), self._kept)
        self._sums = None


def owners(readings: Sequence[Reading]) -> tuple[int, ...]:
    """The expert of each router input that is kept of some readings, in order."""
    return tuple(_owners(readings))


def _owners(readings: Sequence[Reading]) -> Iterator[int]:
    for reading in readings:
        for expert, positions in reading.kept:
            yield from [expert] * len(positions)
