"""The parts of a model that is on the meta device: its layers, what is around them, and where tensors go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymerge.architectures import Role, describe
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.meta_model import NO_PROMPTS_REMEDY
from raymerge.stages.router.parameters import Parameter, ParameterFinder

_FEED_FORWARD = frozenset(
    {Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE}
)
_MOST_LISTED = 3
_STATE_SPACE = frozenset({"A_log", "D"})
# What a state space has, and linear attention has not both of.


@dataclass(frozen=True, slots=True)
class Anatomy:
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


def dissect(base: Source, model: Any, weights: Weights) -> Anatomy:
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
    return Anatomy(decoder, embedding, name, word, layers, outside, inside, feed_forward)


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
