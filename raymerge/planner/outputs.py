"""Makes each output tensor: finds its bytes in every member, binds its numbers, and says what is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType
from raymerge.methods import Access, Method, Settings
from raymerge.planner.align import Aligned
from raymerge.planner.bind import Binder, BindError
from raymerge.planner.dispositions import Disposition, Fate, Fates, Rule
from raymerge.planner.expressions import (
    Expression,
    Output,
    Part,
    Read,
    Row,
    conversion_expression,
    copy_expression,
    make_expression,
)
from raymerge.planner.findings import Findings
from raymerge.planner.logical import Block, LogicalTensors, Place
from raymerge.planner.precision import output_dtype
from raymerge.planner.quantised import quantised_formats
from raymerge.planner.sources import Path_, Source
from raymerge.planner.spans import Member
from raymerge.recipes import Recipe


class OutputBuilder:
    """Builds the outputs of one plan; findings and fates collect on the way."""

    def __init__(
        self, recipe: Recipe, method: Method, sources: Sequence[Source], logical: Sequence[LogicalTensors]
    ) -> None:
        self.findings = Findings()
        self.fates = Fates(sources)
        self._recipe = recipe
        self._method = method
        self._sources = sources
        self._logical = logical
        self._main = [main_dtype(source.checkpoint) for source in sources]
        self._forms = [quantised_formats(source.checkpoint) for source in sources]
        self._binders: dict[Path_, Binder] = {}
        self._latest: tuple[Settings, bool, DType, Expression] | None = None

    def output(self, aligned: Aligned) -> Output | None:
        """The output for one aligned tensor, or None with a finding that says why not."""
        made = self._make(aligned)
        if made is None:
            self._give_up(aligned)
        return made

    def _give_up(self, aligned: Aligned) -> None:
        """Settle what a failed output would have used, so that one fault is not reported twice."""
        for source, name in self._held(aligned):
            self.fates.settle(source, name, Fate(Disposition.MERGED, Rule.METHOD, aligned.output))

    def _make(self, aligned: Aligned) -> Output | None:
        source = aligned.span.lead.source
        lead = self._sources[source].checkpoint.tensors[aligned.lead]
        role = self._logical[source].part(aligned.lead)
        if role is Role.BUFFER or self._is_integer(lead, source):
            return self._from_lead(aligned, lead, lead.dtype, Rule.COPIED_FROM_LEAD)
        dtype = output_dtype(self._recipe, lead, role, self._main[source])
        if aligned.copied:
            return self._from_lead(aligned, lead, dtype, Rule.UNNAMED_MODULE)
        if self._recipe.missing_tensors == "copy_base" and self._lacking(aligned):
            return self._from_lead(aligned, lead, dtype, Rule.ONLY_IN_BASE)
        return self._by_method(aligned, lead, dtype)

    def _by_method(self, aligned: Aligned, lead: StoredTensor, dtype: DType) -> Output | None:
        settings = self._settings(aligned)
        if settings is not None and not self._converts_codes(lead, aligned.span.lead.source):
            whole = self._whole_copy(aligned, lead, settings, dtype)
            if whole is not None:
                return Output(aligned.output, dtype, lead.shape, (whole,), dtype.is_mergeable)
        # What cannot be computed is looked at all the same: every problem is to be said at once.
        combines = settings is not None or len(aligned.span.everyone()) > 1
        if combines and not self._all_plain(aligned):
            settings = None
        rows = self._rows(aligned, lead, settings, dtype)
        return None if rows is None else Output(aligned.output, dtype, lead.shape, rows, True)

    def _is_integer(self, lead: StoredTensor, source: int) -> bool:
        return not lead.dtype.is_mergeable and lead.name not in self._forms[source]

    def _converts_codes(self, lead: StoredTensor, source: int) -> bool:
        """Whether the recipe asks for another dtype of a quantised tensor."""
        wanted = self._recipe.out_dtype or self._recipe.dtype
        return wanted is not None and lead.name in self._forms[source]

    def _from_lead(self, aligned: Aligned, lead: StoredTensor, dtype: DType, rule: Rule) -> Output | None:
        """The lead's tensor whatever the method: its bytes, or its values in another dtype."""
        source = aligned.span.lead.source
        alone = replace(
            aligned,
            span=replace(aligned.span, members=(aligned.span.lead,), base=None),
            names=(aligned.lead,),
        )
        row = _copy_row(alone, lead, source)
        disposition = Disposition.COPIED
        if dtype is not lead.dtype or self._converts_codes(lead, source):
            if not self._all_plain(alone):
                return None
            disposition = Disposition.CONVERTED
            row = replace(row, expression=conversion_expression(dtype))
        instead = Rule.LEAD_HAS_IT if rule is Rule.COPIED_FROM_LEAD else rule
        for other, name in self._held(aligned):
            self.fates.settle(other, name, Fate(Disposition.DROPPED, instead, aligned.output))
        self.fates.settle(source, aligned.lead, Fate(disposition, rule, aligned.output))
        finite = lead.dtype.is_mergeable and rule is not Rule.COPIED_FROM_LEAD
        return Output(aligned.output, dtype, lead.shape, (row,), finite)

    def _lacking(self, aligned: Aligned) -> bool:
        """Whether some member stores the tensor neither by this name nor within another."""
        return any(
            self._logical[member.source].stored(name) is None
            and None in self._elsewhere(aligned, member, name)
            for member, name in zip(aligned.span.everyone(), aligned.names, strict=True)
        )

    def _held(self, aligned: Aligned) -> Iterator[tuple[int, str]]:
        """The stored tensors that hold an aligned tensor: source and name, member by member."""
        for member, name in zip(aligned.span.everyone(), aligned.names, strict=True):
            if self._logical[member.source].stored(name) is not None:
                yield member.source, name
            else:
                places = self._elsewhere(aligned, member, name)
                yield from ((member.source, place.tensor.name) for place in places if place is not None)

    def _elsewhere(self, aligned: Aligned, member: Member, name: str) -> list[Place | None]:
        """Where a member has each logical tensor of the lead's tensor, whatever it is stored in."""
        blocks = self._logical[aligned.span.lead.source].blocks(aligned.lead) or ()
        return [
            self._logical[member.source].find(self._moved(aligned, logical, name))
            for block in blocks
            for logical, _ in block.members
        ]

    def _moved(self, aligned: Aligned, logical: str, name: str) -> str:
        """A logical name of the lead, moved to the layer that ``name`` is in."""
        return logical.replace(_layer_text(aligned.lead), _layer_text(name), 1)

    def _settings(self, aligned: Aligned) -> Settings | None:
        span = aligned.span
        offset = 1 if span.base is not None else 0
        try:
            if span.path not in self._binders:
                self._binders[span.path] = Binder(self._recipe, self._method, span, self._sources)
            settings = self._binders[span.path].settings(
                aligned.alias or aligned.output, aligned.names[offset:], aligned.t
            )
        except BindError as error:
            self._unbound(error)
            return None
        objection = self._method.check(settings)
        if objection is None:
            return settings
        self.findings.tensor(
            ("settings", objection),
            where=self._recipe.where(*span.path),
            what=f"{objection} ({{count}} tensors)",
            remedy="Change the parameters.",
            example=aligned.output,
        )
        return None

    def _unbound(self, error: BindError) -> None:
        problem = error.problem
        if not error.tensor:
            self.findings.add(problem)
            return
        self.findings.tensor(
            ("unbound", problem.where, error.parameter),
            where=problem.where,
            what=f"{problem.what.removesuffix('.')} ({{count}} tensors)",
            remedy=problem.remedy,
            example=error.tensor,
        )

    def _whole_copy(
        self, aligned: Aligned, lead: StoredTensor, settings: Settings, dtype: DType
    ) -> Row | None:
        """A row that moves one source's stored tensor as it is, where the method changes nothing."""
        chosen = self._method.identity(settings)
        if chosen is None:
            return None
        position = chosen + (1 if aligned.span.base is not None else 0)
        member, name = aligned.span.everyone()[position], aligned.names[position]
        stored = self._logical[member.source].stored(name)
        if stored is None or stored.shape != lead.shape or stored.dtype is not dtype:
            return None
        for other, its_name in self._held(aligned):
            if (other, its_name) != (member.source, name):
                self.fates.settle(other, its_name, Fate(Disposition.DROPPED, Rule.METHOD, aligned.output))
        self.fates.settle(member.source, name, Fate(Disposition.COPIED, Rule.ONE_SOURCE, aligned.output))
        return _copy_row(aligned, stored, member.source)

    def _all_plain(self, aligned: Aligned) -> bool:
        """Whether lead and members hold plain numbers by these names; what is quantised is reported."""
        names = zip(aligned.span.everyone(), aligned.names, strict=True)
        stored = dict.fromkeys([(aligned.span.lead.source, aligned.lead), *((m.source, n) for m, n in names)])
        found = [(source, self._logical[source].stored(name)) for source, name in stored]
        plain = [self._is_plain(source, tensor) for source, tensor in found if tensor is not None]
        return all(plain)

    def _is_plain(self, index: int, tensor: StoredTensor) -> bool:
        source = self._sources[index]
        form = self._forms[index].get(tensor.name)
        if form is None and tensor.dtype.is_mergeable:
            return True
        form = form or f"{tensor.dtype.value} integers"
        self.findings.tensor(
            ("quantised", source.name, form),
            where=source.name,
            what=f"{{count}} tensors are quantised as {form}, and raymerge does not combine or convert "
            "quantised tensors yet; their raw codes mean nothing without their scales",
            remedy="Use a checkpoint converted to bfloat16, or a recipe that takes these tensors from one "
            "source unchanged (merge_method: passthrough, without dtype).",
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
        )
        return False

    def _rows(
        self, aligned: Aligned, lead: StoredTensor, settings: Settings | None, dtype: DType
    ) -> tuple[Row, ...] | None:
        blocks = self._logical[aligned.span.lead.source].blocks(aligned.lead)
        if blocks is None:
            blocks = self._unknown_layout(aligned, lead)
        if blocks is None:
            return None
        unchanged = settings is not None and self._method.identity(settings) is not None
        fate = (
            Fate(Disposition.CONVERTED, Rule.DTYPE, aligned.output)
            if unchanged
            else Fate(Disposition.MERGED, Rule.METHOD, aligned.output)
        )
        runs = [self._run(aligned, block, fate) for block in blocks]
        found = [run for run in runs if run is not None]
        if settings is None or len(found) < len(runs):
            return None
        expression = self._expression(settings, aligned, dtype)
        return tuple(
            Row(block.num_elements, expression, *run) for block, run in zip(blocks, found, strict=True)
        )

    def _unknown_layout(self, aligned: Aligned, lead: StoredTensor) -> tuple[Block, ...] | None:
        """An expert stack of unknown orientation is one tensor for element-wise methods only."""
        count = lead.num_elements
        if self._method.access is Access.ELEMENT:
            return (Block(0, count, ((aligned.lead, Place(lead, 0, count, lead.shape, None)),)),)
        source = self._sources[aligned.span.lead.source]
        self.findings.tensor(
            ("layout", source.name),
            where=source.name,
            what=f"{{count}} tensors hold several experts in an order that model_type '{source.model_type}' "
            f"does not tell, and {self._method.name} needs each expert's matrix by itself",
            remedy="Use an element-wise method (linear, task_arithmetic, dare_linear), or report the "
            "model type.",
            example=f"{aligned.lead} {list(lead.shape)}",
        )
        return None

    def _expression(self, settings: Settings, aligned: Aligned, dtype: DType) -> Expression:
        has_base = aligned.span.base is not None
        latest = self._latest
        if latest is not None and latest[0] is settings and latest[1:3] == (has_base, dtype):
            return latest[3]
        made = make_expression(self._method, settings, has_base=has_base, cast=dtype)
        self._latest = (settings, has_base, dtype, made)
        return made

    def _run(
        self, aligned: Aligned, block: Block, fate: Fate
    ) -> tuple[tuple[Part, ...], tuple[Read, ...]] | None:
        """What is read for one block of the lead's tensor, or None with a finding."""
        parts: list[Part] = []
        reads: list[Read] = []
        complete = True
        for logical, place in block.members:
            for position, member in enumerate(aligned.span.everyone()):
                found = self._find(aligned, position, member, logical)
                if found is None or not self._fits(aligned, member, place, found):
                    complete = False
                    continue
                self.fates.settle(member.source, found.tensor.name, fate)
                reads.append(_read(len(parts), member.source, found))
            parts.append(Part(self._output_logical(aligned, logical), place.shape, place.view))
        return (tuple(parts), tuple(reads)) if complete else None

    def _output_logical(self, aligned: Aligned, logical: str) -> str:
        """Name by which chance is drawn: the output's, so that a layer used twice draws twice."""
        if aligned.alias:
            return aligned.alias
        if aligned.lead == aligned.output:
            return logical
        return self._moved(aligned, logical, aligned.output)

    def _find(self, aligned: Aligned, position: int, member: Member, logical: str) -> Place | None:
        source = self._logical[member.source]
        name = aligned.names[position]
        moved = self._moved(aligned, logical, name)
        stored = source.stored(name)
        if stored is not None:
            own = source.blocks(name)
            if own is None:
                return Place(stored, 0, stored.num_elements, stored.shape, None)
            places = dict(member for block in own for member in block.members)
            if len(places) == 1:
                return next(iter(places.values()))
            if moved in places:
                return places[moved]
        found = source.find(moved)
        if found is None:
            self._missing(aligned, member, name)
        return found

    def _missing(self, aligned: Aligned, member: Member, name: str) -> None:
        source = self._sources[member.source]
        lead = self._sources[aligned.span.lead.source]
        self.findings.tensor(
            ("missing", source.name),
            where=source.name,
            what=f"it lacks {{count}} tensors that {lead.name} has and that the recipe merges",
            remedy="Use a complete checkpoint, or name a base_model and say 'missing_tensors: copy_base' in "
            "the recipe to keep the base's.",
            example=name,
        )

    def _fits(self, aligned: Aligned, member: Member, place: Place, found: Place) -> bool:
        """Whether what was found are plain numbers of the lead's shape; else a finding says what they are."""
        if place.shape == found.shape:
            return self._is_plain(member.source, found.tensor)
        source, lead = self._sources[member.source], self._sources[aligned.span.lead.source]
        self.findings.tensor(
            ("shape", source.name),
            where=source.name,
            what=f"{{count}} tensors have other shapes than in {lead.name}",
            remedy="Only models of one size can be merged; vocabularies of different length need a tokenizer "
            "block, which raymerge does not carry out yet.",
            example=f"{found.tensor.name} is {list(found.shape)} here and {list(place.shape)} there",
        )
        return False


def _layer_text(name: str) -> str:
    """The ``.12.`` of a layered name, by which a canonical name is moved to another layer."""
    number = next((piece for piece in name.split(".") if piece.isdigit()), None)
    return f".{number}." if number is not None else ""


def _copy_row(aligned: Aligned, stored: StoredTensor, source: int) -> Row:
    read = Read(0, source, stored.key, stored.offset, stored.nbytes, stored.dtype, None)
    part = Part(aligned.output, stored.shape, None)
    return Row(stored.num_elements, copy_expression(stored.dtype), (part,), (read,))


def _read(part: int, source: int, place: Place) -> Read:
    tensor = place.tensor
    first = tensor.offset + tensor.dtype.nbytes(place.start)
    nbytes = tensor.dtype.nbytes(place.num_elements)
    return Read(part, source, tensor.key, first, nbytes, tensor.dtype, place.view)
