"""Recipes as mappings: means of models, one model as it is, and stacks of their layers.

Models are given by their addresses, or as what has a ``root``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def linear(*models: object, **more: Any) -> dict[str, Any]:
    entries = [{"model": _address(model)} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more}


def slerp(lead: object, other: object, t: float = 0.5, **more: Any) -> dict[str, Any]:
    data = {**linear(lead, other), "merge_method": "slerp", "base_model": _address(lead)}
    return {**data, "parameters": {"t": t}, **more}


def deltas(method: str, base: object, *tuned: object, **more: Any) -> dict[str, Any]:
    """A merge of what models differ by from their base, of which half is taken, by half."""
    halves = {"weight": 0.5, "density": 0.5}
    models = [{"model": _address(each), "parameters": halves} for each in tuned]
    return {"merge_method": method, "base_model": _address(base), "models": models, **more}


def one(model: object, **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": _address(model)}], **more}


def piece(models: object, start: int, stop: int, **more: Any) -> dict[str, Any]:
    """A slice of these layers: of one model, or of each of several in a list or a tuple."""
    members = models if isinstance(models, list | tuple) else [models]
    return {"sources": [{"model": _address(m), "layer_range": [start, stop]} for m in members], **more}


def stack(*pieces: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "slices": list(pieces), **more}


def twice(one: object, other: object, layers: int) -> dict[str, Any]:
    """The mean of so many layers of both, two times, so that ops are copies of others."""
    both = piece((one, other), 0, layers)
    return {"merge_method": "linear", "slices": [both, both], "parameters": {"weight": 1}}


def _address(model: object) -> object:
    place = model if isinstance(model, Path) else getattr(model, "root", model)
    return str(place) if isinstance(place, Path) else place
