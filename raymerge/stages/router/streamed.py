"""Router rows that are made of what the base model's layers see of the prompts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.source import GateSpec, Stage
from raymerge.planner.inputs.stages import RESULT_FILE
from raymerge.stages.router.accumulate import work_nbytes
from raymerge.stages.router.collect import Collector, RowSink, Sink, SumSink, owners, sums_file
from raymerge.stages.router.hidden_states import kept_nbytes
from raymerge.stages.router.prompts import TokenRun, tokenized
from raymerge.stages.router.readings import Reading, Schedule, make_schedule, prompt_problems
from raymerge.stages.router.report import GateReport, layer_report
from raymerge.stages.router.results import CHOICES_FILE, ChoicesFile, Result
from raymerge.stages.router.stream_layers import LayerStream
from raymerge.storage.local.store import LocalStore
from raymerge.storage.ranges import Range


class StreamedWork:
    """Units of texts, which the base reads layer by layer.

    A single unit makes the rows of a layer as soon as the layer is over, and no sums are stored. Several
    leave theirs, which are added in the units' order at the end. What is found out about base and prompts is
    kept in the process; pickled, it is the stage alone.
    """

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        """
        Args:
            stage: whose result.
            spec: what it asks for.
        """
        self._stage = stage
        self._spec = spec
        self._stream = LayerStream(spec.base)

    def __getstate__(self) -> tuple[Stage, GateSpec]:
        return self._stage, self._spec

    def __setstate__(self, state: tuple[Stage, GateSpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def num_units(self) -> int:
        """Units of at most 65,536 tokens."""
        return len(self._schedule.units)

    def costs(self) -> tuple[int, ...]:
        """Bytes that each unit reads: the layers."""
        base = self._spec.base
        stack = base.layer_stack(None)
        beginning = f"{stack.prefix}." if stack is not None else ""
        tensors = base.checkpoint.tensors.items()
        nbytes = sum(tensor.nbytes for name, tensor in tensors if name.startswith(beginning))
        return (nbytes,) * self.num_units

    def least_budget(self) -> int:
        """Bytes for one layer of the base, one run in it, and the layer's sums.

        The conclusion takes less: sums alone.
        """
        return self._stream.least_budget(self._schedule.longest) + self._own_nbytes()

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Bytes of disk: the result, the sums of every unit, and states of units in hand that do not fit."""
        units, width = self._schedule.units, self._spec.hidden_size
        store = LocalStore(Path())
        files = self._row_sink(store, [reading for unit in units for reading in unit]).nbytes
        if len(units) > 1:
            files += sum(self._sums(store, number).nbytes for number in range(len(units)))
        spare = budget - self.least_budget()
        states = [kept_nbytes([len(reading.run.tokens) for reading in unit], width) for unit in units]
        return files + sum(sorted((each for each in states if each > spare), reverse=True)[:busy])

    def check(self) -> None:
        """Find out whether the base can be run, and whether its tokenizer and the prompts are fit for it.

        Raises:
            PlanError: with all of the reasons why not.
        """
        problems: list[Problem] = []
        try:
            self._stream.check()
        except PlanError as error:
            problems += error.problems
        try:
            problems += prompt_problems(self._spec, self._runs, where=self._stage.place)
        except PlanError as error:
            problems += error.problems
        if problems:
            raise PlanError(problems)

    def unit(
        self,
        number: int,
        *,
        staging: Path,
        device: torch.device,
        budget: int,
        tell: Callable[[int], None],
    ) -> tuple[int, int]:
        """Have the base read a unit, and leave the rows, or its share of the sums.

        ``tell`` is called after each layer with the bytes read so far.

        Raises:
            CheckpointError: the base cannot be read.
            NonFiniteError: it gives NaN or infinity.
            OptionError: there is no room in ``staging``.
        """
        readings = self._schedule.units[number]
        # Those of attempts that were killed take room. One that was given up but is still alive has its file
        # open, and writes other states: each has a file of its own.
        for left in staging.glob(f"spill-{number}-*"):
            shutil.rmtree(left, ignore_errors=True)
        spill = Path(tempfile.mkdtemp(prefix=f"spill-{number}-", dir=staging))
        try:
            with LocalStore(staging) as store:
                alone = self.num_units == 1
                sink: Sink = self._row_sink(store, readings) if alone else self._sums(store, number)
                sink.create()
                collector = Collector(
                    self._spec, self._schedule, readings, device=device, on_layer=sink.layer
                )
                read = self._stream.read(
                    [reading.run for reading in readings],
                    collector,
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
        """The result and the choices, or the sums; whole files."""
        keys = (RESULT_FILE, CHOICES_FILE) if self.num_units == 1 else (sums_file(number),)
        return dict.fromkeys(keys, ())

    def conclude(self, staging: Path) -> dict[str, Any]:
        """The result of all units, and its report; raises what ``unit`` raises."""
        spec = self._spec
        with LocalStore(staging) as store:
            if self.num_units > 1:
                self._add_up(store)
            result, choices = Result(store, self._stage, spec), ChoicesFile(store, spec)
            layers = tuple(
                layer_report(each, result.routed(each), choices.read(each), choices.separation(each))
                for each in spec.layers
            )
        names = tuple(expert.name for expert in spec.experts)
        schedule = self._schedule
        report = GateReport(spec.mode, names, layers, schedule.num_kept, schedule.on_own)
        return report.to_json()

    @cached_property
    def _runs(self) -> tuple[TokenRun, ...]:
        return tokenized(self._spec)

    @cached_property
    def _schedule(self) -> Schedule:
        routed, shared = len(self._spec.experts), len(self._spec.shared)
        return make_schedule(self._runs, self._spec.mode, num_routed=routed, num_shared=shared)

    def _add_up(self, store: LocalStore) -> None:
        """Make the rows from the sums of several units."""
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
        """Memory beside that of running the base: sums, and what is kept with one copy of it.

        It is as much when units are added up.
        """
        width = self._spec.hidden_size
        kept = 3 * sum(self._schedule.num_kept) * width * torch.float64.itemsize
        return work_nbytes(self._spec.mode, self._schedule.num_experts, width) + kept
