"""What a recipe asks of the tokenizer, decided from the sources' own: rows, files, fields of the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymerge.checkpoints.tokenizer import TokenizerFiles, read_tokenizer
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.slow_tokenizers import convert_slow_tokenizer
from raymerge.planner.sources import Source
from raymerge.planner.vocabulary import (
    ModelVocabulary,
    VocabularyPlan,
    build_vocabulary,
    plan_chat_template,
    wants_vocabulary,
)
from raymerge.recipes import Recipe


@dataclass(frozen=True, slots=True)
class TokenizerChanges:
    """What becomes of tokenizer and vocabulary; empty where the recipe leaves them alone."""

    vocabulary: VocabularyPlan | None = None
    """What rows are made of."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write in place of the donor's companions."""
    left_out: tuple[str, ...] = ()
    """Companions of the donor that are not copied."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that change, by dotted path."""
    notes: tuple[str, ...] = ()
    """Sentences for the plan."""


def plan_tokenizer(
    recipe: Recipe, sources: Sequence[Source], *, donor: int
) -> tuple[TokenizerChanges, list[Problem]]:
    """Decide what the recipe's ``tokenizer``, ``tokenizer_source`` and ``chat_template`` ask for.

    Args:
        recipe: what is asked.
        sources: its models; their tokenizer files are read if anything is asked.
        donor: index of the source that gives config and companions.
    """
    if not wants_vocabulary(recipe) and recipe.chat_template is None:
        return TokenizerChanges(), []
    models, problems = _models(sources, needs_rows=wants_vocabulary(recipe))
    if problems:
        return TokenizerChanges(), problems
    # The base's vocabulary comes first, whatever place the base has in the list.
    models.sort(key=lambda model: model.index != donor)
    if wants_vocabulary(recipe):
        vocabulary, problems = build_vocabulary(recipe, models, donor)
        return (_with_vocabulary(vocabulary) if vocabulary is not None else TokenizerChanges()), problems
    changes, problems = plan_chat_template(recipe, models, donor)
    if changes is None:
        return TokenizerChanges(), problems
    return TokenizerChanges(files=changes.files, left_out=tuple(changes.removed)), problems


def compare_vocabularies(source: Source, lead: Source) -> str:
    """How the token ids of two models compare, as the end of a sentence; "" where their files do not tell."""
    try:
        ours, theirs = _tokenizer(source), _tokenizer(lead)
    except CheckpointError:
        return ""
    if ours is None or theirs is None:
        return ""
    equal = sum(theirs.tokens.get(token) == number for token, number in ours.tokens.items())
    moved = sum(theirs.tokens.get(token, number) != number for token, number in ours.tokens.items())
    added = len(ours.tokens.keys() - theirs.tokens.keys())
    return f" ({equal} tokens have the same id in both, {moved} another, {added} are only here)"


def _with_vocabulary(vocabulary: VocabularyPlan) -> TokenizerChanges:
    return TokenizerChanges(
        vocabulary,
        vocabulary.files,
        tuple(vocabulary.removed),
        vocabulary.config_changes,
        tuple(vocabulary.notes()),
    )


def _models(sources: Sequence[Source], *, needs_rows: bool) -> tuple[list[ModelVocabulary], list[Problem]]:
    models: list[ModelVocabulary] = []
    problems: list[Problem] = []
    for source in sources:
        try:
            tokenizer = _tokenizer(source)
        except CheckpointError as error:
            problems += error.problems
            continue
        checkpoint = source.checkpoint
        embedding = checkpoint.tensors.get(source.pair.embedding) if source.pair is not None else None
        if embedding is None and needs_rows:
            what = "it has no token embedding, whose rows a tokenizer could number."
            problems.append(Problem(source.name, what, "Leave the tokenizer's keys out of the recipe."))
            continue
        num_rows = embedding.shape[0] if embedding is not None else 0
        models.append(ModelVocabulary(source.index, source.reference, tokenizer, num_rows, checkpoint.config))
    return models, problems


def _tokenizer(source: Source) -> TokenizerFiles | None:
    checkpoint = source.checkpoint
    promised = checkpoint.unwritten
    if promised is None:
        return read_tokenizer(checkpoint.root, checkpoint.companions, convert=convert_slow_tokenizer)
    return read_tokenizer(
        promised.companions_root,
        checkpoint.companions,
        convert=convert_slow_tokenizer,
        written=promised.written,
    )
