"""What a stage of router rows leaves: the rows, and where they send the tokens that were kept."""

from __future__ import annotations

import math

import torch

from raymerge.checkpoints.layout import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.merge_plan.elements import torch_dtype
from raymerge.planner.inputs.source import RESULT_FILE, GateSpec, Stage
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.stages.router.gates import Rows
from raymerge.stages.router.report import Choices
from raymerge.stages.router.tensor_files import Piece
from raymerge.storage.local.store import LocalStore

CHOICES_FILE = "choices.safetensors"


class Result:
    """The result file, written and read layer by layer."""

    def __init__(self, store: LocalStore, stage: Stage, spec: GateSpec) -> None:
        self._piece = Piece(store, RESULT_FILE, stage.layout)
        self._spec = spec
        self.nbytes = stage.layout.nbytes
        """Size of the file."""

    def create(self) -> None:
        self._piece.create()

    def write(self, layer: int, rows: Rows) -> None:
        """Put in the rows of a layer."""
        self._piece.write(router_tensor(layer), rows.routed)
        if self._spec.shared:
            self._piece.write(shared_gate_tensor(layer), rows.shared)

    def finish(self) -> None:
        """Put in the constants, and return once the file is safe."""
        for constant in self._spec.constants:
            dtype = torch_dtype(constant.dtype)
            self._piece.write(constant.name, torch.full(constant.shape, constant.value, dtype=dtype))
        self._piece.sync()

    def routed(self, layer: int) -> torch.Tensor:
        """The routed experts' rows of a layer, read back: float32 ``[E, H]``."""
        return self._piece.read(router_tensor(layer))


class ChoicesFile:
    """The choices of every layer."""

    def __init__(self, store: LocalStore, spec: GateSpec) -> None:
        count = len(spec.experts)
        specs = [TensorSpec(f"first.{layer}", DType.F64, (count, count)) for layer in spec.layers]
        specs += [TensorSpec(f"margins.{layer}", DType.F64, (count,)) for layer in spec.layers]
        specs += [TensorSpec(f"separation.{layer}", DType.F64, (1,)) for layer in spec.layers]
        layout = lay_out(specs)
        self._piece = Piece(store, CHOICES_FILE, layout)
        self.nbytes = layout.nbytes
        """Size of the file."""

    def create(self) -> None:
        self._piece.create()

    def write(self, layer: int, choices: Choices, separation: float | None) -> None:
        told = math.nan if separation is None else separation
        self._piece.write(f"separation.{layer}", torch.tensor([told], dtype=torch.float64))
        self._piece.write(f"first.{layer}", choices.first)
        self._piece.write(f"margins.{layer}", choices.margins)

    def finish(self) -> None:
        self._piece.sync()

    def read(self, layer: int) -> Choices:
        return Choices(self._piece.read(f"first.{layer}"), self._piece.read(f"margins.{layer}"))

    def separation(self, layer: int) -> float | None:
        """The separation of a layer's rows; None where it is not known."""
        told = float(self._piece.read(f"separation.{layer}"))
        return None if math.isnan(told) else told
