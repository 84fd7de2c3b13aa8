"""Squared derivatives of what a model says of texts, with one layer in memory at a time.

On the way forward the input of every layer is kept. Then derivatives go backwards: of the log-likelihood of
the judged tokens, from some rows of the head after the other, and through the layers from the last to the
first. Each is read again and computed again, now with a graph, for one window at a time, as it is the
gradient of a window that is squared. Embedding and head come last, as one matrix may be both.

No gradient outlives its layer. A layer that takes the matrices of a stack one by one, as it does with
experts, has a gradient of those alone that it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from raymerge.deferred import torch
from raymerge.merge_plan.elements import strided
from raymerge.stages.calibration.blocks import Walk
from raymerge.stages.streamed_model import Call, Parameter, ResidentLayer, Shape, States, StreamedModel

WriteRows: TypeAlias = "Callable[[str, torch.Tensor, int | None], None]"
"""Takes the logical name and float32 sums of squares: of all of it, or of rows and the first of these."""


class Squares:
    """Sums of squared derivatives by some parameters, in float64."""

    def __init__(self, parameters: Collection[Parameter], device: torch.device) -> None:
        self._parameters = parameters
        self._sums = {
            each.name: torch.zeros(each.shape, dtype=torch.float64, device=device) for each in parameters
        }

    def add(self, name: str, gradient: torch.Tensor | None, *, matrix: int | None = None) -> None:
        """Add one window's gradient: of all of a parameter, or of one matrix of it."""
        if gradient is not None and name in self._sums:
            sums = self._sums[name] if matrix is None else self._sums[name][matrix]
            sums.add_(gradient.square())

    def write(self, write: WriteRows, *, first: int | None = None) -> None:
        """``first``: the first row in the tensor that the parameters are rows of."""
        for parameter in self._parameters:
            sums = self._sums.pop(parameter.name).float()
            for logical, view in parameter.parts:
                write(logical, sums if view is None else strided(sums.view(-1), view), first)


class Backward:
    """The way back over one unit's windows."""

    def __init__(self, walk: Walk, kept: States, write: WriteRows) -> None:
        """``kept``: room for the states of every batch as often as the model has layers, and once more."""
        self._walk = walk
        self._block = walk.block
        self._device = walk.device
        self._kept = kept
        self._write = write
        # float64 [B, T] each: the logarithm of the sum of all likelihoods.
        self._totals = [torch.full(each.tokens.shape, -math.inf).double() for each in walk.block]

    def keep(self, layer: int, batch: int, hidden: torch.Tensor) -> None:
        """Keep the input of a layer, until the derivatives by it take its place."""
        self._kept[layer * len(self._block) + batch] = hidden.cpu()

    def finish(self, model: StreamedModel, states: States, _: int) -> int:
        """As ``LayerStream.read`` calls it."""
        # As many at once for any memory: they are added up in float32.
        head = _runs(model.num_rows, model.fewest_rows)
        read = self._head(model, states, head)
        for layer in reversed(range(model.num_layers)):
            read += self._layer(model, layer)
        outside = Squares(model.outside, self._device)
        self._before_layers(model, outside)
        is_tied = model.head.matrix == model.embedding_name
        if not is_tied:
            for rows in _runs(model.num_tokens, model.fewest_rows):
                self._embedding(model, rows)
        read += self._behind_layers(model, states, head, outside, is_tied=is_tied)
        outside.write(self._write)
        return read

    def _head(self, model: StreamedModel, states: States, blocks: Sequence[range]) -> int:
        """Derivatives by the last layer's outputs."""
        behind, read = model.num_layers * len(self._block), 0
        for number, batch in enumerate(self._block):
            self._kept[behind + number] = torch.zeros(*batch.shape, model.width)
        for rows, is_last in [(rows, is_last) for is_last in (False, True) for rows in blocks]:
            with model.head_rows(rows, self._device) as nbytes:
                for number in range(len(self._block)):
                    hidden = states[number].to(self._device)
                    if not is_last:
                        total = model.logits(hidden).logsumexp(-1).double().cpu()
                        self._totals[number] = torch.logaddexp(self._totals[number], total)
                        continue
                    hidden = hidden.detach().requires_grad_()
                    logits = model.logits(hidden)
                    change = self._change(number, slice(None), logits, rows)
                    (own,) = torch.autograd.grad(logits, hidden, change)
                    self._kept[behind + number] = self._kept[behind + number].add_(own.cpu())
            read += nbytes
        for number in range(len(self._block)):
            self._walk.check(self._kept[behind + number], number, "the head, on the way back,")
        return read

    def _change(self, number: int, windows: slice, logits: torch.Tensor, rows: range) -> torch.Tensor:
        """Derivatives of the log-likelihood by logits: 1 for the token, less the likelihoods of all."""
        batch = self._block[number]
        targets = batch.tokens[windows].roll(-1, 1) - rows.start
        # What begins a window is not judged, so that nothing counts behind its end.
        counts = batch.is_judged[windows].roll(-1, 1)
        totals = self._totals[number][windows, :, None].to(logits)
        change = (logits.detach() - totals).exp_().neg_()
        places = torch.where(counts & (targets >= 0) & (targets < len(rows)))
        change[(*places, targets[places])] += 1.0
        return change.mul_(counts[..., None].to(logits))

    def _layer(self, model: StreamedModel, layer: int) -> int:
        count, calls = len(self._block), dict[Shape, Call]()
        with model.resident(layer, self._device) as resident:
            squares = Squares(resident.parameters, self._device)
            for number, batch in enumerate(self._block):
                own = Shape(1, batch.shape.length)
                if own not in calls:
                    calls = {own: model.calls(own, self._device)[layer]}
                place = layer * count + number
                inputs, outputs = self._kept[place], self._kept[place + count]
                for one in self._windows(number):
                    ends = (inputs[one].to(self._device), outputs[one].to(self._device))
                    inputs[one] = _through(model, resident, calls[own], ends, squares).cpu()
                self._walk.check(inputs, number, f"layer {layer}, on the way back,")
                self._kept[place] = inputs
            squares.write(self._write)
        return resident.read_bytes

    def _before_layers(self, model: StreamedModel, outside: Squares) -> None:
        """Have derivatives by rows of the embedding take the place of those by the first layer's inputs."""
        parameters = model.outside_parameters()
        for number, batch in enumerate(self._block):
            states = self._kept[number]
            for one in self._windows(number):
                hidden, rows = model.embed_graph(batch.tokens[one], self._device)
                behind = states[one].to(self._device)
                leaves = [rows, *parameters.values()]
                own, *others = torch.autograd.grad(hidden, leaves, behind, allow_unused=True)
                for name, gradient in zip(parameters, others, strict=True):
                    outside.add(name, gradient)
                _beginning(states[one], own.shape).copy_(own)
            self._kept[number] = states

    def _embedding(self, model: StreamedModel, rows: range) -> None:
        shape = (len(rows), model.embedding_width)
        squares = Squares([Parameter("weight", shape, ((model.embedding_name, None),), False)], self._device)
        for number in range(len(self._block)):
            states = self._kept[number]
            for one in self._windows(number):
                gradient = torch.zeros(shape, device=self._device)
                self._add_embedded(gradient, number, one, states, rows)
                squares.add("weight", gradient)
        squares.write(self._write, first=rows.start)

    def _add_embedded(
        self, gradient: torch.Tensor, number: int, one: slice, states: torch.Tensor, rows: range
    ) -> None:
        """Add what ``_before_layers`` left of a window to the derivatives by some rows."""
        used = torch.unique(self._block[number].tokens[one])
        inside = (used >= rows.start) & (used < rows.stop)
        own = _beginning(states[one], (len(used), gradient.shape[1]))
        gradient[(used[inside] - rows.start).to(self._device)] += own[inside].to(self._device)

    def _behind_layers(
        self,
        model: StreamedModel,
        states: States,
        blocks: Sequence[range],
        outside: Squares,
        *,
        is_tied: bool,
    ) -> int:
        """The squares of the head, and of what is between it and the last layer."""
        read, held = 0, dict[tuple[int, int], list[torch.Tensor | None]]()
        for rows in blocks:
            with model.head_rows(rows, self._device) as nbytes:
                squares = Squares(model.head.rows_of(rows), self._device)
                for number in range(len(self._block)):
                    hidden, front = states[number].to(self._device), self._kept[number]
                    for one in self._windows(number):
                        weight, bias, *others = self._of_rows(model, number, one, hidden, rows)
                        if is_tied and weight is not None:
                            self._add_embedded(weight, number, one, front, rows)
                        squares.add("weight", weight)
                        squares.add("bias", bias)
                        # A gradient is squared when the logits of all tokens have added to it.
                        before = held.get((number, one.start), [None] * len(others))
                        held[number, one.start] = list(map(_added, before, others))
                squares.write(self._write, first=rows.start)
            read += nbytes
        for gradients in held.values():
            for name, gradient in zip(model.outside_parameters(), gradients, strict=True):
                outside.add(name, gradient)
        return read

    def _of_rows(
        self, model: StreamedModel, number: int, one: slice, hidden: torch.Tensor, rows: range
    ) -> Sequence[torch.Tensor | None]:
        """Derivatives of one window by weight and bias of some rows of the head, and by what is outside the
        layers."""
        linear, outside = model.head.linear, model.outside_parameters().values()
        logits = model.logits(hidden[one].detach().requires_grad_())
        change = self._change(number, one, logits, rows)
        leaves = [linear.weight, *([] if linear.bias is None else [linear.bias]), *outside]
        weight, *others = torch.autograd.grad(logits, leaves, change, allow_unused=True)
        return weight, *([None] if linear.bias is None else []), *others

    def _windows(self, number: int) -> Iterator[slice]:
        return (slice(window, window + 1) for window in range(self._block[number].shape.batch))


def _runs(height: int, step: int) -> Sequence[range]:
    return [range(first, min(first + step, height)) for first in range(0, height, step)]


def _beginning(states: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return states.view(-1)[: math.prod(shape)].view(*shape)


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one.add_(other)


def _through(
    model: StreamedModel,
    resident: ResidentLayer,
    call: Call,
    ends: tuple[torch.Tensor, torch.Tensor],
    squares: Squares,
) -> torch.Tensor:
    """The derivatives by a layer's input, of one window; those by its parameters are added to ``squares``.
    ``ends``: the input, and the derivatives by the output."""
    hidden, behind = ends
    parameters = {name: each for name, each in resident.module.named_parameters() if each.requires_grad}
    hidden = hidden.detach().requires_grad_()
    with torch.enable_grad(), _Matrices(parameters) as matrices:
        output, _ = model.run(resident.number, call, hidden)
    leaves = [hidden, *parameters.values(), *matrices.taken.values()]
    own, *gradients = torch.autograd.grad(output, leaves, behind, allow_unused=True)
    whole = dict(zip(parameters, gradients, strict=False))
    for (name, number), gradient in zip(matrices.taken, gradients[len(parameters) :], strict=True):
        rest = whole.get(name)
        if rest is not None:
            rest[number] += gradient
        else:
            squares.add(name, gradient, matrix=number)
    for name, gradient in whole.items():
        squares.add(name, gradient)
    return own


class _Matrices(torch.overrides.TorchFunctionMode):
    """Makes every matrix that is taken of a stack by its number a leaf of its own.

    The derivatives by ``stack[number]`` are as large as the stack, and mostly zeros."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {id(each): name for name, each in parameters.items() if each.dim() > 2}
        self.taken: dict[tuple[str, int], torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and id(args[0]) in self._names and _is_number(args[1]):
            key = self._names[id(args[0])], int(args[1]) % len(args[0])
            if key not in self.taken:
                self.taken[key] = args[0].detach()[key[1]].requires_grad_()
            return self.taken[key]
        return func(*args, **(kwargs or {}))


def _is_number(index: Any) -> bool:
    is_tensor = isinstance(index, torch.Tensor) and not index.dim() and not index.is_floating_point()
    return is_tensor or (isinstance(index, int) and not isinstance(index, bool))
