"""Tensors with a row for each token: embedding, head and what belongs to them.

Their rows are matched by token where the recipe asks for a tokenizer. Without one, vocabularies of different
length are refused, cut to what is common, or filled up, as the recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.methods import Settings
from raymerge.planner.chosen import Chosen, moved, output_logical
from raymerge.planner.expressions import Assembly, Output, Part, Read, Row, assembled
from raymerge.planner.findings import Findings
from raymerge.planner.rows import RowMaker, fate_of
from raymerge.planner.supplies import Supplies, Supply
from raymerge.planner.vocabularies import compare_vocabularies
from raymerge.planner.vocabulary import RowRun, VocabularyPlan
from raymerge.recipes import Recipe

_BY_POSITION = frozenset(
    {"position_embeddings", "embed_positions", "wpe", "position_embedding", "token_type_embeddings"}
)
# Embeddings of something else than tokens, which may happen to have as many rows.


@dataclass(frozen=True, slots=True)
class _Table:
    """A tensor with a row for each token, in everyone who takes part."""

    supplies: Mapping[int, Supply]
    """Where each source has it, by the source's index."""
    rows: Mapping[int, int]
    """Its rows there."""
    columns: int
    """Elements of a row; 1 for a vector."""


class Embeddings:
    """Makes the outputs that have a row for each token."""

    def __init__(
        self,
        recipe: Recipe,
        supplies: Supplies,
        maker: RowMaker,
        findings: Findings,
        *,
        vocabulary: VocabularyPlan | None,
    ) -> None:
        self._recipe = recipe
        self._supplies = supplies
        self._maker = maker
        self._findings = findings
        self._vocabulary = vocabulary
        self.num_rows: int | None = vocabulary.num_rows if vocabulary is not None else None
        """Rows of the output's embedding, where they may be others than the lead's."""

    def concerns(self, chosen: Chosen, lead: StoredTensor) -> bool:
        """Whether an output has a row for each token, and its rows cannot be merged as they stand."""
        source = chosen.aligned.span.lead.source
        if not is_vocabulary_tensor(self._supplies, source, lead.name):
            return False
        if self._vocabulary is not None:
            return True
        return len(set(self._table(chosen).rows.values()) | {lead.shape[0]}) > 1

    def output(
        self, chosen: Chosen, lead: StoredTensor, settings: Settings | None, dtype: DType
    ) -> Output | None:
        """The output, or None with a finding."""
        table = self._table(chosen)
        if not self._fits(chosen, lead, table):
            return None
        inputs = self._inputs(chosen, lead, table)
        if settings is None or inputs is None:
            return None
        num_rows, reads = inputs
        shape = (num_rows, *lead.shape[1:])
        part = Part(output_logical(chosen.aligned, chosen.aligned.lead), shape, None)
        expression = self._maker.expression(settings, chosen, dtype)
        row = Row(num_rows * table.columns, expression, (part,), tuple(reads))
        return Output(chosen.aligned.output, dtype, shape, (row,), True)

    def _table(self, chosen: Chosen) -> _Table:
        aligned = chosen.aligned
        names = {m.source: name for m, name in zip(aligned.span.members, aligned.names, strict=True)}
        lead = self._supplies.sources[aligned.span.lead.source]
        for source in self._supplies.sources:
            # A model that only gives tokens has the tensor under its own name for it.
            pair = source.pair
            is_head = lead.pair is not None and aligned.lead == lead.pair.head
            if source.index not in names and pair is not None:
                names[source.index] = pair.head if is_head else pair.embedding
        supplies = {
            index: found
            for index, name in names.items()
            if (found := self._supplies.find(index, name, moved(aligned, aligned.lead, name))) is not None
        }
        columns = 1
        for size in supplies[lead.index].place.shape[1:] if lead.index in supplies else ():
            columns *= size
        return _Table(supplies, {i: each.place.shape[0] for i, each in supplies.items()}, columns)

    def _fits(self, chosen: Chosen, lead: StoredTensor, table: _Table) -> bool:
        """Whether every member has the tensor, in plain numbers, with rows of the lead's length."""
        complete = True
        for member, name in chosen.members():
            found = table.supplies.get(member.source)
            if found is None:
                self._maker.missing(chosen, member, name)
                complete = False
            elif found.place.shape[1:] != lead.shape[1:]:
                self._maker.other_shape(chosen, member, found.place, lead.shape)
                complete = False
            elif not self._maker.is_plain(member.source, found.place.tensor):
                complete = False
        return complete

    def _inputs(self, chosen: Chosen, lead: StoredTensor, table: _Table) -> tuple[int, list[Read]] | None:
        """Rows of the output, and the input of each member."""
        if self._vocabulary is not None:
            return self._by_token(self._vocabulary, chosen, table)
        rows = [table.rows[member.source] for member, _ in chosen.members()]
        if self._recipe.embedding_sizes == "error" and self._has_other_sizes(chosen, lead, table):
            return None
        wanted = max(rows) if self._recipe.embedding_sizes == "pad" else min(rows)
        self.num_rows = wanted
        return wanted, [
            self._assembled(chosen, table, self._by_number(chosen, table, member.source, wanted), wanted)
            for member, _ in chosen.members()
        ]

    def _by_token(
        self, vocabulary: VocabularyPlan, chosen: Chosen, table: _Table
    ) -> tuple[int, list[Read]] | None:
        usable = {
            i for i, each in table.supplies.items() if each.place.shape[1:] == self._width(chosen, table)
        }
        renumbered = [each for each in sorted(usable) if self._is_renumbered(each, table)]
        if renumbered:
            return None
        holders = frozenset(usable)
        reads = []
        for member, _ in chosen.members():
            runs = vocabulary.rows_of(member.source, holders)
            reads.append(
                self._assembled(chosen, table, runs, vocabulary.num_rows, real=vocabulary.num_tokens)
            )
        return vocabulary.num_rows, reads

    def _is_renumbered(self, index: int, table: _Table) -> bool:
        """Whether an adapter gives a tensor other rows than its model's tokenizer numbers: a finding then."""
        source, supply = self._supplies.sources[index], table.supplies[index]
        laid = self._supplies.adapters.get(index)
        if laid is None or supply.store != laid.store:
            return False
        name = laid.changed_by(supply.place.tensor.name) or ""
        own = self._supplies.logical[index].stored(name)
        if own is None or own.shape[0] == table.rows[index]:
            return False
        self._findings.tensor(
            ("renumbered", source.name),
            where=laid.adapter.name,
            what=f"{{count}} tensors that it holds whole have {table.rows[index]} rows, one for each token, "
            f"where the model has {own.shape[0]}: the model's tokenizer does not say which token a row is of",
            remedy="Merge the adapter into its model with peft, save the tokenizer that it was trained with "
            "beside it, and name the result.",
            example=supply.place.tensor.name,
        )
        return True

    def _width(self, chosen: Chosen, table: _Table) -> tuple[int, ...]:
        return table.supplies[chosen.treatment.everyone()[0].source].place.shape[1:]

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
            self._maker.settle(table.supplies[source], source, fate)
        terms = tuple(table.supplies[source].term() for source in order)
        is_whole = flat == [(0, 0, num_rows, 0)] and terms[0].num_rows == num_rows
        if is_whole and terms[0].product is None:
            return terms[0].read
        flat.sort(key=lambda each: (each[0], each[3]))
        return assembled(0, Assembly(num_rows, table.columns, terms, tuple(flat), real or num_rows))

    def _has_other_sizes(self, chosen: Chosen, lead: StoredTensor, table: _Table) -> bool:
        """Whether a member has other rows than the lead, which may have them from its adapter: findings."""
        leader = self._supplies.sources[chosen.aligned.span.lead.source]
        wanted = table.rows.get(leader.index, lead.shape[0])
        for member, _ in chosen.members():
            count = table.rows[member.source]
            source = self._supplies.sources[member.source]
            if count == wanted:
                continue
            self._findings.tensor(
                ("vocabulary", source.name),
                where=source.name,
                what=f"{{count}} of its tensors have {count} rows, one for each token, where {leader.name} "
                f"has {wanted}{compare_vocabularies(source, leader)}",
                remedy="Match rows by token with 'tokenizer_source: union' (or base), or say "
                "'embedding_sizes: common' to keep the rows that all have, or 'embedding_sizes: pad' to keep "
                "every row.",
                example=table.supplies[member.source].place.tensor.name,
            )
        return any(table.rows[member.source] != wanted for member, _ in chosen.members())


def is_vocabulary_tensor(supplies: Supplies, source: int, name: str) -> bool:
    """Whether a source's tensor has a row for each token of its vocabulary."""
    tensors, pair = supplies.sources[source].checkpoint.tensors, supplies.sources[source].pair
    if pair is None or pair.embedding not in tensors:
        return False
    shape = tensors[name].shape
    info = supplies.logical[source].infos[name]
    if not shape or shape[0] != tensors[pair.embedding].shape[0] or info.layer is not None:
        return False
    return info.part in (Role.EMBEDDING, Role.HEAD) and _BY_POSITION.isdisjoint(name.split("."))
