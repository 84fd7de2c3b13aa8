"""Merges of quantised models are the float64 merges of what their parents mean, as near as codes can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import slow_but
from kits.merge_cases import Family, merge, recipes
from kits.packed_headers import W4, compressed
from kits.quantised_merges import (
    MAKERS,
    changed_bytes,
    check_merged,
    check_stored_alike,
    entries,
    linear,
    merge_cases,
    merged_values,
    read_numbers,
)
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import int4

import raymerge
from raymerge.api import plan
from raymerge.methods import methods

METHODS = tuple(methods())

_SOME = ("linear", "slerp", "ties", "dare_ties", "nuslerp", "model_stock", "passthrough")
SELF_MERGED = {
    "gpt-oss": METHODS,
    "Kimi-K2-Thinking": _SOME,
    "DeepSeek-V3 F32": _SOME,
    "DeepSeek-V3 U8": _SOME,
}
"""What is merged with itself, and by which methods."""


@pytest.fixture(scope="module", params=slow_but(MAKERS, "Kimi-K2-Thinking", "DeepSeek-V3 F32"))
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """A base and two more of its kind."""
    root = tmp_path_factory.mktemp("parents")
    return [MAKERS[request.param](root / name, seed) for seed, name in enumerate(("base", "one", "two"))]


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
def test_a_merge_is_the_merge_of_what_the_parents_mean(
    method: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is the nearest that codes with the scale of its block can be."""
    recipe, count, expected = merge_cases(parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents[:count], expected), parents)


def test_what_is_checked_with_is_right(parents: list[QuantisedModel]) -> None:
    """The parents mean what they were made to mean, and a merge that is a little off would be noticed."""
    base = parents[0]
    found = read_numbers(base.root)
    assert found.keys() == base.values.keys()
    for name, numbers in found.items():
        assert (numbers.values == base.values[name]).all(), name
    own = merged_values([base], linear(1))
    check_merged(base.root, own, parents)
    name = min(base.quantised)
    off = {**own, name: own[name] * 1.3}
    with pytest.raises(AssertionError):
        check_merged(base.root, off, parents)


@pytest.mark.parametrize("kind", slow_but(SELF_MERGED, "Kimi-K2-Thinking", "DeepSeek-V3 F32"))
def test_a_model_merged_with_itself_is_itself(kind: str, tmp_path: Path) -> None:
    """To the last byte of codes and scales."""
    same = [MAKERS[kind](tmp_path / f"same{number}", 1).root for number in range(4)]
    asked_of = recipes(Family(same[0], tuple(same[1:])))
    for method in SELF_MERGED[kind]:
        # The stack is another model, an expert is changed, and linear's recipe asks for another dtype.
        asked = {key: value for key, value in asked_of[method].items() if key != "dtype"}
        if method in ("passthrough", "upcycle"):
            asked = {"merge_method": method, "models": [{"model": str(same[1])}]}
        merge(asked, tmp_path / method)
        check_stored_alike(tmp_path / method, same[0])
        assert changed_bytes(tmp_path / method, same[0]) == set(), method


def _role(name: str) -> str:
    for role, words in {"expert": (".experts.",), "attention": (".self_attn.",)}.items():
        if any(word in name for word in words) and "layernorm" not in name:
            return role
    return "other"


@pytest.mark.parametrize("role", ["expert", "attention"])
def test_what_no_rule_touches_keeps_its_bytes(
    role: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    base, one, _ = parents
    recipe = {
        "merge_method": "linear",
        "models": entries([base, one], (1, 0)),
        "methods": [{"role": role, "parameters": {"weight": 0.5}}],
    }
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    changed = changed_bytes(tmp_path / "out", base.root)
    assert {_role(name) for name in changed} == {role}
    touched = [name for name in base.values if _role(name) == role]
    mean, own = (merged_values(models, linear(*[1] * len(models))) for models in ([base, one], [base]))
    check_merged(tmp_path / "out", {**own, **{name: mean[name] for name in touched}}, parents)


@pytest.mark.parametrize("role", ["expert", "attention"])
def test_what_a_rule_takes_from_one_parent_is_its_bytes(
    role: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Codes and scales are copied, and not made anew; all else is merged."""
    base, one, _ = parents
    recipe = {
        "merge_method": "linear",
        "models": entries([base, one], (0.5, 0.5)),
        "methods": [{"role": role, "merge_method": "passthrough", "sources": [str(one.root)]}],
    }
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    foreign = changed_bytes(tmp_path / "out", one.root)
    assert not {name for name in foreign if _role(name) == role}
    fates = plan(recipe)["dispositions"].to_pylist()
    copied = {fate["name"] for fate in fates if fate["source"] == 1 and fate["disposition"] == "copied"}
    assert copied == {name for name in read_tensors(base.root) if _role(name) == role}
    mean, own = merged_values([base, one], linear(1, 1)), merged_values([one], linear(1))
    expected = {name: (own if _role(name) == role else mean)[name] for name in base.values}
    check_merged(tmp_path / "out", expected, parents)


def _grouped(root: Path, seed: int, columns: int, group: int) -> QuantisedModel:
    """A tiny Llama with one matrix of so many columns in INT4, whose groups have so many."""
    module, plain = "model.layers.0.mlp.up_proj", tiny_llama(root / "plain", seed)
    tensors, values = dict(read_tensors(plain)), {n: e.values for n, e in read_numbers(plain).items()}
    rows = len(tensors.pop(f"{module}.weight"))
    coded = int4(np.random.default_rng(seed).normal(size=(rows, columns)), group)
    tensors |= {f"{module}.weight_packed": coded.codes, f"{module}.weight_scale": coded.scales}
    tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])
    size = {"strategy": "channel", "group_size": None} if group == columns else {"group_size": group}
    table = compressed({**W4, **size}, ignore=[f"re:(?!{module})"])
    config = json.loads((plain / "config.json").read_text())
    write_checkpoint(root / "packed", tensors, {**config, "quantization_config": table})
    values[f"{module}.weight"] = coded.values
    return QuantisedModel(root / "packed", values, frozenset({f"{module}.weight"}))


@pytest.mark.parametrize(("columns", "group"), [(304, 304), (288, 96), (1024, 512)])
def test_groups_of_any_size_are_merged(columns: int, group: int, tmp_path: Path) -> None:
    """Neither a divisor nor a multiple of what tiles are cut by."""
    parents = [_grouped(tmp_path / name, seed, columns, group) for seed, name in enumerate("ab")]
    models = [
        {"model": str(each.root), "parameters": {"weight": w}}
        for each, w in zip(parents, (1, 3), strict=True)
    ]
    merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents, linear(1, 3)), parents)
    found = raymerge.audit(
        tmp_path / "out", raymerge.AuditOptions(sample=1.0), raymerge.RunOptions(inline=True)
    )
    assert not found.num_problems
