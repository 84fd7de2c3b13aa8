"""Two models of one family on disk, what their loader says of them, and recipes that merge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.model_types import Info, ModelType, perturb

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parents:
    one: Path
    two: Path
    info: Info
    state_one: State
    state_two: State
    like: torch.nn.Module
    """A model that tells its config and what its parts are called; its numbers are the fine-tune's."""

    def entries(self, **parameters: Any) -> list[dict[str, Any]]:
        return [{"model": str(path), "parameters": dict(parameters)} for path in (self.one, self.two)]

    def mean(self) -> State:
        return {
            name: (tensor.double() + self.state_two[name].double()) / 2
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.state_one.items()
        }


def make_parents(kind: ModelType, root: Path) -> Parents:
    model = kind.build(1)
    state_one = save(model, root / "one")
    state_two = save(perturb(model, 2), root / "two")
    _, info = kind.load(root / "one")
    return Parents(root / "one", root / "two", info, state_one, state_two, model)


def load_as_strictly(kind: ModelType, root: Path, info: Info) -> torch.nn.Module:
    model, found = kind.load(root)
    assert found == info
    return model


def save(model: torch.nn.Module, root: Path) -> State:
    model.save_pretrained(root)  # type: ignore[operator]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(found: State, expected: State) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        same = torch.allclose(found[name].double(), tensor.double(), rtol=1e-5, atol=1e-6)
        assert same, name
