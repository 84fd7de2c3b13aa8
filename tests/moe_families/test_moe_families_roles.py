"""Experts of one parent and everything else of another; routers by policy; what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.marks import one_in
from kits.moe_maker import AncestryOf

import raymerge
from raymerge.errors import PlanError

INLINE = raymerge.RunOptions(inline=True)
EXPERTS = r"\.experts\."
ROUTERS = r"\.(gate|router)\.(weight|bias|e_score_correction_bias|layer\.weight)$|e_score_correction_bias$"
ROUTED = ("mixtral", "deepseek_v3", "minimax_m2", "gpt_oss", "dbrx", "qwen3_next")
"""Routers with rows only, with selection biases inside or beside them, with biases, in prediction layers."""

Tensors = Mapping[str, torch.Tensor]


def mean_of(roots: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """The mean of the first two parents."""
    entries = [{"model": root, "parameters": {"weight": 0.5}} for root in roots[:2]]
    return {"merge_method": "linear", "models": entries, **more}


def submit(recipe: Mapping[str, Any], out: Path) -> Tensors:
    """The tensors that a recipe gives."""
    raymerge.submit(recipe, out, INLINE)
    return read_tensors(out)


def assert_from(found: Tensors, wanted: Tensors, names: Callable[[str], bool]) -> int:
    """Those tensors have the very bytes of another checkpoint; returns how many there are."""
    chosen = [name for name in found if names(name)]
    assert [name for name in chosen if not torch.equal(found[name], wanted[name])] == []
    return len(chosen)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss", "granitemoe"])
def test_an_assembly_of_experts(name: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """2506.14794: the routed experts of one parent, the rest of the other, byte for byte."""
    instruct, reasoning = ancestry_of(name).roots[:2]
    recipe = {
        "merge_method": "passthrough",
        "base_model": instruct,
        "models": [{"model": instruct}, {"model": reasoning}],
        "methods": [{"role": "expert", "sources": [reasoning]}, {"role": REST, "sources": [instruct]}],
    }
    found = submit(recipe, tmp_path / "out")
    pattern = r"experts\.|_linear\." if name == "granitemoe" else EXPERTS
    parents = [read_tensors(Path(root)) for root in (instruct, reasoning)]
    assert found.keys() == parents[0].keys()
    experts = assert_from(found, parents[1], lambda key: bool(re.search(pattern, key)))
    rest = assert_from(found, parents[0], lambda key: not re.search(pattern, key))
    assert experts + rest == len(found)
    assert experts >= 8
    assert rest >= 8


REST = ["embedding", "head", "norm", "attention", "mlp", "shared_expert", "router", "router_bias", "other"]


@pytest.mark.parametrize("policy", ["merge", "base", "other"])
@pytest.mark.parametrize("name", one_in(3, ROUTED))
def test_routers_by_policy(name: str, policy: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    base, other = roots = ancestry_of(name).roots[:2]
    recipe = mean_of(roots, base_model=base, router=other if policy == "other" else policy)
    (note,) = [note for note in raymerge.plan(recipe).manifest["notes"] if "router" in note]
    found, parents = submit(recipe, tmp_path / "out"), [read_tensors(Path(root)) for root in roots]
    routers = {key for key in found if re.search(ROUTERS, key)}
    assert len(routers) >= 4
    mean = {key: (tensor.double() + parents[1][key].double()) / 2 for key, tensor in parents[0].items()}
    if policy == "merge":
        assert note == "routers are merged by linear (router: merge)"
    else:
        chosen = base if policy == "base" else other
        assert note == f"routers and their biases are those of {chosen} (router: {recipe['router']})"
        assert_from(found, parents[roots.index(chosen)], routers.__contains__)
    for key in found.keys() - (routers if policy != "merge" else set()):
        torch.testing.assert_close(found[key].double(), mean[key], rtol=1e-5, atol=1e-6, msg=key)
    assert all(found[key].dtype == parents[0][key].dtype for key in found)


def test_a_router_s_model_may_be_any_of_the_recipe(ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """With TIES the base is not among the models, and its routers can be named all the same."""
    base, one, two = ancestry_of("mixtral").roots
    entries = [{"model": root, "parameters": {"weight": 0.5, "density": 0.5}} for root in (one, two)]
    recipe = {"merge_method": "ties", "base_model": base, "models": entries}
    found = [submit({**recipe, "router": chosen}, tmp_path / str(i)) for i, chosen in enumerate((base, two))]
    for tensors, root in zip(found, (base, two), strict=True):
        assert assert_from(tensors, read_tensors(Path(root)), lambda key: bool(re.search(ROUTERS, key))) == 4


def refusal(recipe: Mapping[str, Any]) -> str:
    """The only reason why a recipe is refused."""
    with pytest.raises(PlanError) as caught:
        raymerge.plan(recipe).require()
    (problem,) = caught.value.problems
    return str(problem)


def test_a_policy_for_models_without_routers_is_refused(tmp_path: Path) -> None:
    roots = tuple(str(tiny_llama(tmp_path / name, seed)) for seed, name in enumerate("ab"))
    said = refusal(mean_of(roots, base_model=roots[0], router="base"))
    assert "'router' says where routers come from, but these models have none." in said


def test_a_router_of_a_model_that_is_not_merged_is_refused(ancestry_of: AncestryOf) -> None:
    roots = ancestry_of("mixtral").roots
    said = refusal(mean_of(roots, router=roots[2]))
    assert f"{roots[2]} is not one of the models that the recipe merges" in said
    assert f"Name one of: {roots[0]}, {roots[1]}; or write merge, or base." in said


def test_the_base_s_router_without_a_base_is_refused(ancestry_of: AncestryOf) -> None:
    said = refusal(mean_of(ancestry_of("mixtral").roots, router="base"))
    assert "there is no base_model" in said
    assert "Name the base_model, or one of the models." in said


def test_a_policy_beside_a_rule_for_routers_is_refused(ancestry_of: AncestryOf) -> None:
    base, other, _ = roots = ancestry_of("mixtral").roots
    rule = {"role": "router", "merge_method": "passthrough", "sources": [other]}
    said = refusal(mean_of(roots, base_model=base, router="base", methods=[rule]))
    assert "4 tensors are matched by this rule and by the one at recipe: methods[0] as well" in said
