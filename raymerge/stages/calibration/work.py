"""Calibration as work for workers: each unit runs all of a model on some windows of the texts, layer by
layer, and leaves sums; these are added at the end, in the units' order.

The sums' bytes depend on the number of torch's threads: the caller has to set that to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from raymerge.checkpoints.header import lay_out
from raymerge.checkpoints.json_files import attempt
from raymerge.deferred import torch
from raymerge.device_numerics import full_float32
from raymerge.errors import PlanError, Problem
from raymerge.planner.calibration import KIND, model_digest
from raymerge.planner.inputs.sources import RESULT_FILE, CalibrationSpec, Stage, StatisticsKind
from raymerge.stages.calibration.blocks import Block, Statistics, Walk, blocks_of, num_tokens, tokens_of_few
from raymerge.stages.calibration.experts import ExpertStatistics
from raymerge.stages.calibration.fisher import FisherStatistics
from raymerge.stages.calibration.inputs import InputStatistics
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import LayerStream, kept_nbytes, spill_directory
from raymerge.stages.texts import Text, TextReader
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

_KINDS: Mapping[StatisticsKind, Callable[[CalibrationSpec], Statistics]] = {
    "experts": ExpertStatistics,
    "fisher": FisherStatistics,
    "inputs": InputStatistics,
}
_SUMS = "{}unit-{}.safetensors"


class CalibrationWork:
    """Statistics of one model. Texts are read where it is made, and travel as tokens."""

    def __init__(
        self, stage: Stage, spec: CalibrationSpec, texts: Sequence[Text] | None = None, prefix: str = ""
    ) -> None:
        """``prefix``: of the names of its files, where several share a directory."""
        self._prefix = prefix
        self._stage = stage
        self._spec = spec
        self._given = texts
        self._statistics = _KINDS[spec.kind](spec)
        self._stream = LayerStream(spec.model, self._statistics.purpose)

    def __reduce__(self) -> tuple[type[CalibrationWork], tuple[Stage, CalibrationSpec, Sequence[Text], str]]:
        return type(self), (self._stage, self._spec, self._texts, self._prefix)

    @cached_property
    def _reader(self) -> TextReader:
        spec = self._spec
        # Gradients are those of what a model is to say; it sees inputs and chooses experts for all.
        judges_all = spec.kind != "fisher"
        return TextReader(spec.model, length=spec.length, num_tokens=spec.num_tokens, judges_all=judges_all)

    @cached_property
    def _texts(self) -> Sequence[Text]:
        if self._given is not None:
            return self._given
        return self._reader.read_planned(self._spec.texts)

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        few = self._statistics.num_blocks
        return blocks_of(self._texts, most_tokens=None if few is None else tokens_of_few(self._texts, few))

    @property
    def num_units(self) -> int:
        return len(self._blocks)

    def costs(self) -> tuple[int, ...]:
        tensors = self._spec.model.checkpoint.tensors.values()
        return (sum(tensor.nbytes for tensor in tensors),) * self.num_units

    def least_budget(self) -> int:
        shapes = {batch.shape for block in self._blocks for batch in block}
        return max(map(self._stream.least_budget, shapes)) + self._own_nbytes

    @cached_property
    def _own_nbytes(self) -> int:
        return self._statistics.own_nbytes(self._blocks, self._stream)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """The result, the sums of every unit, and spilled states of units in progress."""
        sums = sum(self._sums(LocalStore(Path()), number).nbytes for number in range(self.num_units))
        spare, width = budget - self.least_budget(), self._stream.width()
        often = 1 + self._statistics.num_kept(self._stream)
        states = [kept_nbytes(num_tokens(block), width) * often for block in self._blocks]
        spilled = sorted((each for each in states if each > spare), reverse=True)[:busy]
        return self._stage.layout.nbytes + sums + sum(spilled)

    def check(self) -> None:
        problems: list[Problem] = []
        attempt(problems, lambda: self._texts, PlanError)
        attempt(problems, lambda: self._statistics.check(self._stream), PlanError)
        if problems:
            raise PlanError(problems)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        names = [text.name for text in self._texts]
        budget -= self._own_nbytes
        block, model = self._blocks[number], self._spec.model
        prefix = f"{self._prefix}spill-{number}-"
        with spill_directory(staging, prefix) as spill, LocalStore(staging) as store, full_float32():
            sums = self._sums(store, number)
            sums.create()
            walk = Walk(model, self._stream, block, names, device, budget, spill, tell)
            read = self._statistics.collect(walk, sums.write)
            sums.sync()
        return read, sums.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        return {_SUMS.format(self._prefix, number): ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        spec = self._spec
        with LocalStore(staging) as store:
            units = self.units(store)
            result = TensorFile(store, RESULT_FILE, self._stage.layout)
            result.create()
            report = self._statistics.conclude(units, result)
            result.sync()
        return {
            "kind": KIND,
            "statistics": spec.kind,
            "model": spec.model.name,
            "model_digest": model_digest(spec.model),
            "tokens": spec.num_tokens,
            "length": spec.length,
            "texts": texts_report(spec, self._texts),
            **report,
        }

    def units(self, store: LocalStore) -> list[TensorFile]:
        """What the units left, in order."""
        return [self._sums(store, number) for number in range(self.num_units)]

    @property
    def texts(self) -> Sequence[Text]:
        return self._texts

    def _sums(self, store: LocalStore, number: int) -> TensorFile:
        layout = lay_out(self._statistics.sums(self._blocks[number]))
        return TensorFile(store, _SUMS.format(self._prefix, number), layout)


def texts_report(spec: CalibrationSpec, texts: Sequence[Text]) -> list[dict[str, Any]]:
    counts = [sum(len(window.tokens) for window in text.windows) for text in texts]
    return [
        {"path": text.path, "digest": text.digest, "tokens": count}
        for text, count in zip(spec.texts, counts, strict=True)
    ]
