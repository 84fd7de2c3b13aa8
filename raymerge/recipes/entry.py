"""References to models, and what all parts of a recipe share: known keys only, all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self, TypeAlias

from pydantic import PlainSerializer, PlainValidator, PrivateAttr, ValidationInfo

from raymerge.documents.fields import (
    DocumentKind,
    Fault,
    FaultError,
    FieldPath,
    MapEntry,
    attempt_key,
    by,
    closest,
    did_you_mean,
    read_integer,
    read_text,
    refusal,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import TEXT, accepts, any_of, map_of
from raymerge.documents.positions import Places, yaml_text
from raymerge.dtypes import DType, config_name, dtype_names, parse_dtype
from raymerge.errors import RecipeError
from raymerge.recipes.settings import Setting, plain_setting, read_setting
from raymerge.storage.addresses import OPTIONS_BEHIND, PLACE_ALONE, USER, is_object_place, shown
from raymerge.units import SIZE_FORM, parse_size

Exists = Callable[[str], bool]

_REFERENCE_KEYS = ("model", "lora", "override_architecture")
_PATH_KEYS = ("path", "revision")
_MAP_FORM = "If the path itself holds '+' or '@', write {model: {path: PATH}}."
_FORMS = "Write PATH[@REVISION][+ADAPTER[@REVISION]], or {model: {path: PATH, revision: REVISION}}."


@dataclass(frozen=True, slots=True)
class ModelReference:
    path: str
    """A local directory, relative to the current one, or a Hub name."""
    revision: str | None = None
    lora_path: str | None = None
    lora_revision: str | None = None
    override_architecture: str | None = None

    def __str__(self) -> str:
        text = _join(self.path, self.revision)
        if self.lora_path is not None:
            text = f"{text}+{_join(self.lora_path, self.lora_revision)}"
        return text if self.override_architecture is None else f"{text} as {self.override_architecture}"


def never_exists(_path: str) -> bool:
    return False


def parse_reference(text: str, *, exists: Exists = never_exists) -> ModelReference:
    """The reference meant by ``PATH[@REVISION][+ADAPTER[@REVISION]]``.

    ``exists`` is asked only about a text with ``+`` or ``@``; a directory of exactly that name is the path.
    Raises FaultError for an empty part, several adapters or revisions."""
    if ("+" in text or "@" in text) and exists(text):
        return ModelReference(text)
    pieces = _split(text, "+")
    if len(pieces) > 2:
        raise refusal(f"'{shown(text)}' names more than one adapter ('+' twice).", _MAP_FORM)
    path, revision = _split_revision(pieces[0], text)
    if len(pieces) == 1:
        return ModelReference(path, revision)
    return ModelReference(path, revision, *_split_revision(pieces[1], text))


def read_reference(value: object, exists: Exists = never_exists) -> ModelReference:
    if isinstance(value, ModelReference):
        return value
    if isinstance(value, str):
        return _without_options(parse_reference(read_text(value), exists=exists))
    if isinstance(value, Mapping):
        return _without_options(_read_map(value, exists))
    raise unexpected(value, "a model", f"{_FORMS} Quote a number.")


def plain_reference(reference: ModelReference) -> object:
    if reference.override_architecture is None and _is_plain(reference):
        return str(reference)
    parts: dict[str, object] = {"model": _plain_path(reference.path, reference.revision)}
    if reference.lora_path is not None:
        parts["lora"] = _plain_path(reference.lora_path, reference.lora_revision)
    if reference.override_architecture is not None:
        parts["override_architecture"] = reference.override_architecture
    return parts


def _without_options(reference: ModelReference) -> ModelReference:
    """Refuse options in addresses: endpoint and credentials are for the user, who need not be the author of
    the recipe."""
    for path in (reference.path, reference.lora_path or ""):
        if is_object_place(path) and "?" in path:
            raise refusal(f"'{shown(path)}' {OPTIONS_BEHIND}", PLACE_ALONE)
    return reference


def _join(path: str, revision: str | None) -> str:
    return path if revision is None else f"{path}@{revision}"


def _is_plain(reference: ModelReference) -> bool:
    try:
        return parse_reference(str(reference)) == reference
    except FaultError:
        return False


def _plain_path(path: str, revision: str | None) -> dict[str, str]:
    return {"path": path} if revision is None else {"path": path, "revision": revision}


def _split(text: str, mark: str) -> list[str]:
    """The parts between marks, of which none is in the user or password of an address."""
    in_users = {at for each in USER.finditer(text) for at in range(*each.span())}
    cuts = [at for at, letter in enumerate(text) if letter == mark and at not in in_users]
    return [text[start:end] for start, end in zip([0, *(at + 1 for at in cuts)], [*cuts, None], strict=True)]


def _split_revision(piece: str, text: str) -> tuple[str, str | None]:
    path, *revisions = _split(piece, "@")
    if len(revisions) > 1:
        raise refusal(f"'{shown(text)}' gives one model two revisions ('@' twice).", _MAP_FORM)
    if not path.strip() or "" in revisions:
        raise refusal(f"'{shown(text)}' has an empty path or revision.", _FORMS)
    return path, revisions[0] if revisions else None


def _read_map(value: Mapping[object, object], exists: Exists) -> ModelReference:
    if misplaced := [key for key in _PATH_KEYS if key in value]:
        path = value.get("path") or value.get("model")
        revision = f", revision: {value['revision']}" if "revision" in value else ""
        form = f"{{model: {{path: {path if isinstance(path, str) else 'PATH'}{revision}}}}}"
        what = f"'{misplaced[0]}' belongs into a map below 'model'."
        raise FaultError(Fault((misplaced[0],), what, f"Write {form}."))
    faults = [unknown_key(key, _REFERENCE_KEYS) for key in value if key not in _REFERENCE_KEYS]
    model = attempt_key(lambda part: _read_path(part, exists), value, "model", faults)
    lora = attempt_key(lambda part: _read_path(part, exists), value, "lora", faults)
    architecture = attempt_key(read_text, value, "override_architecture", faults)
    if value.get("model") is None:
        faults.append(Fault((), "the map names no model.", "Write {model: {path: PATH}} or just PATH."))
    if faults or model is None:
        raise FaultError(faults)
    lora_path, lora_revision = lora or (None, None)
    return ModelReference(*model, lora_path, lora_revision, architecture)


def _read_path(value: object, exists: Exists) -> tuple[str, str | None]:
    if not isinstance(value, Mapping):
        text = read_text(value)
        return (text, None) if exists(text) else _split_revision(text, text)
    faults = [unknown_key(key, _PATH_KEYS) for key in value if key not in _PATH_KEYS]
    path = attempt_key(read_text, value, "path", faults)
    revision = attempt_key(read_text, value, "revision", faults)
    if not value.get("path"):
        faults.append(Fault((), "the map has no path.", "Add 'path: PATH'."))
    if faults or path is None:
        raise FaultError(faults)
    return path, revision


DEFAULT_SHARD_SIZE = 5 * 10**9

_MAX_NAME_BYTES = 100
_MISSPELT = 0.85


@dataclass(frozen=True, slots=True)
class Reading:
    places: Places = field(default_factory=lambda: Places("recipe"))
    text: str | None = None
    exists: Exists = never_exists
    notes: tuple[str, ...] = ()


class Entry(MapEntry):
    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Tell users who write a method parameter as a field where it belongs."""
        super().__pydantic_init_subclass__(**kwargs)
        if "parameters" in cls.model_fields:
            cls.hint = "A parameter of the method goes below 'parameters'. "


AVERAGE = "x-average"
"""Key that raymerge writes into the recipe of an average that can be continued; it changes no byte there."""
NAME_FORM = f"letters, digits, '-', '_' and '.', at most {_MAX_NAME_BYTES} bytes, like 'step-1'"


def is_name(text: str) -> bool:
    """Whether it can name a merge or an output: one directory, and no reference to anything else."""
    is_plain = text.isprintable() and text == text.strip() and not text.startswith(".")
    return is_plain and 0 < len(text.encode()) <= _MAX_NAME_BYTES and not set(text) & set("/\\@+:")


@accepts({**TEXT, "pattern": r"^[^./\\@+:\s][^/\\@+:]*$", "maxLength": _MAX_NAME_BYTES})
def _name(value: object) -> str:
    name = read_text(value)
    if is_name(name):
        return name
    raise refusal(f"{show(name)} cannot be the name of a merge.", f"Write {NAME_FORM}.")


class Document(Entry):
    name: Annotated[str, PlainValidator(_name)] | None = None
    """What other recipes of the file call the result; changes no byte of it."""

    _reading: Reading = PrivateAttr(default_factory=Reading)

    def model_post_init(self, context: Any, /) -> None:
        """Keep the origin of the recipe; it takes no part in comparisons."""
        self._reading = replace(reading_of(context), exists=never_exists)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def at_place_of(self, written: Document) -> Self:
        """With the positions of the recipe that it stands for a part of; its text is its own."""
        placed = self.model_copy()
        placed._reading = replace(written._reading, text=None)
        return placed

    @classmethod
    def ignored(cls, data: Mapping[str, Any], anchored: Collection[str]) -> dict[str, str]:
        """The notes on keys that are left out, by key; empty where there is nothing to tell."""
        notes: dict[str, str] = {}
        known = (*cls.model_fields, *cls.advice)
        for key in (key for key in map(str, data) if key not in cls.model_fields):
            if key == AVERAGE:
                notes[key] = ""
            elif key.startswith("x-"):
                notes[key] = f"'{key}' has no effect: keys that begin with 'x-' are not read"
            elif key in anchored and closest(key, known, cutoff=_MISSPELT) is None:
                effect = "no effect of its own"
                notes[key] = f"'{key}' has {effect}: it holds what aliases below other keys stand for"
        return notes

    @property
    def text(self) -> str:
        """The user's text; for a recipe made from Python, an equivalent YAML text."""
        if self._reading.text is not None:
            return self._reading.text
        return yaml_text(self.model_dump(mode="json", exclude_defaults=True))

    @property
    def notes(self) -> tuple[str, ...]:
        return self._reading.notes

    def where(self, *path: str | int) -> str:
        """The position of ``where("models", 0, "parameters", "weight")``: ``recipe.yml:7:18``.

        Missing values have the position of their nearest parent. Without a text: ``recipe:
        models[0].parameters.weight``."""
        return self._reading.places.at(path)


def misplaced_keys(document: type[Document], data: object, path: FieldPath = ()) -> Iterator[Fault]:
    """Known keys that stand below ``parameters`` by mistake."""
    if isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from misplaced_keys(document, item, (*path, index))
    elif isinstance(data, Mapping):
        for key, value in data.items():
            place = (*path, key)
            if path[-1:] != ("parameters",):
                yield from misplaced_keys(document, value, place)
            elif key in document.model_fields:
                what = f"'{key}' is a key of the recipe, and no parameter of a method."
                yield Fault(place, what, "Move it to the top of the recipe.")
            elif key in document.advice:
                yield Fault(place, f"'{key}' is no parameter of a method.", document.advice[key])


def reading_of(context: object) -> Reading:
    return context if isinstance(context, Reading) else Reading()


_PATH = any_of(TEXT, map_of({"path": TEXT, "revision": TEXT}, "path"))
REFERENCE = any_of(
    {**TEXT, "minLength": 1}, map_of({"model": _PATH, "lora": _PATH, "override_architecture": TEXT}, "model")
)


@accepts({"title": "Model", **REFERENCE})
def _reference(value: object, info: ValidationInfo) -> ModelReference:
    return read_reference(value, reading_of(info.context).exists)


def _in_any_case(word: str) -> str:
    return "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in word)


_DTYPES = any_of(
    {"enum": [*dtype_names()]},
    {**TEXT, "pattern": f"^(torch\\.)?({'|'.join(map(_in_any_case, dtype_names()))})$"},
)


@accepts({"title": "DType", **_DTYPES})
def _dtype(value: object) -> DType:
    if isinstance(value, DType) and value.is_mergeable:
        return value
    name = read_text(value)
    names = ", ".join(dtype_names())
    if name.removeprefix("torch.").lower().startswith(("int", "uint")):
        what = f"'{name}' holds whole numbers only, and merging makes fractions."
        remedy = f"Write one of: {names}. Integer tensors keep their dtype by themselves."
        raise refusal(what, remedy)
    try:
        return parse_dtype(name)
    except KeyError:
        remedy = f"{did_you_mean(name, dtype_names())} Write one of: {names}.".lstrip()
        meant = closest(name, dtype_names())
        raise refusal(f"'{name}' is not a dtype to merge to.", remedy, meant) from None


@accepts({"type": ["integer", "string"], "minimum": 0, "pattern": SIZE_FORM})
def _shard_size(value: object) -> int:
    try:
        size = parse_size(value) if isinstance(value, (int, str)) else parse_size(read_integer(value))
    except ValueError as error:
        remedy = "Write a size like 5GB or 512MiB, or 0 for one file."
        raise refusal(f"{show(value)} is not a size.", remedy) from error
    # mergekit's "5B" means five billion; five bytes is never what somebody who spells the unit wants.
    if isinstance(value, str) and 0 < size < 1000:
        raise refusal(f"'{value}' means {size} bytes.", f"Write '{value.rstrip('Bb ')}GB' or so.")
    return size


def word_or_reference(*words: str) -> Callable[[object, ValidationInfo], str | ModelReference]:
    def read(value: object, info: ValidationInfo) -> str | ModelReference:
        if isinstance(value, str) and value in words:
            return value
        return _reference(value, info)

    return accepts(any_of({"enum": [*words]}, REFERENCE))(read)


def plain_word_or_reference(*words: str) -> Callable[[str | ModelReference], object]:
    """A model whose path is one of the words is written as a map, which is read as a model again."""

    def plain(source: str | ModelReference) -> object:
        if isinstance(source, str):
            return source
        form = plain_reference(source)
        return {"model": _plain_path(source.path, source.revision)} if form in words else form

    return plain


Text: TypeAlias = Annotated[str, by(read_text)]
Reference: TypeAlias = Annotated[ModelReference, PlainValidator(_reference), PlainSerializer(plain_reference)]
MergeDType: TypeAlias = Annotated[DType, by(_dtype), PlainSerializer(config_name)]
ShardSize: TypeAlias = Annotated[int, by(_shard_size)]
Parameters: TypeAlias = Mapping[str, Annotated[Setting, by(read_setting), PlainSerializer(plain_setting)]]


RECIPE = DocumentKind(
    noun="recipe",
    opening="merge_method: ...",
    error=RecipeError,
    about_secrets=(
        "A recipe is kept in what it makes, for all to read: take it out, make it invalid where it came "
        "from, and log in with 'hf auth login' or set HF_TOKEN."
    ),
)
