"""Router rows that are made of what the base model's layers see of the prompts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raymerge.errors import PlanError, Problem
from raymerge.planner.stages import GateSpec, Stage
from raymerge.router.accumulate import work_nbytes
from raymerge.router.collect import Collector, owners
from raymerge.router.prompts import tokenized
from raymerge.router.readings import Reading, Schedule, prompt_problems, schedule
from raymerge.router.report import GateReport, layer_report
from raymerge.router.results import ChoicesFile, Result
from raymerge.router.sinks import RowSink, Sink, SumSink
from raymerge.router.stream_layers import check_streamable, least_stream_budget, stream
from raymerge.storage.local import LocalStore

_FLOAT64 = 8


class StreamedWork:
    """Units of texts, which the base reads layer by layer.

    A single unit makes the rows of a layer as soon as the layer is over, and no sums are stored. Several
    leave theirs, which are added in the units' order at the end.
    """

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        """
        Args:
            stage: whose result.
            spec: what it asks for.
        """
        self._stage = stage
        self._spec = spec
        self._made: Schedule | None = None

    @property
    def num_units(self) -> int:
        """Units of at most 65,536 tokens."""
        return len(self._plan.units)

    def costs(self) -> tuple[int, ...]:
        """Bytes that each unit reads: the layers."""
        base = self._spec.base
        stack = base.layer_stack(None)
        beginning = f"{stack.prefix}." if stack is not None else ""
        tensors = base.checkpoint.tensors.items()
        nbytes = sum(tensor.nbytes for name, tensor in tensors if name.startswith(beginning))
        return (nbytes,) * self.num_units

    def least_budget(self) -> int:
        """Bytes for one layer of the base, one run in it, and the layer's sums."""
        return least_stream_budget(self._spec.base, self._plan.longest) + self._own_nbytes()

    def check(self) -> None:
        """Find out whether the base can be run, and whether its tokenizer and the prompts are fit for it.

        Raises:
            PlanError: with all of the reasons why not.
        """
        problems: list[Problem] = []
        try:
            check_streamable(self._spec.base)
        except PlanError as error:
            problems += error.problems
        try:
            runs = tokenized(self._spec)
        except PlanError as error:
            problems += error.problems
        else:
            problems += prompt_problems(self._spec, runs, where=self._stage.place)
        if problems:
            raise PlanError(problems)

    def unit(self, number: int, *, staging: Path, device: torch.device, budget: int) -> tuple[int, int]:
        """Have the base read a unit, and leave the rows, or its share of the sums.

        Raises:
            CheckpointError: the base cannot be read.
            NonFiniteError: it gives NaN or infinity.
            OptionError: there is no room in ``staging``.
        """
        readings = self._plan.units[number]
        # Of this attempt alone: another one, given up but still alive, would write other states into it.
        spill = Path(tempfile.mkdtemp(prefix="spill-", dir=staging))
        try:
            with LocalStore(staging) as store:
                alone = self.num_units == 1
                sink: Sink = self._row_sink(store, readings) if alone else self._sums(store, number)
                sink.create()
                collector = Collector(self._spec, self._plan, readings, device=device, on_layer=sink.layer)
                read = stream(
                    self._spec.base,
                    [reading.run for reading in readings],
                    collector,
                    device=device,
                    budget=budget - self._own_nbytes(),
                    spill=spill,
                )
                collector.finish()
                sink.finish()
            return read, sink.nbytes
        finally:
            shutil.rmtree(spill, ignore_errors=True)

    def conclude(self, staging: Path) -> dict[str, Any]:
        """The result of all units, and its report; raises what ``unit`` raises."""
        spec = self._spec
        with LocalStore(staging) as store:
            if self.num_units > 1:
                self._add_up(store)
            result, choices = Result(store, self._stage, spec), ChoicesFile(store, spec)
            layers = tuple(
                layer_report(each, result.routed(each), choices.read(each)) for each in spec.layers
            )
        names = tuple(expert.name for expert in spec.experts)
        plan = self._plan
        report = GateReport(spec.mode, names, layers, plan.num_kept, plan.on_own)
        return report.to_json()

    @property
    def _plan(self) -> Schedule:
        if self._made is None:
            routed, shared = len(self._spec.experts), len(self._spec.shared)
            runs = tokenized(self._spec)
            self._made = schedule(runs, self._spec.mode, num_routed=routed, num_shared=shared)
        return self._made

    def _add_up(self, store: LocalStore) -> None:
        """Make the rows from the sums of several units."""
        units = self._plan.units
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
        return RowSink(store, self._stage, self._spec, plan=self._plan, owners=owners(readings))

    def _sums(self, store: LocalStore, number: int) -> SumSink:
        num_kept = len(owners(self._plan.units[number]))
        return SumSink(store, self._spec, number, plan=self._plan, num_kept=num_kept)

    def _own_nbytes(self) -> int:
        """Memory beside that of running the base: sums, and what is kept with one copy of it."""
        width = self._spec.hidden_size
        kept = 3 * sum(self._plan.num_kept) * width * _FLOAT64
        return work_nbytes(self._spec.mode, self._plan.num_experts, width) + kept
