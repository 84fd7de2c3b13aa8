"""The tokenizer's files in the output: the lead's, with other tokens and another template where asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.checkpoints.tokenizer import (
    CHAT_TEMPLATE,
    EXTRA_TOKENS,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TokenizerFiles,
    token_text,
)
from raymerge.checkpoints.tokenizer_json import AddedToken, has_holes
from raymerge.planner.tokenizer.tokens import TokenSet
from raymerge.planner.tokenizer.vocabulary_ids import json_bytes

_ROLE = re.compile(r"\w+_token")
_DECODER = "added_tokens_decoder"


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What is to be done to the donor's companion files."""

    files: Mapping[str, bytes]
    """Files to write, in place of the donor's of the same name."""
    removed: tuple[str, ...]
    """Companions of the donor that must not be copied: they would contradict the others."""


def tokenizer_files(
    lead: TokenizerFiles, donor: TokenizerFiles | None, tokens: TokenSet, *, template: str | None
) -> FileChanges:
    """What makes the donor's files those of the output's tokenizer.

    Args:
        lead: the tokenizer that the output's is made from.
        donor: the tokenizer whose files are among the companions; None where there are none.
        tokens: the output's tokens.
        template: the output's chat template; None keeps the lead's.
    """
    is_same = tokens.ids == lead.tokens and tokens.added == lead.added and not lead.is_ambiguous
    wanted = dict(lead.files)
    if not is_same:
        wanted[TOKENIZER_JSON] = _tokenizer_json(lead, tokens)
        wanted.pop("added_tokens.json", None)
        for key in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if key in wanted:
                wanted[key] = _config(wanted[key], tokens)
    elif lead is not donor:
        wanted[TOKENIZER_JSON] = lead.tokenizer_json
    if template is not None:
        wanted = with_template(wanted, template)
    kept = lead.older_keys if is_same and lead is donor else ()
    return _changes(donor, wanted, kept)


def template_files(donor: TokenizerFiles, template: str) -> FileChanges:
    """What gives the donor's tokenizer another chat template and changes nothing else."""
    return _changes(donor, with_template(donor.files, template), donor.older_keys)


def with_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """The files with one chat template, kept where they keep it; further templates are taken out."""
    wanted = {key: raw for key, raw in files.items() if not key.startswith(f"{MORE_TEMPLATES}/")}
    config = json.loads(wanted[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in wanted else None
    stated = None if config is None else config.pop("chat_template", None)
    if CHAT_TEMPLATE in wanted or config is None:
        wanted[CHAT_TEMPLATE] = template.encode()
        if config is not None and stated is not None:
            wanted[TOKENIZER_CONFIG] = json_bytes(config)
    else:
        wanted[TOKENIZER_CONFIG] = json_bytes({**config, "chat_template": template})
    if PROCESSOR_TEMPLATE in wanted:
        wanted[PROCESSOR_TEMPLATE] = json_bytes({"chat_template": template})
    return wanted


def _changes(donor: TokenizerFiles | None, wanted: Mapping[str, bytes], kept: tuple[str, ...]) -> FileChanges:
    present = {} if donor is None else donor.files
    older = () if donor is None else donor.older_keys
    # A file may be one of both kinds: added_tokens.json is read, and holds tokens in an older form.
    gone = [key for key in dict.fromkeys((*present, *older)) if key not in wanted and key not in kept]
    changed = {key: raw for key, raw in wanted.items() if present.get(key) != raw}
    return FileChanges(changed, tuple(sorted(gone)))


def _tokenizer_json(lead: TokenizerFiles, tokens: TokenSet) -> bytes:
    parsed = json.loads(lead.tokenizer_json)
    model = parsed["model"]
    if isinstance(model["vocab"], list):
        _cut_list(model, tokens.limit)
    else:
        _cut_map(model, tokens.limit)
        _pin(model["vocab"], tokens)
    by_id = sorted(tokens.added.values(), key=lambda token: tokens.ids[token.content])
    parsed["added_tokens"] = [token.as_json(tokens.ids[token.content]) for token in by_id]
    return json_bytes(parsed)


def _cut_list(model: dict[str, Any], limit: int) -> None:
    model["vocab"] = model["vocab"][:limit]
    unknown = model.get("unk_id")
    if unknown is not None and unknown >= limit:
        model["unk_id"] = None


def _cut_map(model: dict[str, Any], limit: int) -> None:
    """Take out tokens from the id ``limit`` on, and the merges that they take part in."""
    vocab = model["vocab"]
    model["vocab"] = {text: number for text, number in vocab.items() if number < limit}
    if len(model["vocab"]) == len(vocab) or not model.get("merges"):
        return
    prefix = model.get("continuing_subword_prefix") or ""
    model["merges"] = [each for each in model["merges"] if _is_possible(each, model["vocab"], prefix)]
    if model.get("unk_token") not in model["vocab"]:
        model["unk_token"] = None


def _is_possible(merge: Any, vocab: Mapping[str, int], prefix: str) -> bool:
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    whole = first + second.removeprefix(prefix)
    return first in vocab and second in vocab and whole in vocab


def _pin(vocab: dict[str, int], tokens: TokenSet) -> None:
    """Give the model itself the added tokens where their ids would not follow from counting on."""
    outside = sorted((tokens.ids[text], text) for text in tokens.added if text not in vocab)
    counted = [len(vocab) + place for place in range(len(outside))]
    if has_holes(vocab) or [number for number, _ in outside] != counted:
        vocab |= {text: number for number, text in outside}


def _config(raw: bytes, tokens: TokenSet) -> bytes:
    """A config of the tokenizer without special tokens that are gone, and with all added ones."""
    config = json.loads(raw)
    before = json.loads(raw)
    for key in [key for key in config if _ROLE.fullmatch(key)]:
        text = token_text(config[key])
        if text is not None and text not in tokens.ids:
            del config[key]
    for field in EXTRA_TOKENS:
        if isinstance(config.get(field), (Mapping, list)):
            config[field] = _known(config[field], tokens.ids)
    if _DECODER in config:
        config[_DECODER] = _decoder(tokens.added, tokens.ids)
    return raw if config == before else json_bytes(config)


def _known(listed: Any, ids: Mapping[str, int]) -> Any:
    if isinstance(listed, Mapping):
        return {key: value for key, value in listed.items() if token_text(value) in ids}
    return [value for value in listed if token_text(value) in ids]


def _decoder(added: Mapping[str, AddedToken], ids: Mapping[str, int]) -> dict[str, Any]:
    by_id = sorted(added.values(), key=lambda token: ids[token.content])
    return {str(ids[token.content]): token.as_json() for token in by_id}
