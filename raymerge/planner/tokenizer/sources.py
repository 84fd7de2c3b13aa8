"""What a recipe asks of the tokenizer, decided from the sources' own: rows, files, fields of the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.tokenizer import GENERATION_CONFIG, TokenizerFiles, read_tokenizer
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.inputs.source import Source
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.tokenizer.files import token_ids
from raymerge.planner.tokenizer.tokens import examples
from raymerge.planner.tokenizer.vocabulary import (
    ModelVocabulary,
    VocabularyPlan,
    build_vocabulary,
    plan_chat_template,
    wants_vocabulary,
)
from raymerge.recipes import Recipe

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
"""How a file in tiktoken's form begins: a token in base64, and its rank."""


def convert_slow_tokenizer(root: Path) -> str:
    """The text of ``tokenizer.json`` as transformers makes it; code that comes with the model is not run.

    Raises:
        CheckpointError: transformers cannot make it, for want of a library or of a class.
    """
    from transformers import AutoTokenizer

    try:
        # Without the last, transformers asks whoever sits at the terminal whether to run the model's code.
        tokenizer = AutoTokenizer.from_pretrained(
            root, local_files_only=True, use_fast=True, trust_remote_code=False
        )
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # what it raises depends on the class, the files and the libraries installed
        reason = _reason(root, error)
        what = f"has no tokenizer.json, and transformers cannot make one of its other files ({reason})."
        remedy = (
            "Make it where the tokenizer loads, with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
        raise CheckpointError(Problem(str(root), what, remedy)) from error
    return text


def _reason(root: Path, error: Exception) -> str:
    """Why transformers failed, which takes what is no SentencePiece model for a file of tiktoken."""
    text = " ".join(str(error).split())[:160]
    if "tiktoken" not in text:
        return text
    pieces = [path for path in sorted(root.glob("*.model")) if not _is_of_tiktoken(path)]
    return f"{pieces[0].name} is not a SentencePiece model that can be read" if pieces else text


def _is_of_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        return _TIKTOKEN_LINE.match(file.readline(1024)) is not None


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
    recipe: Recipe, resolver: InputResolver, *, donor: int
) -> tuple[TokenizerChanges, list[Problem]]:
    """Decide what the recipe's ``tokenizer``, ``tokenizer_source`` and ``chat_template`` ask for.

    Args:
        recipe: what is asked.
        resolver: its models with their adapters; tokenizer files are read if anything is asked.
        donor: index of the source that gives config and companions.
    """
    is_asked = wants_vocabulary(recipe)
    if not is_asked and (problem := _unasked(resolver, donor)) is not None:
        return TokenizerChanges(), [problem]
    if not is_asked and recipe.chat_template is None:
        return TokenizerChanges(), []
    models, problems = _models(resolver, needs_rows=is_asked)
    if problems:
        return TokenizerChanges(), problems
    # The base's vocabulary comes first, whatever place the base has in the list.
    models.sort(key=lambda model: model.index != donor)
    if is_asked:
        vocabulary, problems = build_vocabulary(recipe, models, donor)
        return (_with_vocabulary(vocabulary) if vocabulary is not None else TokenizerChanges()), problems
    changes, problems = plan_chat_template(recipe, models, donor)
    if changes is None:
        return TokenizerChanges(), problems
    return TokenizerChanges(files=changes.files, left_out=tuple(changes.removed)), problems


def compare_vocabularies(resolver: InputResolver, source: int, lead: int) -> str:
    """How the token ids of two models compare, as the end of a sentence; "" where their files do not tell."""
    try:
        ours = _brought(resolver, source) or _tokenizer(resolver.sources[source])
        theirs = _brought(resolver, lead) or _tokenizer(resolver.sources[lead])
    except CheckpointError:
        return ""
    if ours is None or theirs is None:
        return ""
    equal = sum(theirs.tokens.get(token) == number for token, number in ours.tokens.items())
    moved = sum(theirs.tokens.get(token, number) != number for token, number in ours.tokens.items())
    added = len(ours.tokens.keys() - theirs.tokens.keys())
    return f" ({equal} tokens have the same id in both, {moved} another, {added} are only here)"


def lost_ids(recipe: Recipe, donor: Source, kept: range) -> list[Problem]:
    """A problem for each kind of thing that a shorter vocabulary leaves without a row.

    Args:
        recipe: a recipe that leaves the tokenizer alone.
        donor: the source whose config, tokenizer and generation config the output has.
        kept: from the rows of the output to those of the donor: ids that had a row and have none.
    """
    if not kept:
        return []
    try:
        tokenizer = _tokenizer(donor)
    except CheckpointError as error:
        return list(error.problems)
    tokens = {} if tokenizer is None else tokenizer.tokens
    lost = [text for text, number in tokens.items() if number in kept]
    fields = token_ids(donor.checkpoint.config)
    raw = None if tokenizer is None else tokenizer.generation_config
    fields |= {f"{GENERATION_CONFIG}: {key}": ids for key, ids in _generation_ids(raw).items()}
    named = [f"{key} {number}" for key, ids in fields.items() for number in ids if number in kept]
    what = [f"{len(lost)} tokens of its tokenizer ({examples(lost)})"] if lost else []
    what += [f"special ids of its configs ({', '.join(named)})"] if named else []
    remedy = "Match rows by token with 'tokenizer_source: base' (or union) in place of 'embedding_sizes'."
    where = recipe.where("embedding_sizes")
    ending = f"would have no row: the output has {kept.start} and {donor.name} {kept.stop}."
    return [Problem(where, f"{each} {ending}", remedy) for each in what]


def _generation_ids(raw: bytes | None) -> dict[str, list[int]]:
    try:
        config = load_json(raw or b"{}")
    except (ValueError, RecursionError):
        # Such a file is copied as it is; no loader can read ids out of it.
        return {}
    return token_ids(config) if isinstance(config, dict) else {}


def _unasked(resolver: InputResolver, donor: int) -> Problem | None:
    """Refuse to give an embedding that an adapter brings with its tokenizer the model's own tokenizer."""
    source = resolver.sources[donor]
    try:
        brought = _brought(resolver, donor)
        own = _tokenizer(source) if brought is not None else None
    except CheckpointError as error:
        return error.problems[0]
    if brought is None or (own is not None and brought.tokens == own.tokens):
        return None
    return Problem(
        resolver.adapters[donor].adapter.name,
        f"it brings an embedding and a tokenizer of its own ({len(brought.tokens)} tokens), and the output's "
        f"files would be those of {source.checkpoint.name}.",
        "Say 'tokenizer_source: base' in the recipe (or union), which goes by the adapter's tokenizer.",
    )


def _with_vocabulary(vocabulary: VocabularyPlan) -> TokenizerChanges:
    return TokenizerChanges(
        vocabulary,
        vocabulary.files,
        tuple(vocabulary.removed),
        vocabulary.config_changes,
        tuple(vocabulary.notes()),
    )


def _models(resolver: InputResolver, *, needs_rows: bool) -> tuple[list[ModelVocabulary], list[Problem]]:
    models: list[ModelVocabulary] = []
    problems: list[Problem] = []
    for source in resolver.sources:
        try:
            model = _model(resolver, source)
        except CheckpointError as error:
            problems += error.problems
            continue
        models.append(model)
        if model.num_rows == 0 and needs_rows:
            what = "it has no token embedding, whose rows a tokenizer could number."
            problems.append(Problem(source.name, what, "Leave the tokenizer's keys out of the recipe."))
        elif needs_rows and (problem := _unnumbered(resolver, model)) is not None:
            problems.append(problem)
    return models, problems


def _model(resolver: InputResolver, source: Source) -> ModelVocabulary:
    found = resolver.stored(source.index, source.pair.embedding) if source.pair is not None else None
    return ModelVocabulary(
        source.index,
        source.reference,
        _tokenizer(source),
        found[1].shape[0] if found is not None else 0,
        source.checkpoint.config,
        _brought(resolver, source.index),
    )


def _unnumbered(resolver: InputResolver, model: ModelVocabulary) -> Problem | None:
    """Refuse rows that an adapter holds whole where nothing says which tokens they are of."""
    source, laid = resolver.sources[model.index], resolver.adapters.get(model.index)
    if laid is None or source.pair is None or model.brought is not None:
        return None
    own = source.checkpoint.tensors[source.pair.embedding].shape[0]
    if own == model.num_rows:
        return None
    return Problem(
        laid.adapter.name,
        f"the embedding that it holds whole has {model.num_rows} rows where the model has {own}, and it has "
        "no tokenizer that says which token a row is of.",
        "Copy the tokenizer's files that it was trained with beside the adapter.",
    )


def _brought(resolver: InputResolver, index: int) -> TokenizerFiles | None:
    """The tokenizer that an adapter brings with an embedding in place of the model's."""
    laid, pair = resolver.adapters.get(index), resolver.sources[index].pair
    if laid is None or pair is None or laid.replacement(pair.embedding) is None:
        return None
    return read_tokenizer(laid.adapter.root, laid.adapter.companions, convert=convert_slow_tokenizer)


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
