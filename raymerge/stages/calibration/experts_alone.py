"""Experts of a layer, run one at a time on the tokens that chose them, so that one alone has to be in memory.

The layer goes on with the sum of what they give times the coefficients of its router."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raymerge.deferred import torch
from raymerge.errors import PlanError, Problem
from raymerge.stages.calibration.blocks import Walk
from raymerge.stages.streamed_model import ResidentLayer

_CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
# What experts of transformers are called with.


def experts_of(layer: torch.nn.Module, num_experts: int) -> torch.nn.Module | None:
    """The module of a layer that computes its experts, all of them in one call; None if there is none that is
    known."""
    for module in layer.modules():
        parameters = module._parameters.values()
        if not parameters or not all(each is not None and len(each) == num_experts for each in parameters):
            continue
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if names in _CALLS and getattr(module, "num_experts", None) == num_experts:
            return module
    return None


def _alone(experts: torch.nn.Module, number: int, layer: ResidentLayer, path: str) -> Any:
    """A module of one expert, in the same memory, or loaded. ``path``: of ``experts`` in the layer."""
    alone: Any = copy.copy(experts)
    alone._parameters = {}
    for name, every in experts._parameters.items():
        assert every is not None
        own = layer.load_one(f"{path}.{name}", number) if every.is_meta else every[number : number + 1]
        alone._parameters[name] = torch.nn.Parameter(own, requires_grad=False)
    alone.__dict__.pop("forward", None)
    alone.num_experts = 1
    return alone


class ExpertsAlone:
    """Runs the experts of one layer."""

    def __init__(self, num_experts: int, walk: Walk, layer: ResidentLayer, remedy: str) -> None:
        """``remedy``: where a family does more with a coefficient than to multiply."""
        experts = experts_of(layer.module, num_experts)
        assert experts is not None
        self._experts = experts
        self._path = next(name for name, each in layer.module.named_modules() if each is experts)
        self._walk = walk
        self._layer = layer
        self._remedy = remedy
        self._is_tried = False

    def on_choice(self, chosen: torch.Tensor) -> None:
        """Is called with the chosen experts of a batch's tokens, ``[n, k]``."""

    def on_expert(self, number: int, given: torch.Tensor, weights: torch.Tensor) -> None:
        """Is called with what an expert gives for the tokens that chose it, ``[n, hidden]``, and their
        coefficients, ``[n]``."""

    @contextmanager
    def running(self) -> Iterator[None]:
        signature = inspect.signature(type(self._experts).forward)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            _, *given = signature.bind(self._experts, *args, **kwargs).arguments.values()
            return self._forward(*given)

        self._experts.forward = forward
        try:
            yield
        finally:
            del self._experts.forward

    def _forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        self.on_choice(chosen)
        for number in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == number)
            weights = coefficients[tokens, places]
            given = self._run(number, hidden[tokens])
            self.on_expert(number, given, weights)
            output.index_add_(0, tokens, given * weights[:, None])
        return output

    def _run(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        one = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        ones = torch.ones_like(one, dtype=hidden.dtype)
        alone = _alone(self._experts, number, self._layer, self._path)
        given: torch.Tensor = alone(hidden, one, ones)
        if not self._is_tried:
            self._try(alone(hidden[:1], one[:1], 2 * ones[:1]), 2 * given[:1])
        return given

    def _try(self, weighted: torch.Tensor, expected: torch.Tensor) -> None:
        """Whether what an expert gives is multiplied with its coefficient."""
        self._is_tried = True
        if not torch.allclose(weighted, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            what = (
                f"{type(self._experts).__name__} does other things with a coefficient than to multiply what "
            )
            what += f"an expert gives (layer {self._layer.number})."
            raise PlanError(Problem(self._walk.model.name, what, self._remedy))
