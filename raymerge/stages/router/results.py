"""Results of a router stage: the rows, where they send text, and a report of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from raymerge.checkpoints.header import FileLayout, TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.merge_plan.elements import torch_dtype
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Stage
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.stages.router.gates import UNPROVEN, Rows
from raymerge.storage.local.store import LocalStore


class Piece:
    def __init__(self, store: LocalStore, key: str, layout: FileLayout) -> None:
        self._store = store
        self._key = key
        self._layout = layout
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}

    def create(self) -> None:
        self._store.create(self._key, self._layout.nbytes)
        self._store.write_at(self._key, 0, self._layout.header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        placed = self._tensors[name]
        stored = tensor.detach().cpu().contiguous()
        if (stored.dtype, tuple(stored.shape)) != (torch_dtype(placed.dtype), placed.shape):
            found = f"{stored.dtype} {tuple(stored.shape)}"
            raise ValueError(f"{name} is laid out as {placed.dtype.value} {placed.shape}, not as {found}")
        self._store.write_at(self._key, placed.offset, stored.view(-1).view(torch.uint8).numpy().data)

    def sync(self) -> None:
        self._store.sync(self._key)
        self._store.sync_directory()

    def read(self, name: str) -> torch.Tensor:
        placed = self._tensors[name]
        buffer = torch.empty(placed.nbytes, dtype=torch.uint8)
        self._store.read_into(self._key, placed.offset, buffer.numpy().data)
        return buffer.view(torch_dtype(placed.dtype)).view(placed.shape)


KIND = "gates"

_LIMIT, _RIDGE_LIMIT = 5.0, 100.0
# A float32 of the largest singular value's size has no digits for less.
_NOTHING = 2.0**-22


class Choices(NamedTuple):
    first: torch.Tensor
    """How many tokens of each expert's texts go to each expert first: float64 ``[E, E]``."""
    margins: torch.Tensor
    """Sum over the tokens of each expert of the first logit less the second: float64 ``[E]``."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    layer: int
    condition: float
    """Largest over smallest singular value of the rows' differences; infinite if some are the same."""
    routing: tuple[float, ...] | None = None
    """By expert, the share of its tokens that go to it first; None if no text was run."""
    load: tuple[float, ...] | None = None
    """By expert, as ``routing``, every expert's texts counting alike."""
    margin: float | None = None
    """Mean difference of the first and the second logit."""
    separation: float | None = None

    @property
    def entropy(self) -> float | None:
        """Of the load, in bits; log2 of the number of experts if all get the same."""
        if self.load is None:
            return None
        return math.fsum(-share * math.log2(share) for share in self.load if share > 0)


@dataclass(frozen=True, slots=True)
class GateReport:
    mode: str
    experts: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    num_judged: tuple[int, ...] = ()
    """By expert, in each layer; empty if no text was run."""
    on_own: tuple[int, ...] = ()
    """Experts without held-out texts, judged on the texts that their rows were made from."""

    @property
    def limit(self) -> float:
        """The condition number above which rows hardly separate some experts."""
        return _RIDGE_LIMIT if self.mode == "ridge" else _LIMIT

    @property
    def condition(self) -> float:
        return max((each.condition for each in self.layers), default=1.0)

    @property
    def ill_conditioned(self) -> tuple[int, ...]:
        return tuple(each.layer for each in self.layers if each.condition > self.limit)

    @property
    def separation(self) -> float | None:
        return _mean([each.separation for each in self.layers])

    @property
    def unproven(self) -> tuple[int, ...]:
        """Layers where ridge's rows from half of the texts do not hold for the other half.

        Their rows are so short that the chosen experts weigh nearly the same.
        """
        found = ((each.layer, each.separation) for each in self.layers)
        return tuple(layer for layer, told in found if told is not None and told < UNPROVEN)

    @property
    def routing(self) -> tuple[float, ...] | None:
        found = [each.routing for each in self.layers if each.routing is not None]
        return tuple(math.fsum(shares) / len(found) for shares in zip(*found, strict=True)) or None

    @property
    def entropy(self) -> float | None:
        """In bits, mean over the layers."""
        return _mean([each.entropy for each in self.layers])

    @property
    def lowest_entropy(self) -> float | None:
        return min((each.entropy for each in self.layers if each.entropy is not None), default=None)

    @property
    def most_entropy(self) -> float:
        return math.log2(len(self.experts))

    @property
    def margin(self) -> float | None:
        return _mean([each.margin for each in self.layers])

    def to_json(self) -> dict[str, Any]:
        """The fields and a ``summary`` as JSON; null for an infinite condition."""
        summary = {
            "condition": _finite(self.condition),
            "limit": self.limit,
            "ill_conditioned": list(self.ill_conditioned),
            "routing": None if self.routing is None else list(self.routing),
            "entropy": self.entropy,
            "lowest_entropy": self.lowest_entropy,
            "most_entropy": self.most_entropy,
            "margin": self.margin,
            "separation": self.separation,
            "unproven": list(self.unproven),
        }
        layers = [
            _plain(asdict(each)) | {"condition": _finite(each.condition), "entropy": each.entropy}
            for each in self.layers
        ]
        return {"kind": KIND, **_plain(asdict(self)), "layers": layers, "summary": summary}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateReport:
        return cls(
            mode=data["mode"],
            experts=tuple(data["experts"]),
            layers=tuple(_layer(each) for each in data["layers"]),
            num_judged=tuple(data["num_judged"]),
            on_own=tuple(data["on_own"]),
        )


def condition_of(rows: torch.Tensor) -> float:
    """Largest over smallest singular value of the rows' differences.

    What all rows have in common changes no choice and no weight of a softmax, so it is removed first.

    Returns:
        1 for a single row; infinite if the differences of E rows span less than E - 1 dimensions.
    """
    count = rows.shape[0]
    if count == 1:
        return 1.0
    values = torch.linalg.svdvals(rows.double() - rows.double().mean(0)).tolist()
    smallest = values[count - 2] if len(values) > count - 2 else 0.0
    return values[0] / smallest if smallest > values[0] * _NOTHING else math.inf


def choices_of(rows: torch.Tensor, inputs: torch.Tensor, owners: Sequence[int]) -> Choices:
    """Args:
    inputs: router inputs, float32 ``[n, H]``.
    owners: the expert of each.
    """
    count = rows.shape[0]
    first = torch.zeros(count, count, dtype=torch.float64)
    margins = torch.zeros(count, dtype=torch.float64)
    if owners:
        logits = inputs.double() @ rows.double().T
        whose = torch.tensor(owners)
        first.index_put_((whose, logits.argmax(1)), torch.ones((), dtype=torch.float64), accumulate=True)
        if count > 1:
            best = logits.topk(2, dim=1).values
            margins.index_add_(0, whose, best[:, 0] - best[:, 1])
    return Choices(first, margins)


def layer_report(
    layer: int, rows: torch.Tensor, choices: Choices | None, separation: float | None = None
) -> LayerReport:
    """``choices`` of at least one token of every expert; None if no text was run."""
    condition = condition_of(rows)
    if choices is None:
        return LayerReport(layer, condition)
    counts = choices.first.sum(1)
    shares = choices.first / counts[:, None]
    return LayerReport(
        layer,
        condition,
        routing=tuple(shares.diagonal().tolist()),
        load=tuple(shares.mean(0).tolist()),
        margin=float((choices.margins / counts).mean()),
        separation=separation,
    )


def _layer(data: Mapping[str, Any]) -> LayerReport:
    condition, routing, load = data["condition"], data["routing"], data["load"]
    return LayerReport(
        layer=data["layer"],
        condition=math.inf if condition is None else condition,
        routing=None if routing is None else tuple(routing),
        load=None if load is None else tuple(load),
        margin=data["margin"],
        separation=data["separation"],
    )


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


CHOICES_FILE = "choices.safetensors"


class Result:
    def __init__(self, store: LocalStore, stage: Stage, spec: GateSpec) -> None:
        self._piece = Piece(store, RESULT_FILE, stage.layout)
        self._spec = spec
        self.nbytes = stage.layout.nbytes

    def create(self) -> None:
        self._piece.create()

    def write(self, layer: int, rows: Rows) -> None:
        self._piece.write(router_tensor(layer), rows.routed)
        if self._spec.shared:
            self._piece.write(shared_gate_tensor(layer), rows.shared)

    def finish(self) -> None:
        """Write the constants, and return once the file is safe."""
        for constant in self._spec.constants:
            dtype = torch_dtype(constant.dtype)
            self._piece.write(constant.name, torch.full(constant.shape, constant.value, dtype=dtype))
        self._piece.sync()

    def routed(self, layer: int) -> torch.Tensor:
        """float32 ``[E, H]``."""
        return self._piece.read(router_tensor(layer))


class ChoicesFile:
    def __init__(self, store: LocalStore, spec: GateSpec) -> None:
        count = len(spec.experts)
        specs = [TensorSpec(f"first.{layer}", DType.F64, (count, count)) for layer in spec.layers]
        specs += [TensorSpec(f"margins.{layer}", DType.F64, (count,)) for layer in spec.layers]
        specs += [TensorSpec(f"separation.{layer}", DType.F64, (1,)) for layer in spec.layers]
        layout = lay_out(specs)
        self._piece = Piece(store, CHOICES_FILE, layout)
        self.nbytes = layout.nbytes

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
        told = float(self._piece.read(f"separation.{layer}"))
        return None if math.isnan(told) else told
