"""A model of which only one layer is in memory, and what stands before the first.

The arithmetic is that of transformers' own modules, so that every family of decoders works as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import nn

from raymerge.allocator import return_free_memory
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.calls import Call, are_alike, is_chain, recorded, tensors_of
from raymerge.stages.router.meta_model import NO_PROMPTS_REMEDY, bare_model
from raymerge.stages.router.module_layout import ModuleLayout, Parameter, dissect, state_of


def compute_buffers(decoder: Any, part: nn.Module, *, but: str | None, device: torch.device) -> list[str]:
    """Compute the unsaved buffers of a part of a model whose parameters are all on the meta device.

    They are made on the CPU, for every device alike, by what transformers itself makes them with once it has
    read a checkpoint.

    Args:
        decoder: the model.
        part: the decoder itself, or one of its layers.
        but: name of a child of ``part`` that is passed over.
        device: where they are wanted.

    Returns:
        Names of the buffers that nothing computes.
    """
    left: list[str] = []
    for path, module in part.named_modules():
        if but is not None and (path == but or path.startswith(f"{but}.")):
            continue
        names = [
            name
            for name in module._non_persistent_buffers_set
            if (found := module._buffers.get(name)) is not None and found.is_meta
        ]
        if names:
            # What is computed does not depend on what was there before.
            first, second = (_computed(decoder, module, names, fill) for fill in (0, 1))
            left += [f"{path}.{name}" for name in names if not torch.equal(first[name], second[name])]
            module._buffers.update({name: found.to(device) for name, found in second.items()})
    return left


def _computed(decoder: Any, module: nn.Module, names: list[str], fill: int) -> Mapping[str, torch.Tensor]:
    for name in names:
        module._buffers[name] = torch.full_like(module.get_buffer(name), fill, device="cpu")
    with torch.no_grad():
        decoder._init_weights(module)
    return {name: module.get_buffer(name) for name in names}


_CPU = torch.device("cpu")
_TRIAL = 7
# Tokens of the trial; a size that nothing else in a model has, so that it is seen what grows with them.
_ATTENTION_COPIES = 4
_HIDDEN_COPIES = 16
_WIDE_COPIES = 8
# Matrices of a layer's temporaries that are in memory at once, at most: of scores, of states, of the widest.


class StreamedModel:
    """The base's model on the meta device; parts of it are filled while they are needed.

    Making one finds out, on random numbers, whether the model can be run so at all.
    """

    def __init__(self, base: Source, weights: Weights) -> None:
        """
        Args:
            base: the checkpoint.
            weights: its tensors.

        Raises:
            PlanError: it cannot be run layer by layer, for all the reasons given.
        """
        self._base = base
        self._weights = weights
        # Whoever holds the decoder holds the layers; the head goes.
        self._anatomy: ModuleLayout = dissect(base, bare_model(base), weights)
        # It means nothing without training, and of the few rows that are in memory it may be none.
        self._anatomy.embedding.padding_idx = None
        self._as_tuple = False
        self._calls = self._try()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._anatomy.layers)

    @property
    def width(self) -> int:
        """Elements of one token's hidden state."""
        return int(self._calls[0].hidden.shape[-1])

    def least_bytes(self, longest: int) -> int:
        """Bytes of memory that one run of ``longest`` tokens needs, its kept states not counted."""
        inside = max(sum(each.nbytes for each in layer) for layer in self._anatomy.inside)
        every = [*self._anatomy.outside, *(each for layer in self._anatomy.inside for each in layer)]
        outside = sum(each.nbytes for each in self._anatomy.outside)
        loading = max(each.loading_nbytes for each in every)
        return inside + outside + loading + self.call_bytes(longest) + self._temporaries(every, longest)

    def call_bytes(self, length: int) -> int:
        """Bytes of the masks and positions that layers are called with for a run of so many tokens."""
        found = tensors_of(self._calls)
        sizes = (prod(length if n == _TRIAL else n for n in each.shape) for each in found)
        return sum(n * each.element_size() for n, each in zip(sizes, found, strict=True))

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[int]:
        """What stands around the layers in memory, for as long as the context lasts; gives the bytes read."""
        outside = self._anatomy.outside
        with self._weights:
            self._fill_outside(state_of(outside, self._weights, device), device)
            try:
                yield sum(each.read_bytes(self._weights) for each in outside)
            finally:
                self._anatomy.decoder.to("meta")

    def embed(self, tokens: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
        """What goes into the first layer, float32 ``[T, hidden]``, and the bytes read for it."""
        name = self._anatomy.embedding_name
        used = sorted(set(tokens))
        rows = self._weights.rows(name, used).to(device)
        nbytes = self._weights.nbytes(name) * len(used) // self._weights.shape(name)[0]
        hidden = self._run(torch.tensor(tokens, device=device), torch.tensor(used, device=device), rows)
        return hidden[0].hidden[0], nbytes

    def calls(self, length: int, device: torch.device) -> tuple[Call, ...]:
        """How the layers are called for any run of ``length`` tokens."""
        zeros = torch.zeros(length, dtype=torch.int64, device=device)
        rows = torch.zeros(1, self._anatomy.embedding.embedding_dim, device=device)
        return self._run(zeros, zeros[:1], rows)

    @contextmanager
    def resident(self, layer: int, device: torch.device) -> Iterator[Resident]:
        """One layer with its numbers in memory, for as long as the context lasts."""
        module, parameters = self._anatomy.layers[layer], self._anatomy.inside[layer]
        compute_buffers(self._anatomy.decoder, module, but=None, device=device)
        module.load_state_dict(state_of(parameters, self._weights, device), assign=True)
        paths = self._anatomy.feed_forward[layer]
        read = sum(each.read_bytes(self._weights) for each in parameters)
        try:
            yield Resident(module, [module.get_submodule(path) for path in paths], read)
        finally:
            module.to("meta")
            return_free_memory()

    def _try(self) -> tuple[Call, ...]:
        """Call the model with random numbers around its layers; returns how it calls them.

        Raises:
            PlanError: its layers are no plain chain, or it cannot be called.
        """
        decoder = self._anatomy.decoder
        numbers = torch.Generator().manual_seed(0)
        state = {each.name: _random(each.shape, numbers) for each in self._anatomy.outside}
        left = self._fill_outside(state, _CPU)
        for number, layer in enumerate(self._anatomy.layers):
            found = compute_buffers(decoder, layer, but=None, device=_CPU)
            left += [f"layer {number}: {name}" for name in found]
            layer.to("meta")
        if left:
            raise PlanError(self._refused(f"nothing says how to compute its buffers {', '.join(left[:3])}"))
        try:
            return self._tried(numbers)
        except Exception as error:
            if isinstance(error, PlanError):
                raise
            # What the code of a family raises when its layers answer as they do not in earnest is its own.
            reason = " ".join(str(error).split())[:160]
            raise PlanError(self._refused(f"it fails with {type(error).__name__} ({reason})")) from error
        finally:
            decoder.to("meta")

    def _tried(self, numbers: torch.Generator) -> tuple[Call, ...]:
        def numbered(first: int) -> torch.Tensor:
            return torch.arange(first, first + _TRIAL)

        def trial(tokens: torch.Tensor) -> tuple[Call, ...]:
            used = torch.tensor(sorted(set(tokens.tolist())))
            rows = torch.randn(len(used), self._anatomy.embedding.embedding_dim, generator=numbers)
            return self._run(tokens, used, rows)

        calls = self._in_either_form(lambda: trial(numbered(3)))
        if not is_chain(calls, self.num_layers):
            raise PlanError(self._refused("it does more between layers than to hand on their results"))
        if not all(call.is_plain for call in calls):
            raise PlanError(self._refused("its layers leave things for one another"))
        # Zeros, as it is called with in earnest; and its padding, for which some look.
        padding = getattr(self._anatomy.decoder.config, "pad_token_id", None) or 0
        others = (numbered(3 + _TRIAL), torch.zeros_like(numbered(0)), torch.full_like(numbered(0), padding))
        if not all(are_alike(calls, trial(tokens)) for tokens in others):
            raise PlanError(self._refused("its layers are called with more that depends on the tokens"))
        return calls

    def _in_either_form(self, trial: Callable[[], tuple[Call, ...]]) -> tuple[Call, ...]:
        """Calls of layers that answer with their states; where that does not do, with a tuple of them."""
        # What goes wrong in the first form may be right in the second; if not, the second tells why.
        with suppress(Exception):
            calls = trial()
            if is_chain(calls, self.num_layers):
                return calls
        self._as_tuple = True
        return trial()

    def _run(self, tokens: torch.Tensor, used: torch.Tensor, rows: torch.Tensor) -> tuple[Call, ...]:
        """Call the model with hollow layers and, of the embedding, with the rows of the used tokens only."""
        embedding = self._anatomy.embedding
        embedding.weight = nn.Parameter(rows, requires_grad=False)
        hook = embedding.register_forward_pre_hook(
            lambda _, inputs: (torch.searchsorted(used, inputs[0]), *inputs[1:])
        )
        try:
            with torch.no_grad():
                return recorded(
                    lambda: self._anatomy.decoder(input_ids=tokens[None], use_cache=False),
                    self._anatomy.layers,
                    as_tuple=self._as_tuple,
                )
        finally:
            hook.remove()
            embedding.weight = nn.Parameter(rows.to("meta"), requires_grad=False)

    def _fill_outside(self, state: dict[str, torch.Tensor], device: torch.device) -> list[str]:
        """Fill what is around the layers; returns the buffers that nothing computes."""
        decoder = self._anatomy.decoder
        # Buffers first: computing them would start parameters anew that are there.
        left = compute_buffers(decoder, decoder, but=self._anatomy.word, device=device)
        decoder.load_state_dict(state, assign=True, strict=False)
        return left

    def _temporaries(self, every: Sequence[Parameter], length: int) -> int:
        config: Any = self._anatomy.decoder.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        widest = max(max(each.shape[-2:], default=1) for each in every)
        per_token = _HIDDEN_COPIES * self.width + _WIDE_COPIES * widest + _ATTENTION_COPIES * heads * length
        return torch.float32.itemsize * length * per_token

    def _refused(self, why: str) -> Problem:
        name = type(self._anatomy.decoder).__name__
        return Problem(
            self._base.name, f"transformers' {name} cannot be run layer by layer: {why}.", NO_PROMPTS_REMEDY
        )


def _random(shape: tuple[int, ...], numbers: torch.Generator) -> torch.Tensor:
    """Random numbers that lie over one another, so that large tensors take no memory."""
    return torch.randn(sum(shape) or 1, generator=numbers).as_strided(shape, (1,) * len(shape))


class Resident:
    """A layer that is in memory."""

    def __init__(self, module: nn.Module, feed_forward: Sequence[nn.Module], read_bytes: int) -> None:
        """
        Args:
            module: the layer.
            feed_forward: the modules in it that hold its feed-forward network.
            read_bytes: bytes read to fill it.
        """
        self.read_bytes = read_bytes
        self._module = module
        self._feed_forward = feed_forward

    def run(self, call: Call, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put one run's hidden states ``[T, hidden]`` through the layer.

        Returns:
            What comes out of the layer, and what its feed-forward network was given: both ``[T, hidden]``.
        """
        seen: list[torch.Tensor] = []

        def listen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Of a network in several pieces the first that runs is given what the network is given.
            if not seen:
                seen.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

        hooks = [each.register_forward_pre_hook(listen, with_kwargs=True) for each in self._feed_forward]
        try:
            with torch.no_grad():
                # A copy, as layers may add to what they are given.
                found = call.make(self._module, hidden[None].clone())
        finally:
            for hook in hooks:
                hook.remove()
        return found[0], seen[0].reshape(hidden.shape)
