"""Recipes as mappings: means of models, one model as it is, and stacks of their layers."""

from __future__ import annotations

from typing import Any


def linear(*models: object, **more: Any) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more}


def one(model: object, **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": model}], **more}


def piece(models: object, start: int, stop: int, **more: Any) -> dict[str, Any]:
    """A slice of these layers: of one model, or of each of several in a list or a tuple."""
    members = models if isinstance(models, list | tuple) else [models]
    return {"sources": [{"model": model, "layer_range": [start, stop]} for model in members], **more}


def stack(*pieces: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "slices": list(pieces), **more}
