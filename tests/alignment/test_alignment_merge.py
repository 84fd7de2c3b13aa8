"""A model merged with itself, experts and neurons moved, is the model: in every layout, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import one_in
from kits.permuted_experts import (
    DEEPSEEK,
    FAMILIES,
    FUSED,
    LLAMA4,
    MIXTRAL,
    QWEN,
    Family,
    make_model,
    moved,
    noisy,
    same_bytes,
    store,
    stored,
)

import raymerge


def _entry(root: Path, **parameters: float) -> dict[str, Any]:
    model = {"model": str(root), "override_architecture": "Mixture"}
    return {"model": model, "parameters": parameters}


def _merge(recipe: Mapping[str, Any], out: Path) -> dict[str, torch.Tensor]:
    plain = json.loads(json.dumps(recipe, default=str))
    return read_tensors(raymerge.submit(plain, out, raymerge.RunOptions(inline=True)).output)


def _linear(*roots: Path, weight: float = 0.5, align: object = "experts") -> dict[str, Any]:
    return {"merge_method": "linear", "align": align, "models": [_entry(r, weight=weight) for r in roots]}


@pytest.mark.parametrize("family", one_in(2, FAMILIES), ids=lambda family: f"{family.name}-{family.layout}")
def test_a_model_and_itself_moved_give_the_model(tmp_path: Path, family: Family) -> None:
    model = make_model(family, 1)
    one = store(tmp_path / "one", model, family)
    two = store(tmp_path / "two", moved(model, family, 2), family)
    assert not same_bytes(read_tensors(one), read_tensors(two))
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), read_tensors(one))


@pytest.mark.parametrize("other", [QWEN, FUSED, LLAMA4], ids=lambda family: family.layout)
def test_layouts_meet(tmp_path: Path, other: Family) -> None:
    other = replace(other, shared="")
    model = make_model(MIXTRAL, 5)
    one = store(tmp_path / "one", model, MIXTRAL)
    two = store(tmp_path / "two", moved(model, MIXTRAL, 6), other)
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), stored(model, MIXTRAL))
    back = _merge(_linear(two, one), tmp_path / "back")
    assert same_bytes(back, read_tensors(two))


def test_three_models_with_noise_meet_in_the_first_s_order(tmp_path: Path) -> None:
    family = DEEPSEEK
    model = make_model(family, 7, dtype=torch.float32)
    variants = [noisy(model, seed, 0.1) for seed in range(3)]
    places = [variants[0], *(moved(variant, family, 9 + i) for i, variant in enumerate(variants[1:]))]
    roots = [store(tmp_path / str(i), place, family) for i, place in enumerate(places)]
    merged = _merge(_linear(*roots, weight=1), tmp_path / "out")
    for name, value in stored(model, family).items():
        mean = sum(stored(variant, family)[name].double() for variant in variants) / 3
        torch.testing.assert_close(merged[name].double(), mean, rtol=1e-5, atol=1e-6)
        assert merged[name].dtype == value.dtype


def test_only_experts_are_moved_where_neurons_are_not_wanted(tmp_path: Path) -> None:
    family = DEEPSEEK
    model = make_model(family, 11)
    one = store(tmp_path / "one", model, family)
    two = store(tmp_path / "two", moved(model, family, 12, neurons=False), family)
    recipe = _linear(one, two, align={"neurons": False})
    assert same_bytes(_merge(recipe, tmp_path / "out"), read_tensors(one))
    three = store(tmp_path / "three", moved(model, family, 13, experts=False), family)
    apart = _merge(_linear(one, three, align={"neurons": False}), tmp_path / "apart")
    changed = {name for name, value in apart.items() if not torch.equal(value, read_tensors(one)[name])}
    assert changed
    assert all(".experts." in name or ".shared_experts." in name for name in changed)


def test_dtypes_may_differ_and_the_output_has_the_first_s(tmp_path: Path) -> None:
    model = make_model(DEEPSEEK, 14)
    wide = {name: value.float() for name, value in moved(model, DEEPSEEK, 15).items()}
    one, two = store(tmp_path / "one", model, DEEPSEEK), store(tmp_path / "two", wide, DEEPSEEK)
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), read_tensors(one))
    back = _merge(_linear(two, one), tmp_path / "back")
    assert same_bytes(back, read_tensors(two))


def test_taking_the_experts_of_the_second_model_alone_takes_them_in_the_first_s_order(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 18)
    one = store(tmp_path / "one", model, MIXTRAL)
    tuned = noisy(model, 19, 0.05)
    two = store(tmp_path / "two", moved(tuned, MIXTRAL, 20), MIXTRAL)
    source = {"model": str(two), "override_architecture": "Mixture"}
    rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
    merged = _merge({**_linear(one, two, weight=1), "methods": [rule]}, tmp_path / "out")
    for name, value in stored(tuned, MIXTRAL).items():
        if ".experts." in name:
            assert torch.equal(merged[name], value), name
