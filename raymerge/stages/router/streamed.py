"""Router rows from what the base model's layers see of the prompts.

Every run of tokens goes through a layer before the next layer is read, so that the model may be larger than
memory. A run is its own sequence, without batch, padding or mask, and independent of other runs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch

from raymerge.checkpoints.header import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.gates import Moments, Sums, accumulator, part_shapes, rows_of, work_nbytes
from raymerge.stages.router.prompts import (
    Reading,
    Schedule,
    TokenRun,
    check_prompts,
    make_schedule,
    tokenized,
)
from raymerge.stages.router.results import (
    CHOICES_FILE,
    ChoicesFile,
    RowFile,
    TensorFile,
    choices_of,
    gate_report,
    layer_report,
)
from raymerge.stages.router.streamed_model import Call, StreamedModel
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

_FILE = "hidden_states.bin"


Visit: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""Is called with each layer's number, the run's, the layer's input and that of its feed-forward network (and
so of a router there), both float32 ``[T, hidden]`` on the device; runs in order, for layer after layer.
"""


def kept_nbytes(lengths: Sequence[int], width: int) -> int:
    return sum(lengths) * width * torch.float32.itemsize


class HiddenStates:
    """The last hidden states of each run, float32 ``[T, hidden]`` on the CPU: in memory, or in a file of a
    store.

    The file is read and written, not mapped: mapped pages would count as the worker's memory.
    """

    def __init__(self, lengths: Sequence[int], width: int, store: LocalStore | None) -> None:
        self._store = store
        self._shapes = [(length, width) for length in lengths]
        self._offsets = [0, *accumulate(length * width * torch.float32.itemsize for length in lengths)]
        self._states = [torch.empty(0)] * len(lengths)

    def put(self, run: int, hidden: torch.Tensor) -> None:
        if self._store is None:
            self._states[run] = hidden.cpu()
        else:
            self._store.write_at(_FILE, self._offsets[run], hidden.contiguous().cpu().numpy().data)

    def get(self, run: int) -> torch.Tensor:
        if self._store is None:
            return self._states[run]
        states = torch.empty(self._shapes[run])
        # A flat view of bytes, which is what stores fill.
        self._store.read_into(_FILE, self._offsets[run], states.view(torch.uint8).view(-1).numpy().data)
        return states


@contextmanager
def keep_states(lengths: Sequence[int], width: int, *, spill: Path | None) -> Iterator[HiddenStates]:
    """Keep states in memory, or in a temporary file below ``spill``.

    Raises:
        OptionError: the filesystem has no room for the file.
    """
    if spill is None:
        yield HiddenStates(lengths, width, None)
        return
    store = LocalStore(spill)
    try:
        with store:
            store.create(_FILE, kept_nbytes(lengths, width))
            yield HiddenStates(lengths, width, store)
    finally:
        store.remove(_FILE)


class LayerStream:
    """A base model that is read layer by layer.

    Its model on the meta device is built at first use, and kept. Pickles as the base alone.
    """

    def __init__(self, base: Source) -> None:
        self._base = base
        self._spare: StreamedModel | None = None

    def __getstate__(self) -> Source:
        return self._base

    def __setstate__(self, base: Source) -> None:
        self.__init__(base)  # type: ignore[misc]

    def check(self) -> None:
        """Raises PlanError: it cannot be streamed, with all reasons; tried on a few random numbers."""
        with self._model():
            pass

    def least_budget(self, longest: int) -> int:
        """Fewest bytes of memory for runs of up to ``longest`` tokens; raises PlanError as ``check``."""
        with self._model() as model:
            return model.least_bytes(longest)

    def read(
        self,
        runs: Sequence[TokenRun],
        visit: Visit,
        *,
        device: torch.device,
        budget: int,
        spill: Path,
        tell: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Visit the states of every run at every layer, with one layer in memory at a time.

        Args:
            budget: bytes of memory to use; states that do not fit go to a file.
            spill: directory for that file, of this call alone.
            tell: called after each layer with the bytes read so far; what it raises ends the reading.

        Returns:
            Bytes read.
        """
        if not runs:
            return 0
        lengths = [len(run.tokens) for run in runs]
        with self._model() as model, _deterministic(), torch.no_grad(), model.opened(device) as read:
            spare = budget - model.least_bytes(max(lengths))
            kept = kept_nbytes(lengths, model.width)
            in_memory = kept <= spare
            calls = _Calls(model, device, limit=spare - kept if in_memory else spare)
            with keep_states(lengths, model.width, spill=None if in_memory else spill) as states:
                for run, each in enumerate(runs):
                    hidden, nbytes = model.embed(each.tokens, device)
                    states.put(run, hidden)
                    read += nbytes
                for layer in range(model.num_layers):
                    read += _run_layer(model, layer, lengths, states, visit, calls)
                    tell(read)
        return read

    @contextmanager
    def _model(self) -> Iterator[StreamedModel]:
        """The model on the meta device, for one caller at a time; dropped after a failure."""
        model, self._spare = self._spare, None
        if model is None:
            with Weights(self._base) as weights:
                model = StreamedModel(self._base, weights)
        yield model
        self._spare = model


class _Calls:
    """The layer calls for runs of each length, made anew when they would take more than ``limit`` bytes."""

    def __init__(self, model: StreamedModel, device: torch.device, *, limit: int) -> None:
        self.device = device
        self._model = model
        self._limit = limit
        self._made: dict[int, tuple[Call, ...]] = {}

    def of(self, length: int) -> tuple[Call, ...]:
        if length not in self._made:
            if sum(map(self._model.call_bytes, (*self._made, length))) > self._limit:
                self._made.clear()
            self._made[length] = self._model.calls(length, self.device)
        return self._made[length]


def _run_layer(
    model: StreamedModel,
    layer: int,
    lengths: Sequence[int],
    states: HiddenStates,
    visit: Visit,
    calls: _Calls,
) -> int:
    with model.resident(layer, calls.device) as resident:
        for run, length in enumerate(lengths):
            hidden = states.get(run).to(calls.device)
            output, router_input = resident.run(calls.of(length)[layer], hidden)
            visit(layer, run, hidden, router_input)
            states.put(run, output)
        return resident.read_bytes


@contextmanager
def _deterministic() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        yield
    finally:
        cudnn.deterministic = before


OnLayer: TypeAlias = Callable[[int, Mapping[str, torch.Tensor], torch.Tensor], None]
"""Takes a layer's number, its sums, and the kept router inputs in the order of ``owners``."""


class Collector:
    """Visits the readings of a unit, and passes each layer's sums to ``on_layer`` when it is complete."""

    def __init__(
        self,
        spec: GateSpec,
        schedule: Schedule,
        readings: Sequence[Reading],
        *,
        device: torch.device,
        on_layer: OnLayer,
    ) -> None:
        self._spec = spec
        self._schedule = schedule
        self._readings = readings
        self._device = device
        self._on_layer = on_layer
        self._wanted = frozenset(spec.layers)
        self._current: int | None = None
        self._sums: Sums | Moments | None = None
        self._kept = torch.empty(len(owners(readings)), spec.hidden_size)
        self._num_kept = 0

    def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
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
        if self._sums is not None and self._current is not None:
            self._on_layer(self._current, self._sums.parts(), self._kept)
        self._sums = None


def owners(readings: Sequence[Reading]) -> tuple[int, ...]:
    """The expert of each kept router input of some readings, in order."""
    return tuple(expert for reading in readings for expert, positions in reading.kept for _ in positions)


class RowSink:
    def __init__(
        self, store: LocalStore, stage: Stage, spec: GateSpec, *, schedule: Schedule, owners: Sequence[int]
    ) -> None:
        self._spec = spec
        self._schedule = schedule
        self._owners = owners
        self._rows = RowFile(store, stage, spec)
        self._choices = ChoicesFile(store, spec)
        self.nbytes = self._rows.nbytes + self._choices.nbytes

    def create(self) -> None:
        self._rows.create()
        self._choices.create()

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept: torch.Tensor) -> None:
        rows = rows_of(self._spec, self._schedule, parts, layer=layer)
        self._rows.write_rows(layer, rows)
        choices = choices_of(rows.routed, kept, self._owners)
        self._choices.write_choices(layer, choices._replace(separation=rows.separation))

    def finish(self) -> None:
        self._rows.finish()
        self._choices.sync()


def sums_file(number: int) -> str:
    return f"unit-{number}.safetensors"


class SumSink(TensorFile):
    def __init__(
        self, store: LocalStore, spec: GateSpec, number: int, *, schedule: Schedule, num_kept: int
    ) -> None:
        self._shapes = part_shapes(spec.mode, schedule.num_experts, spec.hidden_size)
        specs = [
            TensorSpec(f"{part}.{layer}", DType.F64, shape)
            for layer in spec.layers
            for part, shape in self._shapes.items()
        ]
        specs += [
            TensorSpec(f"kept.{layer}", DType.F32, (num_kept, spec.hidden_size)) for layer in spec.layers
        ]
        super().__init__(store, sums_file(number), lay_out(specs))

    def layer(self, layer: int, parts: Mapping[str, torch.Tensor], kept: torch.Tensor) -> None:
        for part in self._shapes:
            self.write(f"{part}.{layer}", parts[part])
        self.write(f"kept.{layer}", kept)

    def finish(self) -> None:
        self.sync()

    def add_to(self, totals: Mapping[str, torch.Tensor], layer: int) -> None:
        for part, total in totals.items():
            total += self.read(f"{part}.{layer}")

    def zeros(self) -> Mapping[str, torch.Tensor]:
        return {part: torch.zeros(shape, dtype=torch.float64) for part, shape in self._shapes.items()}

    def kept(self, layer: int) -> torch.Tensor:
        return self.read(f"kept.{layer}")


class GateWork:
    """Makes the rows of one stage. What is found about base and prompts stays in the process; pickled, it is
    the stage alone.

    The rows' bytes depend on the number of torch's threads: the caller has to set that to one.
    """

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        self._stage = stage
        self._spec = spec

    def __getstate__(self) -> tuple[Stage, GateSpec]:
        return self._stage, self._spec

    def __setstate__(self, state: tuple[Stage, GateSpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @cached_property
    def _runs(self) -> tuple[TokenRun, ...]:
        return tokenized(self._spec)

    def _check(self, check_base: Callable[[], object]) -> None:
        """Raises PlanError: base, tokenizer or prompts are unusable, with all reasons."""
        problems: list[Problem] = []
        for check in (check_base, lambda: check_prompts(self._spec, self._runs, where=self._stage.place)):
            try:
                check()
            except PlanError as error:
                problems += error.problems
        if problems:
            raise PlanError(problems)


class StreamedWork(GateWork):
    """Units of texts, which the base reads layer by layer.

    A single unit makes the rows of each layer at once, without storing sums. Several store theirs, which are
    added in the units' order at the end.
    """

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        super().__init__(stage, spec)
        self._stream = LayerStream(spec.base)

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
        return self._stream.least_budget(self._schedule.longest) + self._own_nbytes()

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Bytes of disk: the result, the sums of every unit, and spilled states of units in progress."""
        units, width = self._schedule.units, self._spec.hidden_size
        store = LocalStore(Path())
        files = self._row_sink(store, [reading for unit in units for reading in unit]).nbytes
        if len(units) > 1:
            files += sum(self._sums(store, number).nbytes for number in range(len(units)))
        spare = budget - self.least_budget()
        states = [kept_nbytes([len(reading.run.tokens) for reading in unit], width) for unit in units]
        return files + sum(sorted((each for each in states if each > spare), reverse=True)[:busy])

    def check(self) -> None:
        self._check(self._stream.check)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        readings = self._schedule.units[number]
        # Those of attempts that were killed take room. One that was given up but is still alive has its file
        # open, and writes other states: each has a file of its own.
        for left in staging.glob(f"spill-{number}-*"):
            shutil.rmtree(left, ignore_errors=True)
        spill = Path(tempfile.mkdtemp(prefix=f"spill-{number}-", dir=staging))
        try:
            with LocalStore(staging) as store:
                sink: RowSink | SumSink = self._sums(store, number)
                if self.num_units == 1:
                    sink = self._row_sink(store, readings)
                sink.create()
                collector = Collector(
                    self._spec, self._schedule, readings, device=device, on_layer=sink.layer
                )
                read = self._stream.read(
                    [reading.run for reading in readings],
                    collector.layer,
                    device=device,
                    budget=budget - self._own_nbytes(),
                    spill=spill,
                    tell=tell,
                )
                collector.finish()
                sink.finish()
            return read, sink.nbytes
        finally:
            shutil.rmtree(spill, ignore_errors=True)

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        keys = (RESULT_FILE, CHOICES_FILE) if self.num_units == 1 else (sums_file(number),)
        return dict.fromkeys(keys, ())

    def conclude(self, staging: Path) -> dict[str, Any]:
        spec = self._spec
        with LocalStore(staging) as store:
            if self.num_units > 1:
                self._add_up(store)
            rows, choices = RowFile(store, self._stage, spec), ChoicesFile(store, spec)
            layers = [layer_report(each, rows.routed(each), choices.choices(each)) for each in spec.layers]
        names, schedule = [expert.name for expert in spec.experts], self._schedule
        return gate_report(spec.mode, names, layers, schedule.num_kept, schedule.on_own)

    @cached_property
    def _schedule(self) -> Schedule:
        routed, shared = len(self._spec.experts), len(self._spec.shared)
        return make_schedule(self._runs, self._spec.mode, num_routed=routed, num_shared=shared)

    def _add_up(self, store: LocalStore) -> None:
        units = self._schedule.units
        sums = [self._sums(store, number) for number in range(len(units))]
        sink = self._row_sink(store, [reading for unit in units for reading in unit])
        sink.create()
        for layer in self._spec.layers:
            parts = sums[0].zeros()
            for each in sums:
                each.add_to(parts, layer)
            sink.layer(layer, parts, torch.cat([each.kept(layer) for each in sums]))
        sink.finish()

    def _row_sink(self, store: LocalStore, readings: Sequence[Reading]) -> RowSink:
        return RowSink(store, self._stage, self._spec, schedule=self._schedule, owners=owners(readings))

    def _sums(self, store: LocalStore, number: int) -> SumSink:
        num_kept = len(owners(self._schedule.units[number]))
        return SumSink(store, self._spec, number, schedule=self._schedule, num_kept=num_kept)

    def _own_nbytes(self) -> int:
        """Bytes of memory besides running the base: sums, and kept inputs with one copy; also while adding up
        units.
        """
        width = self._spec.hidden_size
        kept = 3 * sum(self._schedule.num_kept) * width * torch.float64.itemsize
        return work_nbytes(self._spec.mode, self._schedule.num_experts, width) + kept
