"""What is merged, in the words that raymerge and mergekit share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

METHODS = (
    "linear", "task_arithmetic", "slerp", "dare_linear", "dare_ties", "ties", "breadcrumbs", "della", "sce",
    "model_stock", "karcher", "passthrough", "moe",
)  # fmt: skip
VERBATIM = ("passthrough", "moe")
"""Merges that copy bytes: their limit is ``cp``."""

_WEIGHTS = (0.3, 0.3, 0.4)
_OF_EACH: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "dare_linear": {"density": 0.5},
        "dare_ties": {"density": 0.5},
        "ties": {"density": 0.3},
        "breadcrumbs": {"density": 0.85, "gamma": 0.02},
        "della": {"density": 0.5, "epsilon": 0.1},
    }
)
_OF_ALL: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"slerp": {"t": 0.5}, "sce": {"select_topk": 0.5}, "model_stock": {"filter_wise": False}}
)
_WITHOUT_BASE = ("linear", "karcher")
_WITHOUT_WEIGHTS = ("slerp", "sce", "model_stock", "karcher")


def recipe(method: str, parents: Sequence[Path], layers: int) -> dict[str, Any]:
    if method == "moe":
        experts = [{"source_model": str(parent)} for parent in parents]
        return _recipe(base_model=str(parents[0]), gate_mode="random", experts=experts)
    if method == "passthrough":
        return _recipe(merge_method=method, slices=_slices(parents, layers))
    models = [_model(method, str(parents[number]), number) for number in numbers_of(method) if number]
    chosen: dict[str, Any] = {"merge_method": method, "models": models}
    if method == "slerp":
        chosen["base_model"] = str(parents[1])
    elif method not in _WITHOUT_BASE:
        chosen["base_model"] = str(parents[0])
    if method in _OF_ALL:
        chosen["parameters"] = dict(_OF_ALL[method])
    return _recipe(**chosen)


def numbers_of(method: str) -> tuple[int, ...]:
    """Which parents a merge reads; the output is as large as the first of them, but for ``VERBATIM``."""
    if method in ("slerp", "passthrough"):
        return (1, 2)
    return (1, 2, 3) if method in _WITHOUT_BASE else (0, 1, 2, 3)


def _recipe(**fields: Any) -> dict[str, Any]:
    return {**fields, "dtype": "bfloat16"}


def _model(method: str, model: str, number: int) -> dict[str, Any]:
    if method in _WITHOUT_WEIGHTS:
        return {"model": model}
    return {"model": model, "parameters": {"weight": _WEIGHTS[number - 1], **_OF_EACH.get(method, {})}}


def _slices(parents: Sequence[Path], layers: int) -> list[dict[str, Any]]:
    one = {"model": str(parents[1]), "layer_range": [0, layers]}
    two = {"model": str(parents[2]), "layer_range": [layers // 2, layers]}
    return [{"sources": [one]}, {"sources": [two]}]
