"""What the matrices of a model are multiplied with: a Gram matrix for each input, of tokens that reach it.

Products are seen as torch computes them, whatever the code of the family: which matrices take part is told by
the memory that they lie in."""

# ruff: noqa: ARG002 - sums are alike for all blocks

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raymerge.architectures.roles import EXPERT_NUMBER
from raymerge.checkpoints.header import TensorSpec
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import CalibrationSpec, Source
from raymerge.planner.linear_inputs import LinearInput, linear_inputs
from raymerge.stages.calibration.blocks import FEW_TOKENS, Block, Walk, Write, added, num_tokens
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import LayerStream, Purpose, ResidentLayer

INPUTS = Purpose("Merge it by a method that needs no inputs of layers, such as linear.")

TOKENS = "tokens"
_NUM_BLOCKS = 2
# The sums of each may be larger than the model.


class InputStatistics:
    def __init__(self, spec: CalibrationSpec) -> None:
        self._spec = spec
        self._inputs = inputs_of(spec)
        self._each = tuple(dict.fromkeys(self._inputs.values()))

    @property
    def purpose(self) -> Purpose:
        return INPUTS

    @property
    def num_blocks(self) -> int:
        return _NUM_BLOCKS

    def check(self, stream: LayerStream) -> None:
        stream.check()

    def sums(self, block: Block) -> Sequence[TensorSpec]:
        grams = (TensorSpec(f"{each.name}.gram", DType.F32, (each.width, each.width)) for each in self._each)
        counts = (TensorSpec(f"{each.name}.count", DType.I64, (1,)) for each in self._each)
        return [*grams, *counts, TensorSpec(TOKENS, DType.I64, (1,))]

    def own_nbytes(self, blocks: Sequence[Block], stream: LayerStream) -> int:
        return grams_nbytes(self._each)

    def num_kept(self, stream: LayerStream) -> int:
        return 0

    def collect(self, walk: Walk, write: Write) -> int:
        @contextmanager
        def watch(layer: ResidentLayer) -> Iterator[None]:
            grams = Grams(walk.model, layer, self._inputs)
            with grams.collecting():
                yield
            for name, gram, count in grams.sums():
                write(f"{name}.gram", gram.float())
                write(f"{name}.count", torch.tensor([count]))

        write(TOKENS, torch.tensor([num_tokens(walk.block)]))
        return walk.read(watch=watch)

    def conclude(self, units: Sequence[TensorFile], result: TensorFile) -> Mapping[str, object]:
        tokens, few = added(units, TOKENS), list[str]()
        for each in self._each:
            result.write(f"{each.name}.gram", added(units, f"{each.name}.gram").div_(tokens))
            count = added(units, f"{each.name}.count")
            result.write(f"{each.name}.count", count)
            few += [each.name] if int(count) < FEW_TOKENS else []
        return {"inputs": len(self._each), "few": few}


def inputs_of(spec: CalibrationSpec) -> Mapping[str, LinearInput]:
    every = linear_inputs(spec.model)
    return {name: each for name, each in every.items() if not spec.only or each.name in spec.only}


def grams_nbytes(inputs: Sequence[LinearInput]) -> int:
    """Bytes of memory for the Gram matrices of the largest layer, and of one product with its copies."""
    layers: dict[int, int] = {}
    for each in inputs:
        layers[each.layer] = layers.get(each.layer, 0) + torch.float64.itemsize * each.width**2
    widest = max((each.width for each in inputs), default=0)
    return max(layers.values(), default=0) + 3 * torch.float32.itemsize * widest**2


_PLACES = {
    torch.nn.functional.linear: (0, 1),
    torch.matmul: (0, 1),
    torch.Tensor.matmul: (0, 1),
    torch.Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1),
    torch.Tensor.mm: (0, 1),
    torch.addmm: (1, 2),
    torch.Tensor.addmm: (1, 2),
}
# Where functions have their input and the matrix.


class _Products(torch.overrides.TorchFunctionMode):
    """Reports every product with a matrix: its input, and the matrix."""

    def __init__(self, report: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = _PLACES.get(function)
        if places is not None and len(args) > max(places):
            self._report(args[places[0]], args[places[1]])
        return function(*args, **(kwargs or {}))


class Grams:
    """Sums over the tokens that a layer is run on."""

    def __init__(self, model: Source, layer: ResidentLayer, inputs: Mapping[str, LinearInput]) -> None:
        self._model = model
        self._layer = layer
        self._inputs = {name: each for name, each in inputs.items() if each.layer == layer.number}
        self._places = dict(self._located())
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._seen = set[str]()
        self._groups: dict[LinearInput, set[str]] = {}
        for name, each in self._inputs.items():
            self._groups.setdefault(each, set()).add(name)
        self._latest: dict[LinearInput, tuple[torch.Tensor, set[str]]] = {}
        """The last input of several matrices, and those that were multiplied with it."""

    def _located(self) -> Iterator[tuple[int, list[tuple[int, int, str]]]]:
        """By memory, the matrices that lie in it: first and last element, and logical name."""
        state = self._layer.module.state_dict()
        for parameter in self._layer.parameters:
            tensor = state[parameter.name]
            own = [
                (0, tensor.numel(), name)
                if view is None
                else (view.offset, view.offset + _extent(view.shape, view.strides), name)
                for name, view in parameter.parts
                if name in self._inputs
            ]
            if own:
                yield tensor.untyped_storage().data_ptr(), own

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Raises PlanError: a matrix was multiplied in no way that is known, or what was held to be one input
        of several matrices is not."""
        with _Products(self._take):
            yield
        # An expert that no token chose is not multiplied, but then another one is.
        alike = {EXPERT_NUMBER.sub("", name) for name in self._seen}
        absent = (name for name in self._inputs if EXPERT_NUMBER.sub("", name) not in alike)
        if (name := next(absent, None)) is not None:
            raise PlanError(self._refused(f"{name} is multiplied in no way that is known"))

    def _take(self, given: torch.Tensor, matrix: torch.Tensor) -> None:
        places = self._places.get(matrix.untyped_storage().data_ptr())
        if places is None:
            return
        if matrix.dim() != 2:
            what = "a stack of experts is multiplied at once, with tokens that do not reach them"
            raise PlanError(self._refused(what))
        begin = matrix.storage_offset()
        end = begin + _extent(matrix.shape, matrix.stride())
        taken = {name for first, last, name in places if begin <= first and last <= end}
        for group in dict.fromkeys(self._inputs[name] for name in taken):
            self._add(group, taken & self._groups[group], given)

    def _add(self, group: LinearInput, members: set[str], given: torch.Tensor) -> None:
        rows = given.reshape(-1, given.shape[-1])
        if rows.shape[1] != group.width:
            what = f"{group.name} is multiplied with rows of {rows.shape[1]} elements, not {group.width}"
            raise PlanError(self._refused(what))
        self._seen |= members
        if members != self._groups[group] and self._is_counted(group, members, given):
            return
        product = (rows.T @ rows).double()
        before = self._sums.get(group.name)
        self._sums[group.name] = product if before is None else before.add_(product)
        self._counts[group.name] = self._counts.get(group.name, 0) + len(rows)

    def _is_counted(self, group: LinearInput, members: set[str], given: torch.Tensor) -> bool:
        """Whether another matrix of the group was multiplied with this input just before."""
        before, others = self._latest.get(group, (given, members))
        if others & members:
            self._latest[group] = given, set(members)
            return False
        if before is not given and not torch.equal(before, given):
            names = ", ".join(sorted(members))
            raise PlanError(self._refused(f"the input of {names} is not that of {group.name}"))
        others.update(members)
        return True

    def sums(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Of each input its sum float64 ``[in, in]`` and the number of tokens."""
        for each in dict.fromkeys(self._inputs.values()):
            none = torch.zeros(each.width, each.width, dtype=torch.float64)
            yield each.name, self._sums.get(each.name, none), self._counts.get(each.name, 0)

    def _refused(self, why: str) -> Problem:
        what = f"its layer {self._layer.number} cannot be measured: {why}."
        return Problem(self._model.name, what, INPUTS.remedy)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view, both included."""
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
