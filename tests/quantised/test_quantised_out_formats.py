"""``out_format``: what is stored as codes, and that the config says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.merge_cases import merge
from kits.quantised_merges import changed_bytes, check_merged, config_of, linear, merged_values, plain_twin
from kits.quantised_models import deepseek_v3

from raymerge import api
from raymerge.errors import RecipeError

_ATTENTION = ".self_attn."


def _recipe(*roots: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(root), "parameters": {"weight": 0.5}} for root in roots]
    return {"merge_method": "linear", "models": entries, **more}


def _codes(root: Path) -> set[str]:
    return {name for name, tensor in read_tensors(root).items() if tensor.dtype is torch.float8_e4m3fn}


def _table(root: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config_of(root)["quantization_config"]
    return found


def test_plain_parents_become_block_fp8(tmp_path: Path) -> None:
    """The matrices of attention and feed-forward layers, as publishers do it; the others are listed."""
    models = [deepseek_v3(tmp_path / str(seed), seed) for seed in (1, 2)]
    plain = [plain_twin(model, tmp_path / f"{number}-plain") for number, model in enumerate(models)]
    merge(_recipe(*(each.root for each in plain), out_format="fp8_block"), tmp_path / "out")
    assert _codes(tmp_path / "out") == models[0].quantised
    check_merged(tmp_path / "out", merged_values(plain, linear(1, 1)), plain)
    table = _table(tmp_path / "out")
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", [128, 128])
    assert "lm_head" in table["modules_to_not_convert"]
    assert api.verify(tmp_path / "out").problems == ()


def test_formats_by_role_leave_the_rest_as_it_was(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / str(seed), seed) for seed in (1, 2)]
    chosen = [{"role": "attention", "value": "bf16"}, "same"]
    merge(_recipe(*(each.root for each in models), out_format=chosen), tmp_path / "out")
    freed = {name for name in models[0].quantised if _ATTENTION in name}
    assert freed
    assert _codes(tmp_path / "out") == models[0].quantised - freed
    listed = set(_table(tmp_path / "out")["modules_to_not_convert"])
    assert {name.removesuffix(".weight") for name in freed} <= listed
    assert not any(
        name.endswith("_scale_inv") and _ATTENTION in name for name in read_tensors(tmp_path / "out")
    )


def test_experts_that_are_all_plain_are_listed_as_the_one_module_that_loaders_fuse(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1).root

    def listed(*lines: Any) -> set[str]:
        made = api.plan(_recipe(model, model, out_format=[*lines, "same"])).require()
        modules = made.manifest["config"]["quantization_config"].get("modules_to_not_convert") or ()
        return {name for name in modules if name.endswith(".experts")}

    experts = {name.partition(".experts.")[0] + ".experts" for name in _codes(model) if ".experts." in name}
    assert len(experts) > 1
    assert listed({"role": "expert", "value": "bf16"}) == experts
    assert listed({"glob": "*.experts.0.*", "value": "bf16"}) == listed() == set()


def test_same_is_stronger_than_dtype(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model.root)}], "dtype": "bfloat16"}
    merge({**recipe, "out_format": "same"}, tmp_path / "out")
    assert changed_bytes(tmp_path / "out", model.root) == set()
    merge(recipe, tmp_path / "plain")
    assert not _codes(tmp_path / "plain")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("fp8", "'fp8' is not known here"),
        ([], "the list is empty"),
        ([{"role": "attention"}], "out_format"),
        ([{"rol": "attention", "value": "bf16"}], "unknown key 'rol'"),
        ([7], "7 is a number"),
    ],
)
def test_a_format_that_is_none_is_refused_with_those_that_are(asked: object, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        api.read_recipe(_recipe(Path("a"), Path("b"), out_format=asked))
    assert said in str(caught.value)


def test_tensors_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1)
    asked = [{"glob": "*layernorm*", "value": "fp8_block"}]
    found = api.plan(_recipe(model.root, model.root, out_format=asked)).problems
    assert [problem.where for problem in found] == ["recipe: out_format"]
    assert "model.layers.0.input_layernorm.weight [256]" in found[0].what
