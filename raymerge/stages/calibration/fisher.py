"""The diagonal of the empirical Fisher information: for each element of a model the mean square of the
derivative of the log-likelihood of a window of text, whose tokens are those of the text and not the model's
own. Of that, multiples of its mean over all elements are kept, so that models and texts can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from raymerge.checkpoints.header import TensorSpec
from raymerge.deferred import torch
from raymerge.errors import NonFiniteError, PlanError, Problem
from raymerge.planner.calibration import fisher_tensors
from raymerge.planner.inputs.sources import CalibrationSpec
from raymerge.stages.calibration.backward import Backward
from raymerge.stages.calibration.blocks import Block, Walk, Write, added, num_tokens
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import LayerStream, Purpose, ResidentLayer, keep_states, kept_nbytes

_PURPOSE = Purpose("Collect it by a program that has whole models in memory.", reads_logits=True)

_NUM_BLOCKS = 4
# The sums of one are as large as the model in float32.


class FisherStatistics:
    def __init__(self, spec: CalibrationSpec) -> None:
        self._spec = spec
        self._tensors = {each.name: each for each in fisher_tensors(spec.model)}

    @property
    def purpose(self) -> Purpose:
        return _PURPOSE

    @property
    def num_blocks(self) -> int:
        return _NUM_BLOCKS

    def check(self, stream: LayerStream) -> None:
        stream.check()

    def sums(self, block: Block) -> Sequence[TensorSpec]:  # noqa: ARG002 - it is the same for every block
        return tuple(self._tensors.values())

    def own_nbytes(self, blocks: Sequence[Block], stream: LayerStream) -> int:
        shapes = {batch.shape for block in blocks for batch in block}
        most_windows = max(sum(batch.shape.batch for batch in block) for block in blocks)
        backward = max(stream.backward_bytes(shape, most_windows) for shape in shapes)
        largest = max(prod(each.shape) for each in self._tensors.values())
        return max(backward, 3 * largest * torch.float64.itemsize)

    def num_kept(self, stream: LayerStream) -> int:
        return stream.num_layers() + 1

    def collect(self, walk: Walk, write: Write) -> int:
        shapes = [batch.shape for batch in walk.block] * self.num_kept(walk.stream)
        width = walk.stream.width()
        nbytes = kept_nbytes(num_tokens(walk.block), width) * self.num_kept(walk.stream)
        spare = walk.budget - max(walk.stream.least_budget(batch.shape) for batch in walk.block)
        spill = None
        if nbytes > spare:
            spill = walk.spill / "inputs"
            spill.mkdir()
        else:
            walk = replace(walk, budget=walk.budget - nbytes)

        def write_rows(name: str, rows: torch.Tensor, first: int | None) -> None:
            if name in self._tensors:
                write(name, rows, first)

        with keep_states(shapes, width, spill=spill) as kept:
            backward = Backward(walk, kept, write_rows)
            return walk.read(watch=lambda layer: _inputs_kept(layer, backward), finish=backward.finish)

    def conclude(self, units: Sequence[TensorFile], result: TensorFile) -> Mapping[str, object]:
        total, count = 0.0, 0
        for name in self._tensors:
            sums = added(units, name)
            total, count = total + float(sums.sum(dtype=torch.float64)), count + sums.numel()
        if not total < float("inf"):
            what = "the squares of its derivatives are too large to be added."
            raise NonFiniteError(Problem(self._spec.model.name, what, "Check its weights."))
        if not total:
            what = "the texts say nothing about any of its elements."
            raise PlanError(Problem(self._spec.model.name, what, "Calibrate it on other texts."))
        for name in self._tensors:
            result.write(name, added(units, name).double().mul_(count / total).float())
        return {"mean": total / count}


@contextmanager
def _inputs_kept(layer: ResidentLayer, backward: Backward) -> Iterator[None]:
    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy, as layers may add to what they are given.
        hidden = args[0] if args else kwargs["hidden_states"]
        backward.keep(layer.number, layer.batch, hidden.clone())

    hook = layer.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
