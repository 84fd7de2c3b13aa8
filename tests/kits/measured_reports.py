"""Reports on merges of tiny models, for the sentences and the page that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kits.measured_arrays import Arrays, label_of, measure
from kits.tiny_parents import Model, dense, mean, mixture, tuned, with_experts, with_layers

from raymerge.verifier.measurements import SKETCH, Label, Measurements, Report, Speed, shared_sums

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
    kind = "recipe" if merged is None else "merge"
    facts: dict[str, Any] = {"name": "merged", "kind": kind, "method": "linear", "is_exact": True}
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model as large as real ones, of which there are numbers alone."""

    layers: int
    experts: int = 0
    parents: int = 2
    width: int = 4096

    def labels(self) -> list[tuple[Label, float]]:
        inner = self.width * self.width
        found = [(label_of("model.embed_tokens.weight"), 32000.0 * self.width)]
        for layer in range(self.layers):
            path = f"model.layers.{layer}"
            found += [(label_of(f"{path}.self_attn.{word}_proj.weight"), float(inner)) for word in "qkvo"]
            names = [f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"]
            found += [
                (label_of(f"{path}.{name}.{word}_proj.weight"), 2.7 * inner / max(1, self.experts / 8))
                for name in names
                for word in ("gate", "up", "down")
            ]
            found += [(label_of(f"{path}.input_layernorm.weight"), float(self.width))]
            if self.experts:
                found.append((label_of(f"{path}.mlp.gate.weight"), float(self.width * self.experts)))
        return [*found, (label_of("lm_head.weight"), 32000.0 * self.width)]


def synthetic_report(shape: Shape, *, seed: int = 0, **more: Any) -> Report:
    """Numbers such as those of fine-tunes, with larger changes in late layers and in attention."""
    rng = np.random.default_rng(seed)
    labels, sizes = zip(*shape.labels(), strict=True)
    n, count = np.array(sizes), shape.parents
    depth = np.array([(label.layer + 1) / shape.layers for label in labels])
    tone = 1 + 0.7 * np.array([label.role in ("attention", "router") for label in labels])
    own = np.array([0.004 * 1.9**k for k in range(count)])
    relative = own * ((0.4 + depth**1.5) * tone * np.exp(rng.normal(0, 0.12, len(n))))[:, None]
    relative = relative * np.exp(rng.normal(0, 0.1, relative.shape))
    agreement = 0.35 * np.cos(3 * depth) * (0.6 + 0.4 * tone)
    correlations = np.where(np.eye(count, dtype=bool), 1.0, agreement[:, None, None] / max(1, count - 1))
    base = n * 0.02**2
    norms = relative * np.sqrt(base)[:, None]
    gram = correlations * norms[:, :, None] * norms[:, None, :]
    squares = np.einsum("njj->nj", gram)
    weights = np.full(count, 1 / count)
    mean_of = np.sqrt(2 / np.pi * n)
    pairs = squares[:, :, None] + squares[:, None, :] + 2 * gram
    true = rng.standard_normal((len(n), 1, SKETCH)) * np.sqrt(base)[:, None, None]
    noise = rng.standard_normal((len(n), count, SKETCH)) * norms[:, :, None]
    values: dict[str, Any] = {
        "elements": n, "sampled": n / 64, "present": np.repeat(n[:, None], count, 1),
        "base": np.repeat(base[:, None], count, 1), "gram": gram,
        "magnitudes": mean_of[:, None] * np.sqrt(squares),
        "magnitude_of_sum": mean_of * np.sqrt(np.maximum(gram.sum((1, 2)), 0)),
        "pair_magnitudes": mean_of[:, None, None] * np.sqrt(np.maximum(pairs, 0)),
        "zeros": n[:, None] * 0.04 * np.ones(count), "invisible": n[:, None] * 0.1 * np.ones(count),
        "largest": 5.5 * norms / np.sqrt(n)[:, None],
        "overlap": n[:, None, None] * (0.111 + 0.3 * np.maximum(correlations, 0)),
        "merged": gram @ weights @ weights, "merged_dots": gram @ weights,
        "encoding_errors": np.stack([base * 0.026**2, base], 1) * (n > shape.width)[:, None],
        "variance": squares.sum(1) ** 2 * 2 * 64 / n, "sketches": np.concatenate([true + noise, true], 1),
    }  # fmt: skip
    names = ("org/coder-instruct", "org/mathematics-v2", "people/roleplay", "lab/translation")
    facts: dict[str, Any] = {
        "name": "merged", "kind": "merge", "method": "ties", "parents": names[:count],
        "base": "org/foundation-7b",
        "nbytes_by_use": {"merged": 27_000_000_000, "copied": 1_200_000_000, "dropped": 5_000_000},
        "speeds": (Speed("read", 28_000_000_000, 0, 41.0), Speed("write", 0, 14_000_000_000, 30.0)),
        "skipped": {"copied byte for byte": 3}, "raymerge": "0.1.0",
    }  # fmt: skip
    values |= shared_sums(values)
    return Report(measurements=Measurements(tuple(labels), **values), **(facts | more))
