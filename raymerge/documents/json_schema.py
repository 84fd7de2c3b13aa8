"""JSON Schema of documents, derived from the fields of their entries and from what readers declare."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, PlainValidator

from raymerge.documents.fields import MapEntry
from raymerge.documents.grammar import TEXT, Grammar, any_of, declared, or_empty

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def definitions(*entries: type[MapEntry]) -> dict[str, Grammar]:
    """The schemas of entries, and of all entries in them, by the names of their classes."""
    schemas: dict[str, Grammar] = {}
    for entry in entries:
        _define(entry, schemas)
    return schemas


def reference(name: str) -> Grammar:
    return {"$ref": f"#/$defs/{name}"}


def schema_text(schema: Mapping[str, Any]) -> str:
    """One line for each key and each definition, so that changes show."""
    plain = {key: json.dumps(value, ensure_ascii=False) for key, value in schema.items() if key != "$defs"}
    defs = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in schema["$defs"].items()]
    plain["$defs"] = "{\n" + ",\n".join(defs) + "\n }"
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value}" for key, value in plain.items()) + "\n}\n"


def _define(entry: type[MapEntry], schemas: dict[str, Grammar]) -> None:
    if entry.__name__ in schemas:
        return
    schema = schemas[entry.__name__] = {"type": "object"}
    docs = _docstrings(entry)
    properties: dict[str, Grammar] = {}
    for name, field in entry.model_fields.items():
        value = _of(field.annotation, (*field.metadata,), schemas)
        if not field.is_required():
            value = or_empty(value)
            if isinstance(field.default, str | int | float):
                value["default"] = field.default
        properties[name] = {"description": docs[name], **value} if name in docs else value
    required = [name for name, field in entry.model_fields.items() if field.is_required()]
    schema |= {"properties": properties, "required": required, "additionalProperties": False}
    if entry.grammar:
        schema["allOf"] = [entry.grammar]


def _of(annotation: Any, metadata: tuple[Any, ...], schemas: dict[str, Grammar]) -> Grammar:
    for each in metadata:
        if isinstance(each, PlainValidator):
            return _shared(declared(each.func), schemas) or _of(annotation, (), schemas)
        if isinstance(each, BeforeValidator):
            return any_of(declared(each.func), _of(annotation, (), schemas))
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Annotated:
            return _of(arguments[0], arguments[1:], schemas)
        case origin if origin in (Union, UnionType):
            parts = [_of(each, (), schemas) for each in arguments if each is not NoneType]
            return parts[0] if len(parts) == 1 else any_of(*parts)
        case origin if origin is Literal:
            return {"enum": [*arguments]}
        case origin if origin is tuple:
            return {"type": "array", "items": _of(arguments[0], (), schemas)}
        case origin if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": _of(arguments[1], (), schemas)}
    if isinstance(annotation, type) and issubclass(annotation, MapEntry):
        _define(annotation, schemas)
        return reference(annotation.__name__)
    if annotation is str:
        return dict(TEXT)
    raise LookupError(f"{annotation} has no reader that declares what it accepts")


def _shared(grammar: Grammar, schemas: dict[str, Grammar]) -> Grammar:
    if "title" not in grammar:
        return grammar
    schemas[grammar["title"]] = grammar
    return reference(grammar["title"])


def _docstrings(entry: type[MapEntry]) -> dict[str, str]:
    """The texts below fields; without the source there are none."""
    return {
        name: text
        for each in reversed(entry.__mro__)
        if issubclass(each, MapEntry) and each is not MapEntry
        for name, text in _field_docstrings(each)
    }


def _field_docstrings(entry: type[MapEntry]) -> Iterator[tuple[str, str]]:
    try:
        (parsed,) = ast.parse(dedent(inspect.getsource(entry))).body
    except OSError:
        return
    assert isinstance(parsed, ast.ClassDef)
    for field, text in pairwise(parsed.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                yield name, " ".join(words.split()).replace("``", "`")
