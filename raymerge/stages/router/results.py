"""Results of a router stage: the rows, where they send text, and a report of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from raymerge.checkpoints.header import FileLayout
from raymerge.deferred import torch
from raymerge.merge_plan.elements import torch_dtype
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Stage
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.stages.router.gates import UNPROVEN, Rows
from raymerge.storage.local.store import LocalStore


class TensorFile:
    """A safetensors file of a known layout, written and read tensor by tensor."""

    def __init__(self, store: LocalStore, key: str, layout: FileLayout) -> None:
        self.nbytes = layout.nbytes
        self._store = store
        self._key = key
        self._layout = layout
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}

    def create(self) -> None:
        self._store.create(self._key, self._layout.nbytes)
        self._store.write_at(self._key, 0, self._layout.header)

    def write(self, name: str, tensor: torch.Tensor, first: int | None = None) -> None:
        """``first``: the number of the first row that is given, where these are some of all rows."""
        placed = self._tensors[name]
        stored = tensor.detach().cpu().contiguous()
        shape = placed.shape if first is None else (len(stored), *placed.shape[1:])
        if (stored.dtype, tuple(stored.shape)) != (torch_dtype(placed.dtype), shape):
            given = f"{stored.dtype} {tuple(stored.shape)}"
            raise ValueError(f"{name} is laid out as {placed.dtype.value} {placed.shape}, not as {given}")
        offset = placed.offset + (placed.nbytes // placed.shape[0] * first if first else 0)
        self._store.write_at(self._key, offset, stored.view(-1).view(torch.uint8).numpy().data)

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self._tensors[name].dtype)

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


class LayerReport(NamedTuple):
    layer: int
    condition: float
    """Largest over smallest singular value of the rows' differences; infinite if some are the same."""
    routing: Sequence[float] | None = None
    """By expert, the share of its tokens that go to it first; None if no text was run."""
    load: Sequence[float] | None = None
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


def gate_report(
    mode: str,
    experts: Sequence[str],
    layers: Sequence[LayerReport],
    num_judged: Sequence[int] = (),
    on_own: Sequence[int] = (),
) -> dict[str, Any]:
    """The report of a stage as JSON; null for an infinite condition. ``num_judged``: tokens by expert, in
    each layer; empty if no text was run. ``on_own``: experts without held-out texts, judged on the texts that
    their rows were made from."""
    return {
        "kind": KIND,
        "mode": mode,
        "experts": list(experts),
        "layers": [
            {**each._asdict(), "condition": _finite(each.condition), "entropy": each.entropy}
            for each in layers
        ],
        "num_judged": list(num_judged),
        "on_own": list(on_own),
        "summary": _summary(layers, _RIDGE_LIMIT if mode == "ridge" else _LIMIT, len(experts)),
    }


def _summary(layers: Sequence[LayerReport], limit: float, num_experts: int) -> dict[str, Any]:
    """Over the layers: means, and where rows hardly separate some experts (``ill_conditioned``), or ridge's
    rows from half of the texts do not hold for the other half (``unproven``): these are so short that the
    chosen experts weigh nearly the same."""
    routing = [each.routing for each in layers if each.routing is not None]
    entropies = [each.entropy for each in layers]
    separations = [each.separation for each in layers]
    return {
        "condition": _finite(max((each.condition for each in layers), default=1.0)),
        "limit": limit,
        "ill_conditioned": [each.layer for each in layers if each.condition > limit],
        "routing": [math.fsum(shares) / len(routing) for shares in zip(*routing, strict=True)] or None,
        "entropy": _mean(entropies),
        "lowest_entropy": min((each for each in entropies if each is not None), default=None),
        "most_entropy": math.log2(num_experts),
        "margin": _mean([each.margin for each in layers]),
        "separation": _mean(separations),
        "unproven": [
            each.layer
            for each, separation in zip(layers, separations, strict=True)
            if separation is not None and separation < UNPROVEN
        ],
    }


def condition_of(rows: torch.Tensor) -> float:
    """Largest over smallest singular value of the rows' differences.

    What all rows have in common changes no choice and no weight of a softmax, so it is removed first.

    Returns 1 for a single row; infinite if the differences of E rows span less than E - 1 dimensions."""
    count = rows.shape[0]
    if count == 1:
        return 1.0
    values = torch.linalg.svdvals(rows.double() - rows.double().mean(0)).tolist()
    smallest = values[count - 2] if len(values) > count - 2 else 0.0
    return values[0] / smallest if smallest > values[0] * _NOTHING else math.inf


def layer_report(
    layer: int,
    rows: torch.Tensor,
    inputs: torch.Tensor | None = None,
    owners: Sequence[int] = (),
    separation: float | None = None,
) -> LayerReport:
    """``inputs``: router inputs, float32 ``[n, H]``, of at least one token of every expert; None if no text
    was run. ``owners``: the expert of each."""
    condition = condition_of(rows)
    if inputs is None:
        return LayerReport(layer, condition)
    count, whose = rows.shape[0], torch.tensor(owners)
    # How many tokens of each expert's texts go to each expert first, and sums of first logits less second.
    first = torch.zeros(count, count, dtype=torch.float64)
    margins = torch.zeros(count, dtype=torch.float64)
    logits = inputs.double() @ rows.double().T
    first.index_put_((whose, logits.argmax(1)), torch.ones((), dtype=torch.float64), accumulate=True)
    if count > 1:
        best = logits.topk(2, dim=1).values
        margins.index_add_(0, whose, best[:, 0] - best[:, 1])
    counts = first.sum(1)
    shares = first / counts[:, None]
    return LayerReport(
        layer,
        condition,
        routing=shares.diagonal().tolist(),
        load=shares.mean(0).tolist(),
        margin=float((margins / counts).mean()),
        separation=separation,
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


class RowFile(TensorFile):
    """The result of a stage: its rows of every layer, and constants."""

    def __init__(self, store: LocalStore, stage: Stage, spec: GateSpec) -> None:
        super().__init__(store, RESULT_FILE, stage.layout)
        self._spec = spec

    def write_rows(self, layer: int, rows: Rows) -> None:
        self.write(router_tensor(layer), rows.routed)
        if self._spec.shared:
            self.write(shared_gate_tensor(layer), rows.shared)

    def finish(self) -> None:
        """Write the constants, and return once the file is safe."""
        for constant in self._spec.constants:
            dtype = torch_dtype(constant.dtype)
            self.write(constant.name, torch.full(constant.shape, constant.value, dtype=dtype))
        self.sync()
