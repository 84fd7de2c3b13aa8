"""Gathers what router rows are made of while the base model reads, and turns it into rows or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from raymerge.checkpoints.layout import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.planner.inputs.source import GateSpec, Stage
from raymerge.stages.router.accumulate import Accumulator, accumulator, part_shapes
from raymerge.stages.router.gates import rows_of
from raymerge.stages.router.readings import Reading, Schedule
from raymerge.stages.router.report import choices_of
from raymerge.stages.router.results import ChoicesFile, Result
from raymerge.stages.router.tensor_files import Piece
from raymerge.storage.local.store import LocalStore

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


class Sink(Protocol):
    """Takes layer after layer."""

    @property
    def nbytes(self) -> int:
        """Size of what it writes."""

    def create(self) -> None:
        """Begin its files."""

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept: torch.Tensor) -> None:
        """A finished layer: its sums, and the router inputs that were kept, float32 ``[n, H]``."""

    def finish(self) -> None:
        """Return once its files are safe."""


class RowSink:
    """Makes rows at once, and looks where they send what was kept."""

    def __init__(
        self, store: LocalStore, stage: Stage, spec: GateSpec, *, schedule: Schedule, owners: Sequence[int]
    ) -> None:
        """
        Args:
            store: the staging directory.
            stage: whose result.
            spec: what it asks for.
            schedule: what was read.
            owners: the expert of each router input that is kept.
        """
        self._spec = spec
        self._schedule = schedule
        self._owners = owners
        self._result = Result(store, stage, spec)
        self._choices = ChoicesFile(store, spec)

    @property
    def nbytes(self) -> int:
        """Size of the result and of the choices."""
        return self._result.nbytes + self._choices.nbytes

    def create(self) -> None:
        """Begin both files."""
        self._result.create()
        self._choices.create()

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept: torch.Tensor) -> None:
        """Make the rows of a layer; raises what ``rows_of`` raises."""
        rows = rows_of(self._spec, self._schedule, parts, layer=layer)
        self._result.write(layer, rows)
        self._choices.write(layer, choices_of(rows.routed, kept, self._owners), rows.separation)

    def finish(self) -> None:
        """Return once both files are safe."""
        self._result.finish()
        self._choices.finish()


def sums_file(number: int) -> str:
    """The file that a unit leaves its sums in."""
    return f"unit-{number}.safetensors"


class SumSink:
    """Leaves one unit's sums, and what was kept, for later."""

    def __init__(
        self, store: LocalStore, spec: GateSpec, number: int, *, schedule: Schedule, num_kept: int
    ) -> None:
        """
        Args:
            store: the staging directory.
            spec: what is asked.
            number: of the unit.
            schedule: what all units read.
            num_kept: router inputs that this unit keeps of each layer.
        """
        self._shapes = part_shapes(spec.mode, schedule.num_experts, spec.hidden_size)
        specs = [
            TensorSpec(f"{part}.{layer}", DType.F64, shape)
            for layer in spec.layers
            for part, shape in self._shapes.items()
        ]
        specs += [
            TensorSpec(f"kept.{layer}", DType.F32, (num_kept, spec.hidden_size)) for layer in spec.layers
        ]
        layout = lay_out(specs)
        self._piece = Piece(store, sums_file(number), layout)
        self.nbytes = layout.nbytes
        """Size of the file."""

    def create(self) -> None:
        """Begin the file."""
        self._piece.create()

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept: torch.Tensor) -> None:
        """Write the sums of a layer."""
        for part in self._shapes:
            self._piece.write(f"{part}.{layer}", parts[part])
        self._piece.write(f"kept.{layer}", kept)

    def finish(self) -> None:
        """Return once the file is safe."""
        self._piece.sync()

    def add_to(self, totals: Mapping[str, torch.Tensor], layer: int) -> None:
        """Add the sums of a layer to those of the units before."""
        for part, total in totals.items():
            total += self._piece.read(f"{part}.{layer}")

    def zeros(self) -> Mapping[str, torch.Tensor]:
        """Sums of nothing."""
        return {part: torch.zeros(shape, dtype=torch.float64) for part, shape in self._shapes.items()}

    def kept(self, layer: int) -> torch.Tensor:
        """The router inputs that were kept of a layer."""
        return self._piece.read(f"kept.{layer}")
