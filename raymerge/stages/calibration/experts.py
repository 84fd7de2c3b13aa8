"""How much each expert of a mixture does for the texts it is run on (REAP, arXiv 2510.13999).

A layer's experts are run one at a time, on the tokens that chose them; the layer goes on with the sum of what
they give times the coefficients that its router gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from raymerge.architectures.expert_fields import expert_fields
from raymerge.checkpoints.header import TensorSpec
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.calibration import routed_blocks
from raymerge.planner.inputs.sources import CalibrationSpec
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.planner.moe.expert_moves import dropping_order, sizes_of
from raymerge.stages.calibration.blocks import FEW_TOKENS, Block, Walk, Write, added, num_tokens
from raymerge.stages.calibration.experts_alone import ExpertsAlone, experts_of
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import LayerStream, Purpose, ResidentLayer

SCORES = Purpose("Give the scores of its experts in a file.", runs_experts_alone=True)

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
            with figures.running():
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


class _Figures(ExpertsAlone):
    """Sums over the tokens of a block at one layer."""

    def __init__(self, block: ExpertBlock, walk: Walk, layer: ResidentLayer) -> None:
        super().__init__(block.num_experts, walk, layer, SCORES.remedy)
        self._sums = torch.zeros(len(_ADDED) + 1, block.num_experts, dtype=torch.float64)
        self._count = torch.zeros(block.num_experts, dtype=torch.int64)
        self._chosen: list[torch.Tensor] = []

    def on_choice(self, chosen: torch.Tensor) -> None:
        self._chosen.append(chosen.to(torch.int16).cpu())

    def on_expert(self, number: int, given: torch.Tensor, weights: torch.Tensor) -> None:
        weights = weights.double()
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
