"""Recipes of several merges that use each other's results."""

from __future__ import annotations

import re
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


def documents(*, root: str) -> list[dict[str, Any]]:
    """The recipes as mappings; ``root`` goes before the names of models on disk."""
    text = re.sub(r"(model: )(one|two)\b", rf"\1{root}/\2", CHAIN)
    return list(yaml.safe_load_all(text))
