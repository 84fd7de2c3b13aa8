"""Which tokens the output has, and under which ids: the lead's own first, the others' after them in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raymerge.checkpoints.tokenizer import TokenizerFiles
from raymerge.checkpoints.tokenizer_json import AddedToken
from raymerge.recipes import ModelReference

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """One source with its vocabulary."""

    index: int
    """The source's index."""
    reference: ModelReference
    """What the recipe calls it."""
    tokenizer: TokenizerFiles | None
    """The tokenizer beside its config; None where there are no files of one."""
    num_rows: int
    """Rows of its embedding: a token with a higher id has none."""
    config: Mapping[str, Any]
    """Its ``config.json``."""
    brought: TokenizerFiles | None = None
    """The tokenizer that its adapter brings with an embedding of its own."""

    @property
    def used(self) -> TokenizerFiles | None:
        """The tokenizer that numbers the rows."""
        return self.brought or self.tokenizer

    @property
    def name(self) -> str:
        """The reference as text, for messages."""
        return str(self.reference)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The tokens of one source that have a row."""

    model: ModelVocabulary
    """The source."""
    files: TokenizerFiles
    """The tokenizer it goes by: its own, or the lead's."""
    rows: Mapping[str, int]
    """Row by token."""

    @property
    def beyond(self) -> list[str]:
        """Tokens that the tokenizer has and the embedding has no row for."""
        return [token for token, row in self.files.tokens.items() if row >= self.model.num_rows]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """The output's tokens."""

    ids: Mapping[str, int]
    """Id by token."""
    added: Mapping[str, AddedToken]
    """The added ones among them, with their settings."""
    num_tokens: int
    """The highest id and one."""
    limit: int
    """Tokens of the lead from this id on have no row and are no longer its own."""
    notes: tuple[str, ...]
    """What was decided between tokenizers that differ."""

    def by_id(self) -> tuple[str | None, ...]:
        """Tokens in the order of their ids; None for an id that no token has."""
        texts = texts_by_id(self.ids)
        return tuple(texts.get(number) for number in range(self.num_tokens))


def texts_by_id(ids: Mapping[str, int]) -> dict[int, str]:
    """Tokens by id; where two share one, the first keeps it."""
    found: dict[int, str] = {}
    for text, each in ids.items():
        found.setdefault(each, text)
    return found


def number(model: ModelVocabulary, files: TokenizerFiles) -> Numbering:
    """The tokens of ``files`` that have a row in ``model``."""
    return Numbering(model, files, {text: row for text, row in files.tokens.items() if row < model.num_rows})


def gather(lead: Numbering, others: Sequence[Numbering], wanted: Iterable[str]) -> TokenSet:
    """The lead's tokens under their own ids, then what ``others`` have beside, then ``wanted``.

    Ordinary tokens of all others come first, added ones after them; each model's in the order of its ids.
    A token that comes from elsewhere is an added one: the lead's model has no rule that would make it.
    """
    union = _Union(lead)
    for other in others:
        union.take_ordinary(other)
    for other in others:
        union.take_added(other)
    for token in wanted:
        union.append(AddedToken(token))
    notes = tuple(union.notes(others))
    return TokenSet(union.ids, union.added, union.next_id, lead.model.num_rows, notes)


def examples(tokens: Sequence[str]) -> str:
    """A few of the tokens, for messages."""
    shown = ", ".join(map(repr, islice(tokens, _SHOWN)))
    return f"{shown} and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else shown


class _Union:
    """A vocabulary that grows."""

    def __init__(self, lead: Numbering) -> None:
        self.lead = lead
        self.ids: dict[str, int] = dict(lead.rows)
        self.added = {text: token for text, token in lead.files.added.items() if text in self.ids}
        self.next_id = max(self.ids.values(), default=-1) + 1
        self._plain: set[str] = set()
        self._ordinary: dict[str, list[str]] = {}
        self._marked: dict[str, list[str]] = {}
        self._differing: dict[str, list[str]] = {}

    def append(self, token: AddedToken) -> bool:
        """Give a token the next id, unless it has one."""
        if token.content in self.ids:
            return False
        self.ids[token.content] = self.next_id
        self.added[token.content] = token
        self.next_id += 1
        return True

    def take_ordinary(self, other: Numbering) -> None:
        known = self.ids.keys() | other.files.added.keys()
        for text in _in_order(other.rows, other.rows.keys() - known):
            self.append(AddedToken(text))
            self._plain.add(text)
            self._ordinary.setdefault(other.model.name, []).append(text)

    def take_added(self, other: Numbering) -> None:
        for text in _in_order(other.rows, other.rows.keys() & other.files.added.keys()):
            token = other.files.added[text]
            if self.append(token):
                continue
            known = self.added.get(text)
            if known is None or text in self._plain:
                self._plain.discard(text)
                self.added[text] = token
                self._marked.setdefault(other.model.name, []).append(text)
            elif known != token:
                self._differing.setdefault(other.model.name, []).append(text)

    def notes(self, others: Sequence[Numbering]) -> Iterator[str]:
        lead = self.lead.model.name
        for other in others:
            if other.files.kind != self.lead.files.kind:
                yield (
                    f"{other.model.name} has a {other.files.kind} tokenizer and {lead} a "
                    f"{self.lead.files.kind} one: texts are split as {lead} does"
                )
        for name, texts in self._ordinary.items():
            yield (
                f"ordinary tokens of {name} that {lead} lacks: {len(texts)} ({examples(texts)}); they become "
                "added tokens, which are found in a text before anything else is"
            )
        for name, texts in self._marked.items():
            yield f"{examples(texts)} become added tokens, as in {name}"
        for name, texts in self._differing.items():
            yield f"{examples(texts)} have other settings in {name}; the first model's hold"


def _in_order(rows: Mapping[str, int], chosen: Set[str]) -> list[str]:
    return sorted(chosen, key=lambda text: (rows[text], text))
