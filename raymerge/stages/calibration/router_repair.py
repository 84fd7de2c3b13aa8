"""Routers of a merge of mixtures, repaired layer by layer on the merge's own inputs (HARC, arXiv 2606.03391).

The merge runs on the texts of all domains. At each layer with a router the layer is run as far as the
router, whose inputs are kept; the router is solved for, takes its place in the layer that is in memory, and
the layer is run whole: each router is solved on what the repaired ones below it give.

One unit walks all of the model, as each layer needs the one before it: the work is done by one worker, and
begins anew when it is stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

from raymerge.checkpoints.json_files import attempt
from raymerge.deferred import torch
from raymerge.device_numerics import full_float32
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import RESULT_FILE, RepairSpec, RouterPlace, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.router_repair import KIND
from raymerge.stages.calibration.blocks import Block, Walk, blocks_of, num_tokens
from raymerge.stages.calibration.experts_alone import ExpertsAlone, experts_of
from raymerge.stages.calibration.router_solver import Domain, Scoring, solve_router, solver_nbytes
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import (
    LayerLeft,
    LayerStream,
    Parameter,
    Purpose,
    ResidentLayer,
    kept_nbytes,
    spill_directory,
)
from raymerge.stages.texts import Text, TextReader
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

REPAIR = Purpose("Write 'router: merge'.")
ALONE = Purpose(REPAIR.remedy, runs_experts_alone=True)
_REPORT = "layers.json"
_ROWS_AT_ONCE = 4096
# Tokens whose experts are chosen at once, for the report.


@dataclass(frozen=True, slots=True)
class LayerReport:
    layer: int
    iterations: int
    residual: float
    is_converged: bool
    before: tuple[float, ...]
    """By domain: the share of the experts that the source's own router chooses for a token that the merge's
    chooses too, as it was merged."""
    after: tuple[float, ...]
    """As ``before``, as it is repaired."""


class RepairWork:
    """Texts are read where it is made, and travel as tokens."""

    def __init__(self, stage: Stage, spec: RepairSpec, texts: Sequence[Text] | None = None) -> None:
        self._stage = stage
        self.spec = spec
        self._given = texts

    def __reduce__(self) -> tuple[type[RepairWork], tuple[Stage, RepairSpec, Sequence[Text]]]:
        return type(self), (self._stage, self.spec, self._texts)

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text.path for own in self.spec.texts for text in own))

    @cached_property
    def _texts(self) -> Sequence[Text]:
        """Each once, whichever domains it belongs to."""
        if self._given is not None:
            return self._given
        spec = self.spec
        reader = TextReader(spec.merged, length=spec.length, num_tokens=spec.num_tokens, judges_all=True)
        return reader.read_planned([*{text.path: text for own in spec.texts for text in own}.values()])

    @cached_property
    def _block(self) -> Block:
        (block,) = blocks_of(
            self._texts, most_tokens=sum(len(w.tokens) for t in self._texts for w in t.windows)
        )
        return block

    @cached_property
    def _stream(self) -> LayerStream:
        return LayerStream(self.spec.merged, ALONE if self.runs_alone else REPAIR)

    @cached_property
    def runs_alone(self) -> bool:
        """Whether experts are run one at a time, so that a layer need not fit into memory."""
        modules = LayerStream(self.spec.merged, ALONE).modules()
        routers = self.spec.routers
        return all(experts_of(modules[each.layer], each.shape[0]) is not None for each in routers)

    @property
    def num_units(self) -> int:
        return 1

    def costs(self) -> tuple[int, ...]:
        return (sum(tensor.nbytes for tensor in self.spec.merged.checkpoint.tensors.values()),)

    def least_budget(self) -> int:
        shapes = {batch.shape for batch in self._block}
        return max(map(self._stream.least_budget, shapes)) + self._own_nbytes

    @cached_property
    def _own_nbytes(self) -> int:
        """Bytes of memory for a router's inputs, twice while they are put together, and for solving."""
        experts, width = map(max, zip(*(router.shape for router in self.spec.routers), strict=True))
        counts = [sum(len(window.tokens) for window in text.windows) for text in self._texts]
        scored = sum(counts[text] for own in self.domains for text in own)
        return 2 * kept_nbytes(sum(counts), width + 1) + solver_nbytes(
            experts, width + 1, scored, len(self.domains)
        )

    @cached_property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the texts of each model; a text may belong to several."""
        return tuple(tuple(self._paths.index(text.path) for text in own) for own in self.spec.texts)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        del busy
        states = kept_nbytes(num_tokens(self._block), self._stream.width())
        return self._stage.layout.nbytes + (states if states > budget - self.least_budget() else 0)

    def check(self) -> None:
        problems: list[Problem] = []
        # Before the merge is made its tokenizer is not there.
        if self.spec.merged.checkpoint.unwritten is None:
            attempt(problems, lambda: self._texts, PlanError)
        attempt(problems, lambda: self.scorings, PlanError)
        if problems:
            raise PlanError(problems)

    @cached_property
    def scorings(self) -> Mapping[int, Scoring]:
        """By layer; raises PlanError where a router has none that is known."""
        modules, scorings = self._stream.modules(), dict[int, Scoring]()
        for router in self.spec.routers:
            module = modules[router.layer]
            found = router_module(module, self._stream.parameters(router.layer), router)
            scoring = None if found is None else scoring_of(found)
            if scoring is None:
                what = f"the router of layer {router.layer} ({type(found or module).__name__}) does not give "
                what += "experts by a softmax or a sigmoid of one matrix's products."
                raise PlanError(Problem(self._stage.place, what, REPAIR.remedy))
            scorings[router.layer] = scoring
        return scorings

    def unit(
        self,
        number: int,  # noqa: ARG002 - there is one
        *,
        staging: Path,
        device: torch.device,
        budget: int,
        tell: Callable[[int], None],
    ) -> tuple[int, int]:
        spec, names = self.spec, [text.name for text in self._texts]
        budget -= self._own_nbytes
        with ExitStack() as opened, full_float32():
            spill = opened.enter_context(spill_directory(staging, "spill-"))
            store = opened.enter_context(LocalStore(staging))
            result = TensorFile(store, RESULT_FILE, self._stage.layout)
            result.create()
            weights = [opened.enter_context(Weights(model)) for model in spec.models]
            walk = Walk(spec.merged, self._stream, self._block, names, device, budget, spill, tell)
            repair = _Repair(self, walk, weights, result)
            read = walk.read(watch=repair.watch)
            result.sync()
            reports = [asdict(each) for each in repair.reports]
            store.write_atomic(_REPORT, json.dumps(reports).encode())
        return read, result.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:  # noqa: ARG002 - there is one
        return {RESULT_FILE: (), _REPORT: ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        spec = self.spec
        counts = {text.name: sum(len(window.tokens) for window in text.windows) for text in self._texts}
        return {
            "kind": KIND,
            "merged": spec.merged.name,
            "domains": [
                {
                    "model": model.name,
                    "texts": [{**asdict(text), "tokens": counts[text.path]} for text in texts],
                }
                for model, texts in zip(spec.models, spec.texts, strict=True)
            ],
            "layers": json.loads((staging / _REPORT).read_bytes()),
        }


class _Repair:
    """Repairs the routers of the layers that it watches."""

    def __init__(self, work: RepairWork, walk: Walk, weights: Sequence[Weights], result: TensorFile) -> None:
        self.reports: list[LayerReport] = []
        self._routers = {router.layer: router for router in work.spec.routers}
        self._scorings = work.scorings
        self._runs_alone = work.runs_alone
        self._walk = walk
        self._weights = weights
        self._domains = work.domains
        self._result = result

    @contextmanager
    def watch(self, layer: ResidentLayer) -> Iterator[None]:
        router = self._routers.get(layer.number)
        if router is None:
            yield
            return
        self._repair(layer, router)
        with ExitStack() as running:
            if self._runs_alone:
                alone = ExpertsAlone(router.shape[0], self._walk, layer, REPAIR.remedy)
                running.enter_context(alone.running())
            yield

    def _repair(self, layer: ResidentLayer, router: RouterPlace) -> None:
        module = router_module(layer.module, layer.parameters, router)
        assert module is not None
        inputs = self._inputs(layer, module, router)
        states = [_state(layer.parameters, router, weights) for weights in self._weights]
        own = [[inputs[text] for text in texts] for texts in self._domains]
        domains = [
            Domain(each, _matrix(state, module).to(self._walk.device))
            for each, state in zip(own, states, strict=True)
        ]
        agreement = partial(_agreement, module, own, states)
        before = agreement()
        solution = solve_router(
            domains, _matrix(dict(module.named_parameters()), module), self._scorings[layer.number]
        )
        self._put(module, router, solution.router)
        report = (solution.num_iterations, solution.residual, solution.is_converged)
        self.reports.append(LayerReport(layer.number, *report, before, agreement()))

    def _inputs(self, layer: ResidentLayer, module: Any, router: RouterPlace) -> list[torch.Tensor]:
        """What the router is given, by text: float32 ``[n, D]``; one with a bias has ones behind."""
        texts: list[list[torch.Tensor]] = [[] for _ in self._walk.names]

        def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            batch = self._walk.block[layer.batch]
            given = (args[0] if args else kwargs["hidden_states"]).reshape(*batch.shape, router.shape[1])
            self._walk.check(given, layer.batch, f"what goes into the router of layer {layer.number}")
            for number, window in zip(batch.texts, given, strict=True):
                texts[number].append(window.clone())
            raise LayerLeft

        with module.register_forward_pre_hook(note, with_kwargs=True):
            layer.rehearse()
        every = [torch.cat(windows) for windows in texts]
        return [torch.nn.functional.pad(each, (0, 1), value=1.0) for each in every] if router.bias else every

    def _put(self, module: Any, router: RouterPlace, matrix: torch.Tensor) -> None:
        """Into the layer and the result: the numbers that the output will have."""
        parts = {"weight": matrix[:, : router.shape[1]]} | ({"bias": matrix[:, -1]} if router.bias else {})
        for name, part in parts.items():
            logical = router.weight if name == "weight" else router.bias
            rounded = part.to(self._result.dtype(logical))
            self._result.write(logical, rounded)
            module.get_parameter(name).copy_(rounded)


def router_module(
    layer: torch.nn.Module, parameters: Sequence[Parameter], router: RouterPlace
) -> torch.nn.Module | None:
    """The module of a layer that has the router's weight; None if there is none that has it by itself."""
    names = [each.name for each in parameters if [part[0] for part in each.parts] == [router.weight]]
    path, _, name = names[0].rpartition(".") if names else ("", "", "")
    return layer.get_submodule(path) if path and name == "weight" else None


def _state(parameters: Sequence[Parameter], router: RouterPlace, weights: Weights) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the router of another model, by their names in the module."""
    at = next(each.name for each in parameters if each.parts[0][0] == router.weight).removesuffix("weight")
    own = [each for each in parameters if each.name.startswith(at)]
    return {each.name.removeprefix(at): each.load(weights, torch.device("cpu")) for each in own}


def _matrix(state: Mapping[str, torch.Tensor], module: torch.nn.Module) -> torch.Tensor:
    """Weight and bias side by side: float64 ``[E, D]`` or ``[E, D + 1]``."""
    bias = [state["bias"][:, None]] if "bias" in dict(module.named_parameters()) else []
    return torch.cat([state["weight"], *bias], dim=1).double()


def _agreement(
    module: torch.nn.Module,
    domains: Sequence[Sequence[torch.Tensor]],
    states: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[float, ...]:
    """By domain, the share of the experts chosen by a source's router that the module chooses too."""
    shares = []
    for inputs, state in zip(domains, states, strict=True):
        common = count = 0
        for tokens in (part for each in inputs for part in torch.split(each, _ROWS_AT_ONCE)):
            here = tokens[:, : state["weight"].shape[1]]
            on = {name: value.to(here.device) for name, value in state.items()}
            theirs, ours = torch.func.functional_call(module, on, (here,))[2], module(here)[2]
            common += int((theirs[:, :, None] == ours[:, None]).sum())
            count += theirs.numel()
        shares.append(common / count)
    return tuple(shares)


class _Scorings(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[Scoring] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name: Any = getattr(func, "__name__", "").rstrip("_")
        if name in ("softmax", "sigmoid"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


_TRIAL_TOKENS = 5


def scoring_of(router: torch.nn.Module) -> Scoring | None:
    """How a router scores experts, tried on random numbers; None unless it is a linear map that goes through
    a softmax or a sigmoid, and answers with logits, weights and experts."""
    numbers = torch.Generator().manual_seed(0)
    trial: Any = copy.deepcopy(router).to_empty(device="cpu")
    with torch.no_grad(), _Scorings() as scorings:
        for value in trial.state_dict().values():
            value.copy_(torch.randn(value.shape, generator=numbers))
        tokens = torch.randn(_TRIAL_TOKENS, trial.weight.shape[1], generator=numbers)
        linear = torch.nn.functional.linear(tokens, trial.weight, getattr(trial, "bias", None))
        try:
            logits, _, experts = trial(tokens)
            is_linear = (
                torch.allclose(logits, linear, rtol=1e-4, atol=1e-4) and not experts.is_floating_point()
            )
        except Exception:  # what the code of a family raises is its own
            return None
    return next(iter(scorings.names)) if is_linear and len(scorings.names) == 1 else None
