"""References to models: a path or Hub name, a revision, and an adapter laid over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raymerge.documents.fields import Fault, FaultError, attempt_key, kind, read_text, show, unknown_key
from raymerge.storage.addresses import OPTIONS_BEHIND, PLACE_ALONE, is_object_place, shown

Exists = Callable[[str], bool]
"""Whether a text is the path of a local directory."""

_REFERENCE_KEYS = ("model", "lora", "override_architecture")
_PATH_KEYS = ("path", "revision")
_MAP_FORM = "If the path itself holds '+' or '@', write {model: {path: PATH}}."
_FORMS = "Write PATH[@REVISION][+ADAPTER[@REVISION]], or {model: {path: PATH, revision: REVISION}}."


@dataclass(frozen=True, slots=True)
class ModelReference:
    """One source as the recipe names it; equal if every part is."""

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
    Raises FaultError for an empty part, several adapters or revisions.
    """
    if ("+" in text or "@" in text) and exists(text):
        return ModelReference(text)
    pieces = text.split("+")
    if len(pieces) > 2:
        raise FaultError(Fault((), f"'{text}' names more than one adapter ('+' twice).", _MAP_FORM))
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
    raise FaultError(
        Fault((), f"{show(value)} is {kind(value)}; expected a model.", f"{_FORMS} Quote a number.")
    )


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
            raise FaultError(Fault((), f"'{shown(path)}' {OPTIONS_BEHIND}", PLACE_ALONE))
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


def _split_revision(piece: str, text: str) -> tuple[str, str | None]:
    path, *revisions = piece.split("@")
    if len(revisions) > 1:
        raise FaultError(Fault((), f"'{text}' gives one model two revisions ('@' twice).", _MAP_FORM))
    if not path.strip() or "" in revisions:
        raise FaultError(Fault((), f"'{text}' has an empty path or revision.", _FORMS))
    return path, revisions[0] if revisions else None


def _read_map(value: Mapping[object, object], exists: Exists) -> ModelReference:
    if found := [key for key in _PATH_KEYS if key in value]:
        path = value.get("path") or value.get("model")
        revision = f", revision: {value['revision']}" if "revision" in value else ""
        form = f"{{model: {{path: {path if isinstance(path, str) else 'PATH'}{revision}}}}}"
        what = f"'{found[0]}' belongs into a map below 'model'."
        raise FaultError(Fault((found[0],), what, f"Write {form}."))
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
