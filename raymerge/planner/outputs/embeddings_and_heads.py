"""Tensors with a row for each token: embedding, head and their biases; and whether embedding and head are
tied.

Rows are matched by token where the recipe asks for a tokenizer. Without one, vocabularies of different length
are refused, cut to what is common, or filled up, as the recipe says.

A head may be the embedding itself, stored once or twice, or stored on its own. One copy is kept when all
parents agree that they are tied. When a merge makes them differ, or a stack ends in other sources than it
begins with, both are written and ``tie_word_embeddings`` becomes false."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from raymerge.architectures.roles import NameReader, TensorInfo, TiedPair, declared_tie
from raymerge.architectures.rules import Role, text_section
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import Gather, Op, Output, Part, Read, gathered
from raymerge.methods import Settings
from raymerge.planner.inputs.consistency import counts_tokens
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.align import Aligned, Section, Span, moved, output_logical
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.method_assignment import UNSCALED, BoundOutput, lead_alone
from raymerge.planner.outputs.ops import OpMaker, disposition_of
from raymerge.planner.outputs.routing_tables import is_routing_table
from raymerge.planner.tokenizer.tokens import RowRun
from raymerge.planner.tokenizer.vocabulary import VocabularyPlan, lost_ids, other_vocabulary
from raymerge.recipes.schema import Recipe


def _is_bare_bias(name: str, info: TensorInfo, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a bias outside layers and of no matrix of its own, as BART's of the logits."""
    is_loose = info.is_bias and info.role is Role.OTHER and info.layer is None
    return is_loose and f"{name.removesuffix('bias')}weight" not in tensors


_BY_TOKEN = (
    "Match rows by token with 'tokenizer_source: union' (or base), or say 'embedding_sizes: common' to keep "
    "the rows that all have, or 'embedding_sizes: pad' to keep every row."
)


_ONLY_PAIR = "Take a model without them, or a donor whose tokens it has all."


@dataclass(frozen=True, slots=True)
class _Table:
    resolver: Mapping[int, ResolvedInput]
    rows: Mapping[int, int]
    axis: int
    shape: tuple[int, ...]

    @property
    def columns(self) -> int:
        return prod(self.beside(self.shape))

    def beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], *shape[self.axis + 1 :])


class Embeddings:
    def __init__(
        self,
        recipe: Recipe,
        resolver: InputResolver,
        maker: OpMaker,
        findings: Findings,
        *,
        vocabulary: VocabularyPlan | None,
    ) -> None:
        self._recipe = recipe
        self._resolver = resolver
        self._maker = maker
        self._findings = findings
        self._vocabulary = vocabulary
        self._axes: dict[str, int] = {}
        self._made: set[str] = set()
        self._doubtful: dict[str, None] = {}

    def concerns(self, chosen: BoundOutput, lead: StoredTensor) -> bool:
        """Whether an output has a row for each token, and its rows cannot be merged as they are.

        Pass every output to this method or to ``alone``: ``settle`` compares all of them."""
        axis = self._look(chosen.aligned)
        if axis is None or self._vocabulary is not None:
            return axis is not None
        rows = self._table(chosen, axis).rows
        everyone = {chosen.aligned.span.lead.source, *(member.source for member, _ in chosen.members)}
        return {rows.get(each, lead.shape[axis]) for each in everyone} != {lead.shape[axis]}

    def output(
        self, chosen: BoundOutput, lead: StoredTensor, settings: Settings | None, dtype: DType
    ) -> Output | None:
        table = self._table(chosen, self._look(chosen.aligned) or 0)
        if not self._fits(chosen, lead, table):
            return None
        inputs = self._inputs(chosen, table)
        if settings is None or inputs is None:
            return None
        return self._made_of(chosen, inputs, table=table, settings=settings, dtype=dtype)

    def alone(self, aligned: Aligned, lead: StoredTensor, dtype: DType) -> Output | None:
        """The lead's tensor in the output's numbering; None where it stays as it is stored."""
        axis, source = self._look(aligned), aligned.span.lead.source
        if axis is None or not lead.dtype.is_mergeable:
            return None
        chosen = lead_alone(aligned)
        table = self._table(chosen, axis)
        if not self._is_changed(aligned, table.rows[source]) or not self._maker.plain.is_stored_plain(
            source, lead
        ):
            return None
        if self._vocabulary is not None:
            inputs = self._by_token(self._vocabulary, chosen, table)
        else:
            num_rows = self._fewest(aligned)
            inputs = (
                num_rows,
                [self._gathered(chosen, table, [RowRun(0, num_rows, ((source, 0),))], num_rows)],
            )
        return self._made_of(chosen, inputs, table=table, settings=UNSCALED, dtype=dtype)

    def settle(self, outputs: Sequence[Output], donor: Source) -> int | None:
        """Rows of the output's embedding, where they may differ from the donor's; else None.

        Findings report outputs that count other tokens than the rest, and what is left without a row. The
        donor gives config and tokenizer."""
        shapes = {output.name: output.shape for output in outputs}
        counts = {name: shapes[name][axis] for name, axis in self._axes.items() if name in shapes}
        # The config and the tokenizer are those of the model without its adapter.
        own = donor.checkpoint.tensors[donor.pair.embedding].shape[0] if donor.pair is not None else 0
        num_rows = self._wanted(counts, own, donor)
        if num_rows is None:
            return None
        for name in self._strange(counts, num_rows, own):
            if name in shapes:
                self._odd(donor, name, shapes[name], num_rows)
        if self._vocabulary is None:
            self._findings.extend(lost_ids(self._recipe, donor, range(num_rows, own)))
        return num_rows if self._vocabulary is not None or num_rows != own else None

    def _wanted(self, counts: Mapping[str, int], own: int, donor: Source) -> int | None:
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

    def _strange(self, counts: Mapping[str, int], num_rows: int, own: int) -> Iterator[str]:
        is_moved = self._vocabulary is not None and self._vocabulary.is_renumbered
        for name, count in counts.items():
            if count != num_rows or (is_moved and name not in self._made):
                yield name
        if is_moved or num_rows != own:
            yield from self._doubtful

    def _odd(self, donor: Source, name: str, shape: tuple[int, ...], num_rows: int) -> None:
        remedy = "Merge all tensors that have a row for each token from the same models"
        self._findings.tensor(
            donor.name,
            f"the output has {num_rows} rows, one for each token of its vocabulary, and {{count}} "
            "tensors would not have the same tokens in the same order",
            f"{remedy}. {_BY_TOKEN}"
            if self._vocabulary is None
            else f"{remedy}, or leave the tokenizer's keys out of the recipe.",
            example=f"{name} {list(shape)}",
        )

    def _look(self, aligned: Aligned) -> int | None:
        source = aligned.span.lead.source
        if aligned.lead.startswith(self._resolver.sources[source].checkpoint.directories):
            self._refuse_below(aligned)
            return None
        if not self._counts(source, aligned.lead):
            return None
        axis = self._axis(source, aligned.lead)
        if axis is not None:
            self._axes[aligned.output] = axis
        elif self._is_doubtful(source, aligned.lead):
            self._doubtful[aligned.output] = None
        return axis

    def _refuse_below(self, aligned: Aligned) -> None:
        """What lies below a model has the model's tokens, and keeps its rows."""
        vocabulary, source = self._vocabulary, self._resolver.sources[aligned.span.lead.source]
        if vocabulary is None:
            return
        own = next(each for each in source.checkpoint.directories if aligned.lead.startswith(each))
        name, rows = aligned.lead.removeprefix(own), source.checkpoint.tensors[aligned.lead].shape[:1]
        by_token = counts_tokens(name, NameReader(source.rules).describe(name))
        if by_token and (vocabulary.is_renumbered or rows != (vocabulary.num_rows,)):
            self._findings.tensor(
                source.name,
                "the recipe gives the model other tokens, and {count} tensors in directories below it that "
                "have a row for each token would keep theirs",
                "Keep the tokenizer as it is, or merge copies without these directories.",
                example=aligned.output,
            )

    def _counts(self, source: int, name: str) -> bool:
        model = self._resolver.sources[source]
        tensors, pair = model.checkpoint.tensors, model.pair
        if pair is None or not tensors[name].shape:
            return False
        info = self._resolver.logical[source].infos[name]
        if name in (pair.embedding, pair.head):
            return True
        if info.part in (Role.EMBEDDING, Role.HEAD):
            return counts_tokens(name, info)
        return _is_bare_bias(name, info, tensors) or is_routing_table(tensors[name], info.part)

    def _axis(self, source: int, name: str) -> int | None:
        """The axis on which a tensor of which ``_counts`` is true counts tokens; None where it is unknown.

        Embeddings, heads and their biases, also those of multi-token-prediction layers, count them on the
        first axis; a bias stored as ``[1, vocabulary]`` counts them on the second."""
        model = self._resolver.sources[source]
        shape = model.checkpoint.tensors[name].shape
        sizes = self._sizes(source)
        if shape[0] in sizes or (model.pair is not None and name in (model.pair.embedding, model.pair.head)):
            return 0
        return 1 if len(shape) == 2 and shape[0] == 1 and shape[1] in sizes else None

    def _rows(self, source: int) -> int:
        pair = self._resolver.sources[source].pair
        stored = self._resolver.stored(source, pair.embedding) if pair is not None else None
        return stored[1].shape[0] if stored is not None else 0

    def _is_doubtful(self, source: int, name: str) -> bool:
        """Whether a tensor without ``_axis`` counts tokens all the same, which ones being unknown.

        It is transposed, say, or has as many rows as the config says beside ``vocab_size``."""
        model = self._resolver.sources[source]
        fields = text_section(model.checkpoint.config).items()
        others = {value for key, value in fields if "vocab" in key and type(value) is int and value > 1}
        return not (self._sizes(source) | others).isdisjoint(model.checkpoint.tensors[name].shape)

    def _sizes(self, source: int) -> set[int]:
        tensors, pair = self._resolver.sources[source].checkpoint.tensors, self._resolver.sources[source].pair
        names = (pair.embedding, pair.head) if pair is not None else ()
        return {tensors[name].shape[0] for name in names if name in tensors and tensors[name].shape}

    def _is_changed(self, aligned: Aligned, rows: int) -> bool:
        if self._vocabulary is not None:
            return self._vocabulary.is_renumbered or self._vocabulary.num_rows != rows
        return self._recipe.embedding_sizes == "common" and self._fewest(aligned) < rows

    def _fewest(self, aligned: Aligned) -> int:
        return min(self._rows(member.source) for member in aligned.span.members)

    def _made_of(
        self,
        chosen: BoundOutput,
        inputs: tuple[int, Sequence[Read]],
        *,
        table: _Table,
        settings: Settings,
        dtype: DType,
    ) -> Output:
        num_rows, reads = inputs
        shape = (*table.shape[: table.axis], num_rows, *table.shape[table.axis + 1 :])
        # A bias that lies as [1, vocabulary] is a vector to the method.
        of_rows = (num_rows, *table.beside(shape)) if table.axis == 0 else (num_rows,)
        part = Part(output_logical(chosen.aligned, chosen.aligned.lead), of_rows, None)
        expression = self._maker.expression(settings, chosen, dtype)
        op = Op(num_rows * table.columns, expression, (part,), tuple(reads))
        self._made.add(chosen.aligned.output)
        return Output(chosen.aligned.output, dtype, shape, (op,), True)

    def _table(self, chosen: BoundOutput, axis: int) -> _Table:
        aligned = chosen.aligned
        names = {m.source: name for m, name in zip(aligned.span.members, aligned.names, strict=True)}
        lead = self._resolver.sources[aligned.span.lead.source]
        for source in self._resolver.sources:
            names.setdefault(source.index, _name_in(source, lead, aligned.lead))
        resolver = {
            index: resolved
            for index, name in names.items()
            if (resolved := self._resolver.find(index, name, moved(aligned, aligned.lead, name))) is not None
        }
        resolver |= self._resolver.transplanted(aligned.span.lead.source, aligned.lead)
        shapes = {index: each.place.shape for index, each in resolver.items()}
        rows = {index: shape[axis] for index, shape in shapes.items() if len(shape) > axis}
        return _Table(resolver, rows, axis, lead.checkpoint.tensors[aligned.lead].shape)

    def _fits(self, chosen: BoundOutput, lead: StoredTensor, table: _Table) -> bool:
        complete = True
        for member, name in chosen.members:
            resolved = table.resolver.get(member.source)
            if resolved is None:
                self._maker.missing(chosen, member, name)
                complete = False
            elif not self._is_as_wide(resolved, table):
                self._maker.other_shape(chosen, member, resolved.place, lead.shape)
                complete = False
            elif not self._maker.plain.is_stored_plain(member.source, resolved.place.tensor):
                complete = False
        return complete

    def _is_as_wide(self, resolved: ResolvedInput, table: _Table) -> bool:
        return table.beside(resolved.place.shape) == table.beside(table.shape) and len(
            resolved.place.shape
        ) == len(table.shape)

    def _inputs(self, chosen: BoundOutput, table: _Table) -> tuple[int, list[Read]] | None:
        if self._vocabulary is not None:
            return self._by_token(self._vocabulary, chosen, table)
        rows = [table.rows[member.source] for member, _ in chosen.members]
        if self._recipe.embedding_sizes == "error" and self._has_other_sizes(chosen, table):
            return None
        num_rows = max(rows) if self._recipe.embedding_sizes == "pad" else min(rows)
        return num_rows, [
            self._gathered(chosen, table, self._by_number(chosen, table, member.source, num_rows), num_rows)
            for member, _ in chosen.members
        ]

    def _by_token(
        self, vocabulary: VocabularyPlan, chosen: BoundOutput, table: _Table
    ) -> tuple[int, list[Read]]:
        numbered = vocabulary.sources.ids
        holders = {
            index: table.rows[index]
            for index, each in table.resolver.items()
            if index in numbered and self._is_as_wide(each, table)
        }
        if vocabulary.result is not None and vocabulary.result not in holders:
            what = (
                "{count} of its tensors have a row for each token, and only embedding and head get new rows"
            )
            lead = self._resolver.sources[chosen.aligned.span.lead.source].name
            self._findings.tensor(lead, what, _ONLY_PAIR, example=chosen.aligned.lead)
        reads = []
        for member, _ in chosen.members:
            runs = vocabulary.sources.runs(member.source, holders)
            reads.append(self._gathered(chosen, table, runs, vocabulary.num_rows, real=vocabulary.num_tokens))
        return vocabulary.num_rows, reads

    def _by_number(self, chosen: BoundOutput, table: _Table, source: int, num_rows: int) -> Sequence[RowRun]:
        everyone = list(dict.fromkeys(member.source for member, _ in chosen.members))
        base = chosen.aligned.span.base.source if chosen.aligned.span.base is not None else None
        bounds = sorted({min(num_rows, table.rows[each]) for each in everyone} | {num_rows})
        runs, start = [], 0
        for stop in bounds:
            if stop == start:
                continue
            have = [each for each in everyone if table.rows[each] > start]
            givers = [source] if source in have else [base] if base in have else have
            inputs = tuple((each, start) for each in givers if each is not None)
            runs.append(RowRun(start, stop - start, inputs))
            start = stop
        return runs

    def _gathered(
        self,
        chosen: BoundOutput,
        table: _Table,
        runs: Sequence[RowRun],
        num_rows: int,
        *,
        real: int | None = None,
    ) -> Read:
        disposition = disposition_of(chosen, None)
        order: dict[int, int] = {}
        flat: list[tuple[int, int, int, int]] = []
        for run in runs:
            for source, first in run.inputs:
                flat.append((run.to_row, first, run.count, order.setdefault(source, len(order))))
        for source in order:
            self._maker.settle(table.resolver[source], source, disposition)
        gather_inputs = tuple(
            replace(table.resolver[source].gather_input(), num_rows=table.rows[source]) for source in order
        )
        is_whole = flat == [(0, 0, num_rows, 0)] and gather_inputs[0].num_rows == num_rows
        if is_whole and gather_inputs[0].product is None:
            return gather_inputs[0].read
        flat.sort(key=lambda each: (each[0], each[3]))
        return gathered(0, Gather(num_rows, table.columns, gather_inputs, tuple(flat), real or num_rows))

    def _has_other_sizes(self, chosen: BoundOutput, table: _Table) -> bool:
        """Whether a member has another number of rows than the lead, whose adapter may give it them:
        findings."""
        leader = chosen.aligned.span.lead.source
        num_rows = table.rows[leader]
        others = [member.source for member, _ in chosen.members if table.rows[member.source] != num_rows]
        for index in others:
            what = other_vocabulary(self._resolver, (index, table.rows[index]), (leader, num_rows))
            name, example = self._resolver.sources[index].name, table.resolver[index].place.tensor.name
            self._findings.tensor(name, what, _BY_TOKEN, example=example, key="vocabulary")
        return bool(others)


def _name_in(source: Source, lead: Source, name: str) -> str:
    pair, own = source.pair, lead.pair
    if pair is None or own is None or name not in (own.head, own.embedding):
        return name
    is_head = name == own.head and pair.head in source.checkpoint.tensors
    return pair.head if is_head else pair.embedding


_TEXT_MODULES = (None, "default", "text_decoder", "decoder")
_HAS_A_HEAD = re.compile(r"CausalLM|LMHead|MaskedLM|ConditionalGeneration|ForPreTraining")


@dataclass(frozen=True, slots=True)
class TieDecision:
    head: str
    embedding: str
    tied: bool | None
    """New value of ``tie_word_embeddings``; None leaves the config as it is."""
    reason: str


def stores_own_head(source: Source) -> bool:
    pair = source.pair
    if pair is None or pair.head not in source.checkpoint.tensors:
        return False
    return not source.stored_head_is_embedding


def with_heads(
    aligned: Iterable[Aligned],
    sections: Sequence[Section],
    sources: Sequence[Source],
    *,
    donor: Source,
    has_base: bool,
) -> Iterator[Aligned]:
    """The aligned outputs, with every head pointed at the bytes that hold it in each member.

    A head that the lead does not store is added where a member or the donor, whose config is written, has one
    of its own, and where the lead's embedding is not the one that the output begins with. ``has_base``: the
    donor is the recipe's ``base_model``."""
    section = _text_section(sections)
    span = section.spans[-1] if section is not None else None
    pair = sources[span.lead.source].pair if span is not None else None
    if section is None or span is None or pair is None:
        yield from aligned
        return
    named = _named_pair(section, sources) or pair
    for each in aligned:
        if each.copied or each.lead != pair.head:
            yield each
        elif _own_heads(each.span, sources):
            yield each._replace(names=_head_names(each.span, sources))
        else:
            names = tuple(embedding_name(sources[member.source]) for member in each.span.members)
            yield each._replace(lead=pair.embedding, names=names, alias=named.embedding)
    is_needed = _own_heads(span, sources) or stores_own_head(donor)
    is_needed = is_needed or _parts_the_tie(section, sources, base=donor if has_base else None)
    stored = pair.head in sources[span.lead.source].checkpoint.tensors
    if is_needed and not stored and pair.declared is not False:
        yield Aligned(named.head, span, pair.embedding, _head_names(span, sources), 0.0)
        yield from _head_bias(named, pair, span, sources)


def _head_bias(named: TiedPair, pair: TiedPair, span: Span, sources: Sequence[Source]) -> Iterator[Aligned]:
    """The bias of a head that is added, where it too is tied: BERT's ``X.decoder.bias`` is ``X.bias``."""
    own, tied = _bias_names(pair)
    if own and tied in sources[span.lead.source].checkpoint.tensors:
        names = [_bias_name(sources[member.source]) for member in span.members]
        yield Aligned(_bias_names(named)[0] or own, span, tied, tuple(names), 0.0)


def _bias_names(pair: TiedPair) -> tuple[str, str]:
    module = pair.head.removesuffix(".decoder.weight")
    return (f"{module}.decoder.bias", f"{module}.bias") if module != pair.head else ("", "")


def _bias_name(source: Source) -> str:
    own, tied = _bias_names(source.pair) if source.pair is not None else ("", "")
    return own if own in source.checkpoint.tensors else tied


def _parts_the_tie(section: Section, sources: Sequence[Source], *, base: Source | None) -> bool:
    """Whether a stack of tied models ends in other sources than it begins with, so that it needs a head.

    A base that leads both ends gives both one embedding, whatever is merged into it."""
    first, last = section.spans[0], section.spans[-1]
    lead = sources[last.lead.source]
    if base is not None and first.lead.source == last.lead.source == base.index:
        return False
    return _is_tied(lead) and _sources_of(first) != _sources_of(last)


def _is_tied(source: Source) -> bool:
    declared = source.pair.declared if source.pair is not None else False
    # A config that is silent means what its family means by it: a model with a head that stores none ties it.
    return declared or (declared is None and any(map(_HAS_A_HEAD.search, source.architectures)))


def _sources_of(span: Span) -> frozenset[int]:
    return frozenset(member.source for member in (span.lead, *span.members))


def _own_heads(span: Span, sources: Sequence[Source]) -> bool:
    return any(stores_own_head(sources[member.source]) for member in span.members)


def _head_names(span: Span, sources: Sequence[Source]) -> tuple[str, ...]:
    members = [sources[member.source] for member in span.members]
    return tuple(head_name(each) if stores_own_head(each) else embedding_name(each) for each in members)


def settle_tie(
    outputs: Sequence[Output],
    sections: Sequence[Section],
    sources: Sequence[Source],
    dispositions: Dispositions,
    *,
    donor: Source,
) -> TieDecision:
    """Decide whether head and embedding are tied, from what they are made of.

    The new value of the flag is for the donor's config, whatever the other configs say."""
    section = _text_section(sections)
    _settle_stored_heads(sources, dispositions)
    if section is None:
        return TieDecision("", "", None, "the text model is copied, and with it what it ties")
    pair, made = _named_pair(section, sources), {output.name: output for output in outputs}
    embedding = made.get(pair.embedding) if pair is not None else None
    if pair is None or embedding is None:
        return TieDecision("", "", None, "the model has no token embedding that a head could share")
    head = made.get(pair.head)
    if head is None:
        return TieDecision("", pair.embedding, None, "no head is stored, as in the lead checkpoint")
    if [op.content() for op in head.ops] == [op.content() for op in embedding.ops]:
        reason = "the head equals the embedding and is stored, as in the lead checkpoint"
        return TieDecision(pair.head, pair.embedding, None, reason)
    declared = declared_tie(donor.checkpoint.config)
    # A config that is silent means what its family means by it: what the donor does shows it.
    untied = declared is False or (declared is None and stores_own_head(donor))
    tied = None if untied else False
    reason = "head and embedding differ in the result, so both are written"
    return TieDecision(pair.head, pair.embedding, tied, reason)


def head_name(source: Source) -> str:
    return source.pair.head if source.pair is not None else ""


def embedding_name(source: Source) -> str:
    return source.pair.embedding if source.pair is not None else ""


def _text_section(sections: Sequence[Section]) -> Section | None:
    return next((section for section in sections if section.module in _TEXT_MODULES), None)


def _named_pair(section: Section, sources: Sequence[Source]) -> TiedPair | None:
    return sources[section.spans[0].lead.source].pair


def _settle_stored_heads(sources: Sequence[Source], dispositions: Dispositions) -> None:
    for source in sources:
        if source.pair is not None and source.stored_head_is_embedding:
            dispositions.settle(
                source.index,
                source.pair.head,
                Disposition(Use.DROPPED, Rule.EQUALS_EMBEDDING, source.pair.embedding),
            )
