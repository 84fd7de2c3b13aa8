"""One model's tokenizer from its files: tokens with their loaded ids, roles, templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

from raymerge.checkpoints.json_files import attempt, read_bounded, read_object
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.open import open_store
from raymerge.storage.temporary import fetched

_T = TypeVar("_T")


class TokenizerKind(StrEnum):
    BPE = "BPE"
    UNIGRAM = "Unigram"
    """SentencePiece's; ids are places in a list."""
    WORD_PIECE = "WordPiece"
    """BERT's; longest pieces first."""
    WORD_LEVEL = "WordLevel"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before the tokenizer's model runs."""

    content: str
    single_word: bool = False
    """Whether it matches only as a whole word."""
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    """Whether it is matched in the normalised text."""
    special: bool = False

    def as_json(self, number: int | None = None) -> dict[str, Any]:
        """Its entry in ``tokenizer.json`` with that id; without an id, as in the config."""
        settings = asdict(self)
        return settings if number is None else {"id": number, **settings}


@dataclass(frozen=True, slots=True)
class TokenizerModel:
    kind: TokenizerKind
    vocab: Mapping[str, int]
    added: Mapping[str, AddedToken]
    stated: Mapping[str, int]
    """Ids of added tokens in the file; loading may assign others."""


def read_tokenizer_model(parsed: Any) -> TokenizerModel:
    """Raises ValueError: with a clause that completes "tokenizer.json ..."."""
    model = parsed.get("model") if isinstance(parsed, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocab, (Mapping, list)):
        raise ValueError("has no model with a vocab")
    _check_model(model)
    entries = parsed.get("added_tokens") or []
    if not isinstance(entries, list):
        raise ValueError("has added_tokens that are no list")
    added = [(read_added_token(entry), _id_of(entry.get("id"))) for entry in entries]
    return TokenizerModel(
        kind=_kind(model),
        vocab=_read_vocab(vocab),
        added={token.content: token for token, _ in added},
        stated={token.content: number for token, number in added},
    )


def read_added_token(entry: Any) -> AddedToken:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ValueError(f"has an added token without a text ({str(entry)[:60]})")
    flags = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
    is_normalized = bool(entry.get("normalized", not flags["special"]))
    return AddedToken(entry["content"], normalized=is_normalized, **flags)


def has_holes(vocab: Mapping[str, int]) -> bool:
    """Whether the ids of a model's own tokens are not 0, 1, 2 and so on."""
    return bool(vocab) and max(vocab.values()) != len(vocab) - 1


def added_ids(vocab: Mapping[str, int], stated: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """The ids of added tokens once the tokenizer is loaded.

    The library keeps the id of a token that the model has, and numbers all others from the model's size,
    whatever the file states. Where the model's own ids have holes its versions differ; then stated ids count.
    """
    keeps_stated = has_holes(vocab)
    ids: dict[str, int] = {}
    next_id = max(vocab.values(), default=-1) + 1
    for content, number in stated:
        if content in ids or not content:
            continue
        own = vocab.get(content)
        if own is not None:
            ids[content] = own
            continue
        ids[content] = number if keeps_stated and number is not None else next_id
        next_id = max(next_id, ids[content] + 1)
    return ids


def _check_model(model: Mapping[str, Any]) -> None:
    """Check the fields that removing tokens needs."""
    for field in ("unk_token", "continuing_subword_prefix"):
        if not isinstance(model.get(field), str | None):
            raise ValueError(f"has a model whose {field} is no text")
    if not isinstance(model.get("unk_id"), int | None):
        raise ValueError("has a model whose unk_id is no number")
    merges = model.get("merges") or []
    if not isinstance(merges, list) or not all(map(_is_pair, merges)):
        raise ValueError("has a model with merges that are no pairs of texts")


def _is_pair(merge: Any) -> bool:
    """A merge is written as a pair or as one text."""
    if isinstance(merge, str):
        return " " in merge
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(each, str) for each in merge)


def _kind(model: Mapping[str, Any]) -> TokenizerKind:
    stated = model.get("type")
    if stated is not None:
        try:
            return TokenizerKind(stated)
        except ValueError:
            raise ValueError(f"has a model of the unknown type {str(stated)[:40]!r}") from None
    # Files of old releases do not say it.
    if isinstance(model["vocab"], list):
        return TokenizerKind.UNIGRAM
    if "merges" in model:
        return TokenizerKind.BPE
    is_pieces = "max_input_chars_per_word" in model
    return TokenizerKind.WORD_PIECE if is_pieces else TokenizerKind.WORD_LEVEL


def _read_vocab(vocab: Mapping[str, Any] | list[Any]) -> dict[str, int]:
    if isinstance(vocab, Mapping):
        return {token: _id_of(number) for token, number in vocab.items()}
    ids: dict[str, int] = {}
    for number, entry in enumerate(vocab):
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise ValueError(f"has a vocab whose entry {number} is no pair of text and score")
        ids[entry[0]] = number
    return ids


def _id_of(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"has a token whose id is {str(number)[:40]!r}")
    return number


TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""Goes before the template in the tokenizer's config."""
PROCESSOR_TEMPLATE = "chat_template.json"
"""Older releases' chat template of multimodal models."""
MORE_TEMPLATES = "additional_chat_templates"
"""Directory of further templates, by name."""
GENERATION_CONFIG = "generation_config.json"
DEFAULT_TEMPLATE = "default"
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")

Converter = Callable[[Path], str]
"""Makes ``tokenizer.json`` from a directory that has older files only; raises ``CheckpointError``."""

_COPY_AGAIN = "Copy it again from the place the model comes from."
_MEND = "Mend the file, or copy it again from the place the model comes from."
_ADDED_TOKENS = "added_tokens.json"
_JSON_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, PROCESSOR_TEMPLATE, _ADDED_TOKENS)
_READ = (*_JSON_FILES, CHAT_TEMPLATE, GENERATION_CONFIG)
# Vocabularies in the forms of older releases and other libraries.
_VOCABULARY_FILES = (
    *("tokenizer.model*", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "spiece.model"),
    "sentencepiece*.model",
)
_OLDER_FILES = (*_VOCABULARY_FILES, "merges.txt", _ADDED_TOKENS)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLE = re.compile(r"\w+_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    root: str
    kind: TokenizerKind
    tokens: Mapping[str, int]
    """Every token, added ones included, with its loaded id."""
    added: Mapping[str, AddedToken]
    roles: Mapping[str, str]
    """Special tokens by role: ``{"eos_token": "</s>"}``."""
    templates: Mapping[str, str]
    tokenizer_json: bytes
    """Converted where the model has none."""
    files: Mapping[str, bytes]
    generation_config: bytes | None
    older_keys: tuple[str, ...]
    is_ambiguous: bool
    """Whether library releases differ on the ids of added tokens: the model's own have holes."""
    notes: tuple[str, ...]

    @property
    def chat_template(self) -> str | None:
        return self.templates.get(DEFAULT_TEMPLATE)


def read_tokenizer(
    root: Path | str,
    companions: Sequence[str],
    *,
    convert: Converter,
    written: Mapping[str, bytes] = MappingProxyType({}),
) -> TokenizerFiles | None:
    """The tokenizer in the directory ``root``, or None where it has none.

    Raises CheckpointError: with every file that cannot be parsed."""
    top = [key for key in companions if "/" not in key]
    older = tuple(key for key in top if _matches(key, _OLDER_FILES))
    if TOKENIZER_JSON not in top and not any(_matches(key, _VOCABULARY_FILES) for key in older):
        return None
    files = _read_files(str(root), companions, written)
    generation = files.pop(GENERATION_CONFIG, None)
    text = files.get(TOKENIZER_JSON)
    raw = _converted(str(root), top, convert) if text is None else text
    where = shown(str(root))
    problems: list[Problem] = []
    objects = {
        key: attempt(problems, partial(read_object, files[key], f"{where}/{key}", _MEND))
        for key in _JSON_FILES[1:]
        if key in files
    }
    parsed = {key: value or {} for key, value in objects.items()}
    model = _read_model(where, raw, problems)
    decoder = _read_decoder(where, parsed.get(TOKENIZER_CONFIG, {}), problems)
    if problems or model is None:
        raise CheckpointError(problems)
    later = _later_tokens(decoder, parsed, known=model)
    stated = {**model.stated, **{token.content: number for number, token in later}}
    ids = added_ids(model.vocab, stated.items())
    added = {**{token.content: token for _, token in later}, **model.added}
    return TokenizerFiles(
        root=str(root),
        kind=model.kind,
        tokens={**model.vocab, **ids},
        added={text: added[text] for text in ids},
        roles=_roles(parsed),
        templates=_templates(files, parsed),
        tokenizer_json=raw,
        files=files,
        generation_config=generation,
        older_keys=older,
        is_ambiguous=has_holes(model.vocab) and not ids.keys() <= model.vocab.keys(),
        notes=_notes(model, ids),
    )


def token_text(value: Any) -> str | None:
    """A special token in a config: a text, or an object with ``content``."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def extra_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for field in EXTRA_TOKENS:
        listed = config.get(field)
        values = list(listed.values()) if isinstance(listed, Mapping) else listed
        if not isinstance(values, list):
            continue
        yield from (text for text in map(token_text, values) if text is not None)


def role_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """By role, in loading order: the usual roles first."""
    others = [key for key in config if _ROLE.fullmatch(key) and key not in _ROLES]
    texts = {key: token_text(config.get(key)) for key in (*_ROLES, *others)}
    return {key: text for key, text in texts.items() if text is not None}


def _converted(root: str, keys: Sequence[str], convert: Converter) -> bytes:
    with fetched(root, keys) as directory:
        try:
            return convert(directory).encode()
        except CheckpointError as error:
            if not is_remote(root):
                raise
            problems = [replace(each, where=shown(root)) for each in error.problems]
            raise CheckpointError(problems) from error


def _read_files(root: str, companions: Sequence[str], written: Mapping[str, bytes]) -> dict[str, bytes]:
    keys = {key for key in companions if key in _READ or _is_more(key)}
    with open_store(root) as store:
        sizes = {file.key: file.nbytes for file in store.files()}
        copied = sorted((keys & sizes.keys()) - written.keys())
        contents = {key: read_bounded(store, key, sizes[key]) for key in copied}
    return dict(sorted({**contents, **{key: written[key] for key in keys & written.keys()}}.items()))


def _is_more(key: str) -> bool:
    path = PurePosixPath(key)
    return path.parts[0] == MORE_TEMPLATES and len(path.parts) == 2 and path.suffix == ".jinja"


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _read_model(root: str, raw: bytes, problems: list[Problem]) -> TokenizerModel | None:
    where = f"{root}/{TOKENIZER_JSON}"
    parsed = attempt(problems, lambda: read_object(raw, where, _MEND))
    return None if parsed is None else _understood(problems, where, lambda: read_tokenizer_model(parsed))


def _understood(problems: list[Problem], where: str, read: Callable[[], _T]) -> _T | None:
    """What is read, or None after adding the clause of its ValueError."""
    try:
        return read()
    except ValueError as error:
        problems.append(Problem(where, f"{error}.", _COPY_AGAIN))
        return None


def _roles(parsed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Special tokens by role, from the tokenizer's config or the map of older releases."""
    return {
        **role_tokens(parsed.get(SPECIAL_TOKENS_MAP, {})),
        **role_tokens(parsed.get(TOKENIZER_CONFIG, {})),
    }


def _read_decoder(
    root: str, config: Mapping[str, Any], problems: list[Problem]
) -> list[tuple[int, AddedToken]] | None:
    """``added_tokens_decoder`` in the order of its ids; None where the config has none."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return None

    def read() -> list[tuple[int, AddedToken]]:
        # A number of thousands of digits is a ValueError too.
        numbered = sorted([(int(key), key) for key in decoder if key.isdecimal()], key=lambda each: each[0])
        return [(number, read_added_token(decoder[key])) for number, key in numbered]

    return _understood(problems, f"{root}/{TOKENIZER_CONFIG}", read)


def _later_tokens(
    decoder: Sequence[tuple[int, AddedToken]] | None,
    parsed: Mapping[str, dict[str, Any]],
    *,
    known: TokenizerModel,
) -> list[tuple[int | None, AddedToken]]:
    """Tokens that transformers adds after reading ``tokenizer.json``, in its order."""
    configs = [parsed.get(key, {}) for key in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)]
    special = [*_roles(parsed).values(), *(text for config in configs for text in extra_tokens(config))]
    tokens: list[tuple[int | None, AddedToken]] = list(decoder or ())
    if decoder is None:
        older = parsed.get(_ADDED_TOKENS, {})
        pairs = sorted((number, text) for text, number in older.items() if isinstance(number, int))
        tokens += [(number, AddedToken(text, special=text in special)) for number, text in pairs]
    tokens += [(None, AddedToken(text, normalized=False, special=True)) for text in special]
    first: dict[str, tuple[int | None, AddedToken]] = {}
    for number, token in tokens:
        if token.content not in known.added:
            first.setdefault(token.content, (number, token))
    return list(first.values())


def _templates(files: Mapping[str, bytes], parsed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Chat templates by name; a file goes before the config."""
    configs = [parsed.get(key, {}) for key in (PROCESSOR_TEMPLATE, TOKENIZER_CONFIG)]
    templates = {
        name: text for config in configs for name, text in _named(config.get("chat_template")).items()
    }
    for key, raw in files.items():
        if key == CHAT_TEMPLATE or _is_more(key):
            name = DEFAULT_TEMPLATE if key == CHAT_TEMPLATE else PurePosixPath(key).stem
            templates[name] = raw.decode("utf-8", "replace")
    return templates


def _named(value: Any) -> dict[str, str]:
    """From a field that holds a template, a map of them or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
    if not isinstance(value, Mapping):
        return {}
    return {str(name): text for name, text in value.items() if isinstance(text, str)}


def _notes(model: TokenizerModel, ids: Mapping[str, int]) -> tuple[str, ...]:
    moved = [text for text, number in model.stated.items() if text and ids[text] != number]
    if not moved:
        return ()
    text = moved[0]
    return (
        f"{TOKENIZER_JSON} numbers {len(moved)} added tokens otherwise than loading does, "
        f"as {text!r}: {model.stated[text]} in the file, {ids[text]} when loaded; the latter holds",
    )
