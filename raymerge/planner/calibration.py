"""Statistics of what a model computes for texts, decided before the model is run: what goes in, and the names
and shapes of what comes out.

By kind the result has, by canonical names:

- ``experts``: for the experts of each layer, by their path, what ``EXPERT_FIGURES`` says, ``[E]`` each; and
  ``.lost`` int64 ``[E + 1]``, the tokens whose experts all are among the n that are dropped first.
- ``inputs``: for each input that matrices of a layer are multiplied with, by the first of them,
  ``{matrix}.gram`` float32 ``[in, in]``, the sum of ``x x^T`` over the tokens that it has an input for,
  divided by the number of all tokens; and ``.count`` int64 ``[1]``, the number of the former.
- ``fisher``: the information about each tensor of the text model, by its name and of its shape, float32."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from raymerge.architectures.expert_fields import expert_fields
from raymerge.architectures.rules import Role, config_int
from raymerge.checkpoints.header import StoredTensor, TensorSpec, lay_out
from raymerge.documents.fields import FieldPath
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Findings, PlanError, Problem
from raymerge.planner.inputs.quantised import in_numbers
from raymerge.planner.inputs.sources import (
    RESULT_FILE,
    STAGE_RECORD,
    CalibrationSpec,
    CalibrationText,
    Source,
    Stage,
    StatisticsKind,
    beside_weights,
    holdings,
    make_stage,
)
from raymerge.planner.linear_inputs import linear_inputs
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, expert_blocks
from raymerge.planner.parameter_check import check_recipe
from raymerge.recipes.calibration import Calibrate
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.order import references
from raymerge.recipes.schema import Recipe
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import ReadStore

KIND = "calibration"
"""Of the reports of statistics."""

EXPERT_FIGURES: Mapping[str, DType] = {
    "saliency": DType.F64,
    "count": DType.I64,
    "norm": DType.F64,
    "weight": DType.F64,
    "largest": DType.F64,
}
"""Of each expert: the mean of ``g |f|`` over the tokens that chose it (REAP, arXiv 2510.13999), their number,
the mean of ``|f|``, the sum of ``g``, and the largest magnitude in any ``f``; f is the expert's output and g
what the model multiplies it with."""


def calibration_stage(
    kind: StatisticsKind,
    model: Source,
    calibrate: Calibrate,
    *,
    place: str,
    version: str,
    texts: Sequence[str] = (),
    only: Sequence[str] = (),
    length_place: str = "--length",
) -> Stage:
    """The stage that runs a model on the texts of ``calibrate``, or on ``texts`` in their place; ``only`` as
    in the spec.

    ``place``: where in the recipe it is asked for, ``length_place`` the length. Raises PlanError: there are
    no texts, or they cannot be read, or the model has nothing of the kind or reads fewer tokens."""
    paths = tuple(texts or calibrate.texts)
    if not paths:
        what = f"statistics of {model.name} are needed, and no texts are named to run it on."
        raise PlanError(Problem(place, what, "Add 'calibrate: {texts: [FILE]}'."))
    digested = digested_texts(paths, place)
    check_length(calibrate.length, model, length_place)
    spec = CalibrationSpec(model, kind, digested, calibrate.tokens, calibrate.length, tuple(only))
    return make_stage(
        name=f"@{kind}-{xxhash.xxh3_64_hexdigest(str(model.reference).encode())}",
        title=f"statistics of {model.name} ({kind})",
        place=place,
        spec=spec,
        tensors=_tensors(spec),
        version=version,
    )


def method_stages(recipe: Recipe, sources: Sequence[Source], *, version: str) -> tuple[Stage, ...]:
    """The stages that collect what the methods of a recipe go by, of each of its models.

    Raises PlanError: they cannot be made, with every problem."""
    checked = check_recipe(recipe)
    kinds = dict.fromkeys(method.statistics for method in (checked.own, *checked.ruled))
    stages: list[Stage] = []
    problems: list[Problem] = []
    for kind in filter(None, kinds):
        for model, path in _merged(recipe, sources):
            try:
                stages.append(_stage_of(kind, model, path, recipe, version))
            except PlanError as error:
                problems += error.problems
    if stages and recipe.align:
        what = "the experts of a model are brought into another order, and its statistics have its own."
        problems.append(
            Problem(recipe.where("align"), what, "Align the models first, in a merge of its own.")
        )
    if problems:
        raise PlanError(problems)
    return tuple(stages)


def _merged(recipe: Recipe, sources: Sequence[Source]) -> Iterator[tuple[Source, FieldPath]]:
    places: dict[ModelReference, FieldPath] = {}
    for path, reference in references(recipe):
        if path[0] in ("models", "slices", "modules"):
            places.setdefault(reference, path[:-1])
    yield from ((source, places[source.reference]) for source in sources if source.reference in places)


def _stage_of(kind: StatisticsKind, model: Source, path: FieldPath, recipe: Recipe, version: str) -> Stage:
    entry = recipe.models[int(path[1])] if path[0] == "models" else None
    place = recipe.where(*path)
    if entry is not None and entry.statistics is not None:
        return given_statistics(kind, model, entry.statistics, place=place)
    calibrate, texts = recipe.calibrate or Calibrate(), () if entry is None else entry.texts
    if calibrate.model != "source":
        what = f"statistics for {kind} are those of each source, and those of what is merged are asked for."
        raise PlanError(Problem(recipe.where("calibrate", "model"), what, "Remove the line."))
    length_place = recipe.where("calibrate", "length")
    return calibration_stage(
        kind, model, calibrate, place=place, version=version, texts=texts, length_place=length_place
    )


def given_statistics(kind: StatisticsKind, model: Source, directory: str, *, place: str) -> Stage:
    """The stage whose result ``raymerge calibrate`` left in a directory. Raises PlanError: there is none, or
    it is of another kind or another model."""
    root = os.path.abspath(os.path.expanduser(directory))
    record = statistics_record(directory, place=place)
    report = record["report"]
    if model.checkpoint.unwritten is not None:
        what = f"holds statistics of {report['model']}, and {model.name} is not made yet."
        raise PlanError(Problem(f"{place}: {directory}", what, "Name statistics of models that are there."))
    if report["statistics"] != kind:
        what = f"holds statistics of the kind {report['statistics']}, and {kind} are needed."
        remedy = f"Make them: raymerge calibrate MODEL --texts FILE --statistics {kind} -o DIR."
        raise PlanError(Problem(f"{place}: {directory}", what, remedy))
    if report["model_digest"] != model_digest(model):
        what = f"holds statistics of {report['model']}, which is not {model.name}."
        raise PlanError(Problem(f"{place}: {directory}", what, "Name the directory made of this very model."))
    texts = tuple(CalibrationText(text["path"], text["digest"]) for text in report["texts"])
    spec = CalibrationSpec(model, kind, texts, report["tokens"], report["length"])
    return Stage(
        name=f"@{kind}",
        title=f"statistics of {model.name} ({kind})",
        place=place,
        spec=spec,
        layout=lay_out(_tensors(spec)),
        digest=record["result"]["digest"],
        made_at=root,
    )


def statistics_record(directory: str, *, place: str) -> Mapping[str, Any]:
    """The record of a directory of statistics; raises PlanError where it is none, or not as it was made."""
    root = Path(os.path.expanduser(directory))
    try:
        record = json.loads((root / STAGE_RECORD).read_bytes())
        if (root / RESULT_FILE).is_file() and _is_of_statistics(record):
            return dict(record)
    except (OSError, ValueError):
        pass
    what = "is no directory of statistics, or its record is not as it was written."
    remedy = "Name one that 'raymerge calibrate' made."
    raise PlanError(Problem(f"{place}: {directory}", what, remedy))


def _is_of_statistics(record: Any) -> bool:
    """Whether a record has what is read of it."""
    try:
        report = record["report"]
        words = [report[key] for key in ("model", "model_digest", "statistics")]
        words += [text[key] for text in report["texts"] for key in ("path", "digest")]
        words.append(record["result"]["digest"])
        numbers = [report["tokens"], *(text["tokens"] for text in report["texts"])]
        if report["statistics"] == "experts":
            layers = [(each["saliency"], each["shares"], each["lost"]) for each in report["layers"]]
            numbers += [number for layer in layers for figures in layer for number in figures]
            numbers += [score for scores in report["sizes"].values() for score in scores]
        are_typed = [isinstance(each, str) for each in words], [isinstance(n, int | float) for n in numbers]
        return report["kind"] == KIND and all(map(all, are_typed)) and "length" in report
    except (AttributeError, KeyError, TypeError):
        return False


def stage_report(stage: Stage, *places: Path) -> Mapping[str, Any] | None:
    """The report of a stage in the first record of it at these places; None where there is none."""
    for place in places:
        try:
            record = json.loads(place.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("digest") == stage.digest:
            report: Mapping[str, Any] = record["report"]
            return report
    return None


_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
# What configs call the number of tokens that the model reads at once.


def most_positions(source: Source) -> int | None:
    """Tokens that a model reads at once; None where its config names no limit."""
    return config_int(source.checkpoint.config, _POSITIONS)


def check_length(length: int | None, model: Source, place: str) -> None:
    """Raises PlanError: a model does not read so many tokens at once."""
    most = most_positions(model)
    if length is not None and most is not None and length > most:
        what = f"windows have {length} tokens, and {model.name} reads {most} at once."
        raise PlanError(Problem(place, what, f"Give {most} or fewer, or leave it out."))


_MOST_SAMPLES, _SAMPLE_NBYTES = 4096, 64
_NUM_READERS = 16
# Those of a store far away wait for each other.


def model_digest(model: Source) -> str:
    """Of the contents of a model, wherever it lies: its config, tokenizer and scales of adapters, and names,
    shapes and samples of its weights."""
    digest = xxhash.xxh3_128(json.dumps(beside_weights(model), sort_keys=True).encode())
    for holding in holdings([model]):
        tensors = [tensor for _, tensor in sorted(holding.stored.items())]
        digest.update(repr([(each.name, each.dtype.value, each.shape) for each in tensors]).encode())
        # By a digest: every n-th name would be the same part of each layer.
        chosen = sorted(tensors, key=lambda each: xxhash.xxh3_64_intdigest(each.name.encode()))
        with holding.open() as store, ThreadPoolExecutor(_NUM_READERS) as readers:
            for sample in readers.map(partial(_sample, store), chosen[:_MOST_SAMPLES]):
                digest.update(sample)
    return digest.hexdigest()


def _sample(store: ReadStore, tensor: StoredTensor) -> bytes:
    count = min(_SAMPLE_NBYTES, tensor.nbytes)
    return store.read(tensor.key, tensor.offset + (tensor.nbytes - count) // 2, count)


def routed_blocks(model: Source, *, are_mtp: bool = False) -> tuple[ExpertBlock, ...]:
    """The layers with experts that run for a text, or those that predict further tokens."""
    findings = Findings()
    fields = expert_fields(model.checkpoint.config, model.rules)
    count = fields.count.value if fields is not None else 0
    blocks = expert_blocks(model, LogicalTensors(model), count, findings) if count else ()
    if not findings.is_empty:
        raise PlanError(findings.problems())
    return tuple(block for block in blocks if block.is_mtp is are_mtp)


def digested_texts(paths: Sequence[str], place: str) -> tuple[CalibrationText, ...]:
    problems: list[Problem] = []
    texts: list[CalibrationText] = []
    for path in paths:
        whole = Path(os.path.abspath(os.path.expanduser(path)))
        try:
            with LocalStore(whole.parent) as store:
                info = store.info(whole.name)
                content = store.read(whole.name, 0, info.nbytes) if info is not None else None
        except (OSError, CheckpointError):
            content = None
        if content is None:
            problems.append(Problem(f"{place}: {path}", "there is no such file.", "Name a file of text."))
        elif not content.strip():
            what = "gives no token: there is nothing in it."
            problems.append(Problem(f"{place}: {path}", what, "Name a file with more text in it."))
        else:
            texts.append(CalibrationText(path, xxhash.xxh3_128_hexdigest(content)))
    if problems:
        raise PlanError(problems)
    return tuple(texts)


def _of_experts(model: Source) -> Iterator[TensorSpec]:
    blocks = routed_blocks(model)
    if not blocks:
        what = "has no layer with experts, of which statistics could be made."
        raise PlanError(Problem(model.name, what, "Name a mixture of experts."))
    for block in blocks:
        count = block.num_experts
        for figure, dtype in EXPERT_FIGURES.items():
            yield TensorSpec(f"{block.canonical}.experts.{figure}", dtype, (count,))
        yield TensorSpec(f"{block.canonical}.experts.lost", DType.I64, (count + 1,))


def _of_inputs(model: Source) -> Iterator[TensorSpec]:
    inputs = linear_inputs(model)
    if not inputs:
        what = "has no layers with matrices that are known as those of attention or a feed-forward network."
        raise PlanError(Problem(model.name, what, "Name a language model."))
    for each in dict.fromkeys(inputs.values()):
        yield TensorSpec(f"{each.name}.gram", DType.F32, (each.width, each.width))
        yield TensorSpec(f"{each.name}.count", DType.I64, (1,))


_ASIDE = frozenset({Role.MTP, Role.VISION})
_WITHOUT_GRADIENT = frozenset({Role.BUFFER, Role.ROUTER_BIAS})


def fisher_tensors(model: Source) -> Iterator[TensorSpec]:
    """Of what a text goes through: no vision tower, no layers that predict further tokens, no buffers."""
    model = in_numbers(model)
    logical, packed = LogicalTensors(model), model.checkpoint.packed
    for name, info in logical.infos.items():
        is_number = name in packed or model.checkpoint.tensors[name].dtype.is_mergeable
        if is_number and info.role not in _ASIDE and info.part not in _WITHOUT_GRADIENT:
            for member, place in (logical.members(name) or {}).items():
                yield TensorSpec(member, DType.F32, place.shape)


_TENSORS: Mapping[StatisticsKind, Callable[[Source], Iterator[TensorSpec]]] = {
    "experts": _of_experts,
    "inputs": _of_inputs,
    "fisher": fisher_tensors,
}


def _tensors(spec: CalibrationSpec) -> tuple[TensorSpec, ...]:
    every = _TENSORS[spec.kind](spec.model)
    return tuple(each for each in every if not spec.only or each.name.rpartition(".")[0] in spec.only)
