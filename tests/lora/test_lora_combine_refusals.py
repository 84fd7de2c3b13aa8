"""Adapters that cannot be merged: all reasons at once, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, pickled_adapter, write_adapter
from kits.adapter_merges import Q0, adapter, add, recipe, with_heads

from raymerge.errors import NonFiniteError, PlanError, TargetError
from raymerge.lora import combine_recipe
from raymerge.recipes import Recipe, parse_recipe


def refusal(made: Recipe, root: Path) -> str:
    with pytest.raises(PlanError) as caught:
        combine_recipe(made, root / "refused")
    assert not (root / "refused").exists()
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
            (
                "merge_method: linear\nmodels: [{model: a0}]\nadapter: {}\n",
                "recipe.yml:2:1: 1 adapter is given",
            ),
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

    def test_one_adapter(self, tmp_path: Path) -> None:
        assert "1 adapter is given" in refusal(recipe("linear", self.two(tmp_path)[:1]), tmp_path)

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
            combine_recipe(recipe("linear", roots, adapter=block), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_taken_place(self, tmp_path: Path) -> None:
        roots = self.two(tmp_path)
        with pytest.raises(TargetError):
            combine_recipe(recipe("linear", roots), roots[0])


class TestSavedWhole:
    def test_one_alone_has_them(self, tmp_path: Path) -> None:
        roots = [adapter(tmp_path / "x", 0), with_heads(tmp_path)[1]]
        assert "holds no lm_head.weight, which others hold whole" in refusal(
            recipe("linear", roots), tmp_path
        )

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
