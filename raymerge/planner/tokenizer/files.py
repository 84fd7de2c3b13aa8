"""The tokenizer's files in the output: the lead's, with other tokens and chat template where asked."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from raymerge.architectures.rules import sections
from raymerge.checkpoints.json_files import json_bytes, load_json
from raymerge.checkpoints.tokenizer import (
    CHAT_TEMPLATE,
    EXTRA_TOKENS,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    AddedToken,
    TokenizerFiles,
    has_holes,
    token_text,
)
from raymerge.documents.fields import did_you_mean
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.config import VOCABULARY_KEY, row_counts
from raymerge.planner.tokenizer.tokens import TokenSet
from raymerge.recipes.schema import Recipe

_USUAL_ROLES = ("bos_token", "eos_token", "pad_token")
# Fields of configs that hold the id of a token, or a list of such.
_ID_FIELD = re.compile(r"(\w+)_token_(?:id|ids|index)|(?:begin_)?suppress_tokens")


@dataclass(frozen=True, slots=True)
class Renumbering:
    texts: Mapping[int, str]
    ids: Mapping[str, int]
    num_rows: int
    roles: Mapping[str, str]
    """Special tokens of the output's tokenizer by role; they replace tokens that are gone."""
    other_roles: Mapping[str, str] = field(default_factory=dict)
    """Those that the tokenizer beside the config gives another token: the config follows."""
    states_all: bool = False
    """Whether the usual roles have ids in the configs, also where these had none."""

    def config_changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for path, section in sections(config):
            own = {**dict(self._changed(section)), **row_counts(section, self.num_rows)}
            changes |= {".".join((*path, key)): value for key, value in own.items()}
        if VOCABULARY_KEY not in section:
            changes[".".join((*path, VOCABULARY_KEY))] = self.num_rows
        return changes | {".".join((*path, key)): value for key, value in self._unstated(section)}

    def _unstated(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Ids that classes of configs would fill in with their own where nothing is stated."""
        for role in _USUAL_ROLES if self.states_all else ():
            key, token = f"{role}_id", self.roles.get(role, "")
            if token in self.ids and section.get(key) is None:
                yield key, self.ids[token]

    def generation_config(self, raw: bytes, place: str) -> bytes | None:
        """``generation_config.json`` with the output's ids; None if it stays as it is. Raises
        CheckpointError: it is not a JSON object."""
        try:
            config = load_json(raw)
        except (ValueError, RecursionError) as error:
            config = str(error)[:80]
        if not isinstance(config, dict):
            remedy = "Mend the file, or take it away."
            raise CheckpointError(Problem(place, f"is not a JSON object ({str(config)[:80]}).", remedy))
        changes = dict(self._changed(config)) | dict(self._unstated(config))
        return json_bytes({**config, **changes}) if changes else None

    def _changed(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            match = _ID_FIELD.fullmatch(key)
            if match is None or value is None:
                continue
            new = self._renumber(value, f"{match[1]}_token")
            if new != value:
                yield key, new

    def _renumber(self, value: Any, role: str) -> Any:
        chosen = self.ids.get(self.other_roles.get(role.removeprefix("forced_"), ""))
        if isinstance(value, list):
            numbers = [new for each in value if (new := self._renumber_one(each)) is not None]
            # Further tokens that end a text go on to do so.
            return numbers if chosen is None else [chosen, *(each for each in numbers if each != chosen)]
        new = chosen if chosen is not None else self._renumber_one(value)
        return self.ids.get(self.roles.get(role, "")) if new is None else new

    def _renumber_one(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value in self.texts:
            return self.ids.get(self.texts[value])
        return value if value < self.num_rows else None


def token_ids(config: Mapping[str, Any]) -> dict[str, list[int]]:
    fields = {(*path, key): value for path, section in sections(config) for key, value in section.items()}
    listed = {path: value if isinstance(value, list) else [value] for path, value in fields.items()}
    return {
        ".".join(path): [each for each in values if type(each) is int]
        for path, values in listed.items()
        if _ID_FIELD.fullmatch(path[-1])
    }


_ROLE = re.compile(r"\w+_token")
_DECODER = "added_tokens_decoder"


@dataclass(frozen=True, slots=True)
class TokenizerChanges:
    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Companions of the donor that must not be copied: they would contradict the others."""
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tokenizer_files(
    lead: TokenizerFiles, donor: TokenizerFiles | None, tokens: TokenSet, *, template: str | None
) -> TokenizerChanges:
    """Changes that turn ``donor``'s companion files into the output's tokenizer.

    That is made from ``lead``; a ``template`` of None keeps the lead's."""
    is_same = tokens.ids == lead.tokens and tokens.added == lead.added and not lead.is_ambiguous
    files = dict(lead.files)
    if not is_same:
        files[TOKENIZER_JSON] = _tokenizer_json(lead, tokens)
        files.pop("added_tokens.json", None)
        for key in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if key in files:
                files[key] = _config(files[key], tokens)
    elif lead is not donor:
        files[TOKENIZER_JSON] = lead.tokenizer_json
    if template is not None:
        files = with_template(files, template)
    older = lead.older_keys if is_same and lead is donor else ()
    return _changes(donor, files, older)


def template_files(donor: TokenizerFiles, template: str) -> TokenizerChanges:
    return _changes(donor, with_template(donor.files, template), donor.older_keys)


def with_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """The files with one chat template, in its present place; further templates are removed."""
    files_left = {key: raw for key, raw in files.items() if not key.startswith(f"{MORE_TEMPLATES}/")}
    config = json.loads(files_left[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in files_left else None
    stated = None if config is None else config.pop("chat_template", None)
    if CHAT_TEMPLATE in files_left or config is None:
        files_left[CHAT_TEMPLATE] = template.encode()
        if config is not None and stated is not None:
            files_left[TOKENIZER_CONFIG] = json_bytes(config)
    else:
        files_left[TOKENIZER_CONFIG] = json_bytes({**config, "chat_template": template})
    if PROCESSOR_TEMPLATE in files_left:
        files_left[PROCESSOR_TEMPLATE] = json_bytes({"chat_template": template})
    return files_left


def _changes(
    donor: TokenizerFiles | None, files: Mapping[str, bytes], unchanged: tuple[str, ...]
) -> TokenizerChanges:
    present = {} if donor is None else donor.files
    older = () if donor is None else donor.older_keys
    # A file may be one of both kinds: added_tokens.json is read, and holds tokens in an older form.
    gone = [key for key in dict.fromkeys((*present, *older)) if key not in files and key not in unchanged]
    changed = {key: raw for key, raw in files.items() if present.get(key) != raw}
    return TokenizerChanges(changed, tuple(sorted(gone)))


def _tokenizer_json(lead: TokenizerFiles, tokens: TokenSet) -> bytes:
    parsed = json.loads(lead.tokenizer_json)
    model = parsed["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][: tokens.limit]
        if model.get("unk_id") is not None and model["unk_id"] >= tokens.limit:
            model["unk_id"] = None
    else:
        _cut_map(model, tokens.limit)
        _pin(model["vocab"], tokens)
    by_id = sorted(tokens.added.values(), key=lambda token: tokens.ids[token.content])
    parsed["added_tokens"] = [token.as_json(tokens.ids[token.content]) for token in by_id]
    return json_bytes(parsed)


def _cut_map(model: dict[str, Any], limit: int) -> None:
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
    """Move added tokens into the model's vocabulary where their ids would not follow from counting on."""
    outside = sorted((tokens.ids[text], text) for text in tokens.added if text not in vocab)
    counted = [len(vocab) + place for place in range(len(outside))]
    if has_holes(vocab) or [number for number, _ in outside] != counted:
        vocab |= {text: number for number, text in outside}


def _config(raw: bytes, tokens: TokenSet) -> bytes:
    config = json.loads(raw)
    before = json.loads(raw)
    for key in [key for key in config if _ROLE.fullmatch(key)]:
        text = token_text(config[key])
        if text is not None and text not in tokens.ids:
            del config[key]
    for key in EXTRA_TOKENS:
        if isinstance(config.get(key), (Mapping, list)):
            config[key] = _known(config[key], tokens.ids)
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


AUTO = "auto"
MIN_LITERAL_CHARACTERS = 20
"""A shorter text is a misspelled name, not a template."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def built_in_templates() -> Mapping[str, str]:
    return tomllib.loads((resources.files("raymerge.planner") / "chat_templates.toml").read_text("utf-8"))


def resolve_template(
    recipe: Recipe, tokenizers: Sequence[TokenizerFiles | None], problems: list[Problem]
) -> str | None:
    """The text of the recipe's chat template; None without one, or with a problem more."""
    asked, built_in = recipe.chat_template, built_in_templates()
    if asked is None or asked in built_in:
        return None if asked is None else built_in[asked]
    is_literal = "{" in asked and len(asked) >= MIN_LITERAL_CHARACTERS
    template = most_frequent(tokenizers) if asked == AUTO else asked if is_literal else None
    names = (AUTO, *built_in)
    if template is not None:
        what, remedy = _fault(template), "Correct the template."
    elif asked == AUTO:
        what, remedy = "no model has a chat template.", f"Write one of: {', '.join(built_in)}; or a template."
    else:
        what = f"{asked[:60]!r} is neither a built-in name nor a template."
        remedy = f"{did_you_mean(asked, names)} Write one of: {', '.join(names)}; or a Jinja text.".lstrip()
    if what is not None:
        problems.append(Problem(recipe.where("chat_template"), what, remedy))
    return None if what is not None else template


def most_frequent(tokenizers: Sequence[TokenizerFiles | None]) -> str | None:
    """The template that most tokenizers have, ignoring white space around it; of equals the first."""
    templates = [each.chat_template.strip() for each in tokenizers if each is not None and each.chat_template]
    counts = Counter(text for text in templates if text)
    # max gives the first of equals, and a counter keeps the order in which it met them.
    return max(counts, key=lambda text: counts[text], default=None)


def _fault(template: str) -> str | None:
    from jinja2 import Environment, TemplateSyntaxError

    # transformers marks what the assistant says by a tag of its own, which changes no syntax.
    plain = _GENERATION.sub("", template)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"], autoescape=False).parse(plain)
    except TemplateSyntaxError as error:
        return f"the template cannot be compiled: {error.message} (line {error.lineno})."
    return None
