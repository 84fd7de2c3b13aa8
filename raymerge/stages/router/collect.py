"""Where a layer's sums go once all readings have been through it: to rows, or to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raymerge.checkpoints.layout import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.planner.inputs.stages import GateSpec, Stage
from raymerge.stages.router.accumulate import part_shapes
from raymerge.stages.router.gates_part import rows_of
from raymerge.stages.router.readings import Schedule
from raymerge.stages.router.report import choices_of
from raymerge.stages.router.results import ChoicesFile, Result
from raymerge.stages.router.tensor_files import Piece
from raymerge.storage.local.store import LocalStore


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
