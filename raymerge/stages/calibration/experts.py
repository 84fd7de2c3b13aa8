"""How much each expert of a mixture does for the texts it is run on (REAP, arXiv 2510.13999).

A layer's experts are run one at a time, on the tokens that chose them; the layer goes on with the sum of what
they give times the coefficients that its router gave."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raymerge.architectures.expert_fields import expert_fields
from raymerge.checkpoints.header import TensorSpec
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.calibration import routed_blocks
from raymerge.planner.inputs.sources import CalibrationSpec
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.planner.moe.expert_moves import dropping_order, sizes_of
from raymerge.stages.calibration.blocks import Block, Walk, Write, added, num_tokens
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import LayerStream, Purpose, ResidentLayer

SCORES = Purpose("Give the scores of its experts in a file.", runs_experts_alone=True)

FEW_TOKENS = 32
"""Tokens of an expert below which its mean says little."""

_CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
# What experts of transformers are called with.
_ADDED = ("weighted", "norm", "weight")


class ExpertStatistics:
    def __init__(self, spec: CalibrationSpec) -> None:
        self._spec = spec
        self._blocks = {block.layer: block for block in routed_blocks(spec.model)}
        fields = expert_fields(spec.model.checkpoint.config, spec.model.rules)
        self._chosen = fields.chosen.value if fields is not None and fields.chosen is not None else 0
        self._num_groups = fields.num_groups if fields is not None else 1

    @property
    def purpose(self) -> Purpose:
        return SCORES

    @property
    def num_blocks(self) -> None:
        return None

    def check(self, stream: LayerStream) -> None:
        model, problems = self._spec.model, []
        if not self._chosen:
            what = "its config does not say how many experts a token chooses."
            problems.append(Problem(model.name, what, SCORES.remedy))
        modules = stream.modules()
        for layer, block in self._blocks.items():
            module = experts_of(modules[layer], block.num_experts)
            if module is None:
                what = f"transformers' {type(modules[layer]).__name__} has no experts that are called one by "
                what += f"one with the tokens that chose them (layer {layer})."
                problems.append(Problem(model.name, what, SCORES.remedy))
                break
        if problems:
            raise PlanError(problems)

    def sums(self, block: Block) -> Sequence[TensorSpec]:
        return [spec for each in self._blocks.values() for spec in self._of_layer(each, num_tokens(block))]

    def _of_layer(self, block: ExpertBlock, count: int) -> Iterator[TensorSpec]:
        for name in (*_ADDED, "largest"):
            yield TensorSpec(f"{name}.{block.layer}", DType.F64, (block.num_experts,))
        yield TensorSpec(f"count.{block.layer}", DType.I64, (block.num_experts,))
        yield TensorSpec(f"chosen.{block.layer}", DType.I16, (count, self._chosen))

    def own_nbytes(self, blocks: Sequence[Block], stream: LayerStream) -> int:  # noqa: ARG002
        """Chosen experts of all tokens and their ranks in order, of one layer."""
        tokens = max(sum(map(num_tokens, blocks)), 1)
        return tokens * self._chosen * 4 * torch.int64.itemsize

    def num_kept(self, stream: LayerStream) -> int:  # noqa: ARG002
        return 0

    def collect(self, walk: Walk, write: Write) -> int:
        @contextmanager
        def watch(layer: ResidentLayer) -> Iterator[None]:
            block = self._blocks.get(layer.number)
            if block is None:
                yield
                return
            figures = _Figures(block, walk, layer)
            with figures.collecting():
                yield
            for name, values in figures.sums(self._chosen):
                write(f"{name}.{block.layer}", values)

        return walk.read(watch=watch)

    def conclude(self, units: Sequence[TensorFile], result: TensorFile) -> Mapping[str, object]:
        layers = []
        for layer, block in self._blocks.items():
            weighted, norm, weight = (added(units, f"{name}.{layer}") for name in _ADDED)
            count = added(units, f"count.{layer}")
            largest = torch.stack([unit.read(f"largest.{layer}") for unit in units]).amax(0)
            often = count.clamp_min(1)
            saliency = weighted / often
            order = dropping_order(saliency.tolist(), self._num_groups)
            chosen = torch.cat([unit.read(f"chosen.{layer}") for unit in units])
            lost = tokens_lost(chosen, order)
            figures = {"saliency": saliency, "count": count, "norm": norm / often, "weight": weight}
            for name, values in {**figures, "largest": largest, "lost": lost}.items():
                result.write(f"{block.canonical}.experts.{name}", values)
            own = {"layer": layer, "saliency": saliency.tolist()}
            layers.append({**own, **_risks(count, weight[order], lost)})
        mtp = routed_blocks(self._spec.model, are_mtp=True)
        # The model may be gone when its experts are chosen again.
        sizes = sizes_of(self._spec.model, mtp) if mtp else {}
        facts = {"sizes": sizes, "num_groups": self._num_groups, "few_below": FEW_TOKENS}
        return {"layers": layers, **facts}


def tokens_lost(chosen: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """How many tokens have chosen none but the first n experts of an order: int64 ``[E + 1]`` by n.
    ``chosen``: ``[tokens, k]``."""
    ranks = torch.empty(len(order), dtype=torch.int64)
    ranks[torch.tensor(order)] = torch.arange(len(order))
    last = ranks[chosen.long()].amax(1)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(last, minlength=len(order))]).cumsum(
        0
    )


def _risks(count: torch.Tensor, weight: torch.Tensor, lost: torch.Tensor) -> Mapping[str, object]:
    """``weight``: in the order in which experts go."""
    shares = weight.cumsum(0) / weight.sum()
    return {
        "never": int((count == 0).sum()),
        "few": int(((count > 0) & (count < FEW_TOKENS)).sum()),
        "shares": [0.0, *shares.tolist()],
        "lost": lost.tolist(),
    }


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


class _Figures:
    """Sums over the tokens of a block at one layer."""

    def __init__(self, block: ExpertBlock, walk: Walk, layer: ResidentLayer) -> None:
        experts = experts_of(layer.module, block.num_experts)
        assert experts is not None
        self._experts = experts
        self._path = next(name for name, each in layer.module.named_modules() if each is experts)
        self._walk = walk
        self._layer = layer
        self._sums = torch.zeros(len(_ADDED) + 1, block.num_experts, dtype=torch.float64)
        self._count = torch.zeros(block.num_experts, dtype=torch.int64)
        self._chosen: list[torch.Tensor] = []
        self._is_tried = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
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
        self._chosen.append(chosen.to(torch.int16).cpu())
        for number in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == number)
            weights = coefficients[tokens, places]
            given = self._run(number, hidden[tokens])
            self._add(number, given, weights.double())
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
            raise PlanError(Problem(self._walk.model.name, what, SCORES.remedy))

    def _add(self, number: int, given: torch.Tensor, weights: torch.Tensor) -> None:
        norms = torch.linalg.vector_norm(given, dim=1, dtype=torch.float64)
        self._walk.check(norms, self._layer.batch, f"expert {number} of layer {self._layer.number}")
        own = torch.stack([(weights * norms).sum(), norms.sum(), weights.sum()]).cpu()
        self._sums[:-1, number] += own
        self._sums[-1, number] = max(float(self._sums[-1, number]), float(given.abs().max()))
        self._count[number] += len(given)

    def sums(self, chosen: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from zip((*_ADDED, "largest"), self._sums, strict=True)
        yield "count", self._count
        every = torch.cat(self._chosen)
        if every.shape[1] != chosen:
            what = (
                f"layer {self._layer.number} sends a token to {every.shape[1]} experts, and its config says "
            )
            raise PlanError(Problem(self._walk.model.name, f"{what}{chosen}.", SCORES.remedy))
        yield "chosen", every
