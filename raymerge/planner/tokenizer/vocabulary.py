"""The output's vocabulary: its tokens, what every row is made of, its files, and its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.tokenizer import GENERATION_CONFIG, TokenizerFiles, read_tokenizer
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.tokenizer.files import (
    FileChanges,
    Renumbering,
    resolve_template,
    template_files,
    token_ids,
    tokenizer_files,
)
from raymerge.planner.tokenizer.tokens import (
    ABSENT,
    FixedRow,
    Ids,
    ModelVocabulary,
    Numbering,
    RowRun,
    RowSources,
    TokenSet,
    examples,
    find_model,
    fixed_rows,
    gather,
    number,
    source_place,
    texts_by_id,
    tokenizer_block,
)
from raymerge.recipes import Recipe, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelReport:
    index: int
    name: str
    num_rows: int
    num_equal: int
    moved: tuple[str, ...]
    """Tokens with another id in the output, in the order of its ids."""
    dropped: tuple[str, ...]
    added: tuple[str, ...]
    """Tokens of the output that it lacks: their rows are filled from elsewhere."""
    beyond: tuple[str, ...]
    """Tokens that its tokenizer has and its embedding has no row for; they count as absent."""

    def __str__(self) -> str:
        parts = [f"{self.num_equal} tokens with equal ids"]
        for verb, tokens in (("moved", self.moved), ("added", self.added), ("dropped", self.dropped)):
            parts += [f"{len(tokens)} {verb} ({examples(tokens)})"] if tokens else []
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    models: tuple[ModelReport, ...]
    means: tuple[str, ...]
    """Tokens whose missing rows are the mean of several sources' rows."""
    zeros: tuple[str, ...]
    forced: tuple[str, ...]
    num_holes: int

    def notes(self) -> Iterator[str]:
        yield from map(str, self.models)
        for model in self.models:
            if model.beyond:
                yield (
                    f"{model.name}: tokens beyond the {model.num_rows} rows of its embedding: "
                    f"{len(model.beyond)} ({examples(model.beyond)}); they count as absent there"
                )
        for what, tokens in (
            ("missing rows filled with the mean of several models' rows", self.means),
            ("missing rows filled with zeros", self.zeros),
            ("rows forced to be the same for all models", self.forced),
        ):
            if tokens:
                yield f"{what}: {len(tokens)} ({examples(tokens)})"
        if self.num_holes:
            yield f"ids that belong to no token, with rows of zeros: {self.num_holes}"


def report_vocabulary(
    known: Mapping[int, Numbering], tokens: TokenSet, texts: Sequence[str | None], sources: RowSources
) -> VocabularyReport:
    lacking = {text for each in known.values() for text in tokens.ids if text not in each.rows}
    counts = sources.defaults().tolist()
    chosen = {texts[number] for number in sources.fixed}
    zeros = {texts[number] for number, row in sources.fixed.items() if row.term is None}
    by_default = [
        (text, counts[number])
        for number, text in enumerate(texts)
        if text is not None and text in lacking and text not in chosen
    ]
    zeros |= {text for text, count in by_default if count == 0}
    return VocabularyReport(
        models=tuple(_report_model(each, tokens.ids) for each in known.values()),
        means=tuple(text for text, count in by_default if count > 1),
        zeros=tuple(text for text in texts if text is not None and text in zeros),
        forced=tuple(text for n in sorted(sources.forced) if (text := texts[n]) is not None),
        num_holes=sum(text is None for text in texts),
    )


def _report_model(known: Numbering, ids: Mapping[str, int]) -> ModelReport:
    in_both = [(text, row, ids[text]) for text, row in known.rows.items() if text in ids]
    moved = [text for text, row, number in in_both if row != number]
    return ModelReport(
        index=known.model.index,
        name=known.model.name,
        num_rows=known.model.num_rows,
        num_equal=len(in_both) - len(moved),
        moved=tuple(moved),
        dropped=tuple(text for text in known.rows if text not in ids),
        added=tuple(text for text in ids if text not in known.rows),
        beyond=tuple(known.beyond),
    )


__all__ = [
    "ModelVocabulary",
    "RowRun",
    "VocabularyPlan",
    "build_vocabulary",
    "plan_chat_template",
    "wants_vocabulary",
]
_REMEDY = "Copy the tokenizer's files from the place the model comes from."


@dataclass(frozen=True, slots=True)
class VocabularyPlan:
    tokens: tuple[str | None, ...]
    """In the order of their ids; None for an id without a token."""
    num_rows: int
    """Rows to write: those of the tokens, rounded up as the recipe says."""
    files: Mapping[str, bytes]
    removed: tuple[str, ...]
    """Companions of the donor that must not be copied: they would contradict the others."""
    config_changes: Mapping[str, Any]
    report: VocabularyReport
    remarks: tuple[str, ...]
    sources: RowSources = field(repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Rows with a token of their own; further ones are the mean of all of them."""
        return len(self.tokens)

    def rows_of(self, member: int, holders: Mapping[int, int]) -> tuple[RowRun, ...]:
        return self.sources.runs(member, holders)

    @property
    def is_renumbered(self) -> bool:
        """Whether a token of some source has another id here, or none, or one that the source lacks."""
        return any(model.moved or model.dropped or model.added for model in self.report.models)

    def notes(self) -> list[str]:
        return [*self.remarks, *self.report.notes()]


def wants_vocabulary(recipe: Recipe) -> bool:
    """Whether the recipe mentions the vocabulary; else files and rows stay as they are."""
    return tokenizer_block(recipe) is not None


def build_vocabulary(
    recipe: Recipe, models: Sequence[ModelVocabulary], donor: int
) -> tuple[VocabularyPlan | None, list[Problem]]:
    """The output's vocabulary, or the problems that prevent it.

    Of ``models`` the base comes first; one of which only the tokenizer is taken may be among them. The donor
    gives config and companions.
    """
    wish = tokenizer_block(recipe) or Tokenizer()
    giver = next(model for model in models if model.index == donor)
    lead, problems = _find_lead(recipe, wish, models, giver)
    if lead is None:
        return None, problems
    known, unknown = _number_all(recipe, models, lead)
    if unknown:
        return None, unknown
    others = [known[model.index] for model in models if wish.source == "union" and model is not lead.model]
    tokens = gather(lead, [each for each in others if each.model.used], wish.tokens)
    fixed, problems, remarks = fixed_rows(recipe, wish, known, tokens)
    template, more = resolve_template(recipe, [model.used for model in models])
    sources = _row_sources(known, tokens, wish, fixed, base=donor)
    if problems or more:
        return None, [*problems, *more]
    try:
        return _assemble(_Decided(wish, giver, lead, known, tokens, sources), template, remarks), []
    except CheckpointError as error:
        return None, list(error.problems)


def plan_chat_template(
    recipe: Recipe, models: Sequence[ModelVocabulary], donor: int
) -> tuple[FileChanges | None, list[Problem]]:
    if recipe.chat_template is None:
        return None, []
    giver = next(model for model in models if model.index == donor)
    template, problems = resolve_template(recipe, [model.used for model in models])
    if giver.tokenizer is None:
        what = f"{giver.name} has no tokenizer that a chat template could go with."
        problems = [*problems, Problem(recipe.where("chat_template"), what, _REMEDY)]
    if problems or template is None or giver.tokenizer is None:
        return None, problems
    return template_files(giver.tokenizer, template), []


@dataclass(frozen=True, slots=True)
class _Decided:
    wish: Tokenizer
    giver: ModelVocabulary
    lead: Numbering
    known: Mapping[int, Numbering]
    tokens: TokenSet
    sources: RowSources

    @property
    def num_rows(self) -> int:
        multiple = self.wish.pad_to_multiple_of or 1
        return -(-self.tokens.num_tokens // multiple) * multiple


def _find_lead(
    recipe: Recipe, wish: Tokenizer, models: Sequence[ModelVocabulary], giver: ModelVocabulary
) -> tuple[Numbering | None, list[Problem]]:
    place = source_place(recipe)
    found = giver if isinstance(wish.source, str) else find_model(wish.source, models, place)
    if isinstance(found, Problem):
        return None, [found]
    if found.used is None:
        return None, [Problem(place, f"{found.name} has no tokenizer files.", _REMEDY)]
    return number(found, found.used), []


def _number_all(
    recipe: Recipe, models: Sequence[ModelVocabulary], lead: Numbering
) -> tuple[dict[int, Numbering], list[Problem]]:
    known: dict[int, Numbering] = {}
    problems: list[Problem] = []
    for model in models:
        if model.used is None and model.num_rows != lead.model.num_rows:
            what = (
                f"{model.name} has no tokenizer files, and its embedding has {model.num_rows} rows where "
                f"{lead.model.name} has {lead.model.num_rows}: nothing says which token a row is of."
            )
            problems.append(Problem(source_place(recipe), what, _REMEDY))
        known[model.index] = number(model, model.used or lead.files)
    return known, problems


def _row_sources(
    known: Mapping[int, Numbering],
    tokens: TokenSet,
    wish: Tokenizer,
    fixed: Mapping[int, FixedRow],
    *,
    base: int,
) -> RowSources:
    texts = tokens.by_id()
    return RowSources(
        ids={index: _ids(each.rows, texts) for index, each in known.items()},
        base=base,
        fixed=fixed,
        forced=frozenset(tokens.ids[token] for token, entry in wish.tokens.items() if entry.force),
    )


def _ids(rows: Mapping[str, int], texts: Sequence[str | None]) -> Ids:
    found = (ABSENT if text is None else rows.get(text, ABSENT) for text in texts)
    return np.fromiter(found, dtype=np.int64, count=len(texts))


def _assemble(decided: _Decided, template: str | None, remarks: Sequence[str]) -> VocabularyPlan:
    tokens, lead, giver = decided.tokens, decided.lead, decided.giver
    changes = tokenizer_files(lead.files, giver.tokenizer, tokens, template=template)
    renumbering = _renumbering(decided)
    generation = _generation_config(renumbering, giver.tokenizer)
    texts = tokens.by_id()
    config_changes = renumbering.config_changes(giver.config)
    return VocabularyPlan(
        tokens=texts,
        num_rows=decided.num_rows,
        files={**changes.files, **generation},
        removed=changes.removed,
        config_changes=config_changes,
        report=report_vocabulary(decided.known, tokens, texts, decided.sources),
        remarks=(*_remarks(decided, config_changes), *tokens.notes, *remarks),
        sources=decided.sources,
    )


def _renumbering(decided: _Decided) -> Renumbering:
    own = decided.giver.tokenizer or decided.known[decided.giver.index].files
    return Renumbering(
        texts=texts_by_id(own.tokens),
        ids=decided.tokens.ids,
        num_rows=decided.num_rows,
        roles=decided.lead.files.roles,
        other_roles=_other_roles(decided),
    )


def _other_roles(decided: _Decided) -> dict[str, str]:
    own = decided.giver.tokenizer
    roles = decided.lead.files.roles.items()
    return {} if own is None else {role: text for role, text in roles if own.roles.get(role) != text}


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
    notes += [
        f"{role} is {text!r} as in {lead.model.name}, also in the configs; {decided.giver.name} has "
        f"{own[role]!r}"
        for role, text in _other_roles(decided).items()
        if role in own
    ]
    for model in decided.known.values():
        if model.model.used is None:
            notes.append(
                f"{model.model.name} has no tokenizer files and is taken to go by {lead.model.name}'s"
            )
        else:
            notes += [f"{model.model.name}: {note}" for note in model.files.notes]
    notes += [f"config.json: {key} becomes {value}" for key, value in config_changes.items()]
    return notes


_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
"""Start of a file in tiktoken's form: a token in base64, and its rank."""


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
    """Why transformers failed, which mistakes anything but a SentencePiece model for a tiktoken file."""
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
    vocabulary: VocabularyPlan | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plan_tokenizer(
    recipe: Recipe, resolver: InputResolver, *, donor: int
) -> tuple[TokenizerChanges, list[Problem]]:
    """Decide what the recipe's ``tokenizer``, ``tokenizer_source`` and ``chat_template`` ask for.

    Tokenizer files are read if anything is asked. The donor gives config and companions.
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
    """A problem for each kind of use that a shorter vocabulary leaves without a row.

    The recipe leaves the tokenizer alone, and the output has the donor's config, tokenizer and generation
    config. ``kept`` goes from the rows of the output to those of the donor: ids that had a row and have none.
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
    """Refuse the model's own tokenizer for an embedding that an adapter brings with a tokenizer."""
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
