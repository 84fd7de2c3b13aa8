"""The tokens of the output, the lead's own ids first, and the source rows of each output row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.tokenizer import AddedToken, TokenizerFiles
from raymerge.documents.fields import did_you_mean
from raymerge.errors import PlanError, Problem, shortlist
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.schema import Recipe, RowSource, Tokenizer, TokenRow, ZeroRow


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
    ids = dict(lead.rows)
    tokens = {text: token for text, token in lead.files.added.items() if text in ids}
    numbers = count(max(ids.values(), default=-1) + 1)
    ordinary, marked, differing = (defaultdict[str, list[str]](list) for _ in range(3))
    plain: set[str] = set()
    for other in others:
        for text in _in_order(other.rows, other.rows.keys() - ids.keys() - other.files.added.keys()):
            ids[text], tokens[text] = next(numbers), AddedToken(text)
            plain.add(text)
            ordinary[other.model.name].append(text)
    for other in others:
        for text in _in_order(other.rows, other.rows.keys() & other.files.added.keys()):
            token = other.files.added[text]
            if text not in ids:
                ids[text], tokens[text] = next(numbers), token
            elif text not in tokens or text in plain:
                plain.discard(text)
                tokens[text] = token
                marked[other.model.name].append(text)
            elif tokens[text] != token:
                differing[other.model.name].append(text)
    for text in added:
        if text not in ids:
            ids[text], tokens[text] = next(numbers), AddedToken(text)
    notes = (*_kind_notes(lead, others), *_token_notes(lead.model.name, ordinary, marked, differing))
    return TokenSet(ids, tokens, next(numbers), lead.model.num_rows, notes)


def examples(tokens: Sequence[str]) -> str:
    return shortlist([repr(token) for token in tokens])


def _kind_notes(lead: Numbering, others: Sequence[Numbering]) -> Iterator[str]:
    name, kind = lead.model.name, lead.files.kind
    for other in others:
        if other.files.kind != kind:
            yield (
                f"{other.model.name} has a {other.files.kind} tokenizer and {name} a {kind} one: texts are "
                f"split as {name} does"
            )


def _token_notes(
    lead: str,
    ordinary: Mapping[str, list[str]],
    marked: Mapping[str, list[str]],
    differing: Mapping[str, list[str]],
) -> Iterator[str]:
    for name, texts in ordinary.items():
        yield (
            f"ordinary tokens of {name} that {lead} lacks: {len(texts)} ({examples(texts)}); they become "
            "added tokens, which are found in a text before anything else is"
        )
    for name, texts in marked.items():
        yield f"{examples(texts)} become added tokens, as in {name}"
    for name, texts in differing.items():
        yield f"{examples(texts)} have other settings in {name}; the first model's hold"


def _in_order(rows: Mapping[str, int], chosen: Set[str]) -> list[str]:
    return sorted(chosen, key=lambda text: (rows[text], text))


def find_model(reference: ModelReference, models: Sequence[ModelVocabulary], place: str) -> ModelVocabulary:
    for model in models:
        if model.reference == reference:
            return model
    names = [model.name for model in models]
    what = f"'{reference}' is not one of the models of this merge."
    remedy = f"{did_you_mean(str(reference), names)} Name one of: {', '.join(names)}.".lstrip()
    raise PlanError(Problem(place, what, remedy))


def fixed_rows(
    recipe: Recipe, wish: Tokenizer, known: Mapping[int, Numbering], tokens: TokenSet, problems: list[Problem]
) -> tuple[dict[int, FixedRow], list[str]]:
    """Rows that the recipe chooses by output id, and notes on choices without effect."""
    fixed: dict[int, FixedRow] = {}
    notes: list[str] = []
    for token, entry in wish.tokens.items():
        if entry.source is None:
            continue
        try:
            fixed[tokens.ids[token]] = _fixed_row(recipe, token, entry.source, known)
        except PlanError as error:
            problems += error.problems
            continue
        if not entry.force and all(token in each.rows for each in known.values()):
            notes.append(
                f"the source of {token!r} has no effect, since every model has the token; "
                "'force: true' would give all of them that row"
            )
    return fixed, notes


def _fixed_row(recipe: Recipe, token: str, source: RowSource, known: Mapping[int, Numbering]) -> FixedRow:
    path = ("tokenizer", "tokens", token, "source")
    place = recipe.where(*path)
    if isinstance(source, ZeroRow):
        return FixedRow(place, f"{token!r}", None)
    if isinstance(source, ModelReference):
        reference, at = source, place
    else:
        reference, at = source.model, recipe.where(*path, "model")
    model = find_model(reference, [each.model for each in known.values()], at)
    name = f"{token!r} takes its row from {model.name}, which"
    return FixedRow(place, name, (model.index, _row(token, source, known[model.index], place)))


def _row(token: str, source: ModelReference | TokenRow, known: Numbering, place: str) -> int:
    name, num_rows = known.model.name, known.model.num_rows
    if isinstance(source, TokenRow) and source.token_id is not None:
        if source.token_id < num_rows:
            return source.token_id
        what = f"{name} has no token_id {source.token_id}; its embedding has {num_rows} rows."
        raise PlanError(Problem(place, what, f"Write a number from 0 to {num_rows - 1}."))
    text = token if isinstance(source, ModelReference) else str(source.token)
    number = known.files.tokens.get(text)
    if number is None:
        what = f"{name} has no token {text!r}."
        remedy = f"{did_you_mean(text, known.files.added)} Name a model or a token that exists.".lstrip()
        raise PlanError(Problem(place, what, remedy))
    if number >= num_rows:
        what = f"the token {text!r} of {name} has the id {number}, its embedding {num_rows} rows."
        raise PlanError(Problem(place, what, "Name a token that has a row."))
    return number


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
        limits = np.array([[holders[source]] for source in order])
        rows = np.stack([self.ids[source] for source in order])
        rows[rows >= limits] = ABSENT
        used = self._defaults(rows, order)
        own = np.zeros(len(self.ids[self.base]), dtype=np.bool_)
        if member in holders:
            at = order.index(member)
            own = rows[at] != ABSENT
            own[sorted(self.forced)] = False
            used[:, own] = False
            used[at, own] = True
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
    inputs = [
        tuple((s, row) for s, is_used, row in zip(order, flag, first, strict=True) if is_used)
        for flag, first in zip(flags, firsts, strict=True)
    ]
    return tuple(map(RowRun, starts.tolist(), counts.tolist(), inputs))
