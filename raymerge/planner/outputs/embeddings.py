"""Tensors with a row for each token: embedding, head and what belongs to them.

Their rows are matched by token where the recipe asks for a tokenizer. Without one, vocabularies of different
length are refused, cut to what is common, or filled up, as the recipe says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Assembly, Output, Part, Read, Row, assembled
from raymerge.methods import Settings
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.method_assignment import OWN, AssignedMethod
from raymerge.planner.outputs.bound_output import Chosen, moved, output_logical
from raymerge.planner.outputs.rows import RowMaker, fate_of
from raymerge.planner.tokenizer.sources import compare_vocabularies, lost_ids
from raymerge.planner.tokenizer.tensors import VocabularyTensors
from raymerge.planner.tokenizer.vocabulary import RowRun, VocabularyPlan
from raymerge.recipes import Recipe

_BY_TOKEN = (
    "Match rows by token with 'tokenizer_source: union' (or base), or say 'embedding_sizes: common' to keep "
    "the rows that all have, or 'embedding_sizes: pad' to keep every row."
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A tensor with a row for each token, in everyone who takes part."""

    resolver: Mapping[int, ResolvedInput]
    """Where each source has it, by the source's index."""
    rows: Mapping[int, int]
    """Its rows there."""
    axis: int
    """The axis on which it counts them."""
    shape: tuple[int, ...]
    """Its shape in the lead, without what the lead's adapter changes."""

    @property
    def columns(self) -> int:
        """Elements of a row; 1 for a vector."""
        return prod(self.beside(self.shape))

    def beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape without its rows."""
        return (*shape[: self.axis], *shape[self.axis + 1 :])


class Embeddings:
    """Makes the outputs that have a row for each token."""

    def __init__(
        self,
        recipe: Recipe,
        resolver: InputResolver,
        maker: RowMaker,
        findings: Findings,
        *,
        vocabulary: VocabularyPlan | None,
    ) -> None:
        self._recipe = recipe
        self._resolver = resolver
        self._maker = maker
        self._findings = findings
        self._vocabulary = vocabulary
        self._tensors = VocabularyTensors(resolver)
        self._axes: dict[str, int] = {}
        self._made: set[str] = set()
        self._doubtful: dict[str, None] = {}

    def concerns(self, chosen: Chosen, lead: StoredTensor) -> bool:
        """Whether an output has a row for each token, and its rows cannot be merged as they stand.

        Every output is to be shown here or to ``alone``: ``settle`` looks at all of them together.
        """
        axis = self._look(chosen.aligned)
        if axis is None or self._vocabulary is not None:
            return axis is not None
        rows = self._table(chosen, axis).rows
        everyone = {chosen.aligned.span.lead.source, *(member.source for member, _ in chosen.members())}
        return {rows.get(each, lead.shape[axis]) for each in everyone} != {lead.shape[axis]}

    def output(
        self, chosen: Chosen, lead: StoredTensor, settings: Settings | None, dtype: DType
    ) -> Output | None:
        """The output of a tensor of which ``concerns`` is true, or None with a finding."""
        table = self._table(chosen, self._look(chosen.aligned) or 0)
        if not self._fits(chosen, lead, table):
            return None
        inputs = self._inputs(chosen, table)
        if settings is None or inputs is None:
            return None
        return self._made_of(chosen, inputs, table=table, settings=settings, dtype=dtype)

    def alone(self, aligned: Aligned, lead: StoredTensor, dtype: DType) -> Output | None:
        """The lead's tensor in the output's numbering; None where it stays as it is stored.

        Args:
            aligned: an output that is the lead's, whatever the method.
            lead: the lead's stored tensor.
            dtype: what the output is stored in.
        """
        axis, source = self._look(aligned), aligned.span.lead.source
        if axis is None or not lead.dtype.is_mergeable:
            return None
        assignment = AssignedMethod(PASSTHROUGH, (aligned.span.lead,), None, {}, (), OWN, aligned.span.path)
        chosen = Chosen(aligned, assignment, (aligned.lead,))
        table = self._table(chosen, axis)
        if not self._is_changed(aligned, table.rows[source]) or not self._maker.is_plain(source, lead):
            return None
        if self._vocabulary is not None:
            inputs = self._by_token(self._vocabulary, chosen, table)
        else:
            wanted = self._fewest(aligned)
            inputs = wanted, [self._assembled(chosen, table, [RowRun(0, wanted, ((source, 0),))], wanted)]
        settings = Settings(values={}, sources=({"scale": None},))
        return self._made_of(chosen, inputs, table=table, settings=settings, dtype=dtype)

    def settle(self, outputs: Sequence[Output], donor: Source) -> int | None:
        """Rows of the output's embedding, where they may be others than the donor's; else None.

        Findings say which outputs count other tokens than the rest, and what is left without a row.

        Args:
            outputs: all of the plan.
            donor: the source that gives config and tokenizer.
        """
        shapes = {output.name: output.shape for output in outputs}
        counts = {name: shapes[name][axis] for name, axis in self._axes.items() if name in shapes}
        # The config and the tokenizer are those of the model without its adapter.
        own = donor.checkpoint.tensors[donor.pair.embedding].shape[0] if donor.pair is not None else 0
        wanted = self._wanted(counts, own, donor)
        if wanted is None:
            return None
        for name in self._strange(counts, wanted, own):
            if name in shapes:
                self._odd(donor, name, shapes[name], wanted)
        if self._vocabulary is None:
            for problem in lost_ids(self._recipe, donor, range(wanted, own)):
                self._findings.add(problem)
        return wanted if self._vocabulary is not None or wanted != own else None

    def _wanted(self, counts: Mapping[str, int], own: int, donor: Source) -> int | None:
        """Rows that every output should have; None where all have what they have in the donor."""
        if self._vocabulary is not None:
            return self._vocabulary.num_rows
        tensors, pair = donor.checkpoint.tensors, donor.pair
        as_stored = all(
            name in tensors and tensors[name].shape[self._axes[name]] == count
            for name, count in counts.items()
        )
        if as_stored or pair is None:
            return None
        return counts.get(pair.embedding, max(counts.values(), default=own))

    def _strange(self, counts: Mapping[str, int], wanted: int, own: int) -> Iterator[str]:
        """Outputs that do not go by the vocabulary of the rest."""
        is_moved = self._vocabulary is not None and self._vocabulary.is_renumbered
        for name, count in counts.items():
            if count != wanted or (is_moved and name not in self._made):
                yield name
        if is_moved or wanted != own:
            yield from self._doubtful

    def _odd(self, donor: Source, name: str, shape: tuple[int, ...], wanted: int) -> None:
        remedy = "Merge all tensors that have a row for each token from the same models"
        self._findings.tensor(
            ("odd rows",),
            where=donor.name,
            what=f"the output has {wanted} rows, one for each token of its vocabulary, and {{count}} tensors "
            "would not have the same tokens in the same order",
            remedy=f"{remedy}. {_BY_TOKEN}"
            if self._vocabulary is None
            else f"{remedy}, or leave the tokenizer's keys out of the recipe.",
            example=f"{name} {list(shape)}",
        )

    def _look(self, aligned: Aligned) -> int | None:
        """The axis on which an output counts tokens; None where it counts none, or nothing tells where."""
        source = aligned.span.lead.source
        axis = self._tensors.axis(source, aligned.lead)
        if axis is not None:
            self._axes[aligned.output] = axis
        elif self._tensors.is_doubtful(source, aligned.lead):
            self._doubtful[aligned.output] = None
        return axis

    def _is_changed(self, aligned: Aligned, rows: int) -> bool:
        """Whether a tensor that is the lead's alone gets other rows than it has."""
        if self._vocabulary is not None:
            return self._vocabulary.is_renumbered or self._vocabulary.num_rows != rows
        return self._recipe.embedding_sizes == "common" and self._fewest(aligned) < rows

    def _fewest(self, aligned: Aligned) -> int:
        """Rows that the vocabularies of all members of a span have."""
        return min(self._tensors.rows(member.source) for member in aligned.span.members)

    def _made_of(
        self,
        chosen: Chosen,
        inputs: tuple[int, Sequence[Read]],
        *,
        table: _Table,
        settings: Settings,
        dtype: DType,
    ) -> Output:
        """The output of so many rows, from the input of each member."""
        num_rows, reads = inputs
        shape = (*table.shape[: table.axis], num_rows, *table.shape[table.axis + 1 :])
        # A bias that lies as [1, vocabulary] is a vector to the method.
        of_rows = (num_rows, *table.beside(shape)) if table.axis == 0 else (num_rows,)
        part = Part(output_logical(chosen.aligned, chosen.aligned.lead), of_rows, None)
        expression = self._maker.expression(settings, chosen, dtype)
        row = Row(num_rows * table.columns, expression, (part,), tuple(reads))
        self._made.add(chosen.aligned.output)
        return Output(chosen.aligned.output, dtype, shape, (row,), True)

    def _table(self, chosen: Chosen, axis: int) -> _Table:
        aligned = chosen.aligned
        names = {m.source: name for m, name in zip(aligned.span.members, aligned.names, strict=True)}
        lead = self._resolver.sources[aligned.span.lead.source]
        for source in self._resolver.sources:
            names.setdefault(source.index, _name_in(source, lead, aligned.lead))
        resolver = {
            index: found
            for index, name in names.items()
            if (found := self._resolver.find(index, name, moved(aligned, aligned.lead, name))) is not None
        }
        shapes = {index: each.place.shape for index, each in resolver.items()}
        rows = {index: shape[axis] for index, shape in shapes.items() if len(shape) > axis}
        return _Table(resolver, rows, axis, lead.checkpoint.tensors[aligned.lead].shape)

    def _fits(self, chosen: Chosen, lead: StoredTensor, table: _Table) -> bool:
        """Whether every member has the tensor, in plain numbers, with rows of the lead's length."""
        complete = True
        for member, name in chosen.members():
            found = table.resolver.get(member.source)
            if found is None:
                self._maker.missing(chosen, member, name)
                complete = False
            elif not self._is_as_wide(found, table):
                self._maker.other_shape(chosen, member, found.place, lead.shape)
                complete = False
            elif not self._maker.is_plain(member.source, found.place.tensor):
                complete = False
        return complete

    def _is_as_wide(self, found: ResolvedInput, table: _Table) -> bool:
        return table.beside(found.place.shape) == table.beside(table.shape) and len(found.place.shape) == len(
            table.shape
        )

    def _inputs(self, chosen: Chosen, table: _Table) -> tuple[int, list[Read]] | None:
        """Rows of the output, and the input of each member."""
        if self._vocabulary is not None:
            return self._by_token(self._vocabulary, chosen, table)
        rows = [table.rows[member.source] for member, _ in chosen.members()]
        if self._recipe.embedding_sizes == "error" and self._has_other_sizes(chosen, table):
            return None
        wanted = max(rows) if self._recipe.embedding_sizes == "pad" else min(rows)
        return wanted, [
            self._assembled(chosen, table, self._by_number(chosen, table, member.source, wanted), wanted)
            for member, _ in chosen.members()
        ]

    def _by_token(self, vocabulary: VocabularyPlan, chosen: Chosen, table: _Table) -> tuple[int, list[Read]]:
        holders = {i: table.rows[i] for i, each in table.resolver.items() if self._is_as_wide(each, table)}
        reads = []
        for member, _ in chosen.members():
            runs = vocabulary.rows_of(member.source, holders)
            reads.append(
                self._assembled(chosen, table, runs, vocabulary.num_rows, real=vocabulary.num_tokens)
            )
        return vocabulary.num_rows, reads

    def _by_number(self, chosen: Chosen, table: _Table, source: int, wanted: int) -> Sequence[RowRun]:
        """A member's own rows, and beyond them the base's, or else the mean of those that go on."""
        everyone = list(dict.fromkeys(member.source for member, _ in chosen.members()))
        base = chosen.aligned.span.base.source if chosen.aligned.span.base is not None else None
        bounds = sorted({min(wanted, table.rows[each]) for each in everyone} | {wanted})
        runs, start = [], 0
        for stop in bounds:
            if stop == start:
                continue
            have = [each for each in everyone if table.rows[each] > start]
            givers = [source] if source in have else [base] if base in have else have
            terms = tuple((each, start) for each in givers if each is not None)
            runs.append(RowRun(start, stop - start, terms))
            start = stop
        return runs

    def _assembled(
        self, chosen: Chosen, table: _Table, runs: Sequence[RowRun], num_rows: int, *, real: int | None = None
    ) -> Read:
        """The input of one member, put together from runs of rows."""
        fate = fate_of(chosen, None)
        order: dict[int, int] = {}
        flat: list[tuple[int, int, int, int]] = []
        for run in runs:
            for source, first in run.terms:
                flat.append((run.to_row, first, run.count, order.setdefault(source, len(order))))
        for source in order:
            self._maker.settle(table.resolver[source], source, fate)
        terms = tuple(replace(table.resolver[source].term(), num_rows=table.rows[source]) for source in order)
        is_whole = flat == [(0, 0, num_rows, 0)] and terms[0].num_rows == num_rows
        if is_whole and terms[0].product is None:
            return terms[0].read
        flat.sort(key=lambda each: (each[0], each[3]))
        return assembled(0, Assembly(num_rows, table.columns, terms, tuple(flat), real or num_rows))

    def _has_other_sizes(self, chosen: Chosen, table: _Table) -> bool:
        """Whether a member has other rows than the lead, which may have them from its adapter: findings."""
        leader = chosen.aligned.span.lead.source
        wanted = table.rows[leader]
        others = [member.source for member, _ in chosen.members() if table.rows[member.source] != wanted]
        for index in others:
            source = self._resolver.sources[index]
            self._findings.tensor(
                ("vocabulary", source.name),
                where=source.name,
                what=f"{{count}} of its tensors have {table.rows[index]} rows, one for each token, where "
                f"{self._resolver.sources[leader].name} has {wanted}"
                f"{compare_vocabularies(self._resolver, index, leader)}",
                remedy=_BY_TOKEN,
                example=table.resolver[index].place.tensor.name,
            )
        return bool(others)


def _name_in(source: Source, lead: Source, name: str) -> str:
    """What a model that only gives tokens calls a tensor of the lead's."""
    pair, own = source.pair, lead.pair
    if pair is None or own is None or name not in (own.head, own.embedding):
        return name
    is_head = name == own.head and pair.head in source.checkpoint.tensors
    return pair.head if is_head else pair.embedding
