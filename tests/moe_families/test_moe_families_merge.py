"""Every family merged by three methods: nothing lost, nothing missing, and the model that float64 gives.

One method looks at elements and two at whole matrices, each of which is one projection of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import slow_but
from kits.moe_maker import FAMILIES, FURTHER, Ancestry, AncestryOf, make_ancestry, read_config
from kits.moe_reference import Merge, linear, merged_states, slerp, ties

import raymerge
from raymerge.merge_plan.plan import Plan

INLINE = raymerge.RunOptions(inline=True)
WEIGHTS = (1.0, 2.0, 0.5)
T = 0.4
TIES_WEIGHTS = (0.7, 0.4)
DENSITY = 0.55

METHODS: Mapping[str, tuple[int, Merge]] = {
    "linear": (3, linear(*WEIGHTS)),
    "slerp": (2, slerp(T)),
    "ties": (3, ties(TIES_WEIGHTS, DENSITY)),
}
"""Parents that take part and what float64 makes of them, by method."""


def recipe_of(method: str, roots: tuple[str, ...]) -> dict[str, Any]:
    """A recipe of the method over the base and its fine-tunes."""
    if method == "linear":
        entries = [
            {"model": root, "parameters": {"weight": weight}}
            for root, weight in zip(roots, WEIGHTS, strict=True)
        ]
        return {"merge_method": "linear", "models": entries}
    if method == "slerp":
        entries = [{"model": root} for root in roots[:2]]
        return {"merge_method": "slerp", "base_model": roots[0], "models": entries, "parameters": {"t": T}}
    entries = [
        {"model": root, "parameters": {"weight": weight, "density": DENSITY}}
        for root, weight in zip(roots[1:], TIES_WEIGHTS, strict=True)
    ]
    return {"merge_method": "ties", "base_model": roots[0], "models": entries}


@pytest.mark.parametrize("method", slow_but(METHODS, "ties"))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_merges_as_in_float64(
    name: str, method: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    ancestry, out = ancestry_of(name), tmp_path / "out"
    recipe = recipe_of(method, ancestry.roots)
    num_parents, merge = METHODS[method]
    assert_accounted(raymerge.plan(recipe), ancestry.roots[:num_parents])
    raymerge.submit(recipe, out, INLINE)
    assert_as_base(out, ancestry.parents[0].root)
    assert_same_model(out, ancestry, expected_state(ancestry, merge, num_parents))
    assert_same_tensors(out, ancestry, merge, num_parents)


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_family_merges_as_in_float64(name: str, tmp_path: Path) -> None:
    ancestry = make_ancestry(FURTHER[name], tmp_path)
    recipe = recipe_of("ties", ancestry.roots)
    assert_accounted(raymerge.plan(recipe), ancestry.roots)
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    assert_as_base(tmp_path / "out", ancestry.parents[0].root)
    assert_same_model(tmp_path / "out", ancestry, expected_state(ancestry, METHODS["ties"][1], 3))


@pytest.mark.parametrize(
    ("name", "width"), [("gpt_oss", 32), ("gpt_oss", 16), ("llama4_text", 16), ("granitemoe", 16)]
)
def test_stacks_of_square_matrices_are_turned_by_family(name: str, width: int, tmp_path: Path) -> None:
    """Hidden size 32: a matrix, or a pair of them, is as wide as it is high, and sizes tell nothing."""
    family = FAMILIES[name].with_config(intermediate_size=width)
    ancestry = make_ancestry(family, tmp_path, fine_tunes=1)
    raymerge.submit(recipe_of("slerp", ancestry.roots), tmp_path / "out", INLINE)
    assert_same_model(tmp_path / "out", ancestry, expected_state(ancestry, slerp(T), 2))


def expected_state(ancestry: Ancestry, merge: Merge, num_parents: int) -> dict[str, torch.Tensor]:
    """Tensors of the merged model in memory, in float64."""
    family = ancestry.family
    states = [parent.state for parent in ancestry.parents[:num_parents]]
    return merged_states(states, merge, layout=family.loaded(), num_experts=family.num_experts)


def assert_accounted(plan: Plan, roots: tuple[str, ...]) -> None:
    """Every tensor of every parent goes into the output, once."""
    assert plan.problems == ()
    table = plan["dispositions"].to_pylist()
    found = sorted((row["source"], row["name"]) for row in table)
    assert found == sorted((i, name) for i, root in enumerate(roots) for name in read_tensors(Path(root)))
    assert {row["disposition"] for row in table} == {"merged"}


def assert_as_base(out: Path, base: Path) -> None:
    """Names, shapes, dtypes and config are the base's."""
    found, wanted = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in read_tensors(root).items()}
        for root in (out, base)
    )
    assert found == wanted
    assert read_config(out) == read_config(base)


def assert_same_model(out: Path, ancestry: Ancestry, expected: Mapping[str, torch.Tensor]) -> None:
    """It loads with nothing missing, and gives the logits of the merge in float64."""
    kind, like = ancestry.family.kind, ancestry.model
    model, info = kind.load(out)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("model.layers.4.") for name in info["unexpected_keys"])
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].double(), tensor.double(), rtol=1e-5, atol=1e-6, msg=name)
    like.load_state_dict({name: tensor.float() for name, tensor in expected.items()})
    logits, wanted = kind.run(model), kind.run(like)
    assert wanted.isfinite().all()
    assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def assert_same_tensors(
    out: Path, ancestry: Ancestry, merge: Merge, num_parents: int, *, rtol: float = 1e-5
) -> None:
    """On disk too every tensor is the merge in float64, those that transformers never loads among them."""
    family = ancestry.family
    parents = [read_tensors(parent.root) for parent in ancestry.parents[:num_parents]]
    expected = merged_states(parents, merge, layout=family.layout, num_experts=family.num_experts)
    found = read_tensors(out)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=rtol, atol=1e-6, msg=name)
