"""Adapters merged into one: its product is the merge of their products, as the method defines it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, peft_merge, pickled_adapter, write_adapter
from kits.adapter_merges import BASE, DOWN, Q0, Q1, SHAPES, adapter, add, recipe, with_heads
from kits.memory_meter import AllocationMeter

from raymerge.checkpoints.adapters import open_adapter
from raymerge.errors import OptionError
from raymerge.lora import Combination, combine_recipe
from raymerge.methods import keep_mask, random_key

_OBJECTS = 256 << 10
"""Bytes of Python's own objects, which are counted too."""


def product(root: Path, base: Mapping[str, torch.Tensor] = BASE) -> dict[str, torch.Tensor]:
    """What the adapter adds, float64, by peft's rule."""
    return peft_merge({name: base[name] for name in base}, root)


def deltas(root: Path) -> dict[str, torch.Tensor]:
    """The same for an adapter that lacks some modules."""
    having = {f"{module}.weight" for module in open_adapter(root, "m").factors}
    found = peft_merge({name: tensor for name, tensor in BASE.items() if name in having}, root)
    return {name: found.get(name, tensor.double()) for name, tensor in BASE.items()}


def check(out: Path, expected: Mapping[str, torch.Tensor], combination: Combination) -> None:
    found = product(out)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert combination.relative_error < 1e-5
    assert combination.output == str(out)


class TestAddition:
    @settings(deadline=None, max_examples=20)
    @given(
        weights=st.lists(st.floats(-2, 2).filter(lambda w: abs(w) > 0.1), min_size=2, max_size=3),
        ranks=st.lists(st.integers(1, 4), min_size=3, max_size=3),
        combine=st.sampled_from(["svd", "concatenate"]),
        method=st.sampled_from(["linear", "task_arithmetic"]),
        rslora=st.booleans(),
        is_plain=st.booleans(),
    )
    def test_any_weights_and_ranks(
        self, tmp_path_factory: pytest.TempPathFactory, weights: list[float], ranks: list[int], combine: str,
        method: str, rslora: bool, is_plain: bool,
    ) -> None:  # fmt: skip
        root = tmp_path_factory.mktemp("merge")
        roots = [
            adapter(root / str(i), i, r=rank, lora_alpha=3 + i, use_rslora=rslora and i == 0)
            for i, rank in enumerate(ranks[: len(weights)])
        ]
        is_plain = is_plain or abs(sum(weights)) < 0.5
        values = {"normalize": not is_plain} if method == "linear" else {"lambda": 1.0 if is_plain else 0.5}
        times = 1.0 if is_plain else 1 / sum(weights) if method == "linear" else 0.5
        block: dict[str, Any] = {"combine": combine} | ({"rank": 20} if combine == "svd" else {})
        made = recipe(method, roots, [{"weight": w} for w in weights], parameters=values, adapter=block)
        combination = combine_recipe(made, root / "out")
        each = [(weight, deltas(root)) for weight, root in zip(weights, roots, strict=True)]
        sums = {
            name: torch.stack([times * weight * found[name] for weight, found in each]).sum(0)
            for name in BASE
        }
        check(root / "out", sums, combination)

    def test_concatenated_ranks_add_up_and_say_all(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0, r=2), adapter(tmp_path / "1", 1, [Q0], r=3)]
        made = recipe("linear", roots, adapter={"combine": "concatenate"})
        combination = combine_recipe(made, tmp_path / "out")
        assert {m.name: m.rank for m in combination.modules} == {Q0: 5, DOWN: 2, Q1: 2}
        assert {m.energy for m in combination.modules} == {1.0}
        assert combination.modules[0].total > 0

    def test_the_rank_is_the_largest_of_the_sources(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0, r=1), adapter(tmp_path / "1", 1, r=3)]
        combination = combine_recipe(recipe("linear", roots), tmp_path / "out")
        assert {module.rank for module in combination.modules} == {3}
        assert 0 < combination.relative_error < 1
        one, two = (deltas(root) for root in roots)
        mean = {name: 0.5 * (one[name] + two[name]) for name in one}
        found = product(tmp_path / "out")
        missing = math.sqrt(sum(float((found[n] - mean[n]).square().sum()) for n in mean))
        whole = math.sqrt(sum(float(mean[n].square().sum()) for n in mean))
        assert combination.relative_error == pytest.approx(missing / whole, rel=1e-3)

    def test_energy_makes_ranks_smaller_but_not_those_of_experts(self, tmp_path: Path) -> None:
        expert = "model.layers.0.mlp.experts.0.up_proj"
        roots = []
        for index in range(2):
            tensors = factor_tensors(expert, (6, 6), 4, torch.Generator().manual_seed(index))
            tensors |= factor_tensors(Q0, (6, 6), 4, torch.Generator().manual_seed(index))
            roots.append(write_adapter(tmp_path / str(index), tensors))
        combination = combine_recipe(recipe("linear", roots, adapter={"energy": 0.5}), tmp_path / "out")
        ranks = {module.name: module.rank for module in combination.modules}
        assert ranks[expert] == 4
        assert ranks[Q0] < 4

    def test_a_module_that_one_lacks_counts_as_unchanged(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0), adapter(tmp_path / "1", 1, [Q0, Q1])]
        combination = combine_recipe(recipe("linear", roots, adapter={"rank": 9}), tmp_path / "out")
        one, two = (deltas(root) for root in roots)
        check(tmp_path / "out", {name: 0.5 * (one[name] + two[name]) for name in one}, combination)
        assert combination.notes == (
            f"{roots[1]} does not change {DOWN}: it counts there as a change of zero.",
        )
        targets = open_adapter(tmp_path / "out", "m").config.fields["target_modules"]
        assert set(targets) == set(SHAPES)

    def test_biases_of_the_factors_are_added(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i, lora_bias=True) for i in range(2)]
        one, two = torch.randn(6), torch.randn(6)
        add(roots[0], **{f"{Q0}.lora_B.bias": one})
        add(roots[1], **{f"{Q0}.lora_B.bias": two})
        combine_recipe(recipe("linear", roots), tmp_path / "out")
        base = BASE | {f"{Q0}.bias": torch.zeros(6)}
        found = product(tmp_path / "out", base)[f"{Q0}.bias"]
        torch.testing.assert_close(found, (2.0 * (one + two) / 2).double(), rtol=1e-5, atol=1e-6)

    def test_embeddings_have_factors_too(self, tmp_path: Path) -> None:
        roots, table = [], torch.zeros(9, 5)
        for index in range(2):
            roots.append(
                adapter(tmp_path / str(index), index, target_modules=["q_proj", "down_proj", "embed"])
            )
            add(
                roots[-1],
                embed__lora_embedding_A=torch.randn(4, 9),
                embed__lora_embedding_B=torch.randn(5, 4),
            )
        combination = combine_recipe(recipe("linear", roots, adapter={"rank": 8}), tmp_path / "out")
        base = BASE | {"embed.weight": table}
        one, two = (product(root, base)["embed.weight"] for root in roots)
        found = product(tmp_path / "out", base)["embed.weight"]
        torch.testing.assert_close(found, (one + two) / 2, rtol=1e-4, atol=1e-5)
        assert combination.relative_error < 1e-5

    def test_conv1d_adapters_stay_such(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i, fan_in_fan_out=True) for i in range(2)]
        combine_recipe(recipe("linear", roots, adapter={"rank": 8}), tmp_path / "out")
        assert all(factor.transposed for factor in open_adapter(tmp_path / "out", "m").factors.values())

    def test_the_dtype_is_the_recipes(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        combine_recipe(recipe("linear", roots, dtype="bfloat16"), tmp_path / "out")
        assert {t.dtype.value for t in open_adapter(tmp_path / "out", "m").tensors.values()} == {"BF16"}


class TestSavedWhole:
    def test_linear_means_them(self, tmp_path: Path) -> None:
        made = recipe("linear", with_heads(tmp_path), [{"weight": 1.0}, {"weight": 3.0}])
        combination = combine_recipe(made, tmp_path / "out")
        assert combination.saved == ("lm_head.weight",)
        base = BASE | {"lm_head.weight": torch.zeros(4, 5)}
        assert set(product(tmp_path / "out", base)["lm_head.weight"].flatten().tolist()) == {0.75}
        assert open_adapter(tmp_path / "out", "m").replaced["lm_head.weight"].dtype == "BF16"

    def test_a_resized_embedding_with_factors_keeps_its_place(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        for each in roots:
            add(each, **{f"{Q0}.base_layer.weight": torch.ones(6, 5)})
        combine_recipe(recipe("linear", roots), tmp_path / "out")
        assert f"{PREFIX}{Q0}.base_layer.weight" in open_adapter(tmp_path / "out", "m").tensors


class TestElements:
    def ties(self, deltas: Sequence[torch.Tensor], density: float) -> torch.Tensor:
        """TIES by its definition: trim, elect, mean of those that agree."""
        trimmed = []
        for delta in deltas:
            kept = math.floor(density * delta.numel())
            limit = delta.abs().flatten().sort(descending=True).values[kept - 1]
            trimmed.append(torch.where(delta.abs() >= limit, delta, 0.0))
        stacked = torch.stack(trimmed)
        sign = torch.where(stacked.sum(0) < 0, -1.0, 1.0)
        agree = (stacked.sign() == sign) & (stacked != 0)
        return (stacked * agree).sum(0) / agree.sum(0).clamp_min(1)

    def test_ties(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(3)]
        made = recipe("ties", roots, [{"weight": 1.0, "density": 0.4}] * 3, adapter={"rank": 9})
        combination = combine_recipe(made, tmp_path / "out")
        each = [deltas(root) for root in roots]
        check(tmp_path / "out", {n: self.ties([d[n] for d in each], 0.4) for n in BASE}, combination)

    def test_dare_linear_draws_by_the_seed_and_the_tensors_name(self, tmp_path: Path) -> None:
        seed = 7
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        entries = [{"weight": 1.0, "density": 0.5}, {"weight": -0.5, "density": 0.25}]
        made = recipe("dare_linear", roots, entries, seed=seed, adapter={"rank": 9})
        combination = combine_recipe(made, tmp_path / "out")
        expected = {}
        for name, start in BASE.items():
            total = torch.zeros(start.shape, dtype=torch.float64)
            for index, (root, entry) in enumerate(zip(roots, entries, strict=True)):
                key, number = random_key(seed, name, index), total.numel()
                mask = keep_mask(key, 0, number, entry["density"], torch.device("cpu")).view(total.shape)
                total += entry["weight"] * deltas(root)[name] * mask / entry["density"]
            expected[name] = total
        check(tmp_path / "out", expected, combination)

    def test_a_module_that_one_lacks(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0), adapter(tmp_path / "1", 1, [Q0])]
        combination = combine_recipe(recipe("ties", roots, adapter={"rank": 9}), tmp_path / "out")
        each = [deltas(root) for root in roots]
        check(tmp_path / "out", {n: self.ties([d[n] for d in each], 1.0) for n in BASE}, combination)

    def test_pickled_adapters_give_the_bytes_of_the_same_ones_in_safetensors(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        combine_recipe(recipe("ties", roots), tmp_path / "a")
        pickled = [pickled_adapter(root, tmp_path / f"pickled{root.name}") for root in roots]
        made = combine_recipe(recipe("ties", pickled), tmp_path / "b")
        one, two = ((tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("a", "b"))
        assert one == two
        assert made.notes[0].endswith(
            "pickled0: its tensors are read from a pickled file: adapter_model.bin."
        )


class TestParameters:
    def test_filters_gradients_and_roles(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        weight = [{"role": "mlp", "value": 0.0}, {"value": [0.25, 0.75]}]
        made = recipe("task_arithmetic", roots, [{"weight": weight}, {"weight": 1.0}], adapter={"rank": 8})
        combination = combine_recipe(made, tmp_path / "out")
        one, two = (deltas(root) for root in roots)
        factors = {Q0: 0.25, DOWN: 0.0, Q1: 0.75}
        expected = {f"{m}.weight": k * one[f"{m}.weight"] + two[f"{m}.weight"] for m, k in factors.items()}
        check(tmp_path / "out", expected, combination)


def test_models_of_two_names_are_noted(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i, base_model_name_or_path=f"org/m{i}") for i in range(2)]
    combination = combine_recipe(recipe("linear", roots), tmp_path / "out")
    assert combination.notes[0].startswith("The adapters name different models (org/m0, org/m1)")
    assert open_adapter(tmp_path / "out", "m").config.base_model == "org/m0"


def test_equal_targets_are_kept(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i) for i in range(2)]
    combine_recipe(recipe("linear", roots), tmp_path / "out")
    fields = open_adapter(tmp_path / "out", "m").config.fields
    assert fields["target_modules"] == ["down_proj", "q_proj"]


def test_modules_are_told_as_they_are_done(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / "0", 0, [Q0, DOWN]), adapter(tmp_path / "1", 1, [Q0, Q1], r=2)]
    told: list[tuple[str, int, int]] = []
    combination = combine_recipe(
        recipe("ties", roots),
        tmp_path / "out",
        on_module=lambda module, total: told.append((module.name, module.rank, total)),
    )
    assert told == [(module.name, module.rank, 3) for module in combination.modules]
    assert {name for name, _, _ in told} == {Q0, DOWN, Q1}


def test_parameters_of_other_methods_are_noted(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i) for i in range(2)]
    combination = combine_recipe(recipe("linear", roots, parameters={"density": 9}), tmp_path / "out")
    assert combination.notes == ("'density' has no effect on linear and is accepted for compatibility",)


@pytest.mark.parametrize(
    ("method", "block"),
    [("linear", {}), ("linear", {"combine": "concatenate"}), ("ties", {}), ("dare_linear", {"rank": 9})],
)
def test_threads_change_no_byte_and_memory_is_what_was_stated(
    method: str, block: dict[str, Any], tmp_path: Path
) -> None:
    shapes = dict.fromkeys(SHAPES, (384, 256))
    roots = []
    for seed in range(3):
        tensors: dict[str, torch.Tensor] = {}
        for module, shape in shapes.items():
            tensors |= factor_tensors(module, shape, 16, torch.Generator().manual_seed(seed))
        roots.append(write_adapter(tmp_path / str(seed), tensors, lora_config(r=16)))
    made = recipe(method, roots, adapter=block)
    with pytest.raises(OptionError, match="The smallest budget that works is") as caught:
        combine_recipe(made, tmp_path / "small", memory=1000)
    least = int(re.findall(r"works is (\d+) bytes", str(caught.value))[0])
    assert not (tmp_path / "small").exists()
    combine_recipe(made, tmp_path / "many", threads=3, memory=3 * least)
    with AllocationMeter() as meter:
        combine_recipe(made, tmp_path / "one", threads=3, memory=least)
    assert meter.peak_bytes <= least + _OBJECTS
    one, many = ((tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("one", "many"))
    assert one == many
