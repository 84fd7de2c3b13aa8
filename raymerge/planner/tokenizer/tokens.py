"""The tokens of the output, the lead's own ids first, and the source rows of each output row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.tokenizer import AddedToken, TokenizerFiles
from raymerge.documents.fields import did_you_mean
from raymerge.errors import PlanError, Problem, shortlist
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.schema import Recipe, TokenEntry, Tokenizer, TokenRow, ZeroRow


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    index: int
    reference: ModelReference
    tokenizer: TokenizerFiles | None
    num_rows: int
    """Rows of its embedding: a token with a higher id has none."""
    config: Mapping[str, Any]
    brought: TokenizerFiles | None = None

    @property
    def used(self) -> TokenizerFiles | None:
        return self.brought or self.tokenizer

    @property
    def name(self) -> str:
        return str(self.reference)


@dataclass(frozen=True, slots=True)
class Numbering:
    model: ModelVocabulary
    files: TokenizerFiles
    rows: Mapping[str, int]

    @property
    def beyond(self) -> list[str]:
        """Tokens that the tokenizer has and the embedding has no row for."""
        return [token for token, row in self.files.tokens.items() if row >= self.model.num_rows]


@dataclass(frozen=True, slots=True)
class TokenSet:
    ids: Mapping[str, int]
    added: Mapping[str, AddedToken]
    num_tokens: int
    limit: int
    """Tokens of the lead from this id on have no row and are no longer its own."""
    notes: tuple[str, ...]

    def by_id(self) -> tuple[str | None, ...]:
        """None for an id without a token."""
        texts = texts_by_id(self.ids)
        return tuple(texts.get(number) for number in range(self.num_tokens))


def texts_by_id(ids: Mapping[str, int]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for text, each in ids.items():
        texts.setdefault(each, text)
    return texts


def number(model: ModelVocabulary, files: TokenizerFiles) -> Numbering:
    return Numbering(model, files, {text: row for text, row in files.tokens.items() if row < model.num_rows})


def gather(lead: Numbering, others: Sequence[Numbering], added: Iterable[str]) -> TokenSet:
    """The lead's tokens under their own ids, then further ones of ``others``, then ``added``.

    Ordinary tokens of all others come first, added ones after them; each model's in the order of its ids. A
    token that comes from elsewhere is an added one: the lead's model has no rule that would make it."""
    union = _Union(lead)
    for other in others:
        union.take_ordinary(other)
    for other in others:
        union.take_added(other)
    for token in added:
        union.append(AddedToken(token))
    notes = tuple(union.notes(others))
    return TokenSet(union.ids, union.added, union.next_id, lead.model.num_rows, notes)


def examples(tokens: Sequence[str]) -> str:
    return shortlist([repr(token) for token in tokens])


class _Union:
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


def find_model(
    reference: ModelReference, models: Sequence[ModelVocabulary], place: str
) -> ModelVocabulary | Problem:
    for model in models:
        if model.reference == reference:
            return model
    names = [model.name for model in models]
    what = f"'{reference}' is not one of the models of this merge."
    remedy = f"{did_you_mean(str(reference), names)} Name one of: {', '.join(names)}.".lstrip()
    return Problem(place, what, remedy)


def fixed_rows(
    recipe: Recipe, wish: Tokenizer, known: Mapping[int, Numbering], tokens: TokenSet
) -> tuple[dict[int, FixedRow], list[Problem], list[str]]:
    """Rows that the recipe chooses by output id, problems, and notes on choices without effect."""
    fixed: dict[int, FixedRow] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for token, entry in wish.tokens.items():
        if entry.source is None:
            continue
        row = _fixed_row(recipe, token, entry, known)
        if isinstance(row, Problem):
            problems.append(row)
            continue
        fixed[tokens.ids[token]] = row
        if not entry.force and all(token in each.rows for each in known.values()):
            notes.append(
                f"the source of {token!r} has no effect, since every model has the token; "
                "'force: true' would give all of them that row"
            )
    return fixed, problems, notes


def _fixed_row(
    recipe: Recipe, token: str, entry: TokenEntry, known: Mapping[int, Numbering]
) -> FixedRow | Problem:
    path = ("tokenizer", "tokens", token, "source")
    place = recipe.where(*path)
    source = entry.source
    if source is None or isinstance(source, ZeroRow):
        return FixedRow(place, f"{token!r}", None)
    reference = source if isinstance(source, ModelReference) else source.model
    at = place if isinstance(source, ModelReference) else recipe.where(*path, "model")
    model = find_model(reference, [each.model for each in known.values()], at)
    if isinstance(model, Problem):
        return model
    row = _row(token, source, known[model.index], place)
    name = f"{token!r} takes its row from {model.name}, which"
    return row if isinstance(row, Problem) else FixedRow(place, name, (model.index, row))


def _row(token: str, source: ModelReference | TokenRow, known: Numbering, place: str) -> int | Problem:
    model = known.model
    if isinstance(source, TokenRow) and source.token_id is not None:
        if source.token_id < model.num_rows:
            return source.token_id
        what = f"{model.name} has no token_id {source.token_id}; its embedding has {model.num_rows} rows."
        return Problem(place, what, f"Write a number from 0 to {model.num_rows - 1}.")
    text = token if isinstance(source, ModelReference) else str(source.token)
    row = known.rows.get(text)
    if row is not None:
        return row
    number = known.files.tokens.get(text)
    if number is None:
        what = f"{model.name} has no token {text!r}."
        remedy = f"{did_you_mean(text, known.files.added)} Name a model or a token that exists.".lstrip()
    else:
        what = f"the token {text!r} of {model.name} has the id {number}, its embedding {model.num_rows} rows."
        remedy = "Name a token that has a row."
    return Problem(place, what, remedy)


Ids: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
ABSENT = -1


@dataclass(frozen=True, slots=True)
class RowRun:
    to_row: int
    count: int
    inputs: tuple[tuple[int, int], ...]
    """Source and its first row; rows increase with the output's. Of several the mean; of none zeros."""


@dataclass(frozen=True, slots=True)
class FixedRow:
    place: str
    name: str
    origin: tuple[int, int] | None
    """Source and row; None for zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSources:
    ids: Mapping[int, Ids]
    """The row of each output token in each source, or ``ABSENT``; shape [num_tokens]."""
    base: int
    """The source whose row fills a gap before all others."""
    fixed: Mapping[int, FixedRow]
    """Rows that the recipe chooses, by output row; they fill gaps only, unless forced."""
    forced: frozenset[int]

    def runs(self, member: int, holders: Mapping[int, int]) -> tuple[RowRun, ...]:
        """The rows of ``member``'s matrix in a merge, in order and without a gap.

        ``holders`` has the rows of this tensor in each source that has it; a token beyond them is absent
        there. A member that lacks the tensor is filled throughout.

        Raises PlanError: the recipe takes a row from a source that lacks the tensor."""
        self._check(holders)
        order = sorted(holders)
        rows = np.stack([_within(self.ids[source], holders[source]) for source in order])
        used = self._defaults(rows, order)
        own = self._own(rows[order.index(member)] if member in holders else None)
        used[:, own] = False
        if member in holders:
            used[order.index(member), own] = True
        for row, fixed in self.fixed.items():
            if own[row]:
                continue
            used[:, row] = False
            if fixed.origin is not None:
                at = order.index(fixed.origin[0])
                used[at, row], rows[at, row] = True, fixed.origin[1]
        return _row_runs(used, rows, order)

    def defaults(self) -> Ids:
        """How many sources the row of each token without a row of its own is the mean of; [num_tokens]."""
        order = sorted(self.ids)
        totals: Ids = self._defaults(np.stack([self.ids[each] for each in order]), order).sum(0)
        return totals

    def _own(self, rows: Ids | None) -> _Flags:
        size = len(self.ids[self.base])
        own: _Flags = rows != ABSENT if rows is not None else np.zeros(size, dtype=np.bool_)
        own[sorted(self.forced)] = False
        return own

    def _defaults(self, rows: npt.NDArray[Any], order: Sequence[int]) -> _Flags:
        """Sources that a gap is filled from: the base where it has the token, else all that have it."""
        used: _Flags = rows != ABSENT
        if self.base in order:
            at = order.index(self.base)
            has_base = used[at].copy()
            used[:, has_base] = False
            used[at] = has_base
        return used

    def _check(self, holders: Mapping[int, int]) -> None:
        remedy = "Take the row from a model that has the tensor."
        problems = [
            Problem(row.place, f"{row.name} lacks a tensor that needs it, or that row of it.", remedy)
            for row in self.fixed.values()
            if row.origin is not None and row.origin[1] >= holders.get(row.origin[0], 0)
        ]
        if problems:
            raise PlanError(problems)


def _within(ids: Ids, num_rows: int) -> Ids:
    inside: Ids = np.where(ids < num_rows, ids, ABSENT)
    return inside


def _row_runs(used: _Flags, rows: npt.NDArray[Any], order: Sequence[int]) -> tuple[RowRun, ...]:
    num_tokens = used.shape[1]
    if not num_tokens:
        return ()
    # Rows that advance with the output's keep their distance to it: a run ends where a distance changes.
    distance = np.where(used, rows - np.arange(num_tokens), 0)
    breaks = (used[:, 1:] != used[:, :-1]) | (distance[:, 1:] != distance[:, :-1])
    starts = np.concatenate([[0], np.flatnonzero(breaks.any(axis=0)) + 1])
    counts = np.diff(np.append(starts, num_tokens))
    flags, firsts = used[:, starts].T.tolist(), rows[:, starts].T.tolist()
    return tuple(
        RowRun(
            start,
            count,
            tuple((s, row) for s, is_used, row in zip(order, flag, first, strict=True) if is_used),
        )
        for start, count, flag, first in zip(starts.tolist(), counts.tolist(), flags, firsts, strict=True)
    )
