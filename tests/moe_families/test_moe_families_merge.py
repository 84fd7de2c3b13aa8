"""Families of mixtures: merged as published, layouts, roles, and models of the true size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama
from kits.float64_merges import Merge, linear, slerp, ties
from kits.marks import one_in, slow_but
from kits.moe_maker import (
    FAMILIES,
    FURTHER,
    Ancestry,
    AncestryOf,
    by_expert,
    fused,
    in_bfloat16,
    make_ancestry,
    merged_states,
    taken_apart,
)

import raymerge
from raymerge.errors import PlanError
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

TRIED = ("mixtral", "deepseek_v3", "gpt_oss", "llama4", "granitemoe", "dbrx", "jamba", "qwen3_next")
"""Families of each layout and kind of layers; fast tests of experts, layouts and dtypes merge most others."""


def recipe_of(method: str, roots: tuple[str, ...]) -> dict[str, Any]:
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", slow_but(METHODS, "ties"))
@pytest.mark.parametrize("name", slow_but((*FAMILIES, *FURTHER), *TRIED))
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


@pytest.mark.parametrize(
    ("name", "width"), one_in(2, [("gpt_oss", 32), ("gpt_oss", 16), ("llama4_text", 16), ("granitemoe", 16)])
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
    """Every tensor of every parent goes into the output, once, but for equal tables of experts."""
    assert plan.problems == ()
    table = plan["dispositions"].to_pylist()
    found = sorted((row["source"], row["name"]) for row in table)
    assert found == sorted((i, name) for i, root in enumerate(roots) for name in read_tensors(Path(root)))
    numbers = [row for row in table if not row["name"].endswith(".tid2eid")]
    assert {row["disposition"] for row in numbers} == {"merged"}


def assert_as_base(out: Path, base: Path) -> None:
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


SINGLE = (
    *(("mixtral", "slerp"), ("qwen3_moe", "ties"), ("deepseek_v2", "slerp"), ("phimoe", "ties")),
    ("jamba", "slerp"),
)
"""Published with single experts, which transformers 5 fuses when it saves its own layout; and a method."""
STACKED = (
    *(("gpt_oss", "slerp"), ("gpt_oss", "ties"), ("llama4_text", "slerp"), ("llama4", "ties")),
    *(("dbrx", "slerp"), ("dbrx", "ties"), ("granitemoe", "slerp")),
)
"""Published with experts transposed, interleaved, flattened or joined."""


def merged(root: Path, method: str, *parents: Path) -> dict[str, torch.Tensor]:
    """Two parents merged by a method that looks at whole matrices; the first is the base."""
    entries: list[dict[str, Any]] = [{"model": str(parent)} for parent in parents]
    recipe: dict[str, Any] = {"merge_method": method, "base_model": str(parents[0]), "models": entries}
    if method == "ties":
        recipe["models"] = [{**entries[1], "parameters": {"weight": 0.5, "density": 0.4}}]
    else:
        recipe["parameters"] = {"t": 0.3}
    assert raymerge.plan(recipe).problems == ()
    raymerge.submit(recipe, root, INLINE)
    return read_tensors(root)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def in_memory_layout(ancestry: Ancestry, number: int, root: Path) -> Path:
    """A parent as transformers 5 saves it in its own layout."""
    return fused(ancestry.model, ancestry.parents[number].state, root)


@pytest.mark.parametrize(("name", "method"), slow_but(SINGLE, SINGLE[0]))
def test_single_experts_and_fused_ones(
    name: str, method: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    ancestry = ancestry_of(name)
    base, other = (parent.root for parent in ancestry.parents[:2])
    fused_base, fused_other = (in_memory_layout(ancestry, i, tmp_path / f"fused{i}") for i in range(2))
    assert read_tensors(fused_base).keys() != read_tensors(base).keys()
    alike = merged(tmp_path / "single", method, base, other)
    assert same(merged(tmp_path / "a", method, base, fused_other), alike)
    alike = merged(tmp_path / "fused", method, fused_base, fused_other)
    assert alike.keys() == read_tensors(fused_base).keys()
    assert same(merged(tmp_path / "b", method, fused_base, other), alike)
    (single, _), (stacked, info) = (ancestry.family.kind.load(tmp_path / n) for n in ("single", "b"))
    assert not any(info.values())
    assert same(single.state_dict(), stacked.state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "method"), slow_but(STACKED, *STACKED[:1], *STACKED[3:5], *STACKED[6:]))
def test_stacked_experts_and_single_ones(
    name: str, method: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    ancestry = ancestry_of(name)
    family, (base, other) = ancestry.family, (parent.root for parent in ancestry.parents[:2])
    single_base, single_other = (
        by_expert(root, family, tmp_path / f"single{i}") for i, root in enumerate((base, other))
    )
    alike = merged(tmp_path / "alike", method, base, other)
    assert same(merged(tmp_path / "a", method, base, single_other), alike)
    found = merged(tmp_path / "b", method, single_base, other)
    assert found.keys() == read_tensors(single_base).keys()
    assert same(found, taken_apart(alike, family))


FLOAT32 = ("deepseek_v3", "glm4_moe", "minimax_m2", "jamba", "hunyuan_v1_moe", "ernie4_5_moe", "lfm2_moe")
"""Families some of whose tensors stay in float32."""
PREDICTING = [name for name, family in FAMILIES.items() if family.prediction]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(FLOAT32, "glm4_moe", "jamba", "ernie4_5_moe"))
def test_float32_stays_beside_bfloat16(name: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """Arithmetic is float32 for all, with one rounding of what is stored in bfloat16."""
    ancestry = ancestry_of(name)
    family = ancestry.family
    roots = [in_bfloat16(p.root, family, tmp_path / str(i)) for i, p in enumerate(ancestry.parents[:2])]
    parents, found = [read_tensors(root) for root in roots], merged(tmp_path / "out", "slerp", *roots)
    wanted = merged_states(parents, slerp(0.3), layout=family.layout, num_experts=family.num_experts)
    _, info = family.kind.load(tmp_path / "out")
    assert not info["missing_keys"] | info["mismatched_keys"]
    kept = {key for key in found if found[key].dtype == torch.float32}
    assert kept == {key for key in found if re.search(family.float32, key)}
    assert kept
    for key, tensor in found.items():
        rtol, atol = (1e-5, 1e-6) if key in kept else (2**-8, 1e-6)
        torch.testing.assert_close(tensor.double(), wanted[key], rtol=rtol, atol=atol, msg=key)


@pytest.mark.parametrize("name", one_in(2, PREDICTING))
def test_a_parent_that_lost_them(name: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """A fine-tune that transformers saved has none; the base's are kept where the recipe says so."""
    ancestry = ancestry_of(name)
    base, tuned, _ = ancestry.parents
    ancestry.model.load_state_dict(tuned.state)
    ancestry.model.save_pretrained(tmp_path / "lost")  # type: ignore[operator]
    models = [{"model": str(root), "parameters": {"weight": 0.5}} for root in (base.root, tmp_path / "lost")]
    recipe = {"merge_method": "linear", "base_model": str(base.root), "models": models}
    with pytest.raises(PlanError, match=f"lacks .* tensors(.|\n)*{re.escape(ancestry.family.prediction)}"):
        raymerge.plan(recipe).require()
    raymerge.submit({**recipe, "missing_tensors": "copy_base"}, tmp_path / "out", INLINE)
    found, kept = read_tensors(tmp_path / "out"), read_tensors(base.root)
    assert found.keys() == kept.keys()
    for key in found:
        is_lost = key.startswith(f"{ancestry.family.prediction}.")
        assert torch.equal(found[key], kept[key]) == is_lost, key


EXPERTS = r"\.experts\."
ROUTERS = r"\.(gate|router)\.(weight|bias|e_score_correction_bias|layer\.weight)$|e_score_correction_bias$"
ROUTED = ("mixtral", "deepseek_v3", "minimax_m2", "gpt_oss", "dbrx", "qwen3_next")
"""Routers with rows only, with selection biases inside or beside them, with biases, in prediction layers."""

Tensors = Mapping[str, torch.Tensor]


def mean_of(roots: tuple[str, ...], **more: Any) -> dict[str, Any]:
    entries = [{"model": root, "parameters": {"weight": 0.5}} for root in roots[:2]]
    return {"merge_method": "linear", "models": entries, **more}


def submit(recipe: Mapping[str, Any], out: Path) -> Tensors:
    raymerge.submit(recipe, out, INLINE)
    return read_tensors(out)


def assert_from(found: Tensors, wanted: Tensors, names: Callable[[str], bool]) -> int:
    """Those tensors have the very bytes of another checkpoint; returns how many there are."""
    chosen = [name for name in found if names(name)]
    assert [name for name in chosen if not torch.equal(found[name], wanted[name])] == []
    return len(chosen)


@pytest.mark.parametrize("name", one_in(2, ["deepseek_v3", "mixtral", "gpt_oss", "granitemoe"]))
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ["merge", "base", "other"])
@pytest.mark.parametrize("name", one_in(6, ROUTED))
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
