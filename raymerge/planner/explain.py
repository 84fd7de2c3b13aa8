"""A plan in numbers: the account that the command line prints and gives as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raymerge.checkpoints.adapters import Adapter
from raymerge.checkpoints.files import REASONS, LeftOut
from raymerge.checkpoints.header import MODEL_STEM, shards_by_stem
from raymerge.checkpoints.source import Checkpoint, Holding
from raymerge.errors import Problem
from raymerge.merge_plan.dispositions import Use
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.memory import Projection, op_kinds
from raymerge.merge_plan.plan import Plan, ints, joined_sums, op_bytes, planned_layout, weight_files
from raymerge.merge_plan.report import Duplicates, planned_duplicates
from raymerge.methods import find_method
from raymerge.planner.inputs.sources import Source, holdings

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class SourceLine:
    name: str
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]
    gives_config: bool
    """Whether config, tokenizer and companion files come from it."""


@dataclass(frozen=True, slots=True)
class PartLine:
    """Weights of the output that lie beside the model's own."""

    name: str
    """Of its file, without the number where there are several."""
    shards: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputLine:
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]
    shards: tuple[str, ...]
    parts: tuple[PartLine, ...]


@dataclass(frozen=True, slots=True)
class DispositionLine:
    source: int
    disposition: str
    rule: str
    tensors: int
    nbytes: int
    examples: tuple[str, ...]
    """The first names; only of what is dropped."""


@dataclass(frozen=True, slots=True)
class LeftOutLine:
    source: int
    """Index of the source, adapters behind models."""
    rule: str
    """Name of the rule; "" for weights without a rule, which the plan refuses."""
    reason: str
    files: int
    nbytes: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigChange:
    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class StageLine:
    title: str
    units: int | None
    """None, like the numbers below, where it reads the result of another merge or cannot run."""
    read_bytes: int | None
    least_memory: int | None
    disk_bytes: int | None
    """Most disk beside the output; None also where there is too little memory."""


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """Tensors that a method reads once more, for statistics of all of them, since they do not fit the
    memory."""

    method: str
    times: int
    """Beyond the first; where a sample of a tensor misleads one or two more."""
    tensors: int
    nbytes: int
    """Of the sources, times counted."""
    example: str
    """The tensor with the most bytes."""


@dataclass(frozen=True, slots=True)
class Explanation:
    digest: str
    method: str
    sources: tuple[SourceLine, ...]
    """The sources by index, then the adapters."""
    stages: tuple[StageLine, ...]
    output: OutputLine
    dispositions: tuple[DispositionLine, ...]
    left_out: tuple[LeftOutLine, ...]
    read_bytes: int
    """Every source byte counted once."""
    again: tuple[ReadAgain, ...]
    """What is read more than once."""
    written_bytes: int
    segments: int
    duplicates: Duplicates
    tie: str
    memory: Projection
    config_changes: tuple[ConfigChange, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TensorLine:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: str
    disposition: str
    sources: tuple[int, ...]
    expressions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    plan: Plan,
    sources: Sequence[Source],
    memory: Projection,
    *,
    stages: Sequence[StageLine] = (),
    problems: Sequence[Problem] = (),
) -> Explanation:
    """Explain a plan, which may have problems, for the budget of ``memory``.

    ``problems`` of run options and stages are listed with the plan's."""
    holders = holdings(sources)
    donor = int(plan.manifest["donor"])
    # A merge of single files has no config that a source could give.
    giver = donor if plan.manifest["config"] else -1
    return Explanation(
        digest=plan.digest,
        method=", ".join(dict.fromkeys([plan.manifest["method"], *plan.manifest["rules"]])),
        sources=tuple(_source_line(each, index == giver) for index, each in enumerate(holders)),
        stages=tuple(stages),
        output=_output_line(plan),
        dispositions=_disposition_lines(plan, holders),
        left_out=tuple(_left_out_lines(plan, sources)),
        read_bytes=_read_bytes(plan),
        again=tuple(_read_again(plan, memory)),
        written_bytes=sum(weight_files(plan).values()),
        segments=len(plan["segments"]),
        duplicates=planned_duplicates(plan),
        tie=str(plan.manifest["tie"]["reason"]),
        memory=memory,
        config_changes=tuple(config_changes(sources[donor].checkpoint.config, plan.manifest["config"])),
        notes=tuple(plan.manifest["notes"]),
        problems=(*plan.problems, *problems),
    )


def tensor_lines(plan: Plan) -> Iterator[TensorLine]:
    expressions = plan.expressions
    texts = [expression.text() for expression in expressions]
    shards = plan["shards"].column("name").to_pylist()
    made = _makings(plan)
    tensors = plan["tensors"].to_pylist()
    for index, tensor in sorted(enumerate(tensors), key=lambda each: (each[1]["shard"], each[1]["offset"])):
        used, kinds, origins = made.get(index, ([], [], []))
        yield TensorLine(
            name=tensor["name"],
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            nbytes=tensor["nbytes"],
            shard=shards[tensor["shard"]],
            disposition=_strongest([expressions[each] for each in kinds]).value,
            sources=tuple(origins),
            expressions=tuple(texts[each] for each in used),
        )


def _makings(plan: Plan) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Expressions of each tensor, those that make it, and its sources: distinct, by first use.

    Scales are made by the expressions of their codes."""
    origins = plan["inputs"].column("source").to_pylist()
    makings: dict[int, tuple[dict[int, None], dict[int, None], dict[int, None]]] = {}
    columns = ("tensor", "expression", "first_input", "num_inputs", "copy_of", "made_with")
    ops = list(plan.columns("ops", *columns))
    for tensor, expression, first, count, copy_of, made_with in ops:
        used, kinds, read = makings.setdefault(tensor, ({}, {}, {}))
        codes = ops[copy_of][5] if copy_of >= 0 else made_with
        used.setdefault(expression)
        kinds.setdefault(ops[codes][1] if codes >= 0 else expression)
        read.update(dict.fromkeys(origins[first : first + count]))
    return {tensor: (list(used), list(kinds), list(read)) for tensor, (used, kinds, read) in makings.items()}


def tensors_by_use(plan: Plan) -> dict[str, int]:
    """How many tensors of the output are merged, copied and converted; scales go with their codes."""
    ops, order = plan["ops"], (Use.COPIED, Use.CONVERTED, Use.MERGED)
    strengths = np.array([order.index(_kind(each)) for each in plan.expressions], dtype=np.int64)
    copy_of, made_with = ints(ops, "copy_of"), ints(ops, "made_with")
    own = np.arange(len(copy_of))
    makers = made_with[np.where(copy_of >= 0, copy_of, own)]
    of_op = strengths[ints(ops, "expression")[np.where(makers >= 0, makers, own)]]
    strongest = np.zeros(len(plan["tensors"]), dtype=np.int64)
    np.maximum.at(strongest, ints(ops, "tensor"), of_op)
    counts = np.bincount(strongest, minlength=len(order)).tolist()
    return {use.value: count for use, count in reversed(list(zip(order, counts, strict=True))) if count}


def _strongest(expressions: Sequence[Expression]) -> Use:
    kinds = {_kind(expression) for expression in expressions}
    order = (Use.MERGED, Use.CONVERTED)
    return next((kind for kind in order if kind in kinds), Use.COPIED)


def nbytes_by_use(plan: Plan) -> dict[str, int]:
    """Bytes that are read of sources, by what becomes of them; equal outputs are made of one reading."""
    uses, nbytes = [_kind(each) for each in plan.expressions], plan["inputs"].column("nbytes").to_pylist()
    totals: Counter[str] = Counter()
    columns = plan.columns("ops", "expression", "first_input", "num_inputs", "copy_of")
    for expression, first, count, copy_of in columns:
        if copy_of < 0 and count:
            totals[uses[expression].value] += sum(nbytes[first : first + count])
    return dict(totals)


def _kind(expression: Expression) -> Use:
    if expression.is_copy:
        return Use.COPIED
    if expression.is_constant:
        return Use.CONVERTED
    method = find_method(expression.method)
    keeps_values = method is not None and method.identity(expression.bind(keys=(), shape=())) is not None
    return Use.CONVERTED if keeps_values else Use.MERGED


def _source_line(holder: Holding, gives_config: bool) -> SourceLine:
    stored = holder.stored.values()
    dtypes = _by_size((tensor.dtype.value, tensor.nbytes) for tensor in stored)
    return SourceLine(holder.name, len(stored), sum(each.nbytes for each in stored), dtypes, gives_config)


def _output_line(plan: Plan) -> OutputLine:
    dtypes = _by_size(plan.columns("tensors", "dtype", "nbytes"))
    nbytes = sum(plan["shards"].column("nbytes").to_pylist())
    sizes, groups = weight_files(plan), shards_by_stem(plan["shards"].column("name").to_pylist())
    parts = [
        PartLine(f"{stem}.safetensors", len(names), sum(sizes[name] for name in names))
        for stem, names in groups.items()
        if stem != MODEL_STEM and planned_layout(plan) is None
    ]
    return OutputLine(len(plan["tensors"]), nbytes, dtypes, tuple(sizes), tuple(parts))


def _by_size(tensors: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    sizes: Counter[str] = Counter()
    for dtype, nbytes in tensors:
        sizes[dtype] += nbytes
    return tuple(sorted(sizes, key=lambda dtype: (-sizes[dtype], dtype)))


def _disposition_lines(plan: Plan, holders: Sequence[Holding]) -> tuple[DispositionLine, ...]:
    counts: Counter[tuple[int, str, str]] = Counter()
    sizes: Counter[tuple[int, str, str]] = Counter()
    examples: dict[tuple[int, str, str], list[str]] = {}
    columns = ("source", "disposition", "rule", "name")
    for source, disposition, rule, name in plan.columns("dispositions", *columns):
        line = source, disposition, rule
        counts[line] += 1
        holder = holders[source]
        stored = holder.stored.get(name)
        sizes[line] += holder.left[name] if stored is None else stored.nbytes
        if disposition == Use.DROPPED and counts[line] <= _EXAMPLES:
            examples.setdefault(line, []).append(name)
    order = [each.value for each in Use]
    return tuple(
        DispositionLine(*line, counts[line], sizes[line], tuple(examples.get(line, ())))
        for line in sorted(counts, key=lambda line: (line[0], order.index(line[1]), line[2]))
    )


def _left_out_lines(plan: Plan, sources: Sequence[Source]) -> Iterator[LeftOutLine]:
    """Every left-out file of the donor, and left-out weights of others, whose companions are not copied; but
    those that are copied with a layout."""
    holders: list[Checkpoint | Adapter] = [source.checkpoint for source in sources]
    holders += [source.adapter for source in sources if source.adapter is not None]
    donor, layout = plan.manifest["donor"], planned_layout(plan)
    for index, holder in enumerate(holders):
        copied = layout.files if layout is not None and layout.source == index else {}
        left_out = [each for each in holder.left_out if each.is_weights or index == donor]
        yield from left_out_lines((each for each in left_out if each.key not in copied), index)


def left_out_lines(files: Iterable[LeftOut], source: int) -> Iterator[LeftOutLine]:
    by_rule: dict[str, list[LeftOut]] = {}
    for each in files:
        by_rule.setdefault(each.rule or "", []).append(each)
    for rule, entries in sorted(by_rule.items()):
        examples = tuple(each.key for each in entries[:_EXAMPLES])
        nbytes = sum(each.nbytes for each in entries)
        yield LeftOutLine(source, rule, REASONS.get(rule, ""), len(entries), nbytes, examples)


def _read_bytes(plan: Plan) -> int:
    """Bytes of the inputs of every computed op, and of those that it shares a scale with; copies count 0."""
    own = op_bytes(plan)
    is_made = ints(plan["ops"], "copy_of") < 0
    return int(((own + joined_sums(plan, own).astype(np.int64)) * is_made).sum())


def _read_again(plan: Plan, memory: Projection) -> Iterator[ReadAgain]:
    ops, names = plan["ops"], plan["tensors"].column("name")
    times = op_kinds(plan).read_again(memory.lane) * (ints(ops, "copy_of") < 0)
    nbytes, tensors = times * op_bytes(plan), ints(ops, "tensor")
    known = list(dict.fromkeys(each.method for each in plan.expressions))
    methods = np.array([known.index(each.method) for each in plan.expressions])[ints(ops, "expression")]
    for number, method in enumerate(known):
        for count in np.unique(times[(methods == number) & (times > 0)]).tolist():
            own = np.flatnonzero((methods == number) & (times == count))
            largest = tensors[own[np.argmax(nbytes[own])]]
            total = int(nbytes[own].sum())
            yield ReadAgain(method, count, len(np.unique(tensors[own])), total, names[largest].as_py())


def config_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[ConfigChange]:
    for key in dict.fromkeys([*before, *after]):
        place = f"{path}.{key}" if path else key
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from config_changes(old, new, place)
        elif old != new or (key in before) != (key in after):
            texts = (json.dumps(each[key]) if key in each else None for each in (before, after))
            yield ConfigChange(place, *texts)
