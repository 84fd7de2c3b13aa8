"""Recipes of several merges that use each other's results."""

from __future__ import annotations

from typing import Any

import yaml

CHAIN = """\
name: left
merge_method: linear
models: [{model: one, parameters: {weight: 0.25}}, {model: two, parameters: {weight: 0.75}}]
---
name: right
merge_method: task_arithmetic
base_model: one
models: [{model: left, parameters: {weight: 0.5}}, {model: two, parameters: {weight: 0.5}}]
---
merge_method: slerp
base_model: left
models: [{model: left}, {model: right}]
parameters: {t: 0.5}
"""
"""Over the models ``one`` and ``two``: ``right`` uses ``left``, and the result uses both."""


def documents(text: str = CHAIN, *, root: str = "") -> list[dict[str, Any]]:
    """The recipes of a text as mappings; ``root`` goes before the names of models on disk."""
    found = [document for document in yaml.safe_load_all(text) if document]
    names = {document.get("name") for document in found}
    for document in found:
        for entry in document["models"]:
            entry["model"] = _below(root, entry["model"], names)
        if "base_model" in document:
            document["base_model"] = _below(root, document["base_model"], names)
    return found


def _below(root: str, model: str, names: set[str | None]) -> str:
    return model if model in names or not root else f"{root}/{model}"
