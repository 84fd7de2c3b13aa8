"""The hidden states of a model too large for memory: every run goes through a layer before the next is read.

A run is a sequence by itself, never one of a batch: nothing is padded, nothing masked, and what comes of it
does not depend on the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.calls import Call
from raymerge.stages.router.hidden_states import HiddenStates, keep_states, kept_nbytes
from raymerge.stages.router.prompts import TokenRun
from raymerge.stages.router.streamed_model import StreamedModel


class LayerVisitor(Protocol):
    """Is shown what goes into each layer."""

    def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """One run at one layer; runs in order, for layer after layer.

        Args:
            layer: number of the layer.
            run: place of the run among those that are streamed.
            hidden: what the layer is given, float32 ``[T, hidden]`` on the device.
            router_input: what its feed-forward network, and so a router there, is given: as ``hidden``.
        """


class LayerStream:
    """A base model that is read layer by layer.

    Its hollow model is built when it is first needed, and kept. Pickles as the base alone.
    """

    def __init__(self, base: Source) -> None:
        """
        Args:
            base: the model.
        """
        self._base = base
        self._spare: StreamedModel | None = None

    def __getstate__(self) -> Source:
        return self._base

    def __setstate__(self, base: Source) -> None:
        self.__init__(base)  # type: ignore[misc]

    def check(self) -> None:
        """Find out from headers, and a trial on a few random numbers, whether the model can be streamed.

        Raises:
            PlanError: it cannot, for all the reasons given.
        """
        with self._model():
            pass

    def least_budget(self, longest: int) -> int:
        """Fewest bytes of memory in which runs of up to ``longest`` tokens can be read.

        Raises:
            PlanError: the model cannot be run layer by layer.
        """
        with self._model() as model:
            return model.least_bytes(longest)

    def read(
        self,
        runs: Sequence[TokenRun],
        visitor: LayerVisitor,
        *,
        device: torch.device,
        budget: int,
        spill: Path,
        tell: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Show a visitor the states of every run at every layer, with one layer in memory at a time.

        Args:
            runs: what the model reads.
            visitor: is shown the states.
            device: where the arithmetic is done.
            budget: bytes of memory to use; what does not fit between layers goes to a file.
            spill: directory for that file, of this call alone.
            tell: called after each layer with the bytes read so far; what it raises ends the reading.

        Returns:
            Bytes read.

        Raises:
            PlanError: the model cannot be run layer by layer.
            CheckpointError: its weights cannot be read.
            OptionError: there is no room for the file.
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
                read += _embedded(model, runs, states, device)
                for layer in range(model.num_layers):
                    read += _layer(model, layer, lengths, states, visitor, calls)
                    tell(read)
        return read

    @contextmanager
    def _model(self) -> Iterator[StreamedModel]:
        """The hollow model, of this caller alone; what was left after a failure is not used again."""
        model, self._spare = self._spare, None
        if model is None:
            with Weights(self._base) as weights:
                model = StreamedModel(self._base, weights)
        yield model
        self._spare = model


class _Calls:
    """How layers are called, which depends on the number of tokens only; the latest are kept."""

    def __init__(self, model: StreamedModel, device: torch.device, *, limit: int) -> None:
        """
        Args:
            model: whose layers.
            device: where their arguments are wanted.
            limit: bytes that arguments may take; those that were asked for last are kept in any case.
        """
        self.device = device
        self._model = model
        self._limit = limit
        self._found: OrderedDict[int, tuple[Call, ...]] = OrderedDict()

    def of(self, length: int) -> tuple[Call, ...]:
        """How the layers are called for a run of ``length`` tokens."""
        if length not in self._found:
            taken = sum(map(self._model.call_bytes, (*self._found, length)))
            while self._found and taken > self._limit:
                oldest, _ = self._found.popitem(last=False)
                taken -= self._model.call_bytes(oldest)
            self._found[length] = self._model.calls(length, self.device)
        self._found.move_to_end(length)
        return self._found[length]


def _embedded(
    model: StreamedModel, runs: Sequence[TokenRun], states: HiddenStates, device: torch.device
) -> int:
    """Put what goes into the first layer where it is kept; returns the bytes read."""
    read = 0
    for number, run in enumerate(runs):
        hidden, nbytes = model.embed(run.tokens, device)
        states.put(number, hidden)
        read += nbytes
    return read


def _layer(
    model: StreamedModel,
    layer: int,
    lengths: Sequence[int],
    states: HiddenStates,
    visitor: LayerVisitor,
    calls: _Calls,
) -> int:
    """Take every run through one layer; returns the bytes read."""
    with model.resident(layer, calls.device) as resident:
        for run, length in enumerate(lengths):
            hidden = states.get(run).to(calls.device)
            found, router_input = resident.run(calls.of(length)[layer], hidden)
            visitor.layer(layer, run, hidden, router_input)
            states.put(run, found)
        return resident.read_bytes


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same algorithm of a GPU's library every time."""
    cudnn = torch.backends.cudnn
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        yield
    finally:
        cudnn.deterministic = before
