"""Merges of quantised models are the float64 merges of what their parents mean, as near as codes can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import read_tensors
from kits.merge_cases import Family, merge, recipes
from kits.quantised_merges import (
    MAKERS,
    Merge,
    changed_bytes,
    check_merged,
    check_stored_alike,
    linear,
    merged_values,
    read_numbers,
    slerp,
    ties,
)
from kits.quantised_models import QuantisedModel

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
_WEIGHTS, _DENSITY = (0.618034, 0.381966), 0.4
# Of no simple ratio: what is decoded takes few values, and sums that cancel would leave the sign to rounding.


@pytest.fixture(scope="module", params=MAKERS)
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """A base and two more of its kind."""
    root = tmp_path_factory.mktemp("parents")
    return [MAKERS[request.param](root / name, seed) for seed, name in enumerate(("base", "one", "two"))]


def _entries(models: Sequence[QuantisedModel], weights: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    return [
        {"model": str(model.root), "parameters": {"weight": weight, **more}}
        for model, weight in zip(models, weights, strict=True)
    ]


def _cases(parents: Sequence[QuantisedModel]) -> Mapping[str, tuple[dict[str, Any], int, Merge]]:
    """Recipes, the number of parents that take part, and what is expected of them."""
    base, *tuned = parents
    named = {"base_model": str(base.root)}
    thinned = _entries(tuned, _WEIGHTS, density=_DENSITY)
    return {
        "linear": ({"models": _entries(parents[:2], (0.3, 0.7))}, 2, linear(0.3, 0.7)),
        "slerp": (
            {**named, "models": [{"model": str(tuned[0].root)}], "parameters": {"t": 0.4}},
            2,
            slerp(0.4),
        ),
        "ties": ({**named, "models": thinned}, 3, ties(_WEIGHTS, _DENSITY)),
    }


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
def test_a_merge_is_the_merge_of_what_the_parents_mean(
    method: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is the nearest that codes with the scale of its block can be."""
    recipe, count, expected = _cases(parents)[method]
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


@pytest.mark.parametrize("kind", SELF_MERGED)
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
        "models": _entries([base, one], (1, 0)),
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
        "models": _entries([base, one], (0.5, 0.5)),
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
