"""Router stages as work for workers: rows from what the base model's layers see of the prompts, from its
embedding, or of random numbers."""

# ruff: noqa: ARG002 - a unit has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from raymerge.architectures.roles import logical_name
from raymerge.checkpoints.header import TensorSpec, lay_out
from raymerge.checkpoints.json_files import attempt
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.methods import normal, random_key, uniform
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.recipes.moe import RANDOM_GATES
from raymerge.stages.router.gates import (
    Moments,
    Rows,
    Sums,
    accumulator,
    check_finite,
    part_shapes,
    rows_of,
    unit,
    work_nbytes,
)
from raymerge.stages.router.prompts import (
    Reading,
    Schedule,
    TokenRun,
    check_prompts,
    make_schedule,
    tokenized,
)
from raymerge.stages.router.results import LayerReport, RowFile, TensorFile, gate_report, layer_report
from raymerge.stages.streamed_model import LayerStream, Purpose, Shape, kept_nbytes, spill_directory
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

OnLayer: TypeAlias = "Callable[[int, Mapping[str, torch.Tensor], torch.Tensor], None]"
"""Takes a layer's number, its sums, and the kept router inputs in the order of ``owners``."""


@dataclass(slots=True)
class Collector:
    """Visits the readings of a unit, and passes each layer's sums to ``on_layer`` when it is complete."""

    spec: GateSpec
    schedule: Schedule
    readings: Sequence[Reading]
    device: torch.device
    on_layer: OnLayer
    _sums: Sums | Moments | None = None
    _kept: list[torch.Tensor] = field(default_factory=list)

    def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """``hidden`` and ``router_input``: float32 ``[1, T, hidden]``."""
        if layer not in self.spec.layers:
            return
        hidden, router_input = hidden[0], router_input[0]
        if self._sums is None:
            self._sums = accumulator(self.spec.mode, self.schedule, self.spec.hidden_size, self.device)
            self._kept = [torch.empty(0, self.spec.hidden_size)]
        reading = self.readings[run]
        for use in reading.uses:
            self._sums.add(use, hidden, router_input)
        self._kept += [router_input[list(positions)].cpu() for _, positions in reading.kept]
        if run == len(self.readings) - 1:
            self.on_layer(layer, self._sums.parts(), torch.cat(self._kept))
            self._sums = None


def owners(readings: Sequence[Reading]) -> tuple[int, ...]:
    """The expert of each kept router input of some readings, in order."""
    return tuple(expert for reading in readings for expert, positions in reading.kept for _ in positions)


_REPORTS, _SUMS = "layers.json", "unit-{}.safetensors"
_REPORT_NBYTES = 128
"""Of each expert in the report of a layer, and of the rest of that."""


class RowSink(RowFile):
    def __init__(
        self, store: LocalStore, stage: Stage, spec: GateSpec, *, schedule: Schedule, owners: Sequence[int]
    ) -> None:
        super().__init__(store, stage, spec)
        self._schedule = schedule
        self._owners = owners
        self._reports: list[LayerReport] = []
        # At most, with the reports.
        self.nbytes += len(spec.layers) * (_REPORT_NBYTES * (1 + len(spec.experts)))

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept_tokens: torch.Tensor) -> None:
        rows = rows_of(self._spec, self._schedule, parts, layer=layer)
        self.write_rows(layer, rows)
        report = layer_report(layer, rows.routed, kept_tokens, self._owners, rows.separation)
        self._reports.append(report)

    def finish(self) -> None:
        super().finish()
        self._store.write_atomic(_REPORTS, json.dumps(self._reports).encode())


class SumSink(TensorFile):
    def __init__(
        self, store: LocalStore, spec: GateSpec, number: int, *, schedule: Schedule, num_kept: int
    ) -> None:
        self.shapes = part_shapes(spec.mode, schedule.num_experts, spec.hidden_size)
        kept = (num_kept, spec.hidden_size)
        specs = [
            TensorSpec(f"{part}.{layer}", DType.F64, shape)
            for layer in spec.layers
            for part, shape in self.shapes.items()
        ]
        specs += [TensorSpec(f"kept.{layer}", DType.F32, kept) for layer in spec.layers]
        super().__init__(store, _SUMS.format(number), lay_out(specs))

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept_tokens: torch.Tensor) -> None:
        for part in self.shapes:
            self.write(f"{part}.{layer}", parts[part])
        self.write(f"kept.{layer}", kept_tokens)

    def finish(self) -> None:
        self.sync()


class GateWork:
    """Makes the rows of one stage. What is found about base and prompts stays in the process; pickled, it is
    the stage alone.

    The rows' bytes depend on the number of torch's threads: the caller has to set that to one."""

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        self._stage = stage
        self._spec = spec

    def __reduce__(self) -> tuple[type[GateWork], tuple[Stage, GateSpec]]:
        return type(self), (self._stage, self._spec)

    @cached_property
    def _runs(self) -> tuple[TokenRun, ...]:
        return tokenized(self._spec)

    def _check(self, check_base: Callable[[], object]) -> None:
        problems: list[Problem] = []
        attempt(problems, check_base, PlanError)
        attempt(problems, lambda: check_prompts(self._spec, self._runs, where=self._stage.place), PlanError)
        if problems:
            raise PlanError(problems)


PROMPTS = Purpose(
    "Use gate_mode: cheap_embed or random, which do not run the base model.", reads_router_inputs=True
)


class StreamedWork(GateWork):
    """Units of texts, which the base reads layer by layer.

    A single unit makes the rows of each layer at once, without storing sums. Several store theirs, which are
    added in the units' order at the end."""

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        super().__init__(stage, spec)
        self._stream = LayerStream(spec.base, PROMPTS)

    @property
    def num_units(self) -> int:
        return len(self._schedule.units)

    def costs(self) -> tuple[int, ...]:
        base = self._spec.base
        stack = base.layer_stack(None)
        beginning = f"{stack.prefix}." if stack is not None else ""
        tensors = base.checkpoint.tensors.items()
        nbytes = sum(tensor.nbytes for name, tensor in tensors if name.startswith(beginning))
        return (nbytes,) * self.num_units

    def least_budget(self) -> int:
        return self._stream.least_budget(Shape(1, self._schedule.longest)) + self._own_nbytes()

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Bytes of disk: the result, the sums of every unit, and spilled states of units in progress."""
        units, width = self._schedule.units, self._spec.hidden_size
        store = LocalStore(Path())
        files = self._row_sink(store, list(chain.from_iterable(units))).nbytes
        if len(units) > 1:
            files += sum(self._sums(store, number).nbytes for number in range(len(units)))
        spare = budget - self.least_budget()
        states = [kept_nbytes(sum(len(reading.run.tokens) for reading in unit), width) for unit in units]
        return files + sum(sorted((each for each in states if each > spare), reverse=True)[:busy])

    def check(self) -> None:
        self._check(self._stream.check)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        readings = self._schedule.units[number]
        with spill_directory(staging, f"spill-{number}-") as spill, LocalStore(staging) as store:
            sink: RowSink | SumSink = self._sums(store, number)
            if self.num_units == 1:
                sink = self._row_sink(store, readings)
            sink.create()
            collector = Collector(self._spec, self._schedule, readings, device, sink.layer)
            read = self._stream.read(
                [torch.tensor([reading.run.tokens]) for reading in readings],
                collector.layer,
                device=device,
                budget=budget - self._own_nbytes(),
                spill=spill,
                tell=tell,
            )
            sink.finish()
        return read, sink.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        keys = (RESULT_FILE, _REPORTS) if self.num_units == 1 else (_SUMS.format(number),)
        return dict.fromkeys(keys, ())

    def conclude(self, staging: Path) -> dict[str, Any]:
        spec = self._spec
        with LocalStore(staging) as store:
            if self.num_units > 1:
                self._add_up(store)
        layers = [LayerReport(*each) for each in json.loads((staging / _REPORTS).read_bytes())]
        names, schedule = [expert.name for expert in spec.experts], self._schedule
        return gate_report(spec.mode, names, layers, schedule.num_kept, schedule.on_own)

    @cached_property
    def _schedule(self) -> Schedule:
        routed, shared = len(self._spec.experts), len(self._spec.shared)
        return make_schedule(self._runs, self._spec.mode, num_routed=routed, num_shared=shared)

    def _add_up(self, store: LocalStore) -> None:
        units = self._schedule.units
        sums = [self._sums(store, number) for number in range(len(units))]
        sink = self._row_sink(store, list(chain.from_iterable(units)))
        sink.create()
        for layer in self._spec.layers:
            shapes = sums[0].shapes.items()
            parts = {part: torch.zeros(shape, dtype=torch.float64) for part, shape in shapes}
            for each in sums:
                for part, total in parts.items():
                    total += each.read(f"{part}.{layer}")
            sink.layer(layer, parts, torch.cat([each.read(f"kept.{layer}") for each in sums]))
        sink.finish()

    def _row_sink(self, store: LocalStore, readings: Sequence[Reading]) -> RowSink:
        return RowSink(store, self._stage, self._spec, schedule=self._schedule, owners=owners(readings))

    def _sums(self, store: LocalStore, number: int) -> SumSink:
        num_kept = len(owners(self._schedule.units[number]))
        return SumSink(store, self._spec, number, schedule=self._schedule, num_kept=num_kept)

    def _own_nbytes(self) -> int:
        """Bytes of memory besides running the base: sums, and kept inputs with one copy; also while adding up
        units."""
        width = self._spec.hidden_size
        sums_nbytes = 3 * sum(self._schedule.num_kept) * width * torch.float64.itemsize
        return work_nbytes(self._spec.mode, self._schedule.num_experts, width) + sums_nbytes


_ROWS_AT_ONCE = 1024
_OTHER_MODE = "Use gate_mode: hidden_avg, or random."


def embed_rows(spec: GateSpec, runs: Sequence[TokenRun]) -> Rows:
    """The rows of every layer.

    The embeddings of all tokens of an expert's texts are added and scaled to length 1, and so are those of
    its negative prompts; a row is the difference of the two, of length 1 again. Only the needed rows of the
    embedding are read.

    Raises CheckpointError: the embedding cannot be read."""
    counts = _counts(runs)
    ids = sorted({token for counted in counts.values() for token in counted})
    num_experts = len(spec.experts) + len(spec.shared)
    sums = torch.zeros(2, num_experts, spec.hidden_size, dtype=torch.float64)
    name = str(embedding_of(spec.base))
    with Weights(spec.base) as weights:
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            rows = weights.read_rows(name, some).double()
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
    counts: dict[tuple[int, int], Counter[int]] = {}
    for run in runs:
        if run.sign:
            counts.setdefault((run.expert, run.sign), Counter()).update(run.tokens)
    return counts


def random_rows(mode: str, seed: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Normal numbers, or with ``uniform_random`` uniform ones between -1 and 1 over the root of H.

    Each element is a function of seed, name and index: no two rows are alike, whatever their experts are.

    ``name``: of the tensor in the stage's result. Returns float32 of ``shape``."""
    key, count, device = random_key(seed, name, 0), math.prod(shape), torch.device("cpu")
    if mode == "random":
        return normal(key, 0, count, device).view(shape)
    # Exact up to the one rounding of the quotient: the numbers are multiples of 2**-24.
    return uniform(key, 0, count, device).mul_(2.0).sub_(1.0).div_(math.sqrt(shape[1])).view(shape)


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
            layers = [layer_report(layer, rows.read(router_tensor(layer))) for layer in spec.layers]
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
    assert isinstance(stage.spec, GateSpec)
    if stage.spec.mode in RANDOM_GATES or stage.spec.mode == "cheap_embed":
        return DirectWork(stage, stage.spec)
    return StreamedWork(stage, stage.spec)
