"""Makes each output tensor: says by which rule it is made, binds its numbers, and has its rows made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.layout import TensorSpec
from raymerge.checkpoints.numbers import part_name
from raymerge.checkpoints.packed import Packed
from raymerge.checkpoints.packing import Packing, encoding_of
from raymerge.checkpoints.source import main_dtype
from raymerge.methods import Settings
from raymerge.planner.align import Aligned
from raymerge.planner.bind import Binder, BindError
from raymerge.planner.chosen import Chosen, choose, member_subject, moved, output_subject
from raymerge.planner.dispositions import Disposition, Fate, Fates, Rule
from raymerge.planner.embeddings import Embeddings
from raymerge.planner.expressions import Output, PackedAs, Part, Read, Row, copy_expression
from raymerge.planner.findings import Findings
from raymerge.planner.fresh import fresh_parts, shape_tensor
from raymerge.planner.plain import PlainNumbers
from raymerge.planner.rows import RowMaker
from raymerge.planner.sources import Path_, holdings
from raymerge.planner.spans import Member
from raymerge.planner.supplies import Supplies, Supply
from raymerge.planner.treatments import Treatments
from raymerge.planner.vocabulary import VocabularyPlan
from raymerge.planner.written import OutFormats, Written
from raymerge.recipes import Recipe


class OutputBuilder:
    """Builds the outputs of one plan; findings and fates collect on the way."""

    def __init__(
        self,
        recipe: Recipe,
        treatments: Treatments,
        supplies: Supplies,
        findings: Findings,
        *,
        vocabulary: VocabularyPlan | None = None,
    ) -> None:
        self.findings = findings
        self.fates = Fates(holdings(supplies.sources))
        self._recipe = recipe
        self._treatments = treatments
        self._supplies = supplies
        self._sources = supplies.sources
        self._logical = supplies.logical
        self._names = [source.name for source in supplies.sources]
        self._main = [main_dtype(source.checkpoint) for source in supplies.sources]
        self._plain = PlainNumbers(supplies.sources, findings)
        self._rows = RowMaker(supplies, self._plain, findings, self.fates)
        self._formats = OutFormats(recipe, supplies.logical, self._main, findings)
        self._binders: dict[tuple[Path_, int], Binder] = {}
        self.embeddings = Embeddings(recipe, supplies, self._rows, findings, vocabulary=vocabulary)
        """The rows of tensors with a row for each token."""

    def output(self, aligned: Aligned) -> Output | None:
        """The output for one aligned tensor, or None with a finding that says why not."""
        made = self._make(aligned)
        if made is None:
            self._give_up(aligned)
        return made

    def report_unused(self) -> None:
        """Report what the recipe says of outputs that there are not; after the last of them."""
        self._formats.report_unused()

    def _give_up(self, aligned: Aligned) -> None:
        """Settle what a failed output would have used, so that one fault is not reported twice."""
        for store, name in self._held(aligned):
            self.fates.settle(store, name, Fate(Disposition.MERGED, Rule.METHOD, aligned.output))

    def _make(self, aligned: Aligned) -> Output | None:
        source = aligned.span.lead.source
        lead = self._sources[source].checkpoint.tensors[aligned.lead]
        role = self._logical[source].part(aligned.lead)
        if role is Role.BUFFER or self._plain.is_integer(source, lead):
            return self._from_lead(aligned, lead, Written(lead.dtype), Rule.COPIED_FROM_LEAD)
        written = self._formats.of(aligned, lead, role)
        if aligned.copied:
            return self._from_lead(aligned, lead, written, Rule.UNNAMED_MODULE)
        treatment = self._treatments.of(aligned.span, output_subject(aligned, self._logical))
        if treatment is None:
            return None
        chosen = choose(aligned, treatment)
        if self._recipe.missing_tensors == "copy_base" and self._lacking(chosen):
            return self._from_lead(aligned, lead, written, Rule.ONLY_IN_BASE)
        made = self._by_method(chosen, lead, written)
        if made is not None:
            self._settle_rest(aligned)
        return made

    def _by_method(self, chosen: Chosen, lead: StoredTensor, written: Written) -> Output | None:
        settings = self._settings(chosen)
        if self.embeddings.concerns(chosen, lead):
            dtype = self._formats.dtype_of_rows(chosen.aligned, lead, written)
            return self.embeddings.output(chosen, lead, settings, dtype)
        if settings is not None:
            whole = self._whole_copy(chosen, lead, settings, written)
            if whole is not None:
                return whole
        # What cannot be computed is looked at all the same: every problem is to be said at once.
        combines = settings is not None or len(chosen.names) > 1
        if combines and not self._all_plain(chosen):
            settings = None
        rows = self._rows.rows(chosen, lead, settings, written)
        return None if rows is None else self._computed(chosen.aligned, lead, written, rows)

    def _computed(
        self, aligned: Aligned, lead: StoredTensor, written: Written, rows: tuple[Row, ...]
    ) -> Output:
        """The output of rows that are computed."""
        source = aligned.span.lead.source
        if written.packing is None:
            shape = self._logical[source].shape_in(aligned.lead, None)
            return Output(aligned.output, written.dtype, shape, rows, True)
        packs, packing = self._sources[source].checkpoint.packs, written.packing
        packed = None if packs is None else packs.packed.get(aligned.lead)
        if packs is None or packed is None or packed.packing != packing:
            like = self._logical[source].packed_like(aligned.lead, packing.format)
            packed_as = fresh_parts(aligned.output, packing, like, packs.stored if packs is not None else {})
            return Output(aligned.output, written.dtype, packing.shape, rows, True, packed_as)
        packed_as = _made_alike(packed, packs.stored, aligned.output, source)
        return Output(aligned.output, written.dtype, lead.shape, rows, True, packed_as)

    def _settle_rest(self, aligned: Aligned) -> None:
        """Settle what the method that was chosen leaves out of those that take part."""
        for store, name in self._held(aligned):
            self.fates.settle(store, name, Fate(Disposition.DROPPED, Rule.NOT_CHOSEN, aligned.output))

    def _from_lead(self, aligned: Aligned, lead: StoredTensor, written: Written, rule: Rule) -> Output | None:
        """The lead's tensor whatever the method: its bytes, or its values stored in another way."""
        source = aligned.span.lead.source
        dtype = written.dtype if written.packing is None else lead.dtype
        renumbered = self.embeddings.alone(aligned, lead, dtype)
        if renumbered is not None:
            self._formats.dtype_of_rows(aligned, lead, written)
            self._settle_rest(aligned)
            return renumbered
        if self._supplies.is_changed(source, aligned.lead):
            return self._adapted(aligned, lead, written)
        store, stored = self._supplies.stored(source, aligned.lead) or (source, lead)
        finite = lead.dtype.is_mergeable and rule is not Rule.COPIED_FROM_LEAD
        made = self._copy(aligned, stored, store, check_finite=finite)
        differs = written.dtype is not stored.dtype or self._differs(written.packing, source, aligned.lead)
        disposition = Disposition.CONVERTED if differs else Disposition.COPIED
        # Before its rows are made, which would say that the dtype alone is why.
        self.fates.settle(store, stored.name, Fate(disposition, rule, aligned.output))
        if differs:
            rows = self._rows.alone(aligned, written) if self._plain.check(source, lead) else None
            if rows is None:
                return None
            made = self._computed(aligned, lead, written, rows)
        instead = Rule.LEAD_HAS_IT if rule is Rule.COPIED_FROM_LEAD else rule
        for other, name in self._held(aligned):
            self.fates.settle(other, name, Fate(Disposition.DROPPED, instead, aligned.output))
        return made

    def _copy(self, aligned: Aligned, stored: StoredTensor, store: int, *, check_finite: bool) -> Output:
        """One source's stored tensor as it is; of codes everything that belongs to them."""
        packs = self._sources[store].checkpoint.packs if store < len(self._sources) else None
        packed = None if packs is None else packs.packed.get(stored.name)
        if packs is None or packed is None:
            row = _copy_row(aligned.output, stored, store)
            return Output(aligned.output, stored.dtype, stored.shape, (row,), check_finite)
        codes, *others = (
            _copied(part_name(stored.name, name, aligned.output), packs.stored[name], store)
            for name in packed.stored
        )
        packing = PackedAs(packed.packing, codes.name, "", tuple(others))
        return Output(aligned.output, stored.dtype, stored.shape, codes.rows, False, packing)

    def _adapted(self, aligned: Aligned, lead: StoredTensor, written: Written) -> Output | None:
        """The lead's tensor with what its adapter adds, and nothing else."""
        rows = self._rows.alone(aligned, written)
        if rows is None:
            return None
        self._settle_rest(aligned)
        return self._computed(aligned, lead, written, rows)

    def _lacking(self, chosen: Chosen) -> bool:
        """Whether some of those that take part store the tensor neither by this name nor within another."""
        return any(
            self._logical[member.source].stored(name) is None
            and None in self._elsewhere(chosen.aligned, member, name)
            for member, name in chosen.members()
        )

    def _held(self, aligned: Aligned) -> Iterator[tuple[int, str]]:
        """The stored tensors that hold an aligned tensor, or change it: source or adapter, and name."""
        for member, name in zip(aligned.span.members, aligned.names, strict=True):
            is_bare = member.source not in self._supplies.adapters
            if is_bare and self._logical[member.source].stored(name) is not None:
                yield member.source, name
                continue
            supplies = [supply for supply in self._elsewhere(aligned, member, name) if supply is not None]
            for supply in supplies:
                yield from self._supplies.holders(member.source, supply)

    def _elsewhere(self, aligned: Aligned, member: Member, name: str) -> list[Supply | None]:
        """Where a member has each logical tensor of the lead's tensor, whatever it is stored in."""
        blocks = self._logical[aligned.span.lead.source].blocks(aligned.lead) or ()
        return [
            self._supplies.find(member.source, name, moved(aligned, logical, name))
            for block in blocks
            for logical, _ in block.members
        ]

    def _settings(self, chosen: Chosen) -> Settings | None:
        try:
            settings = self._bound(chosen)
        except BindError as error:
            self._unbound(error)
            return None
        objection = chosen.method.check(settings)
        if objection is None:
            return settings
        self.findings.tensor(
            ("settings", objection),
            where=self._recipe.where(*chosen.treatment.path),
            what=f"{objection} ({{count}} tensors)",
            remedy="Change the parameters.",
            example=chosen.aligned.output,
        )
        return None

    def _bound(self, chosen: Chosen) -> Settings:
        aligned, treatment = chosen.aligned, chosen.treatment
        key = aligned.span.path, treatment.rule
        if key not in self._binders:
            self._binders[key] = Binder(self._recipe, treatment, self._names)
        binder = self._binders[key]
        if binder.constant is not None:
            return binder.constant
        members = [
            member_subject(member, name, self._logical)
            for member, name in chosen.members()
            if member is not treatment.base
        ]
        subject = output_subject(aligned, self._logical)
        return binder.settings(subject, members, aligned.t, depth=aligned.depth)

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
        self, chosen: Chosen, lead: StoredTensor, settings: Settings, written: Written
    ) -> Output | None:
        """One source's stored tensor as it is, where the method changes nothing."""
        which = chosen.method.identity(settings)
        if which is None:
            return None
        aligned, position = chosen.aligned, which + (1 if chosen.treatment.base is not None else 0)
        member, name = chosen.treatment.everyone()[position], chosen.names[position]
        found = self._supplies.stored(member.source, name)
        if found is None or self._supplies.is_changed(member.source, name):
            return None
        store, stored = found
        differs = stored.dtype is not written.dtype or self._differs(written.packing, member.source, name)
        if stored.shape != lead.shape or differs:
            return None
        self.fates.settle(store, stored.name, Fate(Disposition.COPIED, Rule.ONE_SOURCE, aligned.output))
        laid = self._supplies.aligned.get(member.source)
        if laid is not None and laid.store == store:
            self.fates.settle(member.source, name, Fate(Disposition.COPIED, Rule.ONE_SOURCE, aligned.output))
        for other, other_name in chosen.members():
            if self._logical[other.source].stored(other_name) is not None:
                fate = Fate(Disposition.DROPPED, Rule.METHOD, aligned.output)
                self.fates.settle(other.source, other_name, fate)
        return self._copy(aligned, stored, store, check_finite=stored.dtype.is_mergeable)

    def _differs(self, packing: Packing | None, source: int, name: str) -> bool:
        """Whether a source's tensor is packed in another way."""
        other = self._logical[source].packing(name)
        if packing is None or other is None:
            return packing is not other
        return encoding_of(packing) != encoding_of(other)

    def _all_plain(self, chosen: Chosen) -> bool:
        """Whether lead and members hold plain numbers by these names; what is quantised is reported."""
        aligned = chosen.aligned
        names = ((member.source, name) for member, name in chosen.members())
        stored = dict.fromkeys([(aligned.span.lead.source, aligned.lead), *names])
        found = [(source, self._logical[source].stored(name)) for source, name in stored]
        plain = [self._plain.check(source, tensor) for source, tensor in found if tensor is not None]
        return all(plain)


def _made_alike(packed: Packed, stored: Mapping[str, StoredTensor], output: str, source: int) -> PackedAs:
    """How an output is stored as a source has a tensor.

    Codes, scales and what repeats the shape are made; all else is copied.
    """
    names = {name: part_name(packed.name, name, output) for name in packed.stored}
    one = packed.tensor_scale
    others = (name for name in packed.others if name != one)
    return PackedAs(
        packed.packing,
        names[packed.codes],
        "" if packed.scales == one else names[packed.scales],
        tuple(
            shape_tensor(names[name], stored[name].dtype, packed.packing)
            if name == packed.shape_tensor
            else _copied(names[name], stored[name], source)
            for name in others
        ),
        None if one is None else TensorSpec(names[one], stored[one].dtype, stored[one].shape),
    )


def _copied(name: str, stored: StoredTensor, store: int) -> Output:
    return Output(name, stored.dtype, stored.shape, (_copy_row(name, stored, store),), False)


def _copy_row(name: str, stored: StoredTensor, store: int) -> Row:
    read = Read(0, store, stored.key, stored.offset, stored.nbytes, stored.dtype, None)
    part = Part(name, stored.shape, None)
    return Row(stored.num_elements, copy_expression(stored.dtype), (part,), (read,))
