"""What matrices are multiplied with before they are added, from the inputs that their models have for texts.

RegMean (arXiv 2212.09849): with the Gram matrix ``G_i`` of each source's inputs, what is off its diagonal
times alpha, and a ridge r, the merged matrix is ``sum W_i A_i``, ``A_i = (G_i + r I) (sum G_j + N r I)^-1``.
That is the least squares of ``W x - W_i x`` over all inputs, and of ``W - W_i`` where there are none.
RegMean++ (arXiv 2508.03121) takes the inputs of each layer behind merged layers."""

# ruff: noqa: ARG002 - a unit has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from raymerge.checkpoints.json_files import attempt
from raymerge.deferred import torch
from raymerge.device_numerics import full_float32
from raymerge.errors import NonFiniteError, PlanError, Problem, UserError
from raymerge.merge_plan.elements import torch_dtype
from raymerge.methods import combine
from raymerge.planner.inputs.sources import RESULT_FILE, CalibrationSpec, MixedMatrices, RegMeanSpec, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.calibration.blocks import FEW_TOKENS, Batch, added, blocks_of
from raymerge.stages.calibration.inputs import INPUTS, TOKENS, Grams, grams_nbytes, inputs_of
from raymerge.stages.calibration.work import CalibrationWork, texts_report
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import (
    Call,
    LayerStream,
    ResidentLayer,
    Shape,
    States,
    StreamedModel,
    check_finite,
    keep_states,
    kept_nbytes,
    spill_directory,
)
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

KIND = "regmean"

_COPIES = 5
# Matrices in float64 beside those of the sources while a system is solved.


def mixes_of(
    grams: Sequence[torch.Tensor], *, alpha: float, ridge: float, name: str = ""
) -> list[torch.Tensor]:
    """``N A_i - I`` for each of the Gram matrices, float32 ``[in, in]``. ``ridge``: relative to the mean of
    the diagonal of their mean; without any input, each ``A_i`` is ``I / N``.

    Raises UserError, which says ``name``: there is no solution, or the Gram matrices are not finite."""
    count, total = len(grams), torch.zeros_like(grams[0], dtype=torch.float64)
    # Sums in float32 are off by this share of the diagonal; beyond it, their rounding would be solved for.
    alpha = min(alpha, 1.0 / (1.0 + len(total) * torch.finfo(torch.float32).eps))
    scaled = []
    for gram in grams:
        own = gram.double()
        diagonal = own.diagonal().clone()
        own = own.mul_(alpha) if own is not gram else own * alpha
        own.diagonal().copy_(diagonal)
        total += own
        scaled.append(own)
    mean = float(total.diagonal().mean())
    if not math.isfinite(mean):
        what = "has inputs whose products are NaN or infinite."
        raise NonFiniteError(Problem(name, what, "Check the models' weights by `raymerge inspect`."))
    least = ridge * mean / count
    if not least:
        return [torch.zeros_like(each, dtype=torch.float32) for each in scaled]
    total.diagonal().add_(count * least)
    factor, failed = torch.linalg.cholesky_ex(total)
    if failed:
        what = "has no solution for what its inputs are: they are too alike, or out of range."
        raise UserError(Problem(name, what, "Write a smaller 'alpha', or a larger 'ridge'."))
    mixes = []
    for own in scaled:
        own.diagonal().add_(least)
        # The transpose of A_i, as both factors are symmetric.
        turned = torch.cholesky_solve(own, factor).mul_(count)
        turned.diagonal().sub_(1.0)
        mixes.append(turned.T.float().contiguous())
    return mixes


def _mixes(mixed: MixedMatrices, grams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return mixes_of(grams, alpha=mixed.alpha, ridge=mixed.ridge, name=mixed.name)


def regmean_work(stage: Stage, spec: RegMeanSpec) -> MeasuredWork | SequentialWork:
    return (SequentialWork if spec.is_sequential else MeasuredWork)(stage, spec)


Works: TypeAlias = tuple[CalibrationWork | None, ...]


class _Work:
    def __init__(self, stage: Stage, spec: RegMeanSpec, works: Works | None = None) -> None:
        """``works``: those of each source's statistics; None for what was made before."""
        self._stage = stage
        self._spec = spec
        self._works = works if works is not None else tuple(_works(spec))

    def __reduce__(self) -> tuple[type[_Work], tuple[Stage, RegMeanSpec, Works]]:
        return type(self), (self._stage, self._spec, self._works)

    def _solve_nbytes(self) -> int:
        each = (len(m.grams) * 2 + _COPIES for m in self._spec.matrices)
        widths = (m.width for m in self._spec.matrices)
        return max(n * width**2 for n, width in zip(each, widths, strict=True)) * torch.float64.itemsize

    def _write(self, result: TensorFile, mixed: MixedMatrices, mixes: Sequence[torch.Tensor]) -> None:
        for position, mix in enumerate(mixes):
            result.write(mixed.mix(position), mix.T if mixed.is_turned else mix)

    def _report(self, few: Sequence[str]) -> dict[str, Any]:
        models = []
        for stage, work in zip(self._spec.statistics, self._works, strict=True):
            assert isinstance(stage.spec, CalibrationSpec)
            texts = [] if work is None else texts_report(stage.spec, work.texts)
            models.append({"model": stage.spec.model.name, "made_at": stage.made_at, "texts": texts})
        names = set(few)
        thin = [each for each in self._spec.matrices if not names.isdisjoint(each.grams)]
        return {
            "kind": KIND,
            "is_sequential": self._spec.is_sequential,
            "models": models,
            "inputs": len(self._spec.matrices),
            "matrices": sum(len(each.members) for each in self._spec.matrices),
            "few": list(few),
            "few_matrices": sum(len(each.members) for each in thin),
            "few_layers": sorted({each.layer for each in thin}),
            "few_below": FEW_TOKENS,
        }


def _works(spec: RegMeanSpec) -> Iterator[CalibrationWork | None]:
    for number, stage in enumerate(spec.statistics):
        assert isinstance(stage.spec, CalibrationSpec)
        yield None if stage.made_at else CalibrationWork(stage, stage.spec, prefix=f"{number}-")


class MeasuredWork(_Work):
    """Units of texts, which each source reads layer by layer; the end solves for every input."""

    @cached_property
    def _units(self) -> tuple[tuple[CalibrationWork, int], ...]:
        return tuple((work, n) for work in self._works if work is not None for n in range(work.num_units))

    @property
    def num_units(self) -> int:
        return len(self._units)

    def costs(self) -> tuple[int, ...]:
        return tuple(cost for work in self._works if work is not None for cost in work.costs())

    def least_budget(self) -> int:
        works = [work.least_budget() for work in self._works if work is not None]
        return max([*works, self._solve_nbytes()])

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        works = [each for each in zip(self._works, self._spec.statistics, strict=True) if each[0] is not None]
        sums = sum(
            work.staging_nbytes(budget=budget, busy=busy) - stage.layout.nbytes
            for work, stage in works
            if work is not None
        )
        return self._stage.layout.nbytes + sums

    def check(self) -> None:
        problems: list[Problem] = []
        for work, stage in zip(self._works, self._spec.statistics, strict=True):
            check = partial(_check_header, stage) if work is None else work.check
            attempt(problems, check, PlanError)
        if problems:
            raise PlanError(problems)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        work, own = self._units[number]
        return work.unit(own, staging=staging, device=device, budget=budget, tell=tell)

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        work, own = self._units[number]
        return work.files(own)

    def conclude(self, staging: Path) -> dict[str, Any]:
        few: list[str] = []
        with ExitStack() as stack:
            store = stack.enter_context(LocalStore(staging))
            read = [
                _Made(stack.enter_context(LocalStore(Path(stage.made_at))), stage)
                if work is None
                else _Summed(work.units(store))
                for work, stage in zip(self._works, self._spec.statistics, strict=True)
            ]
            result = TensorFile(store, RESULT_FILE, self._stage.layout)
            result.create()
            for mixed in self._spec.matrices:
                pairs = list(zip(mixed.models, mixed.grams, strict=True))
                grams = [read[model].gram(name) for model, name in pairs]
                few += [name for model, name in pairs if read[model].count(name) < FEW_TOKENS]
                self._write(result, mixed, _mixes(mixed, grams))
            result.sync()
        return self._report(few)


class _Summed:
    """Statistics of what units left."""

    def __init__(self, units: Sequence[TensorFile]) -> None:
        self._units = units
        self._tokens = added(units, TOKENS)

    def gram(self, name: str) -> torch.Tensor:
        return added(self._units, f"{name}.gram").div_(self._tokens)

    def count(self, name: str) -> int:
        return int(added(self._units, f"{name}.count"))


class _Made:
    """Statistics in a directory."""

    def __init__(self, store: LocalStore, stage: Stage) -> None:
        self._file = TensorFile(store, RESULT_FILE, stage.layout)

    def gram(self, name: str) -> torch.Tensor:
        return self._file.read(f"{name}.gram")

    def count(self, name: str) -> int:
        return int(self._file.read(f"{name}.count"))


def _check_header(stage: Stage) -> None:
    with LocalStore(Path(stage.made_at)) as store:
        if store.read(RESULT_FILE, 0, len(stage.layout.header)) == stage.layout.header:
            return
    what = "holds statistics of other inputs than this version of raymerge takes of the model."
    raise PlanError(Problem(stage.made_at, what, "Make them again by 'raymerge calibrate'."))


class MergedWeights(Weights):
    """The merged model: the mean of the sources, with what their matrices are multiplied with so far."""

    def __init__(self, spec: RegMeanSpec) -> None:
        first, *others = spec.sources
        super().__init__(first)
        self._others = [Weights(each) for each in others]
        self._dtype = None if spec.dtype is None else torch_dtype(spec.dtype)
        self._turned = {name for each in spec.matrices if each.is_turned for name in each.members}
        self.mixes: dict[str, Sequence[torch.Tensor]] = {}

    def close(self) -> None:
        super().close()
        for each in self._others:
            each.close()

    def load(self, logical: str, *, device: torch.device | str = "cpu") -> torch.Tensor:
        weights = [super().load(logical, device=device)]
        weights += [each.load(logical, device=device) for each in self._others]
        for weight, mix in zip(weights, self.mixes.get(logical, ()), strict=False):
            own = mix.to(weight.device)
            weight += own.T @ weight if logical in self._turned else weight @ own
        return self._mean(logical, weights)

    def read_rows(self, logical: str, indices: Sequence[int], *, at_once: int = 1) -> torch.Tensor:
        rows = [super().read_rows(logical, indices, at_once=at_once)]
        rows += [each.read_rows(logical, indices, at_once=at_once) for each in self._others]
        return self._mean(logical, rows)

    def _mean(self, logical: str, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.stack([each.flatten() for each in weights])
        mean = combine.combine(flat, [1.0 / len(weights)] * len(weights), None).view(weights[0].shape)
        dtype = self._dtype or torch_dtype(self._find_input(logical).place.tensor.dtype)
        return mean.to(dtype).float()


_REPORT = "few.json"


class SequentialWork(_Work):
    """One unit: every layer is measured in each source, solved, merged and run before the next."""

    @cached_property
    def _batches(self) -> tuple[tuple[Batch, ...], ...]:
        every = [blocks_of(work.texts, most_tokens=1 << 62) for work in self._works if work is not None]
        return tuple(batch for (batch,) in every)

    @cached_property
    def _names(self) -> list[list[str]]:
        """Of the texts of each source."""
        return [[text.name for text in work.texts] for work in self._works if work is not None]

    @property
    def num_units(self) -> int:
        return 1

    def costs(self) -> tuple[int, ...]:
        sizes = (t.nbytes for source in self._spec.sources for t in source.checkpoint.tensors.values())
        return (2 * sum(sizes),)

    @cached_property
    def _stream(self) -> LayerStream:
        return LayerStream(self._spec.sources[0], INPUTS)

    @cached_property
    def _shapes(self) -> list[Shape]:
        return [batch.shape for own in self._batches for batch in own]

    def least_budget(self) -> int:
        return max(map(self._stream.least_budget, set(self._shapes))) + self._own_nbytes()

    def _own_nbytes(self) -> int:
        """Gram matrices of all sources for a layer, what is made of them, and the sources' weights."""
        specs = [stage.spec for stage in self._spec.statistics]
        inputs = [inputs_of(each) for each in specs if isinstance(each, CalibrationSpec)]
        grams = sum(grams_nbytes(tuple(dict.fromkeys(each.values()))) for each in inputs)
        tensors = self._spec.sources[0].checkpoint.tensors.values()
        largest = max(tensor.num_elements for tensor in tensors) * torch.float32.itemsize
        return 2 * grams + self._solve_nbytes() + 2 * (len(specs) + 1) * largest

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        return self._stage.layout.nbytes + self._states_nbytes()

    def _states_nbytes(self) -> int:
        width = self._stream.width()
        return sum(kept_nbytes(shape.num_tokens, width) for shape in self._shapes)

    def check(self) -> None:
        problems: list[Problem] = []
        for work in self._works:
            assert work is not None
            attempt(problems, work.check, PlanError)
        if problems:
            raise PlanError(problems)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        spare = budget - self.least_budget()
        fits = spare >= self._states_nbytes()
        spare -= self._states_nbytes() if fits else 0
        with ExitStack() as stack, full_float32(), torch.no_grad():
            spill = stack.enter_context(spill_directory(staging, "spill-"))
            store = stack.enter_context(LocalStore(staging))
            result = TensorFile(store, RESULT_FILE, self._stage.layout)
            result.create()
            walk = _Walk(self._spec, self._batches, self._names, stack, device, spare)
            few: list[str] = []
            with keep_states(self._shapes, walk.width, spill=None if fits else spill) as states:
                for mixed, mixes, counts in walk.layers(states, tell):
                    self._write(result, mixed, mixes)
                    few += [n for n, c in zip(mixed.grams, counts, strict=True) if c < FEW_TOKENS]
            result.sync()
            store.write_atomic(_REPORT, json.dumps(few).encode())
        return walk.read_bytes, result.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        return {RESULT_FILE: (), _REPORT: ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        return self._report(json.loads((staging / _REPORT).read_bytes()))


Solved: TypeAlias = "tuple[MixedMatrices, Sequence[torch.Tensor], Sequence[int]]"


class _Walk:
    """All sources and the merged model, one layer of one of them in memory at a time."""

    def __init__(
        self,
        spec: RegMeanSpec,
        batches: Sequence[Sequence[Batch]],
        names: Sequence[Sequence[str]],
        stack: ExitStack,
        device: torch.device,
        limit: int,
    ) -> None:
        """``batches`` and ``names`` of texts: of each source; ``limit``: bytes of memory for the arguments of
        layer calls, beyond those of one shape."""
        self._spec = spec
        self._batches = batches
        self._texts = [
            [own[text] for text in batch.texts]
            for own, some in zip(names, batches, strict=True)
            for batch in some
        ]
        self._device = device
        self._weights = MergedWeights(spec)
        stack.callback(self._weights.close)
        self._merged = StreamedModel(spec.sources[0], self._weights, INPUTS)
        self._models = [
            StreamedModel(source, stack.enter_context(Weights(source)), INPUTS) for source in spec.sources
        ]
        self.read_bytes = stack.enter_context(self._merged.opened(device))
        self._limit = limit
        self._calls: dict[Shape, tuple[Call, ...]] = {}

    @property
    def width(self) -> int:
        return self._merged.width

    def layers(self, states: States, tell: Callable[[int], None]) -> Iterator[Solved]:
        flat = [batch for own in self._batches for batch in own]
        for number, batch in enumerate(flat):
            hidden, nbytes = self._merged.embed(batch.tokens, self._device)
            self._check(hidden, number, "the embedding")
            states[number] = hidden.cpu()
            self.read_bytes += nbytes
        for layer in range(self._merged.num_layers):
            for mixed, mixes, counts in self._solved(layer, states):
                self._weights.mixes.update(dict.fromkeys(mixed.members, mixes))
                yield mixed, mixes, counts
            with self._resident(self._merged, layer):
                for number in range(len(flat)):
                    hidden = self._run(self._merged, layer, flat[number], states[number])
                    self._check(hidden, number, f"layer {layer}")
                    states[number] = hidden.cpu()
            self._weights.mixes.clear()
            tell(self.read_bytes)

    def _solved(self, layer: int, states: States) -> Iterator[Solved]:
        """What the matrices of a layer are multiplied with, and the tokens of each source."""
        grams = [self._measured(model, layer, states) for model in range(len(self._models))]
        for mixed in self._spec.matrices:
            if mixed.layer == layer:
                taken = [grams[m][name] for m, name in zip(mixed.models, mixed.grams, strict=True)]
                yield mixed, _mixes(mixed, [gram for gram, _ in taken]), [count for _, count in taken]

    def _measured(self, model: int, layer: int, states: States) -> dict[str, tuple[torch.Tensor, int]]:
        spec = self._spec.statistics[model].spec
        assert isinstance(spec, CalibrationSpec)
        first = sum(map(len, self._batches[:model]))
        with self._resident(self._models[model], layer) as resident:
            grams = Grams(spec.model, resident, inputs_of(spec))
            with grams.collecting():
                for number, batch in enumerate(self._batches[model], start=first):
                    hidden = self._run(self._models[model], layer, batch, states[number])
                    self._check(hidden, number, f"layer {layer}", model)
        tokens = sum(batch.shape.num_tokens for batch in self._batches[model])
        return {name: ((gram / tokens).cpu(), count) for name, gram, count in grams.sums()}

    def _check(self, values: torch.Tensor, batch: int, where: str, model: int | None = None) -> None:
        """As ``check_finite``; ``model``: None for what is merged."""
        names = [source.name for source in self._spec.sources]
        name = f"what is merged of {' and '.join(names)}" if model is None else names[model]
        check_finite(values, where, model=name, texts=self._texts[batch])

    @contextmanager
    def _resident(self, model: StreamedModel, layer: int) -> Iterator[ResidentLayer]:
        with model.resident(layer, self._device) as resident:
            self.read_bytes += resident.read_bytes
            yield resident

    def _run(self, model: StreamedModel, layer: int, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        shape = batch.shape
        if shape not in self._calls:
            # They are made anew where they would take more than there is.
            if sum(map(self._merged.call_bytes, (*self._calls, shape))) > self._limit:
                self._calls.clear()
            self._calls[shape] = self._merged.calls(shape, self._device)
        return model.run(layer, self._calls[shape][layer], hidden.to(self._device))[0]
