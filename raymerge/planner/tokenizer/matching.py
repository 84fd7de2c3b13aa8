"""Tokens of two tokenizers compared by what they stand for, whatever marks each puts into its texts.

Byte-level tokenizers write every byte as a printable character (a space as ``Ġ``), others a space as ``▁``
and bytes that no token covers as ``<0x0A>``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from raymerge.checkpoints.tokenizer import TokenizerFiles
from raymerge.planner.tokenizer.tokens import ABSENT, Ids

Form: TypeAlias = bytes | int
"""The bytes of a token's text; for a token such as ``<0x0A>`` the number of its byte."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


@dataclass(frozen=True, slots=True, eq=False)
class TokenMatch:
    rows: Ids
    """The base's row of each of the donor's ids, or ``ABSENT``: ``[ids]``."""
    num_exact: int
    num_role: int
    """Special tokens that both tokenizers give the same role, such as the end of a text."""
    num_byte: int
    """Bytes such as ``<0x0A>`` in one tokenizer that are ordinary tokens in the other."""
    shared: Ids
    """The donor's ids of exact matches and of equal roles, in order."""
    missing: Ids
    """The donor's ids with a token that the base lacks, in order."""


def match_tokens(
    base: TokenizerFiles, donor: TokenizerFiles, *, base_rows: int, num_ids: int | None = None
) -> TokenMatch:
    """``base_rows`` of the base's embedding: its tokens beyond them do not count. ``num_ids`` of the output;
    None for as many as the donor's tokens need."""
    known: dict[Form, int] = {}
    for form, row in sorted(token_forms(base), key=lambda each: each[1]):
        if row < base_rows:
            known.setdefault(form, row)
    forms = dict(sorted(((row, form) for form, row in token_forms(donor)), key=lambda each: each[0]))
    size = max(forms, default=-1) + 1 if num_ids is None else num_ids
    rows = np.full(size, ABSENT, dtype=np.int64)
    exact = {number: known[form] for number, form in forms.items() if form in known}
    by_role = {number: row for number, row in _same_roles(base, donor, base_rows) if number not in exact}
    shared = exact | by_role
    others = {number: _other_form(form) for number, form in forms.items() if number not in shared}
    by_byte = {number: known[form] for number, form in others.items() if form in known}
    for number, row in (shared | by_byte).items():
        rows[number] = row
    return TokenMatch(
        rows,
        num_exact=len(exact),
        num_role=len(by_role),
        num_byte=len(by_byte),
        shared=_ids(shared),
        missing=_ids(others.keys() - by_byte.keys()),
    )


def _same_roles(base: TokenizerFiles, donor: TokenizerFiles, base_rows: int) -> Iterator[tuple[int, int]]:
    for role, text in donor.roles.items():
        row = base.tokens.get(base.roles.get(role, ""))
        if text in donor.tokens and row is not None and row < base_rows:
            yield donor.tokens[text], row


def token_forms(files: TokenizerFiles) -> Iterator[tuple[Form, int]]:
    """What every token stands for, with its id. Added tokens stand for their own text."""
    byte_of = _byte_characters() if is_byte_level(files) else None
    for text, number in files.tokens.items():
        yield _form(text, byte_of, is_added=text in files.added), number


def is_byte_level(files: TokenizerFiles) -> bool:
    parsed = json.loads(files.tokenizer_json)
    steps = (parsed.get(key) for key in ("pre_tokenizer", "decoder"))
    return any(step.get("type") == "ByteLevel" for each in steps for step in _steps(each))


def pieces_of(files: TokenizerFiles, forms: Iterable[Form], *, num_rows: int) -> list[tuple[int, ...]]:
    """The rows of the tokens that each text is split into, without what the tokenizer does beforehand: no
    space is put in front. Tokens without a row, and unknown ones, are left out.

    Bytes that make no text become the tokens of the single bytes."""
    from tokenizers import Tokenizer

    text = files.tokenizer_json.decode()
    model, byte_level = Tokenizer.from_str(text).model, is_byte_level(files)
    unknown = _unknown(json.loads(text)["model"], files)
    character_of = {byte: character for character, byte in _byte_characters().items()}
    split: list[tuple[int, ...]] = []
    for form in forms:
        raw = bytes([form]) if isinstance(form, int) else form
        written = _written(raw, character_of if byte_level else None)
        if written is None:
            ids = [files.tokens.get(f"<0x{byte:02X}>") for byte in raw]
        else:
            ids = [token.id for token in model.tokenize(written)] if written else []
        split.append(tuple(each for each in ids if each is not None and each != unknown and each < num_rows))
    return split


def _written(raw: bytes, character_of: Mapping[int, str] | None) -> str | None:
    """Bytes as a tokenizer's model sees them; None where they are no text to it."""
    if character_of is not None:
        return "".join(character_of[byte] for byte in raw)
    try:
        return raw.decode().replace(" ", _SPACE)
    except UnicodeDecodeError:
        return None


def _unknown(model: Mapping[str, Any], files: TokenizerFiles) -> int | None:
    number, text = model.get("unk_id"), model.get("unk_token")
    if number is not None:
        return int(number)
    return None if text is None else files.tokens.get(text)


def _form(text: str, byte_of: Mapping[str, int] | None, *, is_added: bool) -> Form:
    if byte_of is not None:
        if not is_added and all(character in byte_of for character in text):
            return bytes(byte_of[character] for character in text)
    elif (match := _BYTE.fullmatch(text)) is not None:
        return int(match[1], 16)
    return (text if is_added or byte_of is not None else text.replace(_SPACE, " ")).encode("utf-8", "replace")


def _other_form(form: Form) -> Form | None:
    if isinstance(form, int):
        return bytes([form])
    return form[0] if len(form) == 1 else None


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """A step of a pipeline, and those that it consists of."""
    if not isinstance(step, Mapping):
        return
    yield step
    for key in ("pretokenizers", "decoders"):
        for each in step.get(key) or ():
            yield from _steps(each)


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable ones for themselves, the rest
    for characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _ids(numbers: Iterable[int]) -> Ids:
    return np.array(sorted(numbers), dtype=np.int64)
