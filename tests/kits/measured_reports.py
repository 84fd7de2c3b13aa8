"""Reports on merges of tiny models, for the sentences and the page that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kits.measured_arrays import Arrays, measure
from kits.tiny_parents import Model, dense, mean, mixture, tuned, with_experts, with_layers

from raymerge.verifier.measurements import Report

BASE = dense()
FIRST, SECOND = tuned(BASE, 1), tuned(BASE, 2)
EXPERTS = mixture()
ORDERS = (
    (1, 0, 2, 3, 4, 5, 6, 7),
    (3, 4, 5, 6, 7, 0, 1, 2),
    (7, 6, 5, 4, 3, 2, 1, 0),
    (0, 2, 1, 3, 4, 5, 7, 6),
)


def make_report(
    *parents: Arrays, base: Arrays | None = BASE, merged: Arrays | None = None, **more: Any
) -> Report:
    """Of parents named ``models/one``, ``models/two``, ``models/three``, all of whose numbers were read."""
    names = tuple(f"models/{word}" for word in ("one", "two", "three", "four")[: len(parents)])
    place = None if base is None else "models/base"
    facts: dict[str, Any] = {"name": "merged", "kind": "merge", "method": "linear", "is_exact": True}
    return Report(parents=names, base=place, measurements=measure(parents, base, merged), **(facts | more))


def changed(model: Model, part: str, how: Any) -> Model:
    """With other numbers in the tensors that have ``part`` in their names."""
    return {name: how(value) if part in name else value for name, value in model.items()}


def permuted(model: Model, orders: Sequence[Sequence[int]] = ORDERS) -> Model:
    for layer, order in enumerate(orders):
        model = with_experts(model, layer, order)
    return model


def swapped(model: Model, pairs: Mapping[int, int]) -> Model:
    return with_layers(model, {**pairs, **{b: a for a, b in pairs.items()}})


def usual() -> Report:
    return make_report(FIRST, SECOND, merged=mean(FIRST, SECOND))
