"""Router stages as work for workers; random rows and those of embeddings are made in one unit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raymerge.architectures import logical_name
from raymerge.errors import PlanError, Problem
from raymerge.methods import normal, random_key, uniform
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.recipes import RANDOM_GATES
from raymerge.stages.router.gates import Rows, check_finite, unit
from raymerge.stages.router.prompts import TokenRun
from raymerge.stages.router.results import RowFile, gate_report, layer_report
from raymerge.stages.router.streamed import GateWork, StreamedWork
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

_ROWS_AT_ONCE = 1024
_OTHER_MODE = "Use gate_mode: hidden_avg, or random."


def embed_rows(spec: GateSpec, runs: Sequence[TokenRun]) -> Rows:
    """The rows of every layer.

    The embeddings of all tokens of an expert's texts are added and scaled to length 1, and so are those of
    its negative prompts; a row is the difference of the two, of length 1 again. Only the needed rows of the
    embedding are read.

    Raises:
        CheckpointError: the embedding cannot be read.
    """
    counts = _counts(runs)
    ids = sorted({token for counted in counts.values() for token in counted})
    num_experts = len(spec.experts) + len(spec.shared)
    sums = torch.zeros(2, num_experts, spec.hidden_size, dtype=torch.float64)
    name = str(embedding_of(spec.base))
    with Weights(spec.base) as weights:
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            rows = weights.rows(name, some).double()
            for (expert, sign), counted in counts.items():
                often = torch.tensor([counted[token] for token in some], dtype=torch.float64)
                sums[0 if sign > 0 else 1, expert] += often @ rows
    positive, negative = unit(sums)
    both = unit(positive - negative)
    routed = len(spec.experts)
    return Rows((both[:routed] * spec.scale).float(), both[routed:].float())


def embed_nbytes(spec: GateSpec, runs: Sequence[TokenRun]) -> int:
    with Weights(spec.base) as weights:
        name = str(embedding_of(spec.base))
        one = weights.nbytes(name) // weights.shape(name)[0]
    return one * len({token for run in runs if run.sign for token in run.tokens})


def embedding_of(base: Source) -> str | None:
    """Logical name of the base's token embedding, or None if no tensor is known as one."""
    return None if base.pair is None else logical_name(base.pair.embedding, base.rules)


def check_embedding(spec: GateSpec) -> None:
    """Raises PlanError: the base has no token embedding as wide as the rows."""
    name = embedding_of(spec.base)
    if name is None:
        what = "has no token embedding that is known as such."
        raise PlanError(Problem(spec.base.name, what, _OTHER_MODE))
    with Weights(spec.base) as weights:
        shape = weights.shape(name)
    if shape[1:] != (spec.hidden_size,):
        rows = f"the router's rows have {spec.hidden_size} elements"
        what = f"its embedding {name} is {list(shape)}, and {rows}."
        raise PlanError(Problem(spec.base.name, what, _OTHER_MODE))


def _counts(runs: Sequence[TokenRun]) -> dict[tuple[int, int], Counter[int]]:
    found: dict[tuple[int, int], Counter[int]] = {}
    for run in runs:
        if run.sign:
            found.setdefault((run.expert, run.sign), Counter()).update(run.tokens)
    return found


_CPU = torch.device("cpu")


def random_rows(mode: str, seed: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Normal numbers, or with ``uniform_random`` uniform ones between -1 and 1 over the root of H.

    Each element is a function of seed, name and index: no two rows are alike, whatever their experts are.

    Args:
        name: of the tensor in the stage's result.

    Returns:
        float32 of ``shape``.
    """
    key, count = random_key(seed, name, 0), math.prod(shape)
    if mode == "random":
        return normal(key, 0, count, _CPU).view(shape)
    # Exact up to the one rounding of the quotient: the numbers are multiples of 2**-24.
    return uniform(key, 0, count, _CPU).mul_(2.0).sub_(1.0).div_(math.sqrt(shape[1])).view(shape)


# ruff: noqa: ARG002 - a unit has all arguments of the protocol, whether it needs them or not


class DirectWork(GateWork):
    """One unit, which makes the result at once."""

    @property
    def num_units(self) -> int:
        return 1

    def costs(self) -> tuple[int, ...]:
        return (0 if self._is_random else embed_nbytes(self._spec, self._runs),)

    def least_budget(self) -> int:
        """Bytes for the rows of one layer, and for the embedding rows that are read at once."""
        num_experts = len(self._spec.experts) + len(self._spec.shared)
        return 8 * self._spec.hidden_size * (8 * num_experts + 4096)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        return self._stage.layout.nbytes

    def check(self) -> None:
        if not self._is_random:
            self._check(lambda: check_embedding(self._spec))

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Make the rows, always on the CPU: they are small."""
        rows: Rows | None = None
        read_bytes = 0
        with LocalStore(staging) as store:
            result = RowFile(store, self._stage, self._spec)
            result.create()
            if not self._is_random:
                rows = embed_rows(self._spec, self._runs)
                read_bytes = embed_nbytes(self._spec, self._runs)
                check_finite(rows.routed, self._spec, self._spec.layers[0])
            for layer in self._spec.layers:
                result.write_rows(layer, rows or self._random(layer))
                tell(read_bytes)
            result.finish()
        return read_bytes, result.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        return {RESULT_FILE: ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        """The condition of the rows; where they send text is unknown."""
        spec = self._spec
        with LocalStore(staging) as store:
            rows = RowFile(store, self._stage, spec)
            layers = [layer_report(layer, rows.routed(layer), None) for layer in spec.layers]
        return gate_report(spec.mode, [expert.name for expert in spec.experts], layers)

    @property
    def _is_random(self) -> bool:
        return self._spec.mode in RANDOM_GATES

    def _random(self, layer: int) -> Rows:
        spec, width = self._spec, self._spec.hidden_size
        routed = random_rows(spec.mode, spec.seed, router_tensor(layer), (len(spec.experts), width))
        shared = random_rows(spec.mode, spec.seed, shared_gate_tensor(layer), (len(spec.shared), width))
        return Rows(routed * spec.scale, shared)


def gate_work(stage: Stage) -> DirectWork | StreamedWork:
    if not isinstance(stage.spec, GateSpec):
        raise TypeError(f"{stage.name} asks for no router rows")
    if stage.spec.mode in RANDOM_GATES or stage.spec.mode == "cheap_embed":
        return DirectWork(stage, stage.spec)
    return StreamedWork(stage, stage.spec)
