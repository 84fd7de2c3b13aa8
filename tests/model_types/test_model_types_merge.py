"""Families of transformers: two models of each are saved, merged, and loaded with nothing missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from kits.marks import one_in
from kits.model_parents import Parents, State, assert_same_state, load_as_strictly, save
from kits.model_types import ModelType
from kits.model_types_decoders import DECODERS
from kits.model_types_others import OTHERS

import raymerge

ALL: Mapping[str, ModelType] = {kind.name: kind for kind in (*DECODERS, *OTHERS)}
INLINE = raymerge.RunOptions(inline=True)
ParentsOf = Callable[[ModelType], Parents]

AS_STORED = ("qwen2", "phi3", "gpt2", "gemma2", "mamba", "opt", "bert", "modernbert", "t5", "whisper", "vit")
"""Families whose files hold the tensors as the model does, so that angles can be taken of either."""
ELEMENTWISE = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "dbrx", "jamba", "distilbert", "bart", "llava")
"""Families for methods that look at one element at a time, whatever the layout."""


def test_every_group_is_there() -> None:
    assert len(ALL) == len(DECODERS) + len(OTHERS) >= 45
    for group in ("tied", "biased", "fused-qkv", "sliding-window", "encoder", "vision-language"):
        assert sum(group in kind.groups for kind in ALL.values()) >= 8, group


@pytest.mark.parametrize("name", one_in(3, ALL))
def test_the_mean_of_two_models(name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
    recipe = {"merge_method": "linear", "models": parents.entries(weight=0.5)}
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert_same_state(model.state_dict(), parents.mean())
    assert kind.run(model).isfinite().all()


@pytest.mark.parametrize("name", AS_STORED)
def test_the_middle_of_the_arc(name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
    recipe = {
        "merge_method": "slerp",
        "base_model": str(parents.one),
        "models": parents.entries(),
        "parameters": {"t": 0.5},
    }
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    expected = {key: _halfway(one, parents.state_two[key]) for key, one in parents.state_one.items()}
    assert_same_state(model.state_dict(), expected)
    assert kind.run(model).isfinite().all()


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_deltas_of_two_fine_tunes(method: str, name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
    third = kind.build(3)
    base = save(third, tmp_path / "base")
    density = {"density": 1.0} if method == "ties" else {}
    recipe = {
        "merge_method": method,
        "base_model": str(tmp_path / "base"),
        "models": parents.entries(weight=0.5, **density),
        "parameters": {"normalize": False},
    }
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert_same_state(model.state_dict(), _moved(base, parents, elect=method == "ties"))
    assert kind.run(model).isfinite().all()


def _halfway(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The middle of the arc between two tensors, or of the line where they are all but parallel."""
    if not one.is_floating_point():
        return one
    first, second = one.double(), two.double()
    cosine = float((first * second).sum() / (first.norm() * second.norm()))
    if abs(cosine) > 0.9995:
        return (first + second) / 2
    angle = math.acos(cosine)
    return (first + second) * (math.sin(angle / 2) / math.sin(angle))


def _moved(base: State, parents: Parents, *, elect: bool) -> State:
    """The base plus half of each delta; with ``elect`` only where a delta has the sign of their sum."""
    moved: dict[str, torch.Tensor] = {}
    for name, tensor in base.items():
        moved[name] = tensor
        if tensor.is_floating_point():
            states = (parents.state_one, parents.state_two)
            deltas = torch.stack([state[name].double() - tensor.double() for state in states]) / 2
            agrees = deltas.sign() == deltas.sum(dim=0).sign() if elect else torch.ones_like(deltas)
            moved[name] = tensor.double() + (deltas * agrees).sum(dim=0)
    return moved
