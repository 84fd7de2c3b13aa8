"""Tied heads: a language-model head may be the embedding itself, stored once or twice, or stored on its own.

One copy is kept when all parents agree that head and embedding are one. When a merge makes them differ, or a
stack ends in other sources than it begins with, both are written and ``tie_word_embeddings`` becomes false.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raymerge.architectures import TiedPair, declared_tie
from raymerge.merge_plan.dispositions import Disposition, Fate, Fates, Rule
from raymerge.merge_plan.expressions import Output
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.layer_map import Section, Span

_TEXT_MODULES = (None, "default", "text_decoder", "decoder")
_HAS_A_HEAD = re.compile(r"CausalLM|LMHead|MaskedLM|ConditionalGeneration|ForPreTraining")


@dataclass(frozen=True, slots=True)
class TieDecision:
    """What becomes of the head."""

    head: str
    """Output name of the head, or "" where the model has none."""
    embedding: str
    """Output name of the embedding."""
    tied: bool | None
    """New value of ``tie_word_embeddings``; None leaves the config as it is."""
    reason: str
    """One sentence for the plan."""


def stores_own_head(source: Source) -> bool:
    """Whether a source stores a head that is not just its embedding again."""
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
    of its own, and where the lead's embedding is not the one that the output begins with.

    Args:
        aligned: the outputs without heads that no lead stores.
        sections: those of the recipe.
        sources: all of the recipe.
        donor: the source that gives the config.
        has_base: whether the donor is the recipe's ``base_model``.
    """
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
    wanted = _own_heads(span, sources) or stores_own_head(donor)
    wanted = wanted or _parts_the_tie(section, sources, base=donor if has_base else None)
    stored = pair.head in sources[span.lead.source].checkpoint.tensors
    if wanted and not stored and pair.declared is not False:
        yield Aligned(named.head, span, pair.embedding, _head_names(span, sources), 0.0)
        yield from _head_bias(named, pair, span, sources)


def _head_bias(named: TiedPair, pair: TiedPair, span: Span, sources: Sequence[Source]) -> Iterator[Aligned]:
    """The bias of a head that is added, where it too is tied: BERT's ``X.decoder.bias`` is ``X.bias``."""
    own, tied = _bias_names(pair)
    if own and tied in sources[span.lead.source].checkpoint.tensors:
        names = [_bias_name(sources[member.source]) for member in span.members]
        yield Aligned(_bias_names(named)[0] or own, span, tied, tuple(names), 0.0)


def _bias_names(pair: TiedPair) -> tuple[str, str]:
    """A head's bias and what it is tied to; empty where the head has none of that kind."""
    module = pair.head.removesuffix(".decoder.weight")
    return (f"{module}.decoder.bias", f"{module}.bias") if module != pair.head else ("", "")


def _bias_name(source: Source) -> str:
    """The tensor that holds the bias of a source's head."""
    own, tied = _bias_names(source.pair) if source.pair is not None else ("", "")
    return own if own in source.checkpoint.tensors else tied


def _parts_the_tie(section: Section, sources: Sequence[Source], *, base: Source | None) -> bool:
    """Whether a stack of tied models ends in other sources than it begins with: its head is then another's.

    A base that leads both ends gives both one embedding, whatever is merged into it.
    """
    first, last = section.spans[0], section.spans[-1]
    lead = sources[last.lead.source]
    if base is not None and first.lead.source == last.lead.source == base.index:
        return False
    return _is_tied(lead) and _sources_of(first) != _sources_of(last)


def _is_tied(source: Source) -> bool:
    """Whether a source that stores no head of its own has one all the same."""
    declared = source.pair.declared if source.pair is not None else False
    # A config that is silent means what its family means by it: a model with a head that stores none ties it.
    return declared or (declared is None and any(map(_HAS_A_HEAD.search, source.architectures)))


def _sources_of(span: Span) -> frozenset[int]:
    return frozenset(member.source for member in (span.lead, *span.members))


def _own_heads(span: Span, sources: Sequence[Source]) -> bool:
    """Whether any member has a head that is not its embedding."""
    return any(stores_own_head(sources[member.source]) for member in span.members)


def _head_names(span: Span, sources: Sequence[Source]) -> tuple[str, ...]:
    """The tensor that holds the head in each member: the head, or the embedding that it is tied to."""
    members = [sources[member.source] for member in span.members]
    return tuple(head_name(each) if stores_own_head(each) else embedding_name(each) for each in members)


def settle_tie(
    outputs: Sequence[Output],
    sections: Sequence[Section],
    sources: Sequence[Source],
    fates: Fates,
    *,
    donor: Source,
) -> TieDecision:
    """Say whether head and embedding are one, now that it is known what they are made of.

    The new value of the flag is for the donor's config, whatever the other configs say.
    """
    section = _text_section(sections)
    pair = _named_pair(section, sources) if section is not None else None
    head = next((o for o in outputs if pair is not None and o.name == pair.head), None)
    embedding = next((o for o in outputs if pair is not None and o.name == pair.embedding), None)
    _settle_stored_heads(sources, fates)
    if section is None:
        return TieDecision("", "", None, "the text model is copied, and with it what it ties")
    if pair is None or embedding is None:
        return TieDecision("", "", None, "the model has no token embedding that a head could share")
    if head is None:
        return TieDecision("", pair.embedding, None, "no head is stored, as in the lead checkpoint")
    equal = [row.content() for row in head.rows] == [row.content() for row in embedding.rows]
    if not equal:
        declared = declared_tie(donor.checkpoint.config)
        # A config that is silent means what its family means by it: what the donor does shows it.
        untied = declared is False or (declared is None and stores_own_head(donor))
        tied = None if untied else False
        return TieDecision(
            pair.head, pair.embedding, tied, "head and embedding differ in the result, so both are written"
        )
    reason = "the head equals the embedding and is stored, as in the lead checkpoint"
    return TieDecision(pair.head, pair.embedding, None, reason)


def head_name(source: Source) -> str:
    """Name of a source's head."""
    return source.pair.head if source.pair is not None else ""


def embedding_name(source: Source) -> str:
    """Name of a source's embedding."""
    return source.pair.embedding if source.pair is not None else ""


def _text_section(sections: Sequence[Section]) -> Section | None:
    """The section that head and embedding belong to; None where the recipe leaves the text model alone."""
    return next((section for section in sections if section.module in _TEXT_MODULES), None)


def _named_pair(section: Section, sources: Sequence[Source]) -> TiedPair | None:
    """Head and embedding as the output calls them: as the first source does, whose names the stack takes."""
    return sources[section.spans[0].lead.source].pair


def _settle_stored_heads(sources: Sequence[Source], fates: Fates) -> None:
    for source in sources:
        if source.pair is not None and source.stored_head_is_embedding:
            fates.settle(
                source.index,
                source.pair.head,
                Fate(Disposition.DROPPED, Rule.EQUALS_EMBEDDING, source.pair.embedding),
            )
