"""Makes each output tensor: finds its rule, binds its parameters, and has its ops made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raymerge.architectures.rules import Role
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.checkpoints.quantisation.detect import INPUT_SCALES, is_activation_scale
from raymerge.checkpoints.quantisation.encoding import PartNames, QuantisedWeight, QuantSpec, part_name
from raymerge.checkpoints.source import main_dtypes
from raymerge.documents.fields import FieldPath
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import Op, Output, Part, QuantisedOutput, constant_expression
from raymerge.methods import Settings
from raymerge.methods.linear import MEAN
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.inputs.sources import holdings
from raymerge.planner.matching.align import (
    Aligned,
    Member,
    member_subject,
    moved,
    output_subject,
    output_subjects,
)
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.method_assignment import (
    Binder,
    BindError,
    BoundOutput,
    MethodAssignment,
    choose,
)
from raymerge.planner.outputs.activation_scales import ActivationScales
from raymerge.planner.outputs.embeddings_and_heads import Embeddings
from raymerge.planner.outputs.ops import OpMaker, OutFormats, OutputEncoding, copied_output, matrix_op
from raymerge.planner.outputs.routing_tables import RoutingTables, is_routing_table
from raymerge.planner.parameter_check import written_settings
from raymerge.planner.tokenizer.vocabulary import VocabularyPlan
from raymerge.recipes.schema import Recipe
from raymerge.recipes.settings import Conditional, Selector, Subject, plain_selector

_SHAPE_DTYPE = DType.I64
_WEIGHT = ".weight"


def fresh_parts(
    output: str, quant_spec: QuantSpec, like: QuantisedWeight | None, stored: Mapping[str, StoredTensor]
) -> QuantisedOutput:
    """An output's parts: named and stored as its neighbours are, or else as publishers do it.

    ``like`` is a neighbour in the same format and ``stored`` the tensors of its source."""
    names = quant_spec.format.part_names(output) if like is None else _names_like(like, output)
    dtype = stored[like.shape_tensor].dtype if like is not None and like.shape_tensor else _SHAPE_DTYPE
    shape = (shape_tensor(names.shape, dtype, quant_spec),) if names.shape else ()
    one, size = quant_spec.tensor_scale_dtype, quant_spec.format.tensor_scale_shape
    of_all = None if one is None else TensorSpec(names.tensor_scale, one, size)
    return QuantisedOutput(quant_spec, names.codes, names.scales, shape, of_all, names.zero_points)


def _names_like(like: QuantisedWeight, output: str) -> PartNames:
    one = like.tensor_scale
    scales = None if like.scales == one else like.scales
    held = (like.codes, scales, one, like.shape_tensor, like.zero_points)
    return PartNames(*("" if part is None else part_name(like.name, part, output) for part in held))


def shape_tensor(name: str, dtype: DType, quant_spec: QuantSpec) -> Output:
    """The tensor in which compressed-tensors repeats rows and columns.

    Never copied from a source: no header tells whether a source's is true."""
    size = dtype.bits // 8
    content = b"".join(each.to_bytes(size, "little") for each in quant_spec.logical_shape[-2:])
    op = matrix_op((), (2,), name, constant_expression(dtype, content))
    return Output(name, dtype, (2,), (op,), False)


@dataclass(slots=True)
class _Group:
    """Blocks of an output that are made alike: runs of experts' matrices in a fused tensor."""

    chosen: BoundOutput
    subject: Subject = field(compare=False)
    settings: Settings | None = None
    """None where they are not bound yet, or cannot be."""
    is_copied: bool = False
    blocks: list[int] = field(default_factory=list, compare=False)


class OutputBuilder:
    def __init__(
        self,
        recipe: Recipe,
        assignments: MethodAssignment,
        resolver: InputResolver,
        findings: Findings,
        *,
        vocabulary: VocabularyPlan | None = None,
    ) -> None:
        self.findings = findings
        self.dispositions = Dispositions(holdings(resolver.sources))
        self._recipe = recipe
        self._assignments = assignments
        self._resolver = resolver
        self._sources = resolver.sources
        self._logical = resolver.logical
        self._names = [source.name for source in resolver.sources]
        # A donor of a tokenizer may have no tensors.
        with_tensors = (each for each in resolver.sources if each.checkpoint.tensors)
        mains = {source.index: main_dtypes(source.checkpoint) for source in with_tensors}
        self._plain = PlainNumbers(resolver.sources, findings)
        self._ops = OpMaker(resolver, self._plain, findings, self.dispositions)
        self.scales = ActivationScales(resolver.sources, self.dispositions)
        self.routing_tables = RoutingTables(resolver.sources, findings)
        self.formats = OutFormats(recipe, resolver.logical, mains, findings)
        self._coded: dict[str, Aligned] = {}
        self.selectors = Selectors(recipe)
        chooses_by_name = recipe.out_format is not None and recipe.out_format.is_by_name
        self._is_by_name = self.selectors.are_by_name or chooses_by_name
        self._tensors = [source.checkpoint.tensors for source in resolver.sources]
        self._packed = [source.checkpoint.packed for source in resolver.sources]
        self._alike: dict[tuple[object, ...] | None, tuple[Output, Sequence[tuple[int, Disposition]]]] = {}
        self._binders: dict[tuple[FieldPath, int, str], Binder] = {}
        self._uninformed: dict[str, list[str]] = {}
        # The latest settings that their method has no objection to: mostly those of the next tensor too.
        self._sound: Settings | None = None
        self.embeddings = Embeddings(recipe, resolver, self._ops, findings, vocabulary=vocabulary)

    def output(self, aligned: Aligned) -> Output | None:
        """None with a finding that says why."""
        kind = self._kind(aligned)
        alike = self._alike.get(kind)
        made = self._make(aligned) if alike is None else self._made_as(*alike, aligned)
        if alike is None and kind is not None and made is not None and self._is_pattern(made):
            self._alike[kind] = made, self._uses(aligned)
        if made is None:
            self._settle_held(aligned, Use.MERGED, Rule.METHOD)
        elif made.packed is not None:
            self._coded[made.name] = aligned
        return made

    def _kind(self, aligned: Aligned) -> tuple[object, ...] | None:
        """What an expert's matrix has in common with those of others that are made in the same way; None
        where its number may tell it apart."""
        lead, span = aligned.lead, aligned.span
        is_expert = self._logical[span.lead.source].infos[lead].expert is not None and lead.endswith(_WEIGHT)
        is_same = aligned.output == lead and aligned.names == (lead,) * len(span.members)
        if self._is_by_name or not (is_expert and is_same):
            return None
        block, _, numbered = lead.partition(".experts.")
        kind: list[object] = [span.path, block, numbered.partition(".")[2]]
        for member in span.members if span.lead in span.members else (span.lead, *span.members):
            source = member.source
            tensor, packed = self._tensors[source].get(lead), self._packed[source].get(lead)
            is_simple = self._plain.are_plain[source] if packed is None else not packed.others
            if tensor is None or not is_simple or source in self._resolver.changed:
                return None
            kind += (tensor.dtype, tensor.shape, None if packed is None else id(packed.quant_spec))
        return tuple(kind)

    def _is_pattern(self, made: Output) -> bool:
        """Whether all of its kind are made by one op, as it is; not where a finding counts those like it."""
        is_read_alone = all(read.gather is None for op in made.ops for read in op.reads)
        is_computed = not any(op.expression.is_copy for op in made.ops)
        # What a stage made of it is not told by its name alone.
        is_of_sources = all(read.source < len(self._sources) for op in made.ops for read in op.reads)
        are_simple = is_read_alone and is_computed and is_of_sources
        return len(made.ops) == 1 and are_simple and self.findings.is_empty

    def _uses(self, aligned: Aligned) -> list[tuple[int, Disposition]]:
        """What was settled of the tensors of an output, by the sources that have them."""
        sources = dict.fromkeys(member.source for member in aligned.span.members)
        first_parts = [(each, self._sources[each].checkpoint.parts(aligned.lead)[0]) for each in sources]
        return [(source, self.dispositions.settled[source][part]) for source, part in first_parts]

    def _made_as(self, alike: Output, uses: Sequence[tuple[int, Disposition]], aligned: Aligned) -> Output:
        """The output of a matrix that is made as another one of its kind."""
        name, (op,), lead = aligned.output, alike.ops, aligned.span.lead.source
        for source, use in uses:
            self.dispositions.settle(source, name, Disposition(use.use, use.rule, name))
        part = Part(self._logical[lead].logical_name(name), *op.parts[0][1:])
        reads = [
            self._resolver.plain_read(each.source, self._tensors[each.source][name]) for each in op.reads
        ]
        made = Op(op.num_elements, op.expression, (part,), tuple(reads))
        written = OutputEncoding(alike.dtype, None if alike.packed is None else alike.packed.quant_spec)
        return self._computed(aligned, self._tensors[lead][name], written, (made,))

    def made_anew(self, name: str) -> Output | None:
        return self._make(self._coded[name], may_copy=False)

    def _make(self, aligned: Aligned, *, may_copy: bool = True) -> Output | None:
        source = aligned.span.lead.source
        lead = self._sources[source].checkpoint.tensors[aligned.lead]
        role = self._logical[source].infos[aligned.lead].part
        if role is Role.BUFFER or (not lead.dtype.is_mergeable and self._plain.is_integer(source, lead)):
            if is_routing_table(lead, role) and not aligned.copied:
                return self._routing_table(aligned, lead)
            return self._from_lead(aligned, lead, OutputEncoding(lead.dtype), Rule.COPIED_FROM_LEAD)
        written = self.formats.of(aligned, lead, role)
        if aligned.copied:
            return self._from_lead(aligned, lead, written, Rule.UNNAMED_MODULE, may_copy=may_copy)
        groups = self._groups(aligned, written)
        if groups is None:
            return None
        is_scale = source in self.scales.quantised and is_activation_scale(aligned.lead)
        if is_scale and not self._plain.is_of_unread(source, lead):
            scale = self.scales.alone(groups[0].chosen, lead)
            self._settle_held(aligned)
            return scale
        if len(groups) > 1:
            made = self._of_groups(groups, lead, written)
        elif groups[0].is_copied:
            return self._from_lead(aligned, lead, written, Rule.ONLY_IN_BASE, may_copy=may_copy)
        else:
            made = self._by_method(groups[0], lead, written, may_copy=may_copy)
        if made is not None:
            self._settle_held(aligned)
        return made

    def _routing_table(self, aligned: Aligned, lead: StoredTensor) -> Output | None:
        written = OutputEncoding(lead.dtype)
        # It has a row for each token, as embeddings have.
        self.embeddings.alone(aligned, lead, lead.dtype)
        group = next(iter(self._groups(aligned, written) or ()), None)
        settings = None if group is None else self._settings(group)
        if group is None or settings is None:
            return None
        chosen = self._as_stored(group.chosen)
        taken = self._whole_copy(chosen, lead, settings, None)
        if taken is not None:
            self._settle_held(aligned)
            return taken
        self.routing_tables.compare(chosen, may_lack=group.is_copied)
        return self._from_lead(aligned, lead, written, Rule.COPIED_FROM_LEAD)

    def _as_stored(self, chosen: BoundOutput) -> BoundOutput:
        """With the names that members store it by, some of which may be in another spelling."""

        def stored(member: Member, name: str) -> str:
            placed = next(iter(self._elsewhere(chosen.aligned, member, name)), None)
            return name if placed is None else placed.place.tensor.name

        members = tuple((member, stored(member, name)) for member, name in chosen.members)
        return chosen._replace(members=members)

    def _groups(self, aligned: Aligned, written: OutputEncoding) -> list[_Group] | None:
        subjects: tuple[Subject, ...] = (output_subject(aligned, self._logical),)
        if self.selectors.are_by_name:
            subjects = output_subjects(aligned, self._logical)
        self.selectors.see(subjects)
        outcomes: dict[frozenset[Selector], _Group | None] = {}
        if len(subjects) == 1 and self._recipe.missing_tensors != "copy_base":
            # Nothing tells its blocks apart.
            alone = self._outcome(aligned, subjects[0], outcomes, bind=False)
            return None if alone is None else [alone]
        groups: list[_Group] = []
        for number, (own, names) in enumerate(self._runs(aligned, written, subjects)):
            candidates = [self._outcome(aligned, each, outcomes, bind=len(subjects) > 1) for each in own]
            group = candidates[0]
            if group is None or None in candidates:
                return None
            if any(each != group for each in candidates):
                self._report_interleaved(aligned)
                return None
            if self._recipe.missing_tensors == "copy_base" and self._lacking(group.chosen, names):
                group = replace(group, is_copied=True, blocks=[])
            known = next((each for each in groups if each == group), None)
            if known is None:
                groups.append(group)
            (known or group).blocks.append(number)
        return groups

    def _runs(
        self, aligned: Aligned, written: OutputEncoding, subjects: tuple[Subject, ...]
    ) -> Iterator[tuple[Sequence[Subject], Sequence[str]]]:
        """For each block that may be made in another way than others its logical tensors, and their names.

        One for a tensor that is one block, without names."""
        form = None if written.quant_spec is None else written.quant_spec.format
        blocks = self._logical[aligned.span.lead.source].blocks_in(aligned.lead, form) or ()
        if len(blocks) < 2:
            yield subjects, ()
            return
        start = 0
        for block in blocks:
            stop = start + len(block.members)
            own = subjects if len(subjects) == 1 else subjects[start:stop]
            yield own, [name for name, _ in block.members]
            start = stop

    def _outcome(
        self,
        aligned: Aligned,
        subject: Subject,
        outcomes: dict[frozenset[Selector], _Group | None],
        *,
        bind: bool,
    ) -> _Group | None:
        key = self.selectors.matching(subject)
        if key not in outcomes:
            assignment = self._assignments.of(aligned.span, subject)
            chosen = None if assignment is None else self._informed(choose(aligned, assignment))
            group = None if chosen is None else _Group(chosen, subject)
            if group is not None and bind:
                group.settings = self._settings(group)
            outcomes[key] = group
        return outcomes[key]

    def _informed(self, chosen: BoundOutput) -> BoundOutput:
        """With a plain mean in place of a method for whose statistics nothing was collected."""
        method, aligned = chosen.assignment.method, chosen.aligned
        if method.statistics is None:
            return chosen
        have = (self._resolver.has_statistics(method.statistics, each.source) for each, _ in chosen.members)
        if not all(have):
            self._lacks_statistics(chosen)
        lead = self._sources[aligned.span.lead.source].checkpoint.tensors[aligned.lead]
        if self._ops.have_statistics(chosen) and not self.embeddings.concerns(chosen, lead):
            return chosen
        self._uninformed.setdefault(method.name, []).append(aligned.output)
        return chosen._replace(assignment=replace(chosen.assignment, method=MEAN))

    def _lacks_statistics(self, chosen: BoundOutput) -> None:
        method = chosen.assignment.method.name
        self.findings.tensor(
            self._recipe.where(*chosen.assignment.path),
            f"{method} would make {{count}} tensors by statistics of all models, and some have none",
            f"Use {method} in a merge of its own that lists every model, and name the result here.",
            example=chosen.aligned.output,
        )

    def notes(self) -> Iterator[str]:
        for method, names in self._uninformed.items():
            yield (
                f"{len(names)} tensors, such as {names[0]}, are a mean of the models by 'weight': they have "
                f"no statistics that {method} could go by"
            )

    def _report_interleaved(self, aligned: Aligned) -> None:
        source = self._sources[aligned.span.lead.source]
        self.findings.tensor(
            source.name,
            "the recipe names some of the matrices that {count} tensors hold, and these lie there "
            "interleaved with others, so that they cannot be made in different ways",
            "Name all matrices of an expert in the same line, or use a base whose experts are stored "
            "one by one.",
            example=aligned.output,
        )

    def _of_groups(
        self, groups: Sequence[_Group], lead: StoredTensor, written: OutputEncoding
    ) -> Output | None:
        aligned, ops = groups[0].chosen.aligned, dict[int, Op]()
        for group in groups:
            if group.is_copied:
                made = self._ops.alone(aligned, written, only=group.blocks)
            else:
                settings = self._checked(group.chosen, self._settings(group))
                made = self._ops.ops(group.chosen, lead, settings, written, only=group.blocks)
            if made is not None:
                ops.update(zip(group.blocks, made, strict=True))
        if len(ops) < sum(len(group.blocks) for group in groups):
            return None
        made_ops = tuple(ops[number] for number in sorted(ops))
        return self._computed(aligned, lead, written, made_ops, groups[0].chosen)

    def _by_method(
        self, group: _Group, lead: StoredTensor, written: OutputEncoding, *, may_copy: bool
    ) -> Output | None:
        chosen = group.chosen
        settings = self._settings(group)
        if self.embeddings.concerns(chosen, lead):
            dtype = self.formats.dtype_of_rows(chosen.aligned, lead, written)
            return self.embeddings.output(chosen, lead, settings, dtype)
        if settings is not None and may_copy:
            whole = self._whole_copy(chosen, lead, settings, written)
            if whole is not None:
                return whole
        ops = self._ops.ops(chosen, lead, self._checked(chosen, settings), written)
        return None if ops is None else self._computed(chosen.aligned, lead, written, ops, chosen)

    def _checked(self, chosen: BoundOutput, settings: Settings | None) -> Settings | None:
        """The settings, unless some member holds no plain numbers: findings say which.

        What cannot be computed is checked all the same, so that every problem is reported at once."""
        combines = settings is not None or len(chosen.members) > 1
        return settings if not combines or self._all_plain(chosen) else None

    def _computed(
        self,
        aligned: Aligned,
        lead: StoredTensor,
        written: OutputEncoding,
        ops: tuple[Op, ...],
        chosen: BoundOutput | None = None,
    ) -> Output:
        source = aligned.span.lead.source
        if written.quant_spec is None:
            logical = self._logical[source]
            shape = logical.shape_in(aligned.lead, None) if aligned.lead in logical.stacked else lead.shape
            return Output(aligned.output, written.dtype, shape, ops, True)
        checkpoint, quant_spec = self._sources[source].checkpoint, written.quant_spec
        packed = checkpoint.packed.get(aligned.lead)
        if packed is None or packed.quant_spec != quant_spec:
            like = self._logical[source].packed_like(aligned.lead, quant_spec.format)
            packed_as = fresh_parts(aligned.output, quant_spec, like, checkpoint.stored)
            return Output(aligned.output, written.dtype, quant_spec.shape, ops, True, packed_as)
        packed_as = self._made_alike(packed, aligned.output, source, chosen)
        return Output(aligned.output, written.dtype, lead.shape, ops, True, packed_as)

    def _made_alike(
        self, packed: QuantisedWeight, output: str, source: int, chosen: BoundOutput | None
    ) -> QuantisedOutput:
        """The parts of an output that is stored as in a source.

        Codes, scales and what repeats the shape are made; scales of inputs are the largest; all else is
        copied."""
        stored = self._sources[source].checkpoint.stored
        names = {name: part_name(packed.name, name, output) for name in packed.stored}
        one = packed.tensor_scale

        def other(name: str) -> Output:
            if name == packed.shape_tensor:
                return shape_tensor(names[name], stored[name].dtype, packed.quant_spec)
            if name.endswith(INPUT_SCALES):
                codes = packed.quant_spec.format.code_dtype
                return self.scales.of_inputs(names[name], output, (source, stored[name]), chosen, codes)
            return copied_output(names[name], stored[name], source)

        return QuantisedOutput(
            packed.quant_spec,
            names[packed.codes],
            "" if packed.scales == one else names[packed.scales],
            (
                *(other(name) for name in packed.others if name not in (one, packed.zero_points)),
                *self.scales.of_another(packed, output, source, chosen),
            ),
            None if one is None else TensorSpec(names[one], stored[one].dtype, stored[one].shape),
            "" if packed.zero_points is None else names[packed.zero_points],
        )

    def _settle_held(self, aligned: Aligned, use: Use = Use.DROPPED, rule: Rule = Rule.NOT_CHOSEN) -> None:
        """Settle what members have for an output, where no use of it says more."""
        disposition = Disposition(use, rule, aligned.output)
        for store, name in self._held(aligned):
            if use is not Use.DROPPED or name not in self.dispositions.settled[store]:
                self.dispositions.settle(store, name, disposition)

    def _from_lead(
        self,
        aligned: Aligned,
        lead: StoredTensor,
        written: OutputEncoding,
        rule: Rule,
        *,
        may_copy: bool = True,
    ) -> Output | None:
        source = aligned.span.lead.source
        dtype = written.dtype if written.quant_spec is None else lead.dtype
        renumbered = self.embeddings.alone(aligned, lead, dtype)
        if renumbered is not None:
            self.formats.dtype_of_rows(aligned, lead, written)
            self._settle_held(aligned)
            return renumbered
        if self._resolver.is_changed(source, aligned.lead):
            ops = self._ops.alone(aligned, written)
            if ops is not None:
                self._settle_held(aligned)
            return None if ops is None else self._computed(aligned, lead, written, ops)
        store, stored = self._resolver.stored(source, aligned.lead) or (source, lead)
        finite = lead.dtype.is_mergeable and rule is not Rule.COPIED_FROM_LEAD
        made = self._copy(aligned, stored, store, check_finite=finite)
        differs = written.dtype is not stored.dtype or self._differs(written.quant_spec, source, aligned.lead)
        differs |= not may_copy
        disposition = Use.CONVERTED if differs else Use.COPIED
        # Before its ops are made, which would say that the dtype alone is why.
        self.dispositions.settle(store, stored.name, Disposition(disposition, rule, aligned.output))
        if differs:
            ops = self._ops.alone(aligned, written) if self._plain.check(source, lead) else None
            if ops is None:
                return None
            made = self._computed(aligned, lead, written, ops)
        instead = Rule.LEAD_HAS_IT if rule is Rule.COPIED_FROM_LEAD else rule
        self._settle_held(aligned, rule=instead)
        return made

    def _copy(self, aligned: Aligned, stored: StoredTensor, store: int, *, check_finite: bool) -> Output:
        checkpoint = self._sources[store].checkpoint if store < len(self._sources) else None
        packed = None if checkpoint is None else checkpoint.packed.get(stored.name)
        if checkpoint is None or packed is None:
            return copied_output(aligned.output, stored, store, check_finite=check_finite)
        codes, *others = (
            copied_output(part_name(stored.name, name, aligned.output), checkpoint.stored[name], store)
            for name in packed.stored
        )
        quantised = QuantisedOutput(packed.quant_spec, codes.name, "", tuple(others))
        return Output(aligned.output, stored.dtype, stored.shape, codes.ops, False, quantised)

    def _lacking(self, chosen: BoundOutput, names: Sequence[str]) -> bool:
        """Whether some member stores a tensor neither by this name nor within another, nor where it or the
        lead has it in a format that is not read.

        ``names`` are logical tensors of it; empty for all."""
        return any(
            self._logical[member.source].stored(name) is None
            and None in self._elsewhere(chosen.aligned, member, name, names)
            and not self._is_unread(chosen.aligned, member, name, names)
            for member, name in chosen.members
        )

    def _is_unread(self, aligned: Aligned, member: Member, name: str, names: Sequence[str]) -> bool:
        logical = self._logical_in(aligned, name, names)
        is_unread = any(self._plain.unread_parts(member.source, each) for each in logical)
        return is_unread or self._ops.numbers_of_unread(aligned, member, name) is not None

    def _held(self, aligned: Aligned) -> Iterator[tuple[int, str]]:
        for member, name in zip(aligned.span.members, aligned.names, strict=True):
            is_bare = member.source not in self._resolver.adapters
            if is_bare and name in self._sources[member.source].checkpoint.tensors:
                yield member.source, name
                continue
            for resolved in filter(None, self._elsewhere(aligned, member, name)):
                yield from self._resolver.holders(member.source, resolved)

    def _elsewhere(
        self, aligned: Aligned, member: Member, name: str, names: Sequence[str] = ()
    ) -> list[ResolvedInput | None]:
        logical = self._logical_in(aligned, name, names)
        return [self._resolver.find(member.source, name, each) for each in logical]

    def _logical_in(self, aligned: Aligned, name: str, names: Sequence[str]) -> list[str]:
        """What another source calls logical tensors that it has in ``name``; of all where none is given."""
        if not names:
            blocks = self._logical[aligned.span.lead.source].blocks(aligned.lead) or ()
            names = [logical for block in blocks for logical, _ in block.members]
        return [moved(aligned, each, name) for each in names]

    def _settings(self, group: _Group) -> Settings | None:
        if group.settings is not None:
            return group.settings
        chosen = group.chosen
        try:
            settings = self._bound(chosen, group.subject)
        except BindError as error:
            self._unbound(error)
            return None
        if settings is self._sound:
            return settings
        objection = chosen.assignment.method.check(settings)
        if objection is None:
            self._sound = settings
            return settings
        self.findings.tensor(
            self._recipe.where(*chosen.assignment.path),
            f"{objection} ({{count}} tensors)",
            "Change the parameters.",
            example=chosen.aligned.output,
        )
        return None

    def _bound(self, chosen: BoundOutput, subject: Subject) -> Settings:
        aligned, assignment = chosen.aligned, chosen.assignment
        key = aligned.span.path, assignment.rule, assignment.method.name
        if key not in self._binders:
            self._binders[key] = Binder(self._recipe, assignment, self._names)
        binder = self._binders[key]
        if binder.constant is not None:
            return binder.constant
        members = [
            member_subject(member, name, self._logical, (subject.name, *subject.aliases))
            for member, name in chosen.members
            if member is not assignment.base
        ]
        self.selectors.see(members)
        return binder.settings(subject, members, aligned.t, depth=aligned.depth)

    def _unbound(self, error: BindError) -> None:
        problem = error.problem
        if not error.tensor:
            self.findings.extend([problem])
            return
        self.findings.tensor(
            problem.where,
            f"{problem.what.removesuffix('.')} ({{count}} tensors)",
            problem.remedy,
            example=error.tensor,
            key=error.parameter,
        )

    def _whole_copy(
        self, chosen: BoundOutput, lead: StoredTensor, settings: Settings, written: OutputEncoding | None
    ) -> Output | None:
        """``written``: None for any dtype in which it is stored."""
        which = chosen.assignment.method.identity(settings)
        if which is None:
            return None
        aligned, position = chosen.aligned, which + (1 if chosen.assignment.base is not None else 0)
        member, name = chosen.members[position]
        located = self._resolver.stored(member.source, name)
        if located is None or self._resolver.is_changed(member.source, name):
            return None
        store, stored = located
        differs = written is not None and (
            stored.dtype is not written.dtype or self._differs(written.quant_spec, member.source, name)
        )
        if stored.shape != lead.shape or differs:
            return None
        self.dispositions.settle(store, stored.name, Disposition(Use.COPIED, Rule.ONE_SOURCE, aligned.output))
        laid = self._resolver.aligned.get(member.source)
        if laid is not None and laid.store == store:
            self.dispositions.settle(
                member.source, name, Disposition(Use.COPIED, Rule.ONE_SOURCE, aligned.output)
            )
        for other, other_name in chosen.members:
            if self._logical[other.source].stored(other_name) is not None:
                disposition = Disposition(Use.DROPPED, Rule.METHOD, aligned.output)
                self.dispositions.settle(other.source, other_name, disposition)
        return self._copy(aligned, stored, store, check_finite=stored.dtype.is_mergeable)

    def _differs(self, quant_spec: QuantSpec | None, source: int, name: str) -> bool:
        other = self._logical[source].quant_spec(name)
        if quant_spec is None or other is None:
            return quant_spec is not other
        return quant_spec.encoding != other.encoding

    def _all_plain(self, chosen: BoundOutput) -> bool:
        aligned = chosen.aligned
        names = ((member.source, name) for member, name in chosen.members)
        plain = True
        for source, name in dict.fromkeys([(aligned.span.lead.source, aligned.lead), *names]):
            tensor = self._sources[source].checkpoint.tensors.get(name)
            if tensor is not None and not (self._plain.are_plain[source] and tensor.dtype.is_mergeable):
                # All of them are looked at, to say what each one is.
                plain &= self._plain.check(source, tensor)
        return plain


_EVERYTHING: tuple[dict[str, object], ...] = ({}, {"filter": "*"})
_NONE: frozenset[Selector] = frozenset()


class Selectors:
    """All selectors of one recipe; those of parameters are watched for tensors that they match."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._unmatched: dict[FieldPath, Selector] = dict(_of_parameters(recipe))
        rules = [rule.selector for rule in recipe.methods]
        selectors = dict.fromkeys([*self._unmatched.values(), *rules])
        self._by_name = tuple(each for each in selectors if each.is_by_name)

    @property
    def are_by_name(self) -> bool:
        return bool(self._by_name)

    def matching(self, subject: Subject) -> frozenset[Selector]:
        matching = [each for each in self._by_name if each.matches(subject)]
        return frozenset(matching) if matching else _NONE

    def see(self, subjects: Iterable[Subject]) -> None:
        if self._unmatched:
            for subject in subjects:
                for path in [path for path, each in self._unmatched.items() if each.matches(subject)]:
                    del self._unmatched[path]

    def notes(self) -> Iterator[str]:
        """Those that matched none of the outputs; after the last of them."""
        for path, selector in self._unmatched.items():
            given = ", ".join(f"{key}: {_text(value)}" for key, value in plain_selector(selector).items())
            yield (
                f"{self._recipe.where(*path)}: {given} matches no tensor that is merged, so that its value "
                "has no effect ('raymerge inspect MODEL' lists names and roles)"
            )


def _of_parameters(recipe: Recipe) -> Iterator[tuple[FieldPath, Selector]]:
    for path, setting in written_settings(recipe):
        if isinstance(setting, Conditional):
            for index, choice in enumerate(setting.choices):
                if plain_selector(choice.selector) not in _EVERYTHING:
                    yield (*path, index), choice.selector


def _text(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
