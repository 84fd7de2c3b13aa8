"""A tiny dense model and a tiny mixture as numpy arrays, their fine-tunes, and faults planted in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Model = dict[str, NDArray[np.float64]]
WIDTH, NEURONS, VOCABULARY = 16, 32, 48
LAYERS = 12


def dense(seed: int = 0, *, layers: int = LAYERS) -> Model:
    rng = np.random.default_rng(seed)
    return _whole(rng, layers, lambda path: _network(rng, f"{path}.mlp"))


def mixture(seed: int = 0, *, layers: int = 4, experts: int = 8) -> Model:
    rng = np.random.default_rng(seed)

    def block(path: str) -> Model:
        found = {f"{path}.mlp.gate.weight": rng.standard_normal((experts, WIDTH)) * 0.02}
        for expert in range(experts):
            found |= _network(rng, f"{path}.mlp.experts.{expert}")
        return found

    return _whole(rng, layers, block)


def _whole(rng: np.random.Generator, layers: int, block: Callable[[str], Model]) -> Model:
    found = {"model.embed_tokens.weight": rng.standard_normal((VOCABULARY, WIDTH)) * 0.02}
    for layer in range(layers):
        path = f"model.layers.{layer}"
        found[f"{path}.input_layernorm.weight"] = np.ones(WIDTH) + rng.standard_normal(WIDTH) * 0.05
        for word in "qkvo":
            found[f"{path}.self_attn.{word}_proj.weight"] = rng.standard_normal((WIDTH, WIDTH)) * 0.02
        found |= block(path)
    return found | {"model.norm.weight": np.ones(WIDTH)}


def _network(rng: np.random.Generator, path: str) -> Model:
    shapes = {"gate": (NEURONS, WIDTH), "up": (NEURONS, WIDTH), "down": (WIDTH, NEURONS)}
    return {f"{path}.{word}_proj.weight": rng.standard_normal(shape) * 0.02 for word, shape in shapes.items()}


def tuned(model: Model, seed: int, relative: float = 0.01, *, density: float = 1.0) -> Model:
    """With noise of a relative size, more of it in late layers, in a fraction of the elements."""
    rng = np.random.default_rng(seed)
    return {
        name: value
        + rng.standard_normal(value.shape)
        * (rng.random(value.shape) < density)
        * (relative * np.sqrt(np.mean(value**2)) * (0.5 + rng.random() + depth / len(model)))
        for depth, (name, value) in enumerate(model.items())
    }


def with_layers(model: Model, origins: Mapping[int, int]) -> Model:
    """With other layers of its own at some places."""
    found = dict(model)
    for place, origin in origins.items():
        head = f"model.layers.{origin}."
        found |= {
            f"model.layers.{place}.{name.removeprefix(head)}": value
            for name, value in model.items()
            if name.startswith(head)
        }
    return found


def with_experts(model: Model, layer: int, order: Sequence[int]) -> Model:
    """With its experts of a layer, and their router's rows, in another order."""
    path = f"model.layers.{layer}.mlp"
    found = model | {f"{path}.gate.weight": model[f"{path}.gate.weight"][list(order)]}
    for place, origin in enumerate(order):
        for word in ("gate", "up", "down"):
            name = f"{path}.experts.{{}}.{word}_proj.weight"
            found[name.format(place)] = model[name.format(origin)]
    return found


def mean(*models: Model) -> Model:
    return {name: np.mean([each[name] for each in models], axis=0) for name in models[0]}
