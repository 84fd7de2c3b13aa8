"""``out_format`` with formats that the parents do not have: what is stored, and that it is read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.merge_cases import merge
from kits.quantised_merges import changed_bytes, check_merged, config_of, linear, merged_values, plain_twin
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking

from raymerge import api
from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.errors import UserError
from raymerge.merge_plan.report import equal_tensors
from raymerge.planner.explain import tensor_lines

UP = "model.layers.1.mlp.experts.2.up_proj"
EXPERTS = "model.layers.1.mlp.experts"
OUT_INT4: Mapping[str, Any] = {"out_format": "int4"}
PARTS: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    "int4": {
        "weight_packed": (torch.int32, (128, 32)),
        "weight_scale": (torch.bfloat16, (128, 8)),
        "weight_shape": (torch.int64, (2,)),
    },
    "mxfp4": {"weight_packed": (torch.uint8, (128, 128)), "weight_scale": (torch.uint8, (128, 8))},
    "nvfp4": {
        "weight_packed": (torch.uint8, (128, 128)),
        "weight_scale": (torch.float8_e4m3fn, (128, 16)),
        "weight_global_scale": (torch.float32, (1,)),
    },
    "fp8_channel": {"weight": (torch.float8_e4m3fn, (128, 256)), "weight_scale": (torch.bfloat16, (128, 1))},
    "fp8_tensor": {"weight": (torch.float8_e4m3fn, (128, 256)), "weight_scale": (torch.bfloat16, (1,))},
}
"""What ``UP`` [128, 256] is stored as, by what follows its module's name."""


@dataclass(frozen=True, slots=True)
class Parents:
    """Two quantised models, and the same in bfloat16."""

    quantised: tuple[QuantisedModel, ...]
    plain: tuple[QuantisedModel, ...]


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    root = tmp_path_factory.mktemp("parents")
    models = tuple(deepseek_v3(root / f"fp8-{seed}", seed, ragged=False) for seed in (1, 2))
    return Parents(models, tuple(plain_twin(each, root / f"plain-{n}") for n, each in enumerate(models)))


def _mean(*models: QuantisedModel | Path, **more: Any) -> dict[str, Any]:
    roots = [each if isinstance(each, Path) else each.root for each in models]
    entries = [{"model": str(root), "parameters": {"weight": 0.5}} for root in roots]
    return {"merge_method": "linear", "models": entries, **more}


def _parts(root: Path, module: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        name.removeprefix(f"{module}."): (tensor.dtype, tuple(tensor.shape))
        for name, tensor in read_tensors(root).items()
        if name.startswith(f"{module}.")
    }


def _packed(root: Path) -> set[str]:
    """Modules that are stored as codes."""
    found = read_tensors(root)
    endings = (".weight_scale", ".weight_scale_inv")
    return {name.removesuffix(ending) for name in found for ending in endings if name.endswith(ending)}


def _table(root: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config_of(root)["quantization_config"]
    return found


def _check_read_back(root: Path, again: Path) -> None:
    """A merge of a model with itself is the model, bytes and config, so that all of it is read."""
    assert api.verify(root).problems == ()
    merge(_mean(root, root), again)
    assert changed_bytes(again, root) == set()
    assert config_of(again) == config_of(root)


@pytest.mark.parametrize("form", PARTS)
def test_plain_parents_become_codes_that_are_read_back(form: str, parents: Parents, tmp_path: Path) -> None:
    merge(_mean(*parents.plain, out_format=form), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(parents.plain, linear(1, 1)), parents.plain)
    assert _parts(tmp_path / "out", UP) == PARTS[form]
    modules = {name.removesuffix(".weight") for name in parents.quantised[0].quantised}
    assert _packed(tmp_path / "out") == modules
    table = _table(tmp_path / "out")
    assert table["quant_method"] == "compressed-tensors"
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(table["ignore"])
    assert modules.isdisjoint(table["ignore"])
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_int4_is_what_kimi_has(parents: Parents, tmp_path: Path) -> None:
    """Codes of the merge in float32, the shape beside them, and a table of the same kind."""
    merge(_mean(*parents.plain, out_format="int4"), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    assert found[f"{UP}.weight_shape"].tolist() == [128, 256]
    assert found["model.layers.0.self_attn.o_proj.weight_shape"].tolist() == [256, 128]
    values = [read_tensors(each.root)[f"{UP}.weight"].float() for each in parents.plain]
    packing = usual_quant_spec(INT4, (128, 256))
    codes, scales = codec_of(INT4).encode(packing, values[0] * 0.5 + values[1] * 0.5)
    assert torch.equal(found[f"{UP}.weight_packed"].view(torch.uint8).view(-1), codes)
    assert torch.equal(found[f"{UP}.weight_scale"].view(torch.uint8).view(-1), scales)
    kimi = config_of(kimi_k2_thinking(tmp_path / "kimi", 1).root)["quantization_config"]
    assert _table(tmp_path / "out").keys() == kimi.keys()
    mine, theirs = (table["config_groups"]["group_0"] for table in (_table(tmp_path / "out"), kimi))
    assert mine["weights"].items() <= theirs["weights"].items()
    assert {k: v for k, v in mine.items() if k != "weights"} == {
        k: v for k, v in theirs.items() if k != "weights"
    }


def test_codes_of_one_format_become_codes_of_another(parents: Parents, tmp_path: Path) -> None:
    models = parents.quantised
    merge(_mean(*models, out_format="mxfp4"), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)
    assert _packed(tmp_path / "out") == {name.removesuffix(".weight") for name in models[0].quantised}
    assert not any(name.endswith("_scale_inv") for name in read_tensors(tmp_path / "out"))
    assert "weight_block_size" not in _table(tmp_path / "out")


def test_a_shape_is_told_of_as_bytes_of_the_plan(parents: Parents) -> None:
    plan = api.plan(
        {"merge_method": "passthrough", "models": [{"model": str(parents.plain[0].root)}], **OUT_INT4}
    )
    told = {line.name: line for line in tensor_lines(plan) if line.name.startswith(f"{UP}.")}
    assert {name.rpartition(".")[2]: line.disposition for name, line in told.items()} == dict.fromkeys(
        PARTS["int4"], "converted"
    )
    shape = told[f"{UP}.weight_shape"]
    assert (shape.sources, shape.expressions) == ((), (f"bytes {'80' + '00' * 8 + '01' + '00' * 6}",))


def test_equal_shapes_are_no_news(parents: Parents) -> None:
    plan = api.plan(_mean(*parents.plain, **OUT_INT4))
    constants = [plan.expressions[row["expression"]].is_constant for row in plan["rows"].to_pylist()]
    digests = {number: "the same" for number, is_constant in enumerate(constants) if is_constant}
    assert len(digests) == len(parents.quantised[0].quantised)
    assert equal_tensors(plan, digests) == ()


def test_the_other_tensors_of_a_quantised_base_become_like_their_neighbours(tmp_path: Path) -> None:
    """Modules that its table left plain are no longer listed."""
    models = [kimi_k2_thinking(tmp_path / name, seed) for seed, name in enumerate("ab")]
    merge(_mean(*models, out_format="int4"), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)
    attention = "model.layers.0.self_attn.o_proj"
    assert _parts(tmp_path / "out", attention).keys() == PARTS["int4"].keys()
    listed = _table(tmp_path / "out")["ignore"]
    assert "lm_head" in listed
    assert not any("self_attn" in each for each in listed)
    assert _table(tmp_path / "out")["config_groups"] == _table(models[0].root)["config_groups"]
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_scales_are_powers_of_two_where_those_of_the_base_are(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1, scales="ue8m0 F32")
    asked = [{"filter": "eh_proj", "value": "fp8_block"}, "same"]
    merge(_mean(model, model, out_format=asked), tmp_path / "out")
    scales = read_tensors(tmp_path / "out")["model.layers.2.eh_proj.weight_scale_inv"]
    assert scales.dtype is torch.float32
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    assert _table(tmp_path / "out") == _table(model.root)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    root = tmp_path_factory.mktemp("gpt-oss")
    models = tuple(gpt_oss(root / f"mxfp4-{seed}", seed) for seed in (1, 2))
    return Parents(models, tuple(plain_twin(each, root / f"plain-{n}") for n, each in enumerate(models)))


def test_experts_of_gpt_oss_become_mxfp4_as_it_is_published(gpt: Parents, tmp_path: Path) -> None:
    merge(_mean(*gpt.plain, out_format="mxfp4"), tmp_path / "out")
    found, published = read_tensors(tmp_path / "out"), read_tensors(gpt.quantised[0].root)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in published.items()
    }
    check_merged(tmp_path / "out", merged_values(gpt.plain, linear(1, 1)), gpt.plain)
    table = _table(tmp_path / "out")
    assert table["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.router"} <= set(
        table["modules_to_not_convert"]
    )
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_mxfp4_in_bfloat16_becomes_the_bytes_that_it_was(gpt: Parents, tmp_path: Path) -> None:
    """All of its numbers are codes times powers of two, which bfloat16 holds."""
    recipe = {"merge_method": "passthrough", "models": [{"model": str(gpt.plain[0].root)}]}
    merge({**recipe, "out_format": "mxfp4"}, tmp_path / "out")
    assert changed_bytes(tmp_path / "out", gpt.quantised[0].root) == set()


def _said(recipe: Mapping[str, Any]) -> str:
    problems = api.plan(recipe).problems
    assert all(problem.remedy for problem in problems)
    return "\n".join(map(str, problems))


def test_what_a_format_cannot_hold_is_named_with_a_remedy(tmp_path: Path) -> None:
    """Columns that groups do not divide: a line before the other leaves those tensors out."""
    model = plain_twin(deepseek_v3(tmp_path / "a", 1), tmp_path / "plain")
    said = _said(_mean(model, model, out_format="int4"))
    assert "3 tensors cannot be stored as int4: int4 needs columns that 32 divides" in said
    assert "model.layers.0.self_attn.kv_b_proj.weight [256, 208]" in said
    assert "{glob: 'model.layers.0.self_attn.kv_b_proj.weight', value: bf16}" in said
    asked = [{"glob": "*.kv_b_proj.weight", "value": "bf16"}, "int4"]
    assert _said(_mean(model, model, out_format=asked)) == ""


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ("int4", "compressed-tensors packs the weight of one module, a matrix, and no stack of them"),
        ([{"role": "attention", "value": "mxfp4"}], "gpt-oss has its experts in it and nothing else"),
    ],
)
def test_what_no_loader_takes_is_refused(asked: object, fault: str, gpt: Parents) -> None:
    said = _said(_mean(*gpt.plain, out_format=asked))
    assert fault in said
    assert "choose another format" in said


def test_formats_that_no_table_says_together_are_refused_with_both(tmp_path: Path) -> None:
    model = kimi_k2_thinking(tmp_path / "a", 1)
    said = _said(_mean(model, model, out_format=[{"role": "attention", "value": "fp8_block"}, "same"]))
    assert "stored as fp8_block (such as model.layers.0.self_attn." in said
    assert f"and as int4 (such as {EXPERTS}.0." in said
    assert "'out_format: fp8_block'" in said
    assert _said(_mean(model, model, out_format="fp8_block")) == ""


def test_a_shape_that_lies_is_refused(tmp_path: Path) -> None:
    """Where it is merged, and where it would be copied."""
    model = kimi_k2_thinking(tmp_path / "a", 1)
    name = f"{EXPERTS}.0.up_proj.weight_shape"
    lies = {**read_tensors(model.root), name: torch.tensor([999, 7])}
    lying = write_checkpoint(tmp_path / "lie", lies, config_of(model.root))
    for recipe in (_mean(lying, lying), {"merge_method": "passthrough", "models": [{"model": str(lying)}]}):
        with pytest.raises(UserError, match=rf"{re.escape(name)} says \[999, 7\]"):
            merge(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["int4", "fp8_block"])
def test_embeddings_are_not_made_codes(form: str, parents: Parents) -> None:
    """They are no linear layers, and loaders look for codes of those alone."""
    said = _said(_mean(*parents.plain, out_format=[{"role": "embedding", "value": form}]))
    assert f"tensors cannot be stored as {form}: loaders take codes for the weights of linear layers" in said
    assert "model.embed_tokens.weight" in said


def test_a_head_in_codes_is_a_head(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "plain", 1, tie=False)
    merge({**_mean(model, model), "out_format": [{"role": "head", "value": "int4"}]}, tmp_path / "packed")
    assert "lm_head.weight_packed" in read_tensors(tmp_path / "packed")
    merge(_mean(tmp_path / "packed", tmp_path / "packed"), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", tmp_path / "packed") == set()


def test_heads_of_other_tokens_are_not_made_codes(tmp_path: Path) -> None:
    small, large = (tiny_llama(tmp_path / str(vocab), 1, vocab=vocab) for vocab in (32, 40))
    recipe = _mean(small, large, embedding_sizes="common")
    assert _said(recipe) == ""
    said = _said({**recipe, "out_format": [{"role": "head", "value": "int4"}]})
    assert "1 tensors have other rows than those that are stored" in said
    assert "lm_head.weight" in said


@pytest.mark.parametrize("kind", ["GPTQ", "FP8 without scales"])
def test_plain_numbers_are_not_made_of_codes_that_are_not_read(kind: str, tmp_path: Path) -> None:
    """Neither are they passed on as they are where plain ones are asked for."""
    twin = plain_twin(gpt_oss(tmp_path / "a", 1), tmp_path / "twin")
    tensors, config = read_tensors(twin.root), config_of(twin.root)
    name = "model.layers.0.self_attn.q_proj.weight"
    matrix = tensors.pop(name)
    if kind == "GPTQ":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
        tensors[name.replace("weight", "qweight")] = torch.zeros(8, 128, dtype=torch.int32)
        tensors[name.replace("weight", "scales")] = torch.ones(1, 128, dtype=torch.float16)
    else:
        config["quantization_config"] = {"quant_method": "other"}
        tensors[name] = matrix.to(torch.float8_e4m3fn)
    root = write_checkpoint(tmp_path / "codes", tensors, config)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(root)}]}
    assert _said({**recipe, "out_format": "same"}) == ""
    for asked in ("bf16", [{"role": "attention", "value": "bf16"}, "same"]):
        said = _said({**recipe, "out_format": asked})
        assert f"quantised as {'gptq' if kind == 'GPTQ' else 'other'}" in said
