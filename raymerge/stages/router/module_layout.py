"""The parts of a model that is on the meta device: its layers, what is around them, and where tensors go.

Which logical tensors of a checkpoint a parameter of transformers' model is made of.

A parameter is one tensor of the checkpoint by the same name, or many experts' matrices stacked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from raymerge.architectures import Role, describe, fused_layout, logical_name, logical_names
from raymerge.checkpoints.views import View, fused_views
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.elements import strided
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.meta_model import NO_PROMPTS_REMEDY


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or a buffer that is saved, and what fills it."""

    name: str
    """Its name within the part of the model that it is loaded into."""
    shape: tuple[int, ...]
    """Its shape."""
    parts: tuple[tuple[str, View | None], ...]
    """Logical tensors and where each lies within the parameter; None for one that is all of it."""

    @property
    def nbytes(self) -> int:
        """Its bytes in float32."""
        return prod(self.shape) * torch.float32.itemsize

    @property
    def loading_nbytes(self) -> int:
        """Bytes that are needed beside it while it is loaded."""
        longest = max(prod(view.shape) if view else prod(self.shape) for _, view in self.parts)
        # The stored numbers, and what an adapter adds; of a stack one matrix in float32 as well.
        return longest * torch.float32.itemsize * 2

    def load(self, weights: Weights, device: torch.device) -> torch.Tensor:
        """Its numbers: float32, of its shape.

        Raises:
            CheckpointError: they cannot be read.
        """
        if self.parts[0][1] is None:
            return weights.load(self.parts[0][0], device=device)
        found = torch.empty(self.shape, device=device)
        for logical, view in self.parts:
            assert view is not None
            strided(found.view(-1), view).copy_(weights.load(logical))
        return found

    def read_bytes(self, weights: Weights) -> int:
        """Stored bytes that loading reads."""
        return sum(weights.nbytes(logical) for logical, _ in self.parts)


class ParameterFinder:
    """Finds parameters of a model of transformers in a checkpoint of it."""

    def __init__(self, base: Source, weights: Weights, prefix: str) -> None:
        """
        Args:
            base: the checkpoint.
            weights: its tensors.
            prefix: beginning of names that a checkpoint of the bare model lacks, such as ``model.``.
        """
        self._base = base
        self._weights = weights
        self._names: Collection[str] = weights.names()
        self._prefix = prefix

    def find(self, path: str, name: str, tensor: torch.Tensor) -> Parameter | None:
        """The parameter ``name`` of the module at ``path``; None where the checkpoint has nothing for it."""
        shape = tuple(tensor.shape)
        for full in self._spellings(f"{path}{name}"):
            logical = logical_name(full, self._base.rules)
            if logical in self._names and self._weights.shape(logical) == shape:
                return Parameter(name, shape, ((logical, None),))
            stack = tuple(self._stack(full, shape))
            if stack and all(
                each in self._names and self._weights.shape(each) == view.shape for each, view in stack
            ):
                return Parameter(name, shape, stack)
        return None

    def embedding(self, name: str) -> str | None:
        """Logical name of the matrix that is the embedding ``name``, whatever its number of rows."""
        found = (logical_name(full, self._base.rules) for full in self._spellings(name))
        return next((logical for logical in found if logical in self._names), None)

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix and name.startswith(self._prefix):
            yield name.removeprefix(self._prefix)

    def _stack(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        layout = fused_layout(name, shape, self._base.checkpoint.config, self._base.rules)
        if layout is not None and layout.kind != "unknown":
            views = fused_views(layout.kind, shape, len(layout.projections), layout.num_experts)
            yield from zip(logical_names(layout), views, strict=True)


def state_of(
    parameters: Collection[Parameter], weights: Weights, device: torch.device
) -> dict[str, torch.Tensor]:
    """The parameters of one part of the model by their names in it, loaded."""
    return {each.name: each.load(weights, device) for each in parameters}


_FEED_FORWARD = frozenset(
    {Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE}
)
_MOST_LISTED = 3
_STATE_SPACE = frozenset({"A_log", "D"})
# What a state space has, and linear attention has not both of.


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """Where everything is."""

    decoder: Any
    """The model without its head: a model of transformers."""
    embedding: nn.Embedding
    """The module that tokens go into."""
    embedding_name: str
    """Logical name of its matrix."""
    word: str
    """Name of the list of layers in the decoder."""
    layers: Sequence[nn.Module]
    """The layers in order."""
    outside: tuple[Parameter, ...]
    """What the decoder has around its layers, by name within the decoder; the embedding not counted."""
    inside: tuple[tuple[Parameter, ...], ...]
    """What each layer has, by name within the layer."""
    feed_forward: tuple[tuple[str, ...], ...]
    """Paths in each layer of the modules that hold its feed-forward network."""


def dissect(base: Source, model: Any, weights: Weights) -> ModuleLayout:
    """Find the parts of the base's model.

    Args:
        base: the checkpoint.
        model: what ``bare_model`` made of it.
        weights: its tensors.

    Raises:
        PlanError: with all of the reasons why the checkpoint cannot be read layer by layer.
    """
    decoder, word = _decoder(base, model)
    layers = tuple(decoder.get_submodule(word))
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    finder = ParameterFinder(base, weights, f"{model.base_model_prefix}.")
    search = _Search(base, finder, f"{path}." if path else "")
    embedding = decoder.get_input_embeddings()
    name = search.embedding(decoder, embedding)
    inside = tuple(search.inside(f"{word}.{number}.", layer) for number, layer in enumerate(layers))
    outside = tuple(search.outside(decoder, embedding, word))
    feed_forward = tuple(search.feed_forward(number, layer) for number, layer in enumerate(layers))
    search.state_spaces(layers)
    search.finish(type(model).__name__)
    return ModuleLayout(decoder, embedding, name, word, layers, outside, inside, feed_forward)


class _Search:
    """What was looked for in vain so far."""

    def __init__(self, base: Source, finder: ParameterFinder, path: str) -> None:
        """
        Args:
            base: the checkpoint.
            finder: finds its tensors.
            path: beginning of the names of everything in the decoder.
        """
        self._base = base
        self._finder = finder
        self._path = path
        self._absent: list[str] = []
        self._lacking: list[int] = []
        self._scanning: list[int] = []

    def embedding(self, decoder: Any, embedding: Any) -> str:
        """Logical name of the embedding's matrix."""
        if not isinstance(embedding, nn.Embedding):
            what = f"what takes the tokens in {type(decoder).__name__} is no plain embedding."
            raise PlanError(Problem(self._base.name, what, NO_PROMPTS_REMEDY))
        inner = next(name for name, module in decoder.named_modules() if module is embedding)
        found = self._finder.embedding(f"{self._path}{inner}.weight")
        if found is None:
            self._absent.append(f"{self._path}{inner}.weight")
        return found or ""

    def inside(self, path: str, layer: nn.Module) -> tuple[Parameter, ...]:
        """What a layer at ``path`` within the decoder is made of."""
        return tuple(self._found(path, layer.state_dict()))

    def outside(self, decoder: Any, embedding: nn.Embedding, word: str) -> Iterator[Parameter]:
        """What the decoder has beside its embedding and its layers, which are called ``word``."""
        state = decoder.state_dict()
        names = [name for name in state if not name.startswith(f"{word}.")]
        owners = {name: decoder.get_submodule(name.rpartition(".")[0]) for name in names}
        yield from self._found("", {name: state[name] for name in names if owners[name] is not embedding})

    def feed_forward(self, layer: int, module: nn.Module) -> tuple[str, ...]:
        """Paths of the modules of a layer that hold its feed-forward network: one, or all of its pieces."""
        names = [name for name in module.state_dict() if self._is_feed_forward(layer, name)]
        paths = [tuple(name.split(".")[:-1]) for name in names]
        common = _common(paths)
        if common:
            return (".".join(common),)
        if not paths:
            self._lacking.append(layer)
        return tuple(dict.fromkeys(path[0] for path in paths if path))

    def state_spaces(self, layers: Sequence[nn.Module]) -> None:
        """Look for layers that scan the tokens with a state.

        As transformers computes it without kernels of its own, each token takes as much memory as the state
        is large, or many times that: more than a budget could be said to cover.
        """
        for number, layer in enumerate(layers):
            if any(module._parameters.keys() >= _STATE_SPACE for module in layer.modules()):
                self._scanning.append(number)

    def finish(self, architecture: str) -> None:
        """Tell of all that is wrong.

        Raises:
            PlanError: something is.
        """
        problems = []
        if self._lacking:
            layers = ", ".join(map(str, self._lacking))
            what = f"layers without a feed-forward network in whose place experts could come: {layers}."
            problems.append(Problem(self._base.name, what, NO_PROMPTS_REMEDY))
        if self._scanning:
            layers = ", ".join(map(str, self._scanning))
            what = f"layers with a state space ({architecture}), whose memory cannot be foretold: {layers}."
            problems.append(Problem(self._base.name, what, NO_PROMPTS_REMEDY))
        if self._absent:
            listed = ", ".join(self._absent[:_MOST_LISTED]) + (", ..." if self._absent[_MOST_LISTED:] else "")
            what = f"{len(self._absent)} tensors of {architecture} are not in it by name and shape: {listed}."
            remedy = f"Save it with transformers' save_pretrained and name the result. {NO_PROMPTS_REMEDY}"
            problems.append(Problem(self._base.name, what, remedy))
        if problems:
            raise PlanError(problems)

    def _is_feed_forward(self, layer: int, name: str) -> bool:
        return describe(f"layers.{layer}.{name}", self._base.rules).part in _FEED_FORWARD

    def _found(self, path: str, state: Mapping[str, torch.Tensor]) -> Iterator[Parameter]:
        for name, tensor in state.items():
            found = self._finder.find(f"{self._path}{path}", name, tensor)
            if found is None or not tensor.is_floating_point():
                self._absent.append(f"{self._path}{path}{name}")
            else:
                yield found


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The words that all paths begin with."""
    first = min(paths, default=())
    # Between the first and the last in order lie all others.
    pairs = zip(first, max(paths, default=()), strict=False)
    return first[: next((place for place, (a, b) in enumerate(pairs) if a != b), len(first))]


def _decoder(base: Source, model: Any) -> tuple[Any, str]:
    """The model without its head, and the name of its list of layers.

    It is what the model calls its decoder, unless that is something else: then the first model within that
    has as many layers as the config says.

    Raises:
        PlanError: none has.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    main = base.layer_stack(None)
    word = main.prefix.rpartition(".")[2] if main is not None else ""
    for each in (model.get_decoder(), *model.modules()):
        lists = [
            name
            for name, module in each.named_children()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if hasattr(each, "get_input_embeddings") and (word in lists or len(lists) == 1):
            return each, word if word in lists else lists[0]
    what = f"its config speaks of {count} layers, and {type(model).__name__} has no one list of as many."
    raise PlanError(Problem(base.name, what, NO_PROMPTS_REMEDY))
