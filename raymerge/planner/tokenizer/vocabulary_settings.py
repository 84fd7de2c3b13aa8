"""The recipe's wishes for single tokens: each becomes a source row, or a problem with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymerge.errors import Problem
from raymerge.planner.tokenizer.rows import FixedRow
from raymerge.planner.tokenizer.tokens import ModelVocabulary, Numbering, TokenSet
from raymerge.recipes import (
    ModelReference,
    Recipe,
    TokenEntry,
    Tokenizer,
    TokenRow,
    ZeroRow,
    did_you_mean,
)


def tokenizer_block(recipe: Recipe) -> Tokenizer | None:
    """The recipe's ``tokenizer``, or what its short form ``tokenizer_source`` means; None without either."""
    if recipe.tokenizer is None and recipe.tokenizer_source is not None:
        return Tokenizer(source=recipe.tokenizer_source)
    return recipe.tokenizer


def source_place(recipe: Recipe) -> str:
    """Where the recipe says whose vocabulary the output has."""
    return (
        recipe.where("tokenizer_source") if recipe.tokenizer is None else recipe.where("tokenizer", "source")
    )


def find_model(
    reference: ModelReference, models: Sequence[ModelVocabulary], place: str
) -> ModelVocabulary | Problem:
    """The source that a reference in the tokenizer block names."""
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
    """Rows that the recipe chooses by output id, what is wrong with them, and what has no effect."""
    fixed: dict[int, FixedRow] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for token, entry in wish.tokens.items():
        if entry.source is None:
            continue
        found = _fixed_row(recipe, token, entry, known)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        fixed[tokens.ids[token]] = found
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
    wanted = token if isinstance(source, ModelReference) else str(source.token)
    row = known.rows.get(wanted)
    if row is not None:
        return row
    number = known.files.tokens.get(wanted)
    if number is None:
        what = f"{model.name} has no token {wanted!r}."
        remedy = f"{did_you_mean(wanted, known.files.added)} Name a model or a token that exists.".lstrip()
    else:
        what = (
            f"the token {wanted!r} of {model.name} has the id {number}, its embedding {model.num_rows} rows."
        )
        remedy = "Name a token that has a row."
    return Problem(place, what, remedy)
