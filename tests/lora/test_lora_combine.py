"""Adapters combined: recipes, choices, and refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, peft_merge, pickled_adapter, write_adapter
from kits.adapter_merges import BASE, DOWN, Q0, Q1, SHAPES, adapter, add, recipe, with_heads
from kits.memory_meter import AllocationMeter

from raymerge.api import merge_adapters
from raymerge.checkpoints.adapters import open_adapter
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError, OptionError, PlanError
from raymerge.lora import combine
from raymerge.lora.extract import Selection, choose, compare
from raymerge.lora.writer import Combination
from raymerge.methods import keep_mask, random_key
from raymerge.options import RunOptions
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.schema import Recipe

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
    @settings(deadline=None, max_examples=10)
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
        combination = merge_adapters(made, root / "out")
        each = [(weight, deltas(root)) for weight, root in zip(weights, roots, strict=True)]
        sums = {
            name: torch.stack([times * weight * found[name] for weight, found in each]).sum(0)
            for name in BASE
        }
        check(root / "out", sums, combination)

    def test_concatenated_ranks_add_up_and_say_all(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0, r=2), adapter(tmp_path / "1", 1, [Q0], r=3)]
        made = recipe("linear", roots, adapter={"combine": "concatenate"})
        combination = merge_adapters(made, tmp_path / "out")
        assert {m.name: m.rank for m in combination.modules} == {Q0: 5, DOWN: 2, Q1: 2}
        assert {m.energy for m in combination.modules} == {1.0}
        assert combination.modules[0].total > 0

    def test_the_rank_is_the_largest_of_the_sources(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0, r=1), adapter(tmp_path / "1", 1, r=3)]
        combination = merge_adapters(recipe("linear", roots), tmp_path / "out")
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
        combination = merge_adapters(recipe("linear", roots, adapter={"energy": 0.5}), tmp_path / "out")
        ranks = {module.name: module.rank for module in combination.modules}
        assert ranks[expert] == 4
        assert ranks[Q0] < 4

    def test_a_module_that_one_lacks_counts_as_unchanged(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0), adapter(tmp_path / "1", 1, [Q0, Q1])]
        combination = merge_adapters(recipe("linear", roots, adapter={"rank": 9}), tmp_path / "out")
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
        merge_adapters(recipe("linear", roots), tmp_path / "out")
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
        combination = merge_adapters(recipe("linear", roots, adapter={"rank": 8}), tmp_path / "out")
        base = BASE | {"embed.weight": table}
        one, two = (product(root, base)["embed.weight"] for root in roots)
        found = product(tmp_path / "out", base)["embed.weight"]
        torch.testing.assert_close(found, (one + two) / 2, rtol=1e-4, atol=1e-5)
        assert combination.relative_error < 1e-5

    def test_conv1d_adapters_stay_such(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i, fan_in_fan_out=True) for i in range(2)]
        merge_adapters(recipe("linear", roots, adapter={"rank": 8}), tmp_path / "out")
        assert all(factor.transposed for factor in open_adapter(tmp_path / "out", "m").factors.values())

    def test_the_dtype_is_the_recipes(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        merge_adapters(recipe("linear", roots, dtype="bfloat16"), tmp_path / "out")
        assert {t.dtype.value for t in open_adapter(tmp_path / "out", "m").tensors.values()} == {"BF16"}


class TestSavedWhole:
    def test_linear_means_them(self, tmp_path: Path) -> None:
        made = recipe("linear", with_heads(tmp_path), [{"weight": 1.0}, {"weight": 3.0}])
        combination = merge_adapters(made, tmp_path / "out")
        assert combination.saved == ("lm_head.weight",)
        base = BASE | {"lm_head.weight": torch.zeros(4, 5)}
        assert set(product(tmp_path / "out", base)["lm_head.weight"].flatten().tolist()) == {0.75}
        assert open_adapter(tmp_path / "out", "m").replaced["lm_head.weight"].dtype == "BF16"

    def test_a_resized_embedding_with_factors_keeps_its_place(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        for each in roots:
            add(each, **{f"{Q0}.base_layer.weight": torch.ones(6, 5)})
        merge_adapters(recipe("linear", roots), tmp_path / "out")
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
        combination = merge_adapters(made, tmp_path / "out")
        each = [deltas(root) for root in roots]
        check(tmp_path / "out", {n: self.ties([d[n] for d in each], 0.4) for n in BASE}, combination)

    def test_dare_linear_draws_by_the_seed_and_the_tensors_name(self, tmp_path: Path) -> None:
        seed = 7
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        entries = [{"weight": 1.0, "density": 0.5}, {"weight": -0.5, "density": 0.25}]
        made = recipe("dare_linear", roots, entries, seed=seed, adapter={"rank": 9})
        combination = merge_adapters(made, tmp_path / "out")
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
        combination = merge_adapters(recipe("ties", roots, adapter={"rank": 9}), tmp_path / "out")
        each = [deltas(root) for root in roots]
        check(tmp_path / "out", {n: self.ties([d[n] for d in each], 1.0) for n in BASE}, combination)

    def test_pickled_adapters_give_the_bytes_of_the_same_ones_in_safetensors(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / str(i), i) for i in range(2)]
        merge_adapters(recipe("ties", roots), tmp_path / "a")
        pickled = [pickled_adapter(root, tmp_path / f"pickled{root.name}") for root in roots]
        made = merge_adapters(recipe("ties", pickled), tmp_path / "b")
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
        combination = merge_adapters(made, tmp_path / "out")
        one, two = (deltas(root) for root in roots)
        factors = {Q0: 0.25, DOWN: 0.0, Q1: 0.75}
        expected = {f"{m}.weight": k * one[f"{m}.weight"] + two[f"{m}.weight"] for m, k in factors.items()}
        check(tmp_path / "out", expected, combination)


def test_models_of_two_names_are_noted(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i, base_model_name_or_path=f"org/m{i}") for i in range(2)]
    combination = merge_adapters(recipe("linear", roots), tmp_path / "out")
    assert combination.notes[0].startswith("The adapters name different models (org/m0, org/m1)")
    assert open_adapter(tmp_path / "out", "m").config.base_model == "org/m0"


def test_equal_targets_are_kept(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i) for i in range(2)]
    merge_adapters(recipe("linear", roots), tmp_path / "out")
    fields = open_adapter(tmp_path / "out", "m").config.fields
    assert fields["target_modules"] == ["down_proj", "q_proj"]


def test_parameters_of_other_methods_are_noted(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(i), i) for i in range(2)]
    combination = merge_adapters(recipe("linear", roots, parameters={"density": 9}), tmp_path / "out")
    assert combination.notes == ("'density' has no effect on linear and is accepted for compatibility",)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "block"),
    [("linear", {}), ("linear", {"combine": "concatenate"}), ("ties", {}), ("dare_linear", {"rank": 9})],
)
def test_threads_change_no_byte_and_memory_is_what_was_stated(
    method: str, block: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = dict.fromkeys(SHAPES, (384, 256))
    roots = []
    for seed in range(3):
        tensors: dict[str, torch.Tensor] = {}
        for module, shape in shapes.items():
            tensors |= factor_tensors(module, shape, 16, torch.Generator().manual_seed(seed))
        roots.append(write_adapter(tmp_path / str(seed), tensors, lora_config(r=16)))
    made = recipe(method, roots, adapter=block)
    monkeypatch.setattr(combine, "_UNIT_BYTES", 0)
    with pytest.raises(OptionError, match="The smallest budget that works is") as caught:
        merge_adapters(made, tmp_path / "small", RunOptions(memory=1000))
    least = int(re.findall(r"works is (\d+) bytes", str(caught.value))[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    merge_adapters(made, tmp_path / "many", RunOptions(threads=3, memory=3 * least))
    with AllocationMeter() as meter:
        merge_adapters(made, tmp_path / "one", RunOptions(threads=3, memory=least))
    assert meter.peak_bytes <= least + _OBJECTS
    monkeypatch.undo()
    merge_adapters(made, tmp_path / "together")
    assert _weights(tmp_path / "one") == _weights(tmp_path / "many") == _weights(tmp_path / "together")


def _weights(root: Path) -> bytes:
    return (root / "adapter_model.safetensors").read_bytes()


def refusal(made: Recipe, root: Path) -> str:
    with pytest.raises(PlanError) as caught:
        merge_adapters(made, root / "refused")
    assert [path.name for path in root.iterdir() if "refused" in path.name] == []
    assert all(problem.remedy for problem in caught.value.problems)
    return str(caught.value)


class TestRefusals:
    def two(self, root: Path, **changes: Any) -> list[Path]:
        return [adapter(root / "0", 0), adapter(root / "1", 1, **changes)]

    def test_pickled_adapters_where_the_recipe_refuses_them(self, tmp_path: Path) -> None:
        roots = [pickled_adapter(root, tmp_path / f"pickled{root.name}") for root in self.two(tmp_path)]
        text = refusal(recipe("linear", roots, pickled_weights="refuse"), tmp_path)
        assert text.count("adapter_model.bin, and pickled weights are refused") == 2

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"merge_method": "slerp", "parameters": {"t": 0.5}}, "slerp does not merge adapters"),
            ({"merge_method": "tise"}, "there is no merge_method 'tise'. Did you mean 'ties'?"),
            ({"base_model": "base"}, "'base_model' has no meaning in a merge of adapters"),
            ({"tokenizer_source": "union"}, "'tokenizer_source' has no meaning"),
            ({"parameters": {"lamda": 1.0}}, "'lamda' is not a parameter of ties"),
            ({"parameters": {"density": 2.0}}, "density must be between 0 and 1, is 2"),
            ({"adapter": {"combine": "concatenate"}}, "which factors side by side cannot say"),
        ],
    )
    def test_recipes(self, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
        method = fields.pop("merge_method", "ties")
        entries = [{}, {}] if method == "slerp" else [{"weight": 1.0}] * 2
        assert said in refusal(recipe(method, self.two(tmp_path), entries, **fields), tmp_path)

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("merge_method: slerp\nmodels: [{model: a0}, {model: a1}]\n", "recipe.yml:1:1: slerp does not"),
            (
                "merge_method: ties\nmodels: [{model: a0}, {model: a1}]\nadapter:\n  combine: concatenate\n",
                "recipe.yml:4:3: ties changes single elements",
            ),
            ("merge_method: linear\nmodels: [{model: a0}]\nadapter: {}\n", "recipe.yml:2:1: 1 adapter is"),
        ],
    )
    def test_places_in_the_recipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
    ) -> None:
        for seed in range(2):
            adapter(tmp_path / f"a{seed}", seed)
        monkeypatch.chdir(tmp_path)
        values = "{t: 0.5}" if "slerp" in text else "{weight: 1.0}"
        made = parse_recipe(f"{text}parameters: {values}\n", "recipe.yml")
        assert isinstance(made, Recipe)
        assert line in refusal(made, tmp_path)

    def test_a_required_parameter_once(self, tmp_path: Path) -> None:
        text = refusal(recipe("linear", self.two(tmp_path), [{}, {}]), tmp_path)
        assert text.count("has no value of 'weight', which linear requires") == 1

    def test_weights_that_cancel(self, tmp_path: Path) -> None:
        made = recipe("linear", self.two(tmp_path), [{"weight": 1.0}, {"weight": -1.0}])
        assert "the weights sum to 0" in refusal(made, tmp_path)

    def test_adapters_that_cannot_be_opened_are_told_at_once(self, tmp_path: Path) -> None:
        text = refusal(recipe("linear", [tmp_path / "no", tmp_path / "nor"]), tmp_path)
        assert len(text.splitlines()) == 2
        assert "models[0].model" in text

    def test_an_adapter_on_a_model(self, tmp_path: Path) -> None:
        made = recipe("linear", [Path("base+lora"), *self.two(tmp_path)[:1]])
        assert "names an adapter on a model, in a merge of adapters" in refusal(made, tmp_path)

    def test_shapes_that_differ(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "0", 0)]
        tensors = factor_tensors(Q0, (6, 4), 4, torch.Generator())
        roots.append(write_adapter(tmp_path / "1", tensors))
        text = refusal(recipe("linear", roots), tmp_path)
        assert f"module {Q0} has linear factors of 6 x 4, but linear factors of 6 x 5" in text

    def test_orientations_that_differ(self, tmp_path: Path) -> None:
        roots = self.two(tmp_path, fan_in_fan_out=True)
        assert "fan_in_fan_out is True, unlike in" in refusal(recipe("linear", roots), tmp_path)

    def test_dora(self, tmp_path: Path) -> None:
        tensors = factor_tensors(Q0, (6, 5), 4, torch.Generator())
        tensors[f"{PREFIX}{Q0}.lora_magnitude_vector"] = torch.ones(6)
        root = write_adapter(tmp_path / "dora", tensors, lora_config(use_dora=True))
        assert "has DoRA's magnitudes" in refusal(recipe("linear", [root, *self.two(tmp_path)]), tmp_path)

    def test_biases_and_methods_that_elect(self, tmp_path: Path) -> None:
        roots = self.two(tmp_path, lora_bias=True)
        add(roots[1], **{f"{Q0}.lora_B.bias": torch.ones(6)})
        assert f"changes the bias of {Q0}, which ties does not" in refusal(recipe("ties", roots), tmp_path)

    def test_adapters_without_factors(self, tmp_path: Path) -> None:
        roots = [
            write_adapter(tmp_path / str(i), {f"{PREFIX}lm_head.weight": torch.ones(2, 2)}) for i in range(2)
        ]
        assert "no adapter has factors" in refusal(recipe("linear", roots), tmp_path)

    @pytest.mark.parametrize("block", [{}, {"combine": "concatenate"}])
    def test_nan(self, tmp_path: Path, block: dict[str, Any]) -> None:
        roots = self.two(tmp_path)
        add(roots[1], **{f"{Q0}.lora_B.weight": torch.full((6, 4), float("nan"))})
        with pytest.raises(NonFiniteError, match=f"{roots[1]}: {Q0}: has elements"):
            merge_adapters(recipe("linear", roots, adapter=block), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class TestSavedWholeRefused:
    def test_other_methods_need_the_model(self, tmp_path: Path) -> None:
        text = refusal(recipe("task_arithmetic", with_heads(tmp_path)), tmp_path)
        assert "lm_head.weight is saved whole: task_arithmetic cannot merge that" in text

    def test_an_adapter_that_lacks_many_says_so_once(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "x", 0), adapter(tmp_path / "y", 1), with_heads(tmp_path)[1]]
        norms = {f"model__layers__{layer}__input_layernorm__weight": torch.ones(5) for layer in range(2)}
        add(roots[2], **norms)
        lines = refusal(recipe("linear", [*roots, roots[0]]), tmp_path).splitlines()
        assert [line.partition(":")[0] for line in lines] == [str(root) for root in roots[:2]]
        for line in lines:
            assert ", ... (3 tensors), which others hold whole, and what they are in the model" in line
            assert "or extract with --embeddings skip --rest skip." in line

    def test_a_method_that_cannot_merge_many_says_so_once(self, tmp_path: Path) -> None:
        roots = with_heads(tmp_path)
        for root in roots:
            add(root, model__norm__weight=torch.ones(5))
        lines = refusal(recipe("ties", roots), tmp_path).splitlines()
        assert len(lines) == 1
        assert "lm_head.weight, ... (2 tensors) are saved whole: ties cannot merge that" in lines[0]

    def test_two_vocabularies(self, tmp_path: Path) -> None:
        roots = with_heads(tmp_path)
        add(roots[1], lm_head__weight=torch.zeros(6, 5))
        assert "has the shapes [4, 5], [6, 5]" in refusal(recipe("linear", roots), tmp_path)


def checkpoint(
    shapes: Mapping[str, tuple[int, ...]], dtype: DType = DType.BF16, name: str = "m", **config: Any
) -> Checkpoint:
    """A model of which nothing but the header is known."""
    tensors = {
        each: StoredTensor(each, dtype, shape, "model.safetensors", 0, 0) for each, shape in shapes.items()
    }
    return Checkpoint(name, "nowhere", tensors, (), config, (), ())


def forms(base: Checkpoint, **selection: Any) -> dict[str, str]:
    return {name: m.form for m in choose(base, Selection(**selection)) for name in m.tensors}


LLAMA: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (9, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (9, 4),
}


class TestForms:
    def test_a_dense_decoder(self) -> None:
        assert forms(checkpoint(LLAMA, model_type="llama")) == {
            "model.embed_tokens.weight": "whole",
            "model.layers.0.self_attn.q_proj.weight": "linear",
            "model.layers.0.self_attn.q_proj.bias": "bias",
            "model.layers.0.self_attn.q_norm.weight": "whole",
            "model.layers.0.mlp.up_proj.weight": "linear",
            "model.layers.0.input_layernorm.weight": "whole",
            "model.norm.weight": "whole",
            "lm_head.weight": "whole",
        }

    def test_the_rest_can_stay_out(self) -> None:
        chosen = forms(checkpoint(LLAMA, model_type="llama"), rest="skip")
        out = {name for name, form in chosen.items() if form == "out"}
        assert out == {name for name in LLAMA if "norm" in name or name.endswith("bias")}

    @pytest.mark.parametrize(
        ("model_type", "name", "shape", "form"),
        [
            ("deepseek_v3", "model.layers.3.mlp.experts.7.down_proj.weight", (4, 8), "linear"),
            ("deepseek_v3", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (6, 4), "linear"),
            ("deepseek_v3", "model.layers.3.mlp.gate.weight", (8, 4), "whole"),
            ("deepseek_v3", "model.layers.3.mlp.gate.e_score_correction_bias", (8,), "whole"),
            ("qwen2_moe", "model.layers.3.mlp.shared_expert_gate.weight", (1, 4), "linear"),
            ("mixtral", "model.layers.3.block_sparse_moe.experts.1.w2.weight", (4, 8), "linear"),
            ("qwen3_moe", "model.layers.3.mlp.experts.gate_up_proj", (8, 6, 4), "whole"),
            ("mamba", "backbone.layers.3.mixer.conv1d.weight", (8, 1, 4), "whole"),
            ("t5", "encoder.block.0.layer.0.SelfAttention.q.weight", (4, 4), "linear"),
            ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 2), "whole"),
            ("gpt2", "transformer.h.0.attn.c_attn.weight", (4, 12), "linear"),
            ("llama", "score.weight", (2, 4), "whole"),
            ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (2,), "out"),
        ],
    )
    def test_families(self, model_type: str, name: str, shape: tuple[int, ...], form: str) -> None:
        assert forms(checkpoint({name: shape}, model_type=model_type)) == {name: form}

    def test_a_matrix_with_more_than_a_bias_beside_it_is_saved_whole(self) -> None:
        path = "model.layers.0.mlp.up_proj"
        chosen = forms(checkpoint({f"{path}.weight": (4, 4), f"{path}.gain": (4,)}))
        assert set(chosen.values()) == {"whole"}


class TestSelection:
    @pytest.mark.parametrize(
        ("include", "exclude", "wanted"),
        [
            ((), (), True),
            (("*.v_proj.*",), (), False),
            (("*.v_proj.*", "model.*"), (), True),
            ((), ("*self_attn*",), False),
            (("*.Q_PROJ.*",), (), False),
        ],
    )
    def test_globs(self, include: tuple[str, ...], exclude: tuple[str, ...], wanted: bool) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert Selection(include, exclude).wants(name) == wanted

    def test_a_bias_can_be_excluded_alone(self) -> None:
        chosen = forms(checkpoint(LLAMA), exclude=("*.bias",))
        assert chosen["model.layers.0.self_attn.q_proj.weight"] == "linear"
        assert chosen["model.layers.0.self_attn.q_proj.bias"] == "out"


class TestComparing:
    def problems(self, model: Checkpoint, base: Checkpoint, **selection: Any) -> list[str]:
        chosen = Selection(**selection)
        return [str(problem) for problem in compare(model, base, choose(base, chosen), chosen)]

    def test_codes_saved_whole_are_copied(self) -> None:
        names = {"model.layers.0.mlp.experts.gate_up_proj": (2, 4, 4)}
        assert self.problems(checkpoint(names, DType.U8), checkpoint(names, DType.U8)) == []

    def test_codes_have_no_factors(self) -> None:
        model = checkpoint(LLAMA, DType.F8_E4M3, "tuned")
        found = self.problems(model, checkpoint(LLAMA, name="base"))
        assert len(found) == 2
        assert "is of F8_E4M3, BF16 in base: codes, not plain numbers" in found[0]

    def test_codes_with_scales_are_refused_with_the_way_round(self) -> None:
        q = "model.layers.0.self_attn.q_proj.weight"
        plain = checkpoint(LLAMA, name="base")
        codes = plain.tensors[q]._replace(dtype=DType.F8_E4M3)
        scale = codes._replace(name=f"{q}_scale_inv", dtype=DType.F32, shape=(1, 1))
        coded = replace(plain, name="tuned", tensors={**plain.tensors, q: codes, scale.name: scale})
        (said,) = self.problems(coded, plain)
        assert said.startswith(f"tuned: 1 of its tensors are quantised, such as {q} (fp8_block)")
        assert "raymerge convert MODEL --to bf16 -o OUT" in said
        assert self.problems(coded, coded, exclude=("*.q_proj.*",)) == []

    def test_what_is_left_out_is_not_compared(self) -> None:
        other = {**LLAMA, "model.norm.weight": (5,), "extra.weight": (1,)}
        assert len(self.problems(checkpoint(other), checkpoint(LLAMA))) == 2
        assert self.problems(checkpoint(other), checkpoint(LLAMA), exclude=("model.norm.*", "extra*")) == []
