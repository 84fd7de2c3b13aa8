"""What ``tokenizer.json`` says of its vocabulary: the model's tokens with their ids, and the added ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class TokenizerKind(StrEnum):
    """How a tokenizer splits text."""

    BPE = "BPE"
    """Byte pair encoding: merges of neighbours."""
    UNIGRAM = "Unigram"
    """Scored pieces, as of SentencePiece; ids are places in a list."""
    WORD_PIECE = "WordPiece"
    """Longest pieces first, as of BERT."""
    WORD_LEVEL = "WordLevel"
    """Whole words."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before the tokenizer's model sees it."""

    content: str
    """Its text."""
    single_word: bool = False
    """Whether it must stand alone, not inside a word."""
    lstrip: bool = False
    """Whether it takes the white space before it."""
    rstrip: bool = False
    """Whether it takes the white space after it."""
    normalized: bool = True
    """Whether it is looked for in the normalised text."""
    special: bool = False
    """Whether decoding may skip it."""

    def as_json(self, number: int | None = None) -> dict[str, Any]:
        """Its entry in ``tokenizer.json`` with that id; without an id as in the config."""
        settings = asdict(self)
        return settings if number is None else {"id": number, **settings}


@dataclass(frozen=True, slots=True)
class TokenizerModel:
    """The vocabulary in a ``tokenizer.json``."""

    kind: TokenizerKind
    """How it splits text."""
    vocab: Mapping[str, int]
    """Tokens of the model itself, with their ids."""
    added: Mapping[str, AddedToken]
    """Added tokens by text, in the file's order."""
    stated: Mapping[str, int]
    """The ids that the file gives the added tokens; loading may give them others."""


def read_tokenizer_model(parsed: Any) -> TokenizerModel:
    """The vocabulary of a parsed ``tokenizer.json``.

    Raises:
        ValueError: with a clause that completes "tokenizer.json ...".
    """
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
    """An added token from its JSON object.

    Raises:
        ValueError: it is no object with a text.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ValueError(f"has an added token without a text ({str(entry)[:60]})")
    special = bool(entry.get("special", False))
    return AddedToken(
        entry["content"],
        single_word=bool(entry.get("single_word", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        normalized=bool(entry.get("normalized", not special)),
        special=special,
    )


def has_holes(vocab: Mapping[str, int]) -> bool:
    """Whether the ids of a model's own tokens are not 0, 1, 2 and so on."""
    return bool(vocab) and max(vocab.values()) != len(vocab) - 1


def added_ids(vocab: Mapping[str, int], stated: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """The ids that added tokens have once the tokenizer is loaded.

    The library keeps the id of a token that the model has, and counts on from the model's size for all
    others, whatever their file says. Where the model's own ids have holes its versions differ; then the
    stated id holds.
    """
    keeps_stated = has_holes(vocab)
    found: dict[str, int] = {}
    next_id = max(vocab.values(), default=-1) + 1
    for content, number in stated:
        if content in found or not content:
            continue
        own = vocab.get(content)
        if own is not None:
            found[content] = own
            continue
        found[content] = number if keeps_stated and number is not None else next_id
        next_id = max(next_id, found[content] + 1)
    return found


def _check_model(model: Mapping[str, Any]) -> None:
    """What is needed of a model when tokens are taken out of it."""
    for field in ("unk_token", "continuing_subword_prefix"):
        if not isinstance(model.get(field), str | None):
            raise ValueError(f"has a model whose {field} is no text")
    if not isinstance(model.get("unk_id"), int | None):
        raise ValueError("has a model whose unk_id is no number")
    merges = model.get("merges") or []
    if not isinstance(merges, list) or not all(map(_is_pair, merges)):
        raise ValueError("has a model with merges that are no pairs of texts")


def _is_pair(merge: Any) -> bool:
    """Whether it is two texts, in one of the two forms in which files have them."""
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
    found: dict[str, int] = {}
    for number, entry in enumerate(vocab):
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise ValueError(f"has a vocab whose entry {number} is no pair of text and score")
        found[entry[0]] = number
    return found


def _id_of(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"has a token whose id is {str(number)[:40]!r}")
    return number
