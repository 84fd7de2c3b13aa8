"""RegMean: matrices are multiplied before they are added, with what a stage makes of their inputs.

The merge is decided as a plain mean first. That tells which matrices are made by the method, and of what; the
stage is planned for these, and its results are then put into the decided operations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.dispositions import Disposition, Rule, Use
from raymerge.merge_plan.expressions import Gather, GatherInput, Op, Output, Part, Product, Read, gathered
from raymerge.methods.regmean import REGMEAN
from raymerge.planner.calibration import calibration_stage, given_statistics
from raymerge.planner.inputs.quantised import CONVERT_FIRST
from raymerge.planner.inputs.sources import MixedMatrices, RegMeanSpec, Source, Stage, holdings, make_stage
from raymerge.planner.linear_inputs import LinearInput, linear_inputs
from raymerge.planner.matching.input_resolver import ResolvedInput, whole_read
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.outputs.build import Decided, decide_merge
from raymerge.recipes.calibration import Calibrate
from raymerge.recipes.schema import Recipe

_Bytes = tuple[str, int, int, object]


class _Merged(NamedTuple):
    """A matrix that the method makes, and what is read for it."""

    part: Part
    reads: tuple[Read, ...]
    alpha: float
    ridge: float


def makes_by_regmean(recipe: Recipe) -> bool:
    named = (recipe.merge_method, *(rule.merge_method for rule in recipe.methods))
    return REGMEAN.name in named and recipe.adapter is None


def regmean_stages(recipe: Recipe, sources: Sequence[Source], *, version: str) -> tuple[Stage, ...]:
    """The stage that makes what matrices are multiplied with; none where all that the method makes are means.

    Raises:
        PlanError: a source cannot be used so, or its statistics cannot be made; or there is no plan."""
    decided = decide_merge(recipe, sources)
    if problems := [*decided.findings.problems(), *_refused(recipe, decided)]:
        raise PlanError(problems)
    if recipe.align:
        what = "the experts of a model are brought into another order, and its inputs are those of its own."
        raise PlanError(
            Problem(recipe.where("align"), what, "Align the models first, in a merge of its own.")
        )
    finder = _InputFinder(decided.sources)
    matrices = tuple({each.name: each for each in finder.mixed(decided.outputs).values()}.values())
    if not matrices:
        return ()
    calibrate = recipe.calibrate or Calibrate()
    is_sequential = calibrate.model == "merged"
    models = sorted({model for each in matrices for model in each.models})
    if is_sequential and (problems := list(_not_sequential(recipe, decided, models))):
        raise PlanError(problems)
    statistics = tuple(
        _statistics(recipe, replace(sources[model], prepared=()), calibrate, matrices, model, version)
        for model in models
    )
    placed = [replace(m, models=tuple(models.index(each) for each in m.models)) for m in matrices]
    tensors = [
        TensorSpec(each.mix(position), DType.F32, (each.width, each.width))
        for each in placed
        for position in range(len(each.models))
    ]
    name = f"@{REGMEAN.name}" if recipe.name is None else f"@{REGMEAN.name}-{recipe.name}"
    way = "RegMean++" if is_sequential else "RegMean"
    stage = make_stage(
        name=name,
        title=f"what {len(placed)} inputs say of {len(models)} models ({way})",
        place=recipe.where("merge_method"),
        spec=RegMeanSpec(statistics, tuple(placed), is_sequential, recipe.out_dtype or recipe.dtype),
        tensors=tensors,
        version=version,
    )
    return (stage,)


def _statistics(
    recipe: Recipe,
    source: Source,
    calibrate: Calibrate,
    matrices: Sequence[MixedMatrices],
    model: int,
    version: str,
) -> Stage:
    position, entry = next(
        ((n, each) for n, each in enumerate(recipe.models) if each.model == source.reference), (0, None)
    )
    if entry is not None and entry.statistics is not None:
        place = recipe.where("models", position, "statistics")
        return given_statistics("inputs", source, entry.statistics, place=place)
    pairs = [pair for each in matrices for pair in zip(each.models, each.grams, strict=True)]
    only = tuple(dict.fromkeys(gram for taken, gram in pairs if taken == model))
    texts = () if entry is None else entry.texts
    place = recipe.where("calibrate" if recipe.calibrate else "merge_method")
    if texts:
        place = recipe.where("models", position, "texts")
    length_place = recipe.where("calibrate", "length")
    return calibration_stage(
        "inputs",
        source,
        calibrate,
        place=place,
        version=version,
        texts=texts,
        only=only,
        length_place=length_place,
    )


def _refused(recipe: Recipe, decided: Decided) -> Iterator[Problem]:
    """Sources whose matrices are not stored as plain numbers alone."""
    place, seen = recipe.where("merge_method"), set[tuple[int, str]]()
    for merged in _merged(decided.outputs):
        for read in merged.reads:
            first = read if read.gather is None else read.gather.inputs[0].read
            has_product = read.gather is not None and any(each.product for each in read.gather.inputs)
            kind = "codes" if read.scales or first.scales else "adapter" if has_product else ""
            if not kind or (read.source, kind) in seen:
                continue
            seen.add((read.source, kind))
            name = holdings(decided.sources)[read.source].name
            if kind == "codes":
                what = f"{name} holds {merged.part.logical} as codes, and regmean multiplies plain numbers."
                yield Problem(place, what, CONVERT_FIRST)
            else:
                what = f"{name} has an adapter laid over {merged.part.logical}, and regmean multiplies "
                what += "what is stored."
                remedy = "Merge the adapter into its model first (merge_method: passthrough), and name that."
                yield Problem(place, what, remedy)


def _not_sequential(recipe: Recipe, decided: Decided, models: Sequence[int]) -> Iterator[Problem]:
    """What keeps merged layers from being made while the stage runs, which has the method alone."""
    place = recipe.where("calibrate", "model")
    others = {op.expression.method for output in decided.outputs for op in output.ops}
    others -= {REGMEAN.name, "copy"}
    remedy = "Write 'model: source', or have regmean make all tensors of models as they are."
    if others:
        what = f"merged layers are run while their inputs are measured, and {', '.join(sorted(others))} "
        yield Problem(place, f"{what}makes some of their tensors.", remedy)
    elif others_made := [*_made_otherwise(decided, models)]:
        output, sources = others_made[0]
        held = holdings(decided.sources)
        names = " and ".join(held[each].name for each in dict.fromkeys(sources))
        what = "merged layers are run as regmean makes them of each model once, in the models' order; "
        what += f"{len(others_made)} of their tensors, such as {output}, which is made of {names}, are not."
        yield Problem(place, what, remedy)
    for key in ("slices", "modules", "tokenizer", "tokenizer_source"):
        if getattr(recipe, key, None):
            yield Problem(place, f"merged layers are run, and '{key}' makes another model of them.", remedy)
    for position, entry in enumerate(recipe.models):
        if entry.statistics is not None:
            what = "statistics of the model itself say nothing of its inputs behind merged layers."
            yield Problem(recipe.where("models", position, "statistics"), what, "Give its 'texts'.")


def _made_otherwise(decided: Decided, models: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Outputs, but for kept buffers, that are not made of each model once: their names, and of what."""
    entries = decided.dispositions.entries()
    kept = {each.output for _, _, each in entries if each.rule is Rule.COPIED_FROM_LEAD}
    for output in decided.outputs:
        for op in () if output.name in kept else output.ops:
            sources = tuple(read.source for read in op.reads)
            if sources != tuple(models) * len(op.parts):
                yield output.name, sources
                break


def _merged(outputs: Sequence[Output]) -> Iterator[_Merged]:
    for output in outputs:
        for op in output.ops:
            yield from (merged for merged in _parts(op) if merged is not None)


def _parts(op: Op) -> Iterator[_Merged | None]:
    """Each part of an operation as a matrix that the method makes; None for what is none."""
    count = len(op.reads) // max(1, len(op.parts))
    values = json.loads(op.expression.settings)["values"] if op.expression.method == REGMEAN.name else {}
    for number, part in enumerate(op.parts):
        reads = op.reads[number * count : (number + 1) * count]
        is_matrix = bool(values) and len(part.shape) == 2
        yield _Merged(part, reads, values["alpha"], values["ridge"]) if is_matrix else None


class _InputFinder:
    """Finds the inputs of what is read."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._inputs = [linear_inputs(source) for source in sources]
        self._logical = [self._by_place(source) for source in sources]

    def _by_place(self, source: Source) -> Mapping[_Bytes, str]:
        logical = LogicalTensors(source)
        places = ((name, logical.find(name)) for name in logical.names())
        return {_bytes(ResolvedInput(source.index, place).read(0)): name for name, place in places if place}

    def mixed(self, outputs: Sequence[Output]) -> Mapping[str, MixedMatrices]:
        """The matrices that are multiplied, by logical name; those with one input in all sources together."""
        groups: dict[MixedMatrices, list[str]] = {}
        for merged in _merged(outputs):
            if found := self._found(merged):
                unnamed = MixedMatrices(
                    name="",
                    members=(),
                    models=tuple(read.source for read in merged.reads),
                    grams=tuple(each.name for each in found),
                    width=found[0].width,
                    layer=found[0].layer,
                    is_turned=found[0].is_turned,
                    alpha=merged.alpha,
                    ridge=merged.ridge,
                )
                groups.setdefault(unnamed, []).append(merged.part.logical)
        return {
            member: replace(unnamed, name=members[0], members=tuple(members))
            for unnamed, members in groups.items()
            for member in members
        }

    def _found(self, merged: _Merged) -> tuple[LinearInput, ...]:
        """The input in each source; empty where some has none, or they are of different kinds."""
        found: list[LinearInput] = []
        for read in merged.reads:
            own = read if read.gather is None else read.gather.inputs[0].read
            name = self._logical[read.source].get(_bytes(own)) if read.source < len(self._inputs) else None
            given = None if name is None else self._inputs[read.source].get(name)
            if given is None or (given.is_turned and own.view is not None):
                return ()
            found.append(given)
        is_alike = len({(each.width, each.is_turned) for each in found}) == 1
        return tuple(found) if is_alike else ()


def _bytes(read: Read) -> _Bytes:
    own = read if read.gather is None else read.gather.inputs[0].read
    return own.key, own.offset, own.nbytes, own.view


def with_mixes(decided: Decided) -> Decided:
    """The merge with its matrices multiplied by what the stage makes; as it is where there is no stage."""
    held = holdings(decided.sources)
    prepared = [(source, each) for source in decided.sources for each in source.prepared]
    stage = next((each for _, each in prepared if isinstance(each.stage.spec, RegMeanSpec)), None)
    if stage is None:
        return decided
    store = next(index for index, each in enumerate(held) if each is stage)
    mixed = _InputFinder(decided.sources).mixed(decided.outputs)
    mixing = _Mixing(store, stage.tensors, mixed)
    outputs = tuple(mixing.output(each) for each in decided.outputs)
    for name, output in mixing.used.items():
        decided.dispositions.settle(store, name, Disposition(Use.MERGED, Rule.METHOD, output))
    means = sum(each.name not in mixing.made and _is_mean(each) for each in decided.outputs)
    note = f"{REGMEAN.name}: {len(mixed)} matrices are fitted to their inputs; {means} tensors without "
    note += "measured inputs (norms, embeddings, biases, routers and the like) are the mean."
    return replace(decided, outputs=outputs, notes=(*decided.notes, note))


def _is_mean(output: Output) -> bool:
    return any(op.expression.method == REGMEAN.name for op in output.ops)


class _Mixing:
    def __init__(
        self, store: int, tensors: Mapping[str, StoredTensor], mixed: Mapping[str, MixedMatrices]
    ) -> None:
        self._store = store
        self._tensors = tensors
        self._mixed = mixed
        self.used: dict[str, str] = {}
        """By tensor of the stage's result, an output that it is used for."""
        self.made: set[str] = set()

    def output(self, output: Output) -> Output:
        ops = tuple(self._op(op, output.name) for op in output.ops)
        return output if ops == output.ops else output._replace(ops=ops)

    def _op(self, op: Op, name: str) -> Op:
        count = len(op.reads) // max(1, len(op.parts))
        reads = list(op.reads)
        for number, merged in enumerate(_parts(op)):
            mixed = None if merged is None else self._mixed.get(merged.part.logical)
            if merged is None or mixed is None:
                continue
            self.made.add(name)
            for position, read in enumerate(merged.reads):
                tensor = self._tensors[mixed.mix(position)]
                self.used.setdefault(tensor.name, name)
                by = whole_read(self._store, tensor)
                reads[number * count + position] = _multiplied(read, merged.part, by, mixed)
        return op._replace(reads=tuple(reads))


def _multiplied(read: Read, part: Part, by: Read, mixed: MixedMatrices) -> Read:
    rows, columns = part.shape
    gather = read.gather
    own = read if gather is None else gather.inputs[0].read
    plain = own._replace(part=0)
    product = Product(by, plain, mixed.width, 1.0) if mixed.is_turned else Product(None, by, columns, 1.0)
    runs = ((0, 0, rows, 0),) if gather is None else gather.runs
    return gathered(read.part, Gather(rows, columns, (GatherInput(plain, rows, product),), runs, rows))
