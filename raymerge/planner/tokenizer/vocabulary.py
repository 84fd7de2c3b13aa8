"""The output's vocabulary: its tokens, what every row is made of, its files, and its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.tokenizer import GENERATION_CONFIG, TokenizerFiles, read_tokenizer
from raymerge.errors import CheckpointError, Findings, PlanError, Problem, UserError
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.tokenizer.files import (
    Renumbering,
    TokenizerChanges,
    resolve_template,
    template_files,
    token_ids,
    tokenizer_files,
)
from raymerge.planner.tokenizer.matching import TokenMatch, match_tokens
from raymerge.planner.tokenizer.tokens import (
    ABSENT,
    Ids,
    ModelVocabulary,
    Numbering,
    RowSources,
    TokenSet,
    examples,
    find_model,
    fixed_rows,
    gather,
    number,
    texts_by_id,
)
from raymerge.recipes.schema import Recipe, Tokenizer

_REMEDY = "Copy the tokenizer's files from the place the model comes from."


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPlan(TokenizerChanges):
    tokens: tuple[str | None, ...]
    """In the order of their ids; None for an id without a token."""
    num_rows: int
    """Rows to write: those of the tokens, rounded up as the recipe says."""
    sources: RowSources = field(repr=False, compare=False)
    is_renumbered: bool
    """Whether a token of some source has another id here, or none, or one that the source lacks."""
    result: int | None = None
    """Index of the stage's result that has the rows of tokens that the base lacks."""

    @property
    def num_tokens(self) -> int:
        """Rows with a token of their own; further ones are the mean of all of them."""
        return len(self.tokens)


def tokenizer_block(recipe: Recipe) -> Tokenizer | None:
    """The recipe's ``tokenizer``, or what its short form ``tokenizer_source`` means; None without either."""
    if recipe.tokenizer is None and recipe.tokenizer_source is not None:
        return Tokenizer(source=recipe.tokenizer_source)
    return recipe.tokenizer


def approximation_of(recipe: Recipe) -> str | None:
    """How rows are made for the tokens of a donor; None where none are."""
    return None if recipe.tokenizer is None else recipe.tokenizer.approximation


def _source_place(recipe: Recipe) -> str:
    return recipe.where(*(("tokenizer_source",) if recipe.tokenizer is None else ("tokenizer", "source")))


def build_vocabulary(recipe: Recipe, models: Sequence[ModelVocabulary], donor: int) -> VocabularyPlan:
    """Of ``models`` the base comes first; one of which only the tokenizer is taken may be among them. The
    donor gives config and companions.

    Raises:
        UserError: the vocabulary cannot be made; with all problems."""
    wish = tokenizer_block(recipe) or Tokenizer()
    giver, chosen, files = _chosen(recipe, wish, models, donor)
    lead = number(chosen, files)
    known = _number_all(recipe, models, lead)
    others = [known[model.index] for model in models if wish.source == "union" and model is not lead.model]
    tokens = gather(lead, [each for each in others if each.model.used], wish.tokens)
    problems: list[Problem] = []
    fixed, remarks = fixed_rows(recipe, wish, known, tokens, problems)
    template = resolve_template(recipe, [model.used for model in models], problems)
    if problems:
        raise PlanError(problems)
    texts = tokens.by_id()
    ids: dict[int, Ids] = {}
    for index, each in known.items():
        rows = [ABSENT if text is None else each.rows.get(text, ABSENT) for text in texts]
        ids[index] = np.array(rows, dtype=np.int64)
    forced = frozenset(tokens.ids[token] for token, entry in wish.tokens.items() if entry.force)
    sources = RowSources(ids, donor, fixed, forced)
    return _assemble(_Decided(wish, giver, lead, known, tokens, sources), template, remarks)


def _chosen(
    recipe: Recipe, wish: Tokenizer, models: Sequence[ModelVocabulary], donor: int
) -> tuple[ModelVocabulary, ModelVocabulary, TokenizerFiles]:
    """The model that gives the config, the one that gives the vocabulary, and that."""
    giver, place = next(model for model in models if model.index == donor), _source_place(recipe)
    chosen = giver if isinstance(wish.source, str) else find_model(wish.source, models, place)
    if chosen.used is None:
        raise PlanError(Problem(place, f"{chosen.name} has no tokenizer files.", _REMEDY))
    return giver, chosen, chosen.used


def transplanted_vocabulary(
    recipe: Recipe, models: Sequence[ModelVocabulary], donor: int, result: int | None
) -> VocabularyPlan:
    """The vocabulary of one of ``models`` for the embedding of another, which gives config and body.

    All of its tokens stay, and its embedding's number of rows; ``result`` is the index of the stage's rows,
    None where there are none.

    Raises:
        UserError: the vocabulary cannot be made; with all problems."""
    wish = tokenizer_block(recipe) or Tokenizer()
    giver, chosen, files = _chosen(recipe, wish, models, donor)
    assert giver.tokenizer is not None
    num_ids = max(files.tokens.values(), default=-1) + 1
    lead = number(replace(chosen, num_rows=max(num_ids, chosen.num_rows)), files)
    tokens = gather(lead, (), ())
    match = match_tokens(giver.tokenizer, files, base_rows=giver.num_rows, num_ids=tokens.num_tokens)
    ids: dict[int, Ids] = {donor: match.rows}
    if result is not None:
        ids[result] = np.full(tokens.num_tokens, ABSENT, dtype=np.int64)
        ids[result][match.missing] = np.arange(len(match.missing))
    problems: list[Problem] = []
    template = resolve_template(recipe, [chosen.used], problems)
    if problems:
        raise PlanError(problems)
    known = {donor: number(giver, giver.tokenizer), chosen.index: lead}
    sources = RowSources(ids, donor, {}, frozenset())
    decided = _Decided(wish, giver, lead, known, tokens, sources, chosen.num_rows)
    return replace(_assemble(decided, template, _match_notes(wish, giver, chosen, match)), result=result)


def _match_notes(
    wish: Tokenizer, giver: ModelVocabulary, chosen: ModelVocabulary, match: TokenMatch
) -> list[str]:
    how = f"omp (k = {wish.num_atoms})" if wish.approximation == "omp" else wish.approximation
    beyond = int((match.missing >= chosen.num_rows).sum()) if wish.approximation == "omp" else 0
    parts = [f"{match.num_exact} have rows of {giver.name}"]
    parts += [f"{match.num_role} those of the same roles"] if match.num_role else []
    parts += [f"{match.num_byte} its rows of the same bytes"] if match.num_byte else []
    made = len(match.missing) - beyond
    parts += [f"{made} rows made by {how}"] if made else []
    parts += [f"{beyond} the mean of all rows, for they have none in {chosen.name}"] if beyond else []
    return [f"of the tokens of {chosen.name} {', '.join(parts)}"]


def plan_chat_template(recipe: Recipe, models: Sequence[ModelVocabulary], donor: int) -> TokenizerChanges:
    giver = next(model for model in models if model.index == donor)
    problems: list[Problem] = []
    template = resolve_template(recipe, [model.used for model in models], problems)
    if giver.tokenizer is None:
        what = f"{giver.name} has no tokenizer that a chat template could go with."
        problems.append(Problem(recipe.where("chat_template"), what, _REMEDY))
    if problems or template is None or giver.tokenizer is None:
        raise PlanError(problems)
    return template_files(giver.tokenizer, template)


@dataclass(frozen=True, slots=True)
class _Decided:
    wish: Tokenizer
    giver: ModelVocabulary
    lead: Numbering
    known: Mapping[int, Numbering]
    tokens: TokenSet
    sources: RowSources
    least_rows: int | None = None
    """Rows of the donor of a transplant, which servers compare; None for another vocabulary."""

    @property
    def num_rows(self) -> int:
        multiple = self.wish.pad_to_multiple_of or 1
        return -(-max(self.tokens.num_tokens, self.least_rows or 0) // multiple) * multiple

    @property
    def other_roles(self) -> dict[str, str]:
        """Special tokens by role that the tokenizer beside the config gives another token; all of a
        transplant's."""
        own, roles = self.giver.tokenizer, self.lead.files.roles.items()
        if self.least_rows is not None:
            return dict(roles)
        return {} if own is None else {role: text for role, text in roles if own.roles.get(role) != text}


def _number_all(recipe: Recipe, models: Sequence[ModelVocabulary], lead: Numbering) -> dict[int, Numbering]:
    num_rows = lead.model.num_rows
    problems = [
        Problem(
            _source_place(recipe),
            f"{model.name} has no tokenizer files, and its embedding has {model.num_rows} rows where "
            f"{lead.model.name} has {num_rows}: nothing says which token a row is of.",
            _REMEDY,
        )
        for model in models
        if model.used is None and model.num_rows != num_rows
    ]
    if problems:
        raise PlanError(problems)
    return {model.index: number(model, model.used or lead.files) for model in models}


def _assemble(decided: _Decided, template: str | None, remarks: Sequence[str]) -> VocabularyPlan:
    tokens, lead, giver = decided.tokens, decided.lead, decided.giver
    changes = tokenizer_files(lead.files, giver.tokenizer, tokens, template=template)
    own = giver.tokenizer or decided.known[giver.index].files
    old, roles = texts_by_id(own.tokens), lead.files.roles
    renumbering = Renumbering(
        old,
        tokens.ids,
        decided.num_rows,
        roles,
        decided.other_roles,
        states_all=decided.least_rows is not None,
    )
    config = renumbering.config_changes(giver.config)
    texts = tokens.by_id()
    changed = {
        index: {
            "moved": [text for text, row in each.rows.items() if tokens.ids.get(text, row) != row],
            "added": [text for text in tokens.ids if text not in each.rows],
            "dropped": [text for text in each.rows if text not in tokens.ids],
        }
        for index, each in decided.known.items()
    }
    own_notes = (*_model_notes(decided, changed), *_row_notes(decided, texts))
    return VocabularyPlan(
        tokens=texts,
        num_rows=decided.num_rows,
        files={**changes.files, **_generation_config(renumbering, giver.tokenizer)},
        left_out=changes.left_out,
        config=config,
        notes=(*_remarks(decided, config), *tokens.notes, *remarks, *own_notes),
        sources=decided.sources,
        is_renumbered=any(any(each.values()) for each in changed.values()),
    )


def _model_notes(decided: _Decided, changed: Mapping[int, Mapping[str, list[str]]]) -> Iterator[str]:
    for index, known in decided.known.items():
        own = changed[index]
        parts = [f"{len(known.rows) - len(own['moved']) - len(own['dropped'])} tokens with equal ids"]
        parts += [f"{len(texts)} {verb} ({examples(texts)})" for verb, texts in own.items() if texts]
        yield f"{known.model.name}: {', '.join(parts)}"
    for known in decided.known.values():
        if beyond := known.beyond:
            yield (
                f"{known.model.name}: tokens beyond the {known.model.num_rows} rows of its embedding: "
                f"{len(beyond)} ({examples(beyond)}); they count as absent there"
            )


def _row_notes(decided: _Decided, texts: Sequence[str | None]) -> Iterator[str]:
    known, ids, sources = decided.known.values(), decided.tokens.ids, decided.sources
    lacking = {text for each in known for text in ids if text not in each.rows}
    counts, chosen = sources.defaults().tolist(), {texts[row] for row in sources.fixed}
    lacking -= chosen
    by_default = {text: counts[row] for row, text in enumerate(texts) if text in lacking}
    zeros = {texts[row] for row, fixed in sources.fixed.items() if fixed.origin is None}
    zeros |= {text for text, count in by_default.items() if count == 0}
    lists: Mapping[str, Sequence[str | None]] = {
        "missing rows filled with the mean of several models' rows": [
            t for t, n in by_default.items() if n > 1
        ],
        "missing rows filled with zeros": [text for text in texts if text in zeros],
        "rows forced to be the same for all models": [texts[row] for row in sorted(sources.forced)],
    }
    for what, tokens_of in lists.items():
        if tokens := [text for text in tokens_of if text is not None]:
            yield f"{what}: {len(tokens)} ({examples(tokens)})"
    if num_holes := sum(text is None for text in texts):
        yield f"ids that belong to no token, with rows of zeros: {num_holes}"


def _generation_config(renumbering: Renumbering, giver: TokenizerFiles | None) -> dict[str, bytes]:
    raw = None if giver is None else giver.generation_config
    if giver is None or raw is None:
        return {}
    new = renumbering.generation_config(raw, f"{giver.root}/{GENERATION_CONFIG}")
    return {} if new is None else {GENERATION_CONFIG: new}


def _remarks(decided: _Decided, config_changes: Mapping[str, Any]) -> list[str]:
    wish, lead = decided.wish, decided.lead
    kind = wish.source if isinstance(wish.source, str) else lead.model.name
    num_tokens, num_rows = decided.tokens.num_tokens, decided.num_rows
    notes = [f"vocabulary: {kind}, {num_tokens} tokens in {num_rows} rows"]
    spare = lead.model.num_rows - num_rows
    if spare > 0:
        notes.append(
            f"{lead.model.name} has {spare} rows more, which no token of the output needs; they are left out "
            "('pad_to_multiple_of' rounds the number of rows up)"
        )
    gone = {role: text for role, text in lead.files.roles.items() if text not in decided.tokens.ids}
    notes += [f"{role} {text!r} has no row and is no longer the {role}" for role, text in gone.items()]
    own = {} if decided.giver.tokenizer is None else decided.giver.tokenizer.roles
    name, donor = lead.model.name, decided.giver.name
    for role, text in decided.other_roles.items():
        if own.get(role, text) != text:
            notes.append(f"{role} is {text!r} as in {name}, also in the configs; {donor} has {own[role]!r}")
    for model in decided.known.values():
        if model.model.used is None:
            notes.append(f"{model.model.name} has no tokenizer files and is taken to go by {name}'s")
        else:
            notes += [f"{model.model.name}: {note}" for note in model.files.notes]
    notes += [f"config.json: {key} becomes {value}" for key, value in config_changes.items()]
    return notes


_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
"""Start of a file in tiktoken's form: a token in base64, and its rank."""


def convert_slow_tokenizer(root: Path) -> str:
    """The text of ``tokenizer.json`` as transformers makes it; code that comes with the model is not run.
    Raises CheckpointError: transformers cannot make it, for want of a library or of a class."""
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
    """Why transformers failed, which mistakes anything but a SentencePiece model for a tiktoken file."""
    text = " ".join(str(error).split())[:160]
    if "tiktoken" not in text:
        return text
    pieces = [path for path in sorted(root.glob("*.model")) if not _is_of_tiktoken(path)]
    return f"{pieces[0].name} is not a SentencePiece model that can be read" if pieces else text


def _is_of_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        return _TIKTOKEN_LINE.match(file.readline(1024)) is not None


def plan_tokenizer(
    recipe: Recipe, resolver: InputResolver, findings: Findings, *, donor: int
) -> TokenizerChanges:
    """Decide what the recipe's ``tokenizer``, ``tokenizer_source`` and ``chat_template`` ask for.

    Tokenizer files are read if anything is asked. The donor gives config and companions."""
    is_asked = tokenizer_block(recipe) is not None
    try:
        if not is_asked:
            _refuse_brought(resolver, donor)
            if recipe.chat_template is None:
                return TokenizerChanges()
        # The base's vocabulary comes first, whatever place the base has in the list.
        models = sorted(_models(resolver, needs_rows=is_asked), key=lambda model: model.index != donor)
        if is_asked and approximation_of(recipe) is not None:
            return transplanted_vocabulary(recipe, models, donor, resolver.transplant_store)
        return (build_vocabulary if is_asked else plan_chat_template)(recipe, models, donor)
    except UserError as error:
        findings.extend(error.problems)
        return TokenizerChanges()


def other_vocabulary(resolver: InputResolver, own: tuple[int, int], lead: tuple[int, int]) -> str:
    """What to say of tensors with another number of rows than the lead's: index of the source, and rows."""
    what = f"{{count}} of its tensors have {own[1]} rows, one for each token, where"
    what = f"{what} {resolver.sources[lead[0]].name} has {lead[1]}"
    try:
        ours, theirs = (
            _brought(resolver, i) or read_tokenizer_of(resolver.sources[i]) for i in (own[0], lead[0])
        )
    except CheckpointError:
        return what
    if ours is None or theirs is None:
        return what
    equal = sum(theirs.tokens.get(token) == number for token, number in ours.tokens.items())
    moved = sum(theirs.tokens.get(token, number) != number for token, number in ours.tokens.items())
    added = len(ours.tokens.keys() - theirs.tokens.keys())
    return f"{what} ({equal} tokens have the same id in both, {moved} another, {added} are only here)"


def lost_ids(recipe: Recipe, donor: Source, id_range: range) -> list[Problem]:
    """A problem for each kind of use that a shorter vocabulary leaves without a row.

    The recipe leaves the tokenizer alone, and the output has the donor's config, tokenizer and generation
    config. ``id_range`` goes from the rows of the output to those of the donor: ids that had a row and have
    none."""
    if not id_range:
        return []
    try:
        tokenizer = read_tokenizer_of(donor)
    except CheckpointError as error:
        return list(error.problems)
    tokens = {} if tokenizer is None else tokenizer.tokens
    lost = [text for text, number in tokens.items() if number in id_range]
    fields = token_ids(donor.checkpoint.config)
    raw = None if tokenizer is None else tokenizer.generation_config
    fields |= {f"{GENERATION_CONFIG}: {key}": ids for key, ids in _generation_ids(raw).items()}
    named = [f"{key} {number}" for key, ids in fields.items() for number in ids if number in id_range]
    what = [f"{len(lost)} tokens of its tokenizer ({examples(lost)})"] if lost else []
    what += [f"special ids of its configs ({', '.join(named)})"] if named else []
    remedy = "Match rows by token with 'tokenizer_source: base' (or union) in place of 'embedding_sizes'."
    where = recipe.where("embedding_sizes")
    ending = f"would have no row: the output has {id_range.start} and {donor.name} {id_range.stop}."
    return [Problem(where, f"{each} {ending}", remedy) for each in what]


def _generation_ids(raw: bytes | None) -> dict[str, list[int]]:
    try:
        config = load_json(raw or b"{}")
    except (ValueError, RecursionError):
        # Such a file is copied as it is; no loader can read ids out of it.
        return {}
    return token_ids(config) if isinstance(config, dict) else {}


def _refuse_brought(resolver: InputResolver, donor: int) -> None:
    """Refuse the model's own tokenizer for an embedding that an adapter brings with a tokenizer."""
    source, brought = resolver.sources[donor], _brought(resolver, donor)
    own = read_tokenizer_of(source) if brought is not None else None
    if brought is None or (own is not None and brought.tokens == own.tokens):
        return
    what = (
        f"it brings an embedding and a tokenizer of its own ({len(brought.tokens)} tokens), and the output's "
        f"files would be those of {source.checkpoint.name}."
    )
    remedy = "Say 'tokenizer_source: base' in the recipe (or union), which goes by the adapter's tokenizer."
    raise PlanError(Problem(resolver.adapters[donor].adapter.name, what, remedy))


def _models(resolver: InputResolver, *, needs_rows: bool) -> list[ModelVocabulary]:
    models: list[ModelVocabulary] = []
    problems: list[Problem] = []
    for source in resolver.sources:
        try:
            models.append(_model(resolver, source, needs_rows=needs_rows))
        except UserError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)
    return models


def _model(resolver: InputResolver, source: Source, *, needs_rows: bool) -> ModelVocabulary:
    index, pair, laid = source.index, source.pair, resolver.adapters.get(source.index)
    stored = resolver.stored(index, pair.embedding) if pair is not None else None
    num_rows = stored[1].shape[0] if stored is not None else 0
    model = ModelVocabulary(
        index,
        source.reference,
        read_tokenizer_of(source),
        num_rows,
        source.checkpoint.config,
        _brought(resolver, index),
    )
    if not needs_rows:
        return model
    if num_rows == 0 and source.checkpoint.tensors:
        what = "it has no token embedding, whose rows a tokenizer could number."
        raise PlanError(Problem(source.name, what, "Leave the tokenizer's keys out of the recipe."))
    own = source.checkpoint.tensors[pair.embedding].shape[0] if pair is not None else num_rows
    if laid is not None and model.brought is None and own != num_rows:
        what = (
            f"the embedding that it holds whole has {num_rows} rows where the model has {own}, and it has no "
            "tokenizer that says which token a row is of."
        )
        remedy = "Copy the tokenizer's files that it was trained with beside the adapter."
        raise PlanError(Problem(laid.adapter.name, what, remedy))
    return model


def _brought(resolver: InputResolver, index: int) -> TokenizerFiles | None:
    laid, pair = resolver.adapters.get(index), resolver.sources[index].pair
    if laid is None or pair is None or laid.replacement(pair.embedding) is None:
        return None
    return read_tokenizer(laid.adapter.root, laid.adapter.companions, convert=convert_slow_tokenizer)


def read_tokenizer_of(source: Source) -> TokenizerFiles | None:
    checkpoint = source.checkpoint
    promised = checkpoint.unwritten
    return read_tokenizer(
        checkpoint.root if promised is None else promised.companions_root,
        checkpoint.companions,
        convert=convert_slow_tokenizer,
        written={} if promised is None else promised.written,
    )
