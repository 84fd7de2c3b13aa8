"""A mixture of experts built from dense models: trunk, experts, and routers that a stage makes.

The trunk is an ordinary merge: the base as it is, or any method over any models (Branch-Train-MiX, arXiv
2403.07816). Its feed-forward layers are replaced by experts, each the feed-forward of one model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raymerge.architectures.moe_targets import (
    MoeTarget,
    expert_names,
    fused_names,
    implied_tokenizer_class,
    is_fused,
    router_name,
    shared_gate_name,
    shared_names,
    trunk_name,
)
from raymerge.architectures.roles import logical_name
from raymerge.architectures.rules import Role
from raymerge.checkpoints.json_files import json_bytes, load_json, read_bounded
from raymerge.checkpoints.source import natural_key
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Rule, Use
from raymerge.merge_plan.expressions import (
    Expression,
    Gather,
    GatherInput,
    Op,
    Output,
    Read,
    conversion_expression,
    copy_expression,
    gathered,
    make_expression,
)
from raymerge.methods import Settings, find_method, methods, random_key
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.config import output_config, vocabulary_size, with_fields
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.inputs.sources import Prepared, Source, holdings
from raymerge.planner.matching.align import Aligned, output_subject, output_subjects
from raymerge.planner.matching.input_resolver import ResolvedInput
from raymerge.planner.matching.method_assignment import choose
from raymerge.planner.moe.shape import MoeShape, Upcycled, router_tensor, shape_of, shared_gate_tensor
from raymerge.planner.outputs.build import (
    Decided,
    PlanContext,
    Unplaced,
    Unused,
    open_plan_context,
    settle_unused,
)
from raymerge.planner.outputs.embeddings_and_heads import settle_tie
from raymerge.planner.outputs.ops import OpMaker, all_ops, complete, matrix_op, side_by_side
from raymerge.planner.tokenizer.files import TokenizerChanges
from raymerge.planner.tokenizer.vocabulary import other_vocabulary
from raymerge.recipes.moe import MoeRecipe, trunk_recipe
from raymerge.recipes.schema import Recipe
from raymerge.recipes.settings import Subject
from raymerge.storage.open import open_store


def trunk_outputs(context: PlanContext, shape: MoeShape) -> tuple[Output, ...]:
    dense = set(shape.dense[shape.base.index].values())
    replaced: list[Subject] = []
    made: list[Output] = []
    for aligned in context.aligned():
        name = trunk_name(shape.target, aligned.output)
        if aligned.lead in dense or name is None:
            replaced.append(output_subject(aligned, context.resolver.logical))
            continue
        _check_vocabulary(context, shape, aligned)
        output = context.builder.output(aligned)
        if output is not None:
            made.append(output._replace(name=name))
    context.assignments.report_unused(replaced)
    return tuple(made)


def _check_vocabulary(context: PlanContext, shape: MoeShape, aligned: Aligned) -> None:
    """Refuse other vocabularies than the base's: a mixture has no keys that bring them together.

    The builder counts such tensors by the same key, whose first text is kept."""
    pair, base = shape.base.pair, shape.base
    if pair is None or aligned.lead not in (pair.embedding, pair.head):
        return
    assignment = context.assignments.of(aligned.span, output_subjects(aligned, context.resolver.logical)[0])
    own = context.resolver.stored(base.index, aligned.lead)
    if assignment is None or own is None:
        return
    for member, name in choose(aligned, assignment).members:
        stored = context.resolver.stored(member.source, name)
        if stored is None or stored[1].shape[0] == own[1].shape[0] or stored[1].shape[1:] != own[1].shape[1:]:
            continue
        what = other_vocabulary(
            context.resolver, (member.source, stored[1].shape[0]), (base.index, own[1].shape[0])
        )
        remedy = (
            "Leave it out of the trunk's 'models', which are all experts where none are listed; or merge the "
            "trunk in a recipe of its own before this one, with a 'tokenizer_source', and name its result as "
            "base_model."
        )
        name_of = context.resolver.sources[member.source].name
        context.findings.tensor(name_of, what, remedy, example=name, key="vocabulary")


_FILE = "tokenizer_config.json"
_KEY = "tokenizer_class"


def named_tokenizer(tokenizer: TokenizerChanges, base: Source, target: MoeTarget) -> TokenizerChanges:
    implied = implied_tokenizer_class(base.model_type)
    if implied is None or implied == implied_tokenizer_class(target.name):
        return tokenizer
    stated = _read(tokenizer, base)
    if stated is None or str(stated.get(_KEY, implied)).removesuffix("Fast") == implied:
        return tokenizer
    note = (
        f"{_FILE} names {implied} in place of {stated[_KEY]}: loaders take that class for {base.model_type}, "
        f"whatever the file says, but not for {target.name}"
    )
    files = {**tokenizer.files, _FILE: json_bytes({**stated, _KEY: implied})}
    return replace(tokenizer, files=files, notes=(*tokenizer.notes, note))


def _read(tokenizer: TokenizerChanges, base: Source) -> Mapping[str, Any] | None:
    checkpoint = base.checkpoint
    data = tokenizer.files.get(_FILE)
    if data is None and checkpoint.unwritten is not None:
        data = checkpoint.unwritten.written.get(_FILE)
    if data is None and _FILE in checkpoint.companions:
        given = checkpoint.unwritten
        with open_store(checkpoint.root if given is None else given.companions_root) as store:
            info = store.info(_FILE)
            data = read_bounded(store, _FILE, info.nbytes) if info is not None else None
    try:
        parsed = load_json(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


_PROJECTIONS = ("gate", "up", "down")


_KEY_LIMIT = 2**53
# A parameter of a method is a float: larger keys would lose bits.
_RUN_BYTES = 8 << 20
_RUN_ELEMENTS = 1 << 20
# Of a run of rows of which columns are taken, at most: stored bytes, and elements taken. It is made at once.


@dataclass(frozen=True, slots=True)
class Matrix:
    output: str
    logical: str
    layer: int
    projection: str
    dtype: DType

    @property
    def is_down(self) -> bool:
        """Whether neurons are its columns; those of gate and up are rows."""
        return self.projection == "down"


class MoeExperts:
    """Makes the tensors of experts; what is missing or does not fit becomes a finding."""

    def __init__(self, recipe: MoeRecipe, shape: MoeShape, context: PlanContext) -> None:
        self._recipe = recipe
        self._shape = shape
        self._resolver = context.resolver
        self._findings = context.findings
        self._plain = PlainNumbers(context.resolver.sources, context.findings)
        self._maker = OpMaker(self._resolver, self._plain, self._findings, context.builder.dispositions)

    def outputs(self) -> Iterator[Output]:
        for layer in range(self._shape.num_layers):
            if is_fused(self._shape.target, self._recipe.layout):
                yield from self._fused(layer, *fused_names(self._shape.target, layer))
            else:
                yield from self._single(layer)
            if self._shape.shared:
                yield from self._shared(layer)

    def _single(self, layer: int) -> Iterator[Output]:
        for number, expert in enumerate(self._shape.experts):
            names = expert_names(self._shape.target, layer, number)
            for projection in _PROJECTIONS:
                matrix = self._matrix(names[projection], layer, number, projection)
                yield from self._output(names[projection], [self._ops_of(expert, matrix)])

    def _fused(self, layer: int, gate_up: str, down: str) -> Iterator[Output]:
        """``[experts, 2 width, hidden]``, gate before up in each, and ``[experts, hidden, width]``."""
        for name, projections in ((gate_up, ("gate", "up")), (down, ("down",))):
            ops = [
                self._ops_of(expert, self._matrix(name, layer, number, projection))
                for number, expert in enumerate(self._shape.experts)
                for projection in projections
            ]
            yield from self._output(name, ops, stacked=len(self._shape.experts))

    def _shared(self, layer: int) -> Iterator[Output]:
        shared = self._shape.shared
        names = shared_names(self._shape.target, layer)
        first = len(self._shape.experts)
        for projection in _PROJECTIONS:
            matrix = self._matrix(names[projection], layer, first, projection)
            if projection == "down" and len(shared) > 1:
                if self._lie_beside():
                    yield from self._output(names[projection], [self._beside(shared, matrix)])
                continue
            ops = [
                self._ops_of(expert, self._matrix(names[projection], layer, first + number, projection))
                for number, expert in enumerate(shared)
            ]
            yield from self._output(names[projection], ops)

    def _lie_beside(self) -> bool:
        """Whether down projections of several shared experts may share ops; else a finding says why not.

        One op is computed in one way, and its random numbers are those of one expert."""
        shared = self._shape.shared
        if not any(expert.is_random for expert in shared) and len({each.down_scale for each in shared}) == 1:
            return True
        self._findings.add(
            self._recipe.where("shared_experts"),
            f"{len(shared)} shared experts are stored as one network, whose down projection is made in "
            "one way; these differ in residual_scale, or have noise_scale or reinit_fraction.",
            "Give all of them the same residual_scale and leave the others out; or make such an expert "
            "in a recipe of its own before this one (merge_method passthrough with a scale of its "
            "down_proj, or upcycle), and name its result.",
        )
        return False

    def _matrix(self, output: str, layer: int, number: int, projection: str) -> Matrix:
        # By this chance is drawn, the same whether experts are stored one by one or together.
        logical = f"layers.{layer}.experts.{number}.{projection}_proj"
        return Matrix(output, logical, layer, projection, self._shape.dtype)

    def _output(
        self, name: str, made: Sequence[tuple[Op, ...] | None], *, stacked: int = 0
    ) -> Iterator[Output]:
        ops = all_ops(made)
        if ops is None:
            return
        columns = sum(part.shape[1] for part in ops[0].parts)
        height = sum(op.num_elements for op in ops) // columns
        shape = (stacked, height // stacked, columns) if stacked else (height, columns)
        yield Output(name, self._shape.dtype, shape, ops, True)

    def _ops_of(self, expert: Upcycled, matrix: Matrix) -> tuple[Op, ...] | None:
        """The ops of one matrix of an expert, or None with a finding.

        Columns that are cut out of a matrix are made in runs of its rows, so that none of them takes the
        memory of the whole. A matrix with random numbers is one op: its statistics are those of all."""
        if expert.slices > 1 and matrix.is_down and not expert.is_random:
            return self._beside((expert,), matrix)
        resolved = self._find_input(expert, matrix)
        if resolved is None:
            return None
        read, shape = _read_of(resolved, expert, matrix)
        expression = self._expression(expert, matrix, resolved, shape)
        self._settle(expert, resolved, matrix, expression)
        return (matrix_op([read], shape, matrix.logical, expression),)

    def _beside(self, experts: Sequence[Upcycled], matrix: Matrix) -> tuple[Op, ...] | None:
        """The down projections of several experts side by side, so many rows at a time that what is read of
        them stays small; None with a finding.

        One expression holds for all of an op: no expert has random numbers, and all have one factor."""
        inputs = complete(self._find_input(expert, matrix) for expert in experts)
        if inputs is None:
            return None
        shapes = [each.place.shape for each in inputs]
        height = shapes[0][0]
        stored = sum(each.place.tensor.dtype.nbytes(each.place.shape[1]) for each in inputs)
        taken = sum(shape[1] // expert.slices for expert, shape in zip(experts, shapes, strict=True))
        step = max(1, min(_RUN_BYTES // stored, _RUN_ELEMENTS // taken))
        expression = self._computed(experts[0], matrix, shapes[0])
        for expert, resolved in zip(experts, inputs, strict=True):
            self._settle(expert, resolved, matrix, expression)
        ops: list[Op] = []
        for first in range(0, height, step):
            reads = [
                _columns_read(resolved, expert, part=part, span=(first, min(step, height - first)))
                for part, (expert, resolved) in enumerate(zip(experts, inputs, strict=True))
            ]
            names = [f"{matrix.logical}#{part}.{first}" for part in range(len(reads))]
            ops.append(side_by_side(names, reads, expression))
        return tuple(ops)

    def _find_input(self, expert: Upcycled, matrix: Matrix) -> ResolvedInput | None:
        source = self._resolver.sources[expert.source]
        name = expert.tensors[matrix.layer, matrix.projection]
        resolved = self._resolver.find(expert.source, name, logical_name(name, source.rules))
        if resolved is None or not self._plain.check(expert.source, resolved.place.tensor):
            return None
        if resolved.factor is not None and expert.slices > 1:
            self._findings.tensor(
                source.name,
                "an adapter adds to {count} of the matrices that 'granularity' cuts",
                "Merge the adapter into its model first, with a passthrough recipe before this one.",
                example=name,
            )
            return None
        return resolved

    def _expression(
        self, expert: Upcycled, matrix: Matrix, resolved: ResolvedInput, shape: tuple[int, ...]
    ) -> Expression:
        whole_bytes = expert.slices == 1 or not matrix.is_down
        changed = expert.is_random or _is_scaled(expert, matrix) or resolved.factor is not None
        untouched = whole_bytes and not changed
        if untouched and resolved.place.tensor.dtype is matrix.dtype and resolved.place.view is None:
            return copy_expression(matrix.dtype)
        return self._computed(expert, matrix, shape)

    def _computed(self, expert: Upcycled, matrix: Matrix, shape: tuple[int, ...]) -> Expression:
        scale = expert.down_scale if _is_scaled(expert, matrix) else 1.0
        if not expert.is_random:
            settings = Settings(values={}, sources=({"scale": None if scale == 1 else scale},))
            return make_expression(PASSTHROUGH, settings, has_base=False, cast=matrix.dtype)
        method = find_method("upcycle")
        if method is None:
            raise RuntimeError("the method 'upcycle' is not in the table of methods")
        axis = int(matrix.is_down)
        numbers = {
            "scale": scale,
            "noise_scale": expert.noise_scale,
            "reinit_fraction": expert.reinit_fraction,
            "neuron_axis": axis,
            "neuron_key": self._neuron_key(expert, matrix.layer),
            "neuron_first": expert.slice * shape[axis],
            "num_neurons": expert.slices * shape[axis],
        }
        settings = Settings(values={}, sources=(numbers,))
        return make_expression(method, settings, has_base=False, cast=matrix.dtype)

    def _neuron_key(self, expert: Upcycled, layer: int) -> int:
        """The same for all matrices and slices of an expert in a layer, so that a neuron is drawn whole."""
        return (
            random_key(self._recipe.seed, f"neurons of expert {expert.number} in layer {layer}", 0)
            % _KEY_LIMIT
        )

    def _settle(
        self, expert: Upcycled, resolved: ResolvedInput, matrix: Matrix, expression: Expression
    ) -> None:
        disposition = Use.COPIED if expression.is_copy else Use.CONVERTED
        if resolved.factor is not None or expert.is_random or _is_scaled(expert, matrix):
            disposition = Use.MERGED
        self._maker.settle(resolved, expert.source, Disposition(disposition, Rule.EXPERT, matrix.output))


def moe_trunk(recipe: MoeRecipe) -> Recipe:
    method = methods().get(recipe.trunk.merge_method) if recipe.trunk is not None else None
    parameters = () if method is None else method.parameters
    return trunk_recipe(recipe, frozenset(each.name for each in parameters if each.scope == "source"))


def decide_mixture(recipe: MoeRecipe, sources: Sequence[Source]) -> Decided:
    """Decide the plan of a mixture of experts; ``prepared`` of its base has the router rows.

    Raises:
        PlanError: recipe and sources fit so little that there is no plan to show."""
    shape = shape_of(recipe, sources)
    context = open_plan_context(moe_trunk(recipe), sources)
    dispositions = context.builder.dispositions
    experts = MoeExperts(recipe, shape, context)
    trunk = trunk_outputs(context, shape)
    tie = settle_tie(trunk, context.sections, sources, dispositions, donor=shape.base)
    outputs = (*trunk, *experts.outputs(), *_prepared_outputs(recipe, shape, context))
    rule_of = partial(_rule_of_unused, context, shape, context.merged)
    settle_unused(context.resolver, dispositions, context.findings, rule_of)
    resized = context.builder.embeddings.settle(trunk, shape.base)
    config = output_config(shape.config, tie=tie.tied)
    tokenizer = named_tokenizer(context.tokenizer, shape.base, shape.target)
    return Decided(
        recipe=recipe,
        sources=tuple(sources),
        donor=context.donor,
        method=f"building a {shape.target.title}, trunk by {context.method.name}",
        rules=tuple(each.name for each in context.ruled),
        # In the order of a checkpoint: layer by layer, each name's numbers as numbers.
        outputs=tuple(sorted(outputs, key=lambda output: natural_key(output.name))),
        dispositions=dispositions,
        findings=context.findings,
        config=with_fields(config, vocabulary_size(config, resized) if resized else {}),
        tie=tie,
        tokenizer=tokenizer,
        notes=(*shape.notes(recipe), *context.notes(trunk), *tokenizer.notes),
    )


def _prepared_outputs(recipe: MoeRecipe, shape: MoeShape, context: PlanContext) -> Iterator[Output]:
    held = enumerate(holdings(context.resolver.sources))
    store, prepared = next((index, each) for index, each in held if isinstance(each, Prepared))
    rows = len(shape.experts) // recipe.granularity
    for layer in range(shape.num_layers):
        name = router_name(shape.target, layer, recipe.layout)
        read = _whole(context, store, prepared, router_tensor(layer), name)
        size = (rows * recipe.granularity, shape.hidden_size)
        if recipe.granularity > 1:
            read = repeated_rows(read, rows, shape.hidden_size, times=recipe.granularity)
        yield _converted(name, size, read, shape.dtype)
        gate = shared_gate_name(shape.target, layer)
        if shape.shared_have_gates and gate is not None:
            read = _whole(context, store, prepared, shared_gate_tensor(layer), gate)
            yield _converted(gate, (len(shape.shared), shape.hidden_size), read, shape.dtype)
    for each in shape.constants:
        read = _whole(context, store, prepared, each.name, each.name)
        yield _converted(each.name, each.shape, read, each.dtype)


def _whole(context: PlanContext, store: int, prepared: Prepared, name: str, output: str) -> Read:
    tensor = prepared.tensors[name]
    context.builder.dispositions.settle(store, name, Disposition(Use.CONVERTED, Rule.STAGE, output))
    return Read(0, store, tensor.key, tensor.offset, tensor.nbytes, tensor.dtype, None)


def _converted(name: str, shape: tuple[int, ...], read: Read, dtype: DType) -> Output:
    is_copy = read.gather is None and read.dtype is dtype
    expression = copy_expression(dtype) if is_copy else conversion_expression(dtype)
    return Output(name, dtype, shape, (matrix_op([read], shape, name, expression),), True)


def _rule_of_unused(
    context: PlanContext, shape: MoeShape, merged: Collection[int], unused: Unused
) -> Rule | Unplaced | None:
    resolver, source = context.resolver, unused.source
    if source >= len(resolver.sources):
        return None
    if unused.name in shape.dense[source].values() or trunk_name(shape.target, unused.name) is None:
        return Rule.REPLACED_BY_EXPERTS
    if source not in merged:
        return Rule.ONLY_EXPERTS_TAKEN
    if resolver.logical[source].part(unused.name) is Role.BUFFER:
        return Rule.RECOMPUTED_BUFFER
    return (
        f"{{count}} of its tensors have no place in the output, since {shape.base.name} lacks them",
        "Leave this model out of the trunk, or use a checkpoint without them.",
    )


def repeated_rows(read: Read, num_rows: int, num_columns: int, *, times: int) -> Read:
    runs = tuple((row * times + copy, row, 1, 0) for row in range(num_rows) for copy in range(times))
    total = num_rows * times
    return gathered(0, Gather(total, num_columns, (GatherInput(read, num_rows),), runs, total))


def _read_of(resolved: ResolvedInput, expert: Upcycled, matrix: Matrix) -> tuple[Read, tuple[int, ...]]:
    rows, columns = resolved.place.shape
    whole = resolved.read(0)
    if expert.slices == 1:
        return whole, (rows, columns)
    if matrix.is_down:
        return _columns_read(resolved, expert, part=0, span=(0, rows))
    count, width = rows // expert.slices, whole.dtype.nbytes(columns)
    first = whole.offset + expert.slice * count * width
    return Read(0, whole.source, whole.key, first, count * width, whole.dtype, None), (count, columns)


def _columns_read(
    resolved: ResolvedInput, expert: Upcycled, *, part: int, span: tuple[int, int]
) -> tuple[Read, tuple[int, int]]:
    first, count = span
    columns = resolved.place.shape[1]
    own = columns // expert.slices
    if resolved.factor is not None or resolved.place.view is not None:
        rows = Gather(count, columns, (resolved.gather_input(),), ((0, first, count, 0),), count)
        return gathered(part, rows), (count, columns)
    whole = resolved.read(part)
    width = whole.dtype.nbytes(columns)
    view = View(expert.slice * own, (count, own), (columns, 1)) if expert.slices > 1 else None
    read = whole._replace(offset=whole.offset + first * width, nbytes=count * width, view=view)
    return read, (count, own)


def _is_scaled(expert: Upcycled, matrix: Matrix) -> bool:
    return matrix.is_down and expert.down_scale != 1
