"""Two models of one family on disk, what their loader says of them, and recipes that merge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.model_types import Info, ModelType, perturb

State = Mapping[str, torch.Tensor]
"""Tensors of a loaded model by their name in it, which need not be their name on disk."""


@dataclass(frozen=True, slots=True)
class Parents:
    """A model and a fine-tune of it."""

    one: Path
    """Directory of the model."""
    two: Path
    """Directory of the fine-tune."""
    info: Info
    """What the loader says of the model as transformers saved it."""
    state_one: State
    """The model's tensors."""
    state_two: State
    """The fine-tune's tensors."""
    like: torch.nn.Module
    """A model that tells its config and what its parts are called; its numbers are the fine-tune's."""

    def entries(self, **parameters: Any) -> list[dict[str, Any]]:
        """Both as entries of a recipe, with the same parameters."""
        return [{"model": str(path), "parameters": dict(parameters)} for path in (self.one, self.two)]

    def mean(self) -> State:
        """What their mean is, computed in float64; what is no float is the model's."""
        return {
            name: (tensor.double() + self.state_two[name].double()) / 2
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.state_one.items()
        }


def make_parents(kind: ModelType, root: Path) -> Parents:
    """The parents of a family below ``root``, as ``save_pretrained`` writes them."""
    model = kind.build(1)
    state_one = save(model, root / "one")
    state_two = save(perturb(model, 2), root / "two")
    _, info = kind.load(root / "one")
    return Parents(root / "one", root / "two", info, state_one, state_two, model)


def load_as_strictly(kind: ModelType, root: Path, info: Info) -> torch.nn.Module:
    """The model in a directory; fails where its loader misses other tensors than ``info`` says."""
    model, found = kind.load(root)
    assert found == info
    return model


def save(model: torch.nn.Module, root: Path) -> State:
    """Save a model; returns a copy of its tensors."""
    model.save_pretrained(root)  # type: ignore[operator]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(found: State, expected: State, *, tolerance: float = 1e-6) -> None:
    """Fail unless both hold the same names with the same numbers, tensor by tensor."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        same = torch.allclose(found[name].double(), tensor.double(), rtol=1e-5, atol=tolerance)
        assert same, name
