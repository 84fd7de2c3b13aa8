"""Objects of KubeRay against the schemas of its custom resources, as an API server would check them.

``tests/data/kuberay-crds.json.gz`` is a trimmed copy of KubeRay's definitions (Apache-2.0, the KubeRay
authors). ``python -m kits.crd DIRECTORY``, run in ``tests``, makes it anew from ``ray.io_*.yaml`` there.
"""

from __future__ import annotations

import copy
import gzip
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft4Validator

DATA = Path(__file__).resolve().parents[1] / "data" / "kuberay-crds.json.gz"
FILES = {"RayJob": "ray.io_rayjobs.yaml", "RayCluster": "ray.io_rayclusters.yaml"}

_KEPT = (
    *("type", "properties", "items", "required", "enum", "default", "format", "pattern", "nullable"),
    *("additionalProperties", "anyOf", "allOf", "oneOf", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "x-kubernetes-preserve-unknown-fields"),
)


def trimmed(directory: Path) -> dict[str, Any]:
    """The schemas of version v1 by kind, without what only people read, from KubeRay's own files."""
    return {kind: _trim(_version_1(directory / name)) for kind, name in FILES.items()}


def write(schemas: Mapping[str, Any], path: Path = DATA) -> None:
    text = json.dumps(schemas, sort_keys=True, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


@lru_cache(maxsize=1)
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
    return found


def with_defaults(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return _filled(copy.deepcopy(dict(manifest)), kept()[manifest["kind"]])


def schema_errors(manifest: Mapping[str, Any]) -> list[str]:
    found = _validator(manifest["kind"]).iter_errors(with_defaults(manifest))
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found)


@lru_cache(maxsize=2)
def _validator(kind: str) -> Draft4Validator:
    return Draft4Validator(_strict(kept()[kind]))


def _version_1(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        definition = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _trim(node: Any, *, is_map: bool = False) -> Any:
    """``is_map``: the keys of a node are names of fields, not words of the schema."""
    if isinstance(node, list):
        return [_trim(each) for each in node]
    if not isinstance(node, dict):
        return node
    if is_map:
        return {name: _trim(each) for name, each in node.items()}
    return {
        word: each if word in ("default", "enum", "required") else _trim(each, is_map=word == "properties")
        for word, each in node.items()
        if word in _KEPT
    }


def _strict(node: Any) -> Any:
    """The schema with unknown fields forbidden wherever fields are listed and no others are welcome."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {word: _strict(each) for word, each in node.items() if word not in ("default", "properties")}
    if "properties" in node:
        found["properties"] = {name: _strict(each) for name, each in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


def _filled(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    for name, each in known.items():
        if name not in value and "default" in each:
            value[name] = copy.deepcopy(each["default"])
    for name in value:
        inner = known.get(name, extra if isinstance(extra, dict) else {})
        value[name] = _filled(value[name], inner)
    return value


if __name__ == "__main__":
    write(trimmed(Path(sys.argv[1])))
