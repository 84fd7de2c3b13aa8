"""Ops of an output: how it is stored, and what is read for each logical tensor of it from every member.

Without ``out_format`` and ``dtype`` a tensor is stored as the lead checkpoint has it. A ``dtype`` alone asks
for plain numbers, also of what the lead has as codes; it replaces the checkpoint's main dtype, and tensors
that were kept in float32 on purpose stay so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeVar

from raymerge.architectures.roles import TensorInfo
from raymerge.architectures.rules import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Encoding, Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import format_named, formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import (
    Expression,
    Op,
    Output,
    Part,
    Read,
    copy_expression,
    make_expression,
)
from raymerge.methods import Access, Settings
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.align import (
    Aligned,
    Member,
    moved,
    output_logical,
    output_subject,
    output_subjects,
)
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput, whole_read
from raymerge.planner.matching.logical import Block, ElementOrder, LogicalTensors, Place
from raymerge.planner.matching.method_assignment import UNSCALED, BoundOutput, lead_alone
from raymerge.recipes.schema import Recipe
from raymerge.recipes.settings import FormatChoice


def output_dtype(asked: DType | None, tensor: StoredTensor, role: Role, main: DType) -> DType:
    """Dtype of an output tensor; ``asked`` None asks for the checkpoint's own.

    ``main`` is the dtype of most of the lead checkpoint's bytes. A router's selection bias stays float32
    whatever the recipe says."""
    if asked is None or not tensor.dtype.is_mergeable:
        return tensor.dtype
    kept_on_purpose = tensor.dtype is DType.F32 and (main is not DType.F32 or role is Role.ROUTER_BIAS)
    return tensor.dtype if kept_on_purpose else asked


_USUAL = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
"""Parts whose matrices publishers quantise; embeddings, heads, norms and routers stay plain."""
_BY_OUTPUTS = frozenset({"out_in", "out_in_interleaved"})
_SAME, _PLAIN = "same", "bf16"
_T = TypeVar("_T")
_WEIGHT = ".weight"


class OutputEncoding(NamedTuple):
    dtype: DType
    quant_spec: QuantSpec | None = None
    """None for plain numbers."""


class OutFormats:
    def __init__(
        self,
        recipe: Recipe,
        logical: Sequence[LogicalTensors],
        main: Mapping[int, Mapping[str, DType]],
        findings: Findings,
    ) -> None:
        self._recipe = recipe
        self._logical = logical
        self._main = main
        self._findings = findings
        self._wanted = recipe.out_dtype or recipe.dtype
        self._held: set[FormatChoice] = set()
        self._formats: dict[tuple[str, int], Format] = {}

    def of(self, aligned: Aligned, lead: StoredTensor, role: Role) -> OutputEncoding:
        source = aligned.span.lead.source
        own = self._logical[source].quant_spec(lead.name)
        choice = self._choice(aligned, lead)
        if choice is None or choice.value == _SAME:
            if own is not None and (choice is not None or self._wanted is None):
                return OutputEncoding(own.format.element_dtype, own)
            return self._plain(lead, role, source, is_freed=own is not None)
        if own is not None and self._is_own(choice, own.format, source):
            return OutputEncoding(own.format.element_dtype, own)
        if choice.value != _PLAIN and not self._speaks_of(choice, lead, source):
            return self._plain(lead, role, source, is_freed=own is not None)
        is_unread = own is None and not lead.dtype.is_mergeable
        quant_spec = None if choice.value == _PLAIN or is_unread else self._quant_spec(aligned, lead, choice)
        if quant_spec is None:
            asked = DType.BF16 if choice.value == _PLAIN else None
            return self._plain(lead, role, source, is_freed=own is not None or is_unread, asked=asked)
        return OutputEncoding(quant_spec.format.element_dtype, quant_spec)

    def dtype_of_rows(self, aligned: Aligned, lead: StoredTensor, written: OutputEncoding) -> DType:
        """The dtype of a tensor gathered by token, which may not be codes; else a finding."""
        if written.quant_spec is None:
            return written.dtype
        self._findings.tensor(
            self._recipe.where("out_format"),
            "{count} tensors have other rows than those that are stored, as the tokens are others, and "
            f"cannot be stored as {written.quant_spec.format.word}",
            "Keep them as plain numbers, or convert the merged model.",
            example=aligned.output,
            key="format by token",
        )
        return lead.dtype

    def report_unused(self) -> None:
        asked = self._recipe.out_format
        for index, choice in enumerate(asked.choices if asked is not None else ()):
            if choice.selector is not None and choice not in self._held:
                self._findings.add(
                    self._recipe.where("out_format", index),
                    "this line holds for no tensor of the output.",
                    "Correct its filter, glob, role or layers, put it before the lines that speak of the "
                    "same tensors, or remove it.",
                )

    def _choice(self, aligned: Aligned, lead: StoredTensor) -> FormatChoice | None:
        asked, source = self._recipe.out_format, aligned.span.lead.source
        if asked is None:
            return None
        subjects = output_subjects(aligned, self._logical) if asked.is_by_name else ()
        for choice in asked.matching(subjects or (output_subject(aligned, self._logical),)):
            if not choice.is_for(subjects):
                self._partly_named(aligned, choice)
                return None
            is_for_all = choice.selector is None or choice.value in (_SAME, _PLAIN)
            if is_for_all or self._speaks_of(choice, lead, source):
                self._held.add(choice)
                return choice
        return None

    def _partly_named(self, aligned: Aligned, choice: FormatChoice) -> None:
        self._held.add(choice)
        self._findings.tensor(
            self._recipe.where("out_format"),
            f"a line with the value {choice.value} names some of the matrices that {{count}} tensors "
            "hold, and a tensor has one format",
            "Name all matrices of these tensors.",
            example=aligned.output,
        )

    def _speaks_of(self, choice: FormatChoice, lead: StoredTensor, source: int) -> bool:
        """Whether a choice of a format of codes is meant for a tensor.

        One that names tensors is meant for all of them. Any other is for the matrices that modules multiply
        with; of those, without a role, for what publishers quantise."""
        selector = choice.selector
        if selector is not None and selector.is_by_name:
            return True
        info = self._logical[source].infos[lead.name]
        if not self._is_multiplied(info, lead, source) or self._logical[source].is_left_plain(lead.name):
            return False
        parts = {Role.EXPERT} if self._format(choice, source).for_experts_only else _USUAL
        if selector is not None and selector.roles:
            return info.part in parts or info.part in selector.roles
        return info.part in parts and info.role is not Role.VISION

    def _is_multiplied(self, info: TensorInfo, lead: StoredTensor, source: int) -> bool:
        if lead.dtype is DType.F32 and self._main_of(lead.name, source) is not DType.F32:
            return False
        is_weight = lead.name.endswith(_WEIGHT) or info.part is Role.EXPERT
        return is_weight and not info.is_bias and len(lead.shape) > 1 and min(lead.shape[-2:]) > 1

    def _plain(
        self, lead: StoredTensor, role: Role, source: int, *, is_freed: bool, asked: DType | None = None
    ) -> OutputEncoding:
        """How plain numbers are stored; ``is_freed`` where they were codes, ``asked`` where no dtype is.

        Codes of unread formats are refused where ops are made. Other integers never come here."""
        chosen = self._wanted or asked
        if is_freed or (chosen is not None and not lead.dtype.is_mergeable):
            return OutputEncoding(chosen or DType.BF16)
        return OutputEncoding(output_dtype(chosen, lead, role, self._main_of(lead.name, source)))

    def _main_of(self, name: str, source: int) -> DType:
        mains = self._main[source]
        if len(mains) == 1:
            return mains[""]
        return mains[max((each for each in mains if name.startswith(each)), key=len)]

    def _quant_spec(self, aligned: Aligned, lead: StoredTensor, choice: FormatChoice) -> QuantSpec | None:
        source = aligned.span.lead.source
        form = self._format(choice, source)
        shape = self._logical[source].shape_in(lead.name, form)
        fault, reason = self._fault(form, lead, source), ""
        if not fault:
            try:
                return self._fresh(lead.name, form, shape, source)
            except ValueError as error:
                reason = str(error).rstrip(".")
        self._findings.tensor(
            self._recipe.where("out_format"),
            f"{{count}} tensors cannot be stored as {choice.value}: {fault or reason}",
            f"Put a line before it that speaks of them, such as {{glob: '{aligned.output}', value: "
            f"{_PLAIN}}}, or choose another format.",
            example=f"{aligned.output} {list(shape)}",
            key=f"format {choice.value} {fault or ''}",
        )
        return None

    def _format(self, choice: FormatChoice, source: int) -> Format:
        """The format of a name in recipes, in the layout that the source or else its family has it in."""
        key = choice.value, source
        if key not in self._formats:
            self._formats[key] = _layout(format_named(choice.value), self._logical[source])
        return self._formats[key]

    def _is_own(self, choice: FormatChoice, own: Format, source: int) -> bool:
        """Whether what is asked for is the format that a tensor has in the source."""
        if choice.value == _PLAIN:
            return False
        if own.scales_stack:
            return own.recipe_name == format_named(choice.value).recipe_name
        return own is self._format(choice, source)

    def _fault(self, form: Format, lead: StoredTensor, source: int) -> str | None:
        part = self._logical[source].infos[lead.name].part
        is_stack = form.has_block_axis and self._logical[source].is_turned(lead.name, form)
        if form.for_experts_only and (part is not Role.EXPERT or is_stack != form.has_block_axis):
            return f"{self._logical[source].model_type} has its experts in it and nothing else"
        if part is Role.EMBEDDING:
            return "loaders take codes for the weights of linear layers alone, and embeddings are none"
        is_of_module = lead.name.endswith(_WEIGHT) and len(lead.shape) == 2
        if not (is_of_module or is_stack or form.holds_stacks):
            return "loaders take it for the weight of one module, a matrix, and no stack of them"
        if form.holds_stacks and not is_of_module and len(lead.shape) > 1:
            return self._wrong_stack(lead, source)
        return None

    def _wrong_stack(self, lead: StoredTensor, source: int) -> str | None:
        kind = self._logical[source].kind(lead.name)
        if kind is None or len(lead.shape) < 3:
            return "loaders take the weights of modules in it and stacks of experts, and nothing else"
        if kind not in _BY_OUTPUTS:
            known = "config and family do not tell that these do" if kind == "unknown" else "these do not"
            return f"loaders take experts in it that lie [experts, out, in], and {known}"
        return None

    def _fresh(self, name: str, form: Format, shape: tuple[int, ...], source: int) -> QuantSpec:
        like, own = self._logical[source].packed_like(name, form), self._logical[source].quant_spec(name)
        if like is not None:
            return like.quant_spec.encoding.quant_spec(shape)
        # Under powers of two blocks of FP8 hold MXFP4 exactly, unless its scales are far apart.
        has_powers = form == FP8_BLOCK and own is not None and own.power_of_two
        return usual_quant_spec(form, shape, power_of_two=has_powers)


def _layout(form: Format, own: LogicalTensors) -> Format:
    # Layouts of stacks are no modules'.
    alike = [each for each in formats() if each.recipe_name == form.name and not each.scales_stack]
    usual = [
        each
        for each in alike
        if not each.for_experts_only or each in own.formats or each.name == own.expert_format
    ]
    return min(
        usual, key=lambda each: (each not in own.formats, each.name != own.expert_format), default=form
    )


def matrix_op(reads: Sequence[Read], shape: tuple[int, ...], logical: str, expression: Expression) -> Op:
    return Op(prod(shape), expression, (Part(logical, shape, None),), tuple(reads))


def complete(made: Iterable[_T | None]) -> tuple[_T, ...] | None:
    """All of them; None where one is None, for which a finding says why."""
    each = tuple(made)
    held = tuple(one for one in each if one is not None)
    return held if len(held) == len(each) else None


def all_ops(made: Iterable[tuple[Op, ...] | None]) -> tuple[Op, ...] | None:
    ops = complete(made)
    return None if ops is None else tuple(op for each in ops for op in each)


def copied_output(name: str, stored: StoredTensor, store: int, *, check_finite: bool = False) -> Output:
    op = matrix_op([whole_read(store, stored)], stored.shape, name, copy_expression(stored.dtype))
    return Output(name, stored.dtype, stored.shape, (op,), check_finite)


def side_by_side(
    names: Sequence[str], taken: Sequence[tuple[Read, tuple[int, int]]], expression: Expression
) -> Op:
    """A run of rows of matrices that lie side by side: of each what is read, and its rows and columns."""
    width = sum(columns for _, (_, columns) in taken)
    parts: list[Part] = []
    column = 0
    for name, (_, shape) in zip(names, taken, strict=True):
        parts.append(Part(name, shape, View(column, shape, (width, 1)) if len(taken) > 1 else None))
        column += shape[1]
    return Op(taken[0][1][0] * width, expression, tuple(parts), tuple(read for read, _ in taken))


class OpMaker:
    """Makes ops; what is missing or does not fit becomes a finding, what is used a disposition."""

    def __init__(
        self, resolver: InputResolver, plain: PlainNumbers, findings: Findings, dispositions: Dispositions
    ) -> None:
        self._resolver = resolver
        self._sources = resolver.sources
        self._logical = resolver.logical
        self.plain = plain
        self._findings = findings
        self._dispositions = dispositions
        self._latest: tuple[Settings, bool, DType, Encoding | None, Expression] | None = None

    def ops(
        self,
        chosen: BoundOutput,
        lead: StoredTensor,
        settings: Settings | None,
        written: OutputEncoding,
        *,
        only: Collection[int] | None = None,
    ) -> tuple[Op, ...] | None:
        """The ops of a tensor in the lead's layout, or None with findings.

        With ``settings`` None, which are unknown then, everything else is checked. ``only``: the blocks of
        the lead's tensor to make; None for all of them."""
        aligned = chosen.aligned
        form = None if written.quant_spec is None else written.quant_spec.format
        blocks: Sequence[Block] | None = self._logical[aligned.span.lead.source].blocks_in(aligned.lead, form)
        if blocks is None:
            blocks = self._unknown_layout(chosen, lead, settings)
        elif only is None and settings is not None and self._is_one_run(chosen, settings, written):
            blocks = (self._whole(chosen, form),)
        if blocks is None or not self._have_scales(chosen, blocks, settings, written.quant_spec, only=only):
            return None
        if only is not None:
            blocks = [block for number, block in enumerate(blocks) if number in only]
        disposition = disposition_of(chosen, settings)
        runs = complete([self._run(chosen, block, disposition) for block in blocks])
        if settings is None or runs is None:
            return None
        encode = None if written.quant_spec is None else written.quant_spec.encoding
        expression = self.expression(settings, chosen, written.dtype, encode)
        return tuple(
            Op(block.num_elements, expression, *run) for block, run in zip(blocks, runs, strict=True)
        )

    def expression(
        self, settings: Settings, chosen: BoundOutput, dtype: DType, encode: Encoding | None = None
    ) -> Expression:
        has_base = chosen.assignment.base is not None
        latest = self._latest
        if latest is not None and latest[0] is settings and latest[1:4] == (has_base, dtype, encode):
            return latest[4]
        made = make_expression(
            chosen.assignment.method, settings, has_base=has_base, cast=dtype, encode=encode
        )
        self._latest = (settings, has_base, dtype, encode, made)
        return made

    def alone(
        self, aligned: Aligned, written: OutputEncoding, *, only: Collection[int] | None = None
    ) -> tuple[Op, ...] | None:
        stored = self._sources[aligned.span.lead.source].checkpoint.tensors[aligned.lead]
        return self.ops(lead_alone(aligned), stored, UNSCALED, written, only=only)

    def settle(self, resolved: ResolvedInput, source: int, disposition: Disposition) -> None:
        """Record the use of everything that an input is made of; what an adapter replaces is left out, and
        what it adds to is merged."""
        if resolved.factor is not None and disposition.use is not Use.MERGED:
            disposition = disposition._replace(use=Use.MERGED, rule=Rule.ADAPTED)
        if source not in self._resolver.changed:
            self._dispositions.settle(source, resolved.place.tensor.name, disposition)
            return
        for store, name in resolved.holders():
            self._dispositions.settle(store, name, disposition)
        replaced = self._resolver.replaced(source, resolved)
        if replaced is not None:
            self._dispositions.settle(
                source, replaced, Disposition(Use.DROPPED, Rule.REPLACED, disposition.output)
            )

    def _unknown_layout(
        self, chosen: BoundOutput, lead: StoredTensor, settings: Settings | None
    ) -> tuple[Block, ...] | None:
        """An expert stack of unknown orientation is one tensor for elementwise methods only."""
        aligned, method, count = chosen.aligned, chosen.assignment.method, lead.num_elements
        if settings is None or method.access_with(settings) is Access.ELEMENT:
            return (Block(0, count, ((aligned.lead, Place(lead, 0, count, lead.shape, None)),)),)
        source = self._sources[aligned.span.lead.source]
        self._findings.tensor(
            source.name,
            f"{{count}} tensors hold several experts in an order that model_type '{source.model_type}' "
            f"does not tell, and {method.name} needs each expert's matrix by itself",
            "Use an element-wise method (linear, task_arithmetic, dare_linear), or report the model type.",
            example=f"{aligned.lead} {list(lead.shape)}",
            key="layout",
        )
        return None

    def _have_scales(
        self,
        chosen: BoundOutput,
        blocks: Sequence[Block],
        settings: Settings | None,
        quant_spec: QuantSpec | None,
        *,
        only: Collection[int] | None,
    ) -> bool:
        """Whether each block has the scales of a matrix: one that all of it shares, or those of its rows; or
        that of the whole stack, if it is all of that. Else a finding."""
        if quant_spec is None:
            return True
        if quant_spec.format.scales_stack:
            is_whole = only is None and len(blocks) == 1
            return is_whole or self._part_of_stack(chosen, settings, quant_spec, is_part=only is not None)
        aligned = chosen.aligned
        size, is_one = quant_spec.rows * quant_spec.columns, quant_spec.tensor_scale_dtype is not None
        if all(
            block.num_elements == size
            if is_one
            else quant_spec.has_scale_rows_of(block.start, block.num_elements)
            for block in blocks
        ):
            return True
        self._several_scales(aligned.span.lead.source, aligned.lead, quant_spec)
        return False

    def _is_one_run(self, chosen: BoundOutput, settings: Settings, written: OutputEncoding) -> bool:
        """Whether a fused tensor is made as one logical tensor: elementwise, from tensors in the same element
        order."""
        lead, own = chosen.aligned.lead, self._logical[chosen.aligned.span.lead.source]
        if lead not in own.stacked or own.is_alone(lead) or not _is_by_element(chosen, settings):
            return False
        return _runs_on(written.quant_spec) and not self._in_other_order(chosen, written.quant_spec)

    def _in_other_order(self, chosen: BoundOutput, quant_spec: QuantSpec | None) -> list[int]:
        """The sources that do not have a fused tensor in one piece whose elements are in the lead's order."""
        aligned, form = chosen.aligned, None if quant_spec is None else quant_spec.format
        order = self._logical[aligned.span.lead.source].element_order(aligned.lead, form)
        return [
            member.source
            for member, name in chosen.members
            if order is None or not self._has_order(member.source, name, order)
        ]

    def _has_order(self, source: int, name: str, order: ElementOrder) -> bool:
        own, quant_spec = self._logical[source], self._logical[source].quant_spec(name)
        return (
            self._resolver.whole(source, name) is not None
            and own.element_order(name, None if quant_spec is None else quant_spec.format) == order
            and _runs_on(quant_spec)
        )

    def _whole(self, chosen: BoundOutput, form: Format | None) -> Block:
        aligned, own = chosen.aligned, self._logical[chosen.aligned.span.lead.source]
        lead = self._sources[aligned.span.lead.source].checkpoint.tensors[aligned.lead]
        count = lead.num_elements
        place = Place(lead, 0, count, own.shape_in(aligned.lead, form), None)
        return Block(0, count, ((aligned.lead, place),))

    def _part_of_stack(
        self, chosen: BoundOutput, settings: Settings | None, quant_spec: QuantSpec, *, is_part: bool
    ) -> bool:
        if settings is None and not is_part:
            return True  # whether they would be made at once hangs on the settings
        aligned = chosen.aligned
        why, remedy = self._why_not_at_once(chosen, settings, quant_spec, is_part=is_part)
        self._findings.tensor(
            self._sources[aligned.span.lead.source].name,
            f"{{count}} tensors are {quant_spec.format.word} with one scale for all, which only the largest "
            f"number of all of them tells, so that they are only made at once, and {why}",
            f"{remedy}, store them as plain numbers (out_format: [{{role: expert, value: bf16}}, same]), or "
            "take them from one source unchanged (merge_method: passthrough, without dtype).",
            example=f"{aligned.lead} {list(quant_spec.shape)}",
        )
        return False

    def _why_not_at_once(
        self, chosen: BoundOutput, settings: Settings | None, quant_spec: QuantSpec, *, is_part: bool
    ) -> tuple[str, str]:
        if is_part:
            return "the recipe makes some of their matrices in another way", "Make all of them in one way"
        if settings is None or not _is_by_element(chosen, settings):
            what = f"{chosen.assignment.method.name} does not look at each element alone"
            return what, "Use a method that does (linear, task_arithmetic)"
        others = self._in_other_order(chosen, quant_spec) or [chosen.aligned.span.lead.source]
        names = " and ".join(dict.fromkeys(self._sources[each].name for each in others))
        what = f"in {names} the experts lie in another order, or not in one tensor"
        return what, "Use models that store them in the same way"

    def _several_scales(self, source: int, name: str, quant_spec: QuantSpec) -> None:
        held = self._sources[source]
        scales = "one scale"
        if quant_spec.tensor_scale_dtype is None:
            scales = f"{quant_spec.grid[0]} rows of scales for {quant_spec.rows} rows"
        self._findings.tensor(
            held.name,
            f"{{count}} tensors are several matrices with {scales} each, in an order that model_type "
            f"'{held.model_type}' does not tell",
            "Take them from one source unchanged (merge_method: passthrough, without dtype), or "
            "report the model type.",
            example=f"{name} {list(held.checkpoint.tensors[name].shape)}",
        )

    def _other_heads(self, lead: int, source: int, place: Place, other: Place) -> None:
        if place.half_split_heads < 0:
            lead, source, other = source, lead, place
        field = self._logical[source].heads_fields(other.tensor.name)[0]
        self._findings.tensor(
            self._sources[source].name,
            f"the rows of each head lie in two halves in {{count}} tensors, and {field} of its config does "
            f"not give the heads by which those of {self._sources[lead].name} are ordered",
            f"Write the model's number of heads into {field} of its config.json.",
            example=other.tensor.name,
        )

    def _run(
        self, chosen: BoundOutput, block: Block, disposition: Disposition
    ) -> tuple[tuple[Part, ...], tuple[Read, ...]] | None:
        parts: list[Part] = []
        reads: list[Read] = []
        is_complete = True
        for logical, place in block.members:
            for member, name in chosen.members:
                resolved = self._found(chosen, member, logical, name)
                if resolved is None:
                    is_alone = self._logical[chosen.aligned.span.lead.source].is_alone(chosen.aligned.lead)
                    self.missing(chosen, member, name if is_alone else moved(chosen.aligned, logical, name))
                if resolved is None or not self._fits(chosen, member, place, resolved.place):
                    is_complete = False
                    continue
                self.settle(resolved, member.source, disposition)
                reads.append(resolved.read(len(parts), half_split_heads=place.half_split_heads))
            is_same = not chosen.aligned.alias and chosen.aligned.output == chosen.aligned.lead
            for member, each in self.statistics(chosen, logical):
                if each is not None:
                    self.settle(each, member.source, disposition)
                    reads.append(each.read(len(parts), half_split_heads=place.half_split_heads))
            own = logical if is_same else output_logical(chosen.aligned, logical)
            parts.append(Part(own, place.shape, place.view))
        return (tuple(parts), tuple(reads)) if is_complete else None

    def statistics(self, chosen: BoundOutput, logical: str) -> Iterator[tuple[Member, ResolvedInput | None]]:
        """What the method's calibrations have of a logical tensor of the lead's, for each member."""
        kind = chosen.assignment.method.statistics
        for member, name in chosen.members if kind else ():
            is_same = name == chosen.aligned.lead
            called = logical if is_same else moved(chosen.aligned, logical, name)
            yield member, self._resolver.statistics(str(kind), member.source, name, called)

    def have_statistics(self, chosen: BoundOutput) -> bool:
        """Whether calibrations of all members have every logical tensor of an output."""
        blocks = self._logical[chosen.aligned.span.lead.source].blocks(chosen.aligned.lead)
        members = [logical for block in blocks or () for logical, _ in block.members]
        found = (each for logical in members for _, each in self.statistics(chosen, logical))
        return bool(members) and all(each is not None for each in found)

    def _found(self, chosen: BoundOutput, member: Member, logical: str, name: str) -> ResolvedInput | None:
        lead = self._logical[chosen.aligned.span.lead.source]
        if logical == chosen.aligned.lead and logical in lead.stacked and not lead.is_alone(logical):
            # A stack that is made in one run, which holds many: nobody asks for them one by one.
            resolved = self._resolver.whole(member.source, name)
            if resolved is not None:
                return resolved
        is_same = name == chosen.aligned.lead
        return self._resolver.find(
            member.source, name, logical if is_same else moved(chosen.aligned, logical, name)
        )

    def missing(self, chosen: BoundOutput, member: Member, name: str) -> None:
        if self._is_in_other_form(chosen.aligned, member, name) or self._lack_rows(chosen, member, name):
            return
        source = self._sources[member.source]
        lead = self._sources[chosen.aligned.span.lead.source]
        self._findings.tensor(
            source.name,
            f"it lacks {{count}} tensors that {lead.name} has and that the recipe merges",
            "Use a complete checkpoint, or name a base_model and say 'missing_tensors: copy_base' in "
            "the recipe to keep the base's.",
            example=name,
            key="missing",
        )

    def _is_in_other_form(self, aligned: Aligned, member: Member, name: str) -> bool:
        """Whether a member has a tensor that it lacks by this name, and it or the lead has the codes in a
        format that is not read, as a finding says."""
        if self.refuse_unread(member.source, name, aligned.output):
            return True
        if (numbers := self.numbers_of_unread(aligned, member, name)) is None:
            return False
        lead = aligned.span.lead.source
        self.plain.check(lead, self._sources[lead].checkpoint.tensors[aligned.lead])
        self.settle(numbers, member.source, Disposition(Use.MERGED, Rule.METHOD, aligned.output))
        return True

    def refuse_unread(self, source: int, name: str, output: str) -> bool:
        """Whether a source has what it lacks by this name as codes of a format that is not read, as a finding
        says."""
        unread = self.plain.unread_parts(source, name)
        for part in unread:
            self._dispositions.settle(source, part.name, Disposition(Use.MERGED, Rule.METHOD, output))
        return bool(unread) and not self.plain.check(source, max(unread, key=lambda each: each.num_elements))

    def numbers_of_unread(self, aligned: Aligned, member: Member, name: str) -> ResolvedInput | None:
        """What a member has in place of the lead's codes, where their format is not read."""
        matrix = self.plain.matrix_of(aligned.span.lead.source, aligned.lead)
        called = moved(aligned, matrix, name)
        return self._resolver.find(member.source, called, called) if matrix else None

    def _fits(self, chosen: BoundOutput, member: Member, place: Place, other: Place) -> bool:
        if place.shape != other.shape:
            self.other_shape(chosen, member, other, place.shape)
            return False
        if not place.has_rows_of(other):
            self._other_heads(chosen.aligned.span.lead.source, member.source, place, other)
            return False
        scales = other.scales
        quant_spec = None if scales is None else self._logical[member.source].quant_spec(other.tensor.name)
        if scales is not None and quant_spec is not None:
            lacks_scale = scales.tensor_nbytes and not scales.tensor_key
            if lacks_scale or not quant_spec.has_scale_rows_of(other.start, other.num_elements):
                self._several_scales(member.source, other.tensor.name, quant_spec)
                return False
        tensor = other.tensor
        is_plain = self.plain.are_plain[member.source] and tensor.dtype.is_mergeable
        return is_plain or self.plain.check(member.source, tensor)

    def _lack_rows(self, chosen: BoundOutput, member: Member, name: str) -> bool:
        """Whether the config of a member or of the lead lacks the rows of parts, as a finding says."""
        pair = (self._sources[member.source], self._sources[chosen.aligned.span.lead.source])
        return any(self._lacks_rows(source, name, chosen.aligned.output) for source in pair)

    def _lacks_rows(self, source: Source, name: str, output: str) -> bool:
        tensors = source.checkpoint.tensors
        for each in source.rules.concatenated:
            fields = each.absent_fields(source.checkpoint.config)
            if not fields:
                continue
            start = next((name.removesuffix(part) for part in each.parts if name.endswith(part)), name)
            joined = (stored for stored in tensors if stored.startswith(start))
            holder = next((stored for stored in joined if each.pattern.search(stored)), None)
            if holder is not None:
                self._findings.tensor(
                    source.name,
                    "{count} tensors hold several one below the other, and its config does not tell the rows "
                    f"of each: it lacks {', '.join(fields)}",
                    "Write the model's values into its config.json.",
                    example=f"{holder} {list(tensors[holder].shape)}",
                )
                self._dispositions.settle(source.index, holder, Disposition(Use.MERGED, Rule.METHOD, output))
                return True
        return False

    def other_shape(self, chosen: BoundOutput, member: Member, other: Place, shape: tuple[int, ...]) -> None:
        if self._lack_rows(chosen, member, other.tensor.name):
            return
        source, lead = self._sources[member.source], self._sources[chosen.aligned.span.lead.source]
        self._findings.tensor(
            source.name,
            f"{{count}} tensors have other shapes than in {lead.name}",
            "Only models of one size can be merged.",
            example=f"{other.tensor.name} is {list(other.shape)} here and {list(shape)} there",
            key="shape",
        )


def _is_by_element(chosen: BoundOutput, settings: Settings) -> bool:
    method = chosen.assignment.method
    # Statistics are stored matrix by matrix.
    return not method.random and method.statistics is None and method.access_with(settings) is Access.ELEMENT


def _runs_on(quant_spec: QuantSpec | None) -> bool:
    """Whether the matrices of a stack can be read and written as one: no scale is that of one matrix, and
    none is shared by rows of two matrices."""
    if quant_spec is None:
        return True
    is_of_matrix = quant_spec.tensor_scale_dtype is not None and not quant_spec.format.scales_stack
    return not is_of_matrix and not quant_spec.rows % quant_spec.cut_height


def disposition_of(chosen: BoundOutput, settings: Settings | None) -> Disposition:
    output = chosen.aligned.output
    if settings is not None and chosen.assignment.method.identity(settings) is not None:
        return Disposition(Use.CONVERTED, Rule.DTYPE, output)
    return Disposition(Use.MERGED, Rule.METHOD, output)
