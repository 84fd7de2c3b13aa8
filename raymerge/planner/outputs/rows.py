"""Makes the rows of an output: what is read for each logical tensor of it, from every member."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Encoding, Format, Packing, encoding_of
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Fate, Fates, Rule
from raymerge.merge_plan.expressions import Expression, Part, Read, Row, make_expression
from raymerge.methods import Access, Settings
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.layer_map import Member
from raymerge.planner.matching.logical import Block, ElementOrder, Place
from raymerge.planner.matching.method_assignment import OWN, AssignedMethod
from raymerge.planner.outputs.bound_output import Chosen, moved, output_logical
from raymerge.planner.outputs.encoding import Written


class RowMaker:
    """Makes rows; what is missing or does not fit becomes a finding, what is used a fate."""

    def __init__(
        self, resolver: InputResolver, plain: PlainNumbers, findings: Findings, fates: Fates
    ) -> None:
        self._resolver = resolver
        self._sources = resolver.sources
        self._logical = resolver.logical
        self._plain = plain
        self._findings = findings
        self._fates = fates
        self._latest: tuple[Settings, bool, DType, Encoding | None, Expression] | None = None

    def rows(
        self,
        chosen: Chosen,
        lead: StoredTensor,
        settings: Settings | None,
        written: Written,
        *,
        only: Collection[int] | None = None,
    ) -> tuple[Row, ...] | None:
        """The rows of a tensor with the layout of the lead's, or None with findings.

        Args:
            chosen: the tensor.
            lead: the lead's stored tensor.
            settings: what the method is told; None where that is not known, so that all else is checked.
            written: how the output is stored.
            only: numbers of the blocks of the lead's tensor whose rows are made; None for all of them.
        """
        aligned = chosen.aligned
        form = None if written.packing is None else written.packing.format
        blocks: Sequence[Block] | None = self._logical[aligned.span.lead.source].blocks_in(aligned.lead, form)
        if blocks is None:
            blocks = self._unknown_layout(chosen, lead, settings)
        elif only is None and settings is not None and self._is_one_run(chosen, settings, written):
            blocks = (self._whole(chosen, form),)
        if blocks is None or not self._are_matrices(aligned, blocks, written.packing):
            return None
        if only is not None:
            blocks = [block for number, block in enumerate(blocks) if number in only]
        fate = fate_of(chosen, settings)
        runs = [self._run(chosen, block, fate) for block in blocks]
        found = [run for run in runs if run is not None]
        if settings is None or len(found) < len(runs):
            return None
        encode = None if written.packing is None else encoding_of(written.packing)
        expression = self.expression(settings, chosen, written.dtype, encode)
        return tuple(
            Row(block.num_elements, expression, *run) for block, run in zip(blocks, found, strict=True)
        )

    def expression(
        self, settings: Settings, chosen: Chosen, dtype: DType, encode: Encoding | None = None
    ) -> Expression:
        """The method applied with these settings; the same object for the same ones."""
        has_base = chosen.assignment.base is not None
        latest = self._latest
        if latest is not None and latest[0] is settings and latest[1:4] == (has_base, dtype, encode):
            return latest[4]
        made = make_expression(chosen.method, settings, has_base=has_base, cast=dtype, encode=encode)
        self._latest = (settings, has_base, dtype, encode, made)
        return made

    def alone(
        self, aligned: Aligned, written: Written, *, only: Collection[int] | None = None
    ) -> tuple[Row, ...] | None:
        """The rows of the lead's tensor with what its adapter adds, or of ``only`` some blocks of it.

        None with a finding.
        """
        lead = aligned.span.lead
        assignment = AssignedMethod(PASSTHROUGH, (lead,), None, {}, (), OWN, aligned.span.path)
        chosen = Chosen(aligned, assignment, (aligned.lead,))
        stored = self._sources[lead.source].checkpoint.tensors[aligned.lead]
        return self.rows(chosen, stored, Settings(values={}, sources=({"scale": None},)), written, only=only)

    def settle(self, resolved: ResolvedInput, source: int, fate: Fate) -> None:
        """Record the use of everything that an input is made of; what an adapter replaces is left out."""
        for store, name in resolved.holders():
            self._fates.settle(store, name, fate)
        replaced = self._resolver.replaced(source, resolved)
        if replaced is not None:
            self._fates.settle(source, replaced, Fate(Disposition.DROPPED, Rule.REPLACED, fate.output))

    def _unknown_layout(
        self, chosen: Chosen, lead: StoredTensor, settings: Settings | None
    ) -> tuple[Block, ...] | None:
        """An expert stack of unknown orientation is one tensor for element-wise methods only."""
        aligned, method, count = chosen.aligned, chosen.method, lead.num_elements
        if settings is None or method.access_with(settings) is Access.ELEMENT:
            return (Block(0, count, ((aligned.lead, Place(lead, 0, count, lead.shape, None)),)),)
        source = self._sources[aligned.span.lead.source]
        self._findings.tensor(
            ("layout", source.name),
            where=source.name,
            what=f"{{count}} tensors hold several experts in an order that model_type '{source.model_type}' "
            f"does not tell, and {method.name} needs each expert's matrix by itself",
            remedy="Use an element-wise method (linear, task_arithmetic, dare_linear), or report the "
            "model type.",
            example=f"{aligned.lead} {list(lead.shape)}",
        )
        return None

    def _are_matrices(self, aligned: Aligned, blocks: Sequence[Block], packing: Packing | None) -> bool:
        """Whether blocks have the scales of a matrix: of one where all of it shares one, else of bands that
        are those of its rows; if not, a finding says so."""
        if packing is None:
            return True
        size, is_one = packing.rows * packing.columns, packing.tensor_scale_dtype is not None
        if all(
            block.num_elements == size if is_one else packing.has_bands_of(block.start, block.num_elements)
            for block in blocks
        ):
            return True
        self._several_scales(aligned.span.lead.source, aligned.lead, packing)
        return False

    def _is_one_run(self, chosen: Chosen, settings: Settings, written: Written) -> bool:
        """Whether a fused tensor is made as one logical tensor: from tensors that have their elements in its
        order, element by element, whatever matrix they are of."""
        aligned, method = chosen.aligned, chosen.method
        source, packing = aligned.span.lead.source, written.packing
        if self._logical[source].is_alone(aligned.lead):
            return False
        if method.random or method.access_with(settings) is not Access.ELEMENT:
            return False
        order = self._logical[source].element_order(aligned.lead, None if packing is None else packing.format)
        return (
            order is not None
            and _runs_on(packing)
            and all(self._has_order(member.source, name, order) for member, name in chosen.members())
        )

    def _has_order(self, source: int, name: str, order: ElementOrder) -> bool:
        """Whether a source's tensor of a name has its elements in an order, and can be read in one run."""
        own, packing = self._logical[source], self._logical[source].packing(name)
        return (
            self._resolver.whole(source, name) is not None
            and own.element_order(name, None if packing is None else packing.format) == order
            and _runs_on(packing)
        )

    def _whole(self, chosen: Chosen, form: Format | None) -> Block:
        """All of the lead's tensor as one logical tensor, which goes by the tensor's name."""
        aligned, own = chosen.aligned, self._logical[chosen.aligned.span.lead.source]
        lead = self._sources[aligned.span.lead.source].checkpoint.tensors[aligned.lead]
        count = lead.num_elements
        place = Place(lead, 0, count, own.shape_in(aligned.lead, form), None)
        return Block(0, count, ((aligned.lead, place),))

    def _several_scales(self, source: int, name: str, packing: Packing) -> None:
        """Report a stack of matrices with scales of their own that is one logical tensor."""
        held = self._sources[source]
        scales = "one scale"
        if packing.tensor_scale_dtype is None:
            scales = f"{packing.grid[0]} rows of scales for {packing.rows} rows"
        self._findings.tensor(
            ("matrices", held.name, scales),
            where=held.name,
            what=f"{{count}} tensors are several matrices with {scales} each, in an order that model_type "
            f"'{held.model_type}' does not tell",
            remedy="Take them from one source unchanged (merge_method: passthrough, without dtype), or "
            "report the model type.",
            example=f"{name} {list(held.checkpoint.tensors[name].shape)}",
        )

    def _run(
        self, chosen: Chosen, block: Block, fate: Fate
    ) -> tuple[tuple[Part, ...], tuple[Read, ...]] | None:
        """What is read for one block of the lead's tensor, or None with a finding."""
        parts: list[Part] = []
        reads: list[Read] = []
        complete = True
        lead = self._logical[chosen.aligned.span.lead.source]
        is_alone = lead.is_alone(chosen.aligned.lead)
        for logical, place in block.members:
            for member, name in chosen.members():
                found = self._found(chosen, member, logical, name)
                if found is None:
                    self.missing(chosen, member, name if is_alone else moved(chosen.aligned, logical, name))
                if found is None or not self._fits(chosen, member, place, found.place):
                    complete = False
                    continue
                self.settle(found, member.source, _with_factor(fate, found))
                reads.append(found.read(len(parts)))
            parts.append(Part(output_logical(chosen.aligned, logical), place.shape, place.view))
        return (tuple(parts), tuple(reads)) if complete else None

    def _found(self, chosen: Chosen, member: Member, logical: str, name: str) -> ResolvedInput | None:
        """Where a member has a logical tensor of the lead's."""
        lead = self._logical[chosen.aligned.span.lead.source]
        if logical == chosen.aligned.lead and not lead.is_alone(logical):
            # A stack that is made in one run, which holds many: nobody asks for them one by one.
            found = self._resolver.whole(member.source, name)
            if found is not None:
                return found
        return self._resolver.find(member.source, name, moved(chosen.aligned, logical, name))

    def missing(self, chosen: Chosen, member: Member, name: str) -> None:
        """Report a tensor that a member lacks."""
        source = self._sources[member.source]
        lead = self._sources[chosen.aligned.span.lead.source]
        self._findings.tensor(
            ("missing", source.name),
            where=source.name,
            what=f"it lacks {{count}} tensors that {lead.name} has and that the recipe merges",
            remedy="Use a complete checkpoint, or name a base_model and say 'missing_tensors: copy_base' in "
            "the recipe to keep the base's.",
            example=name,
        )

    def _fits(self, chosen: Chosen, member: Member, place: Place, found: Place) -> bool:
        """Whether what was found are plain numbers of the lead's shape; else a finding says what they are."""
        if place.shape != found.shape:
            self.other_shape(chosen, member, found, place.shape)
            return False
        scales, packing = found.scales, self._logical[member.source].packing(found.tensor.name)
        if scales is not None and packing is not None:
            lacks_scale = scales.tensor_nbytes and not scales.tensor_key
            if lacks_scale or not packing.has_bands_of(found.start, found.num_elements):
                self._several_scales(member.source, found.tensor.name, packing)
                return False
        return self._plain.check(member.source, found.tensor)

    def is_plain(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor is stored as plain numbers; else a finding says what it holds."""
        return self._plain.is_stored_plain(source, tensor)

    def other_shape(self, chosen: Chosen, member: Member, found: Place, wanted: tuple[int, ...]) -> None:
        """Report a tensor whose shape is not the lead's."""
        source, lead = self._sources[member.source], self._sources[chosen.aligned.span.lead.source]
        self._findings.tensor(
            ("shape", source.name),
            where=source.name,
            what=f"{{count}} tensors have other shapes than in {lead.name}",
            remedy="Only models of one size can be merged.",
            example=f"{found.tensor.name} is {list(found.shape)} here and {list(wanted)} there",
        )


def _runs_on(packing: Packing | None) -> bool:
    """Whether the matrices of a stack can be read and written as one: no scale is that of a whole matrix, and
    none is shared by rows of two."""
    return packing is None or (packing.tensor_scale_dtype is None and not packing.rows % packing.band)


def fate_of(chosen: Chosen, settings: Settings | None) -> Fate:
    """What becomes of the tensors that an output is computed from."""
    output = chosen.aligned.output
    if settings is not None and chosen.method.identity(settings) is not None:
        return Fate(Disposition.CONVERTED, Rule.DTYPE, output)
    return Fate(Disposition.MERGED, Rule.METHOD, output)


def _with_factor(fate: Fate, resolved: ResolvedInput) -> Fate:
    """A fate, but for what would keep its values, had an adapter not added to them."""
    if resolved.factor is None or fate.disposition is Disposition.MERGED:
        return fate
    return Fate(Disposition.MERGED, Rule.ADAPTED, fate.output)
