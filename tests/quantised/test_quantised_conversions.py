"""Formats of the output: converted, fresh, and chosen by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama, write_checkpoint
from kits.float64_merges import linear
from kits.marks import slow_but
from kits.merge_cases import merge
from kits.plan_maker import good, header_checkpoint, refusals
from kits.quantised_merges import (
    MAKERS,
    changed_bytes,
    check_merged,
    check_stored_alike,
    in_plain_layout,
    merged_values,
    plain_twin,
    read_numbers,
    same_bytes,
)
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.quantised_numbers import Values
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model

from raymerge import api
from raymerge.api import conversion
from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.dtypes import DType
from raymerge.errors import RecipeError
from raymerge.merge_plan.report import found_duplicates
from raymerge.planner.explain import tensor_lines


def loaded(root: Path, **options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of a checkpoint in float32, and what is reported of loading it.

    MXFP4 is decoded on the way. FP8 models load on a CPU without accelerate, but transformers asks for it
    before it looks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
    from transformers.quantizers import quantizer_finegrained_fp8

    table = (
        getattr(AutoConfig.from_pretrained(root, local_files_only=True), "quantization_config", None) or {}
    )
    if table.get("quant_method") == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with mock.patch.object(quantizer_finegrained_fp8, "is_accelerate_available", return_value=True):
        model, report = AutoModelForCausalLM.from_pretrained(
            root, dtype=torch.float32, output_loading_info=True, local_files_only=True, **options
        )
    return model, {kind: names for kind, names in report.items() if names}


FEW = slow_but(MAKERS, "DeepSeek-V3 F32", "gpt-oss")
EXACT = ("DeepSeek-V3 ue8m0 F32", "DeepSeek-V3 U8", "gpt-oss")
"""Layouts whose scales are powers of two, so that bfloat16 holds whatever the codes mean."""
_TOKENS = torch.tensor([[3, 4, 5, 9]])


def _plain(values: Mapping[str, Values]) -> dict[str, Values]:
    return {name: in_plain_layout(name, each) for name, each in values.items()}


def _mean(*models: QuantisedModel) -> dict[str, Values]:
    return merged_values(models, linear(*[1] * len(models)))


@pytest.mark.parametrize("kind", FEW)
def test_a_conversion_to_bfloat16_rounds_once(kind: str, tmp_path: Path) -> None:
    model = MAKERS[kind](tmp_path / "a", 1)
    merge(conversion(model.root, "bf16"), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    assert found.keys() == model.values.keys()
    for name, values in _plain(model.values).items():
        exact = torch.from_numpy(values).float()
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert found[name].dtype is dtype
        assert torch.equal(found[name], exact.to(dtype)), name
    twin = plain_twin(model, tmp_path / "twin")
    assert "quantization_config" not in read_config(tmp_path / "out")
    assert read_config(tmp_path / "out") == read_config(twin.root)


@pytest.mark.slow
def test_block_fp8_comes_back_from_bfloat16_within_a_code(tmp_path: Path) -> None:
    """Not in the same bytes: what scales it had is not to be known any more."""
    model = deepseek_v3(tmp_path / "a", 1)
    merge(conversion(model.root, "bf16"), tmp_path / "plain")
    merge(conversion(tmp_path / "plain", "fp8_block"), tmp_path / "back")
    plain = QuantisedModel(tmp_path / "plain", _decoded(tmp_path / "plain"), frozenset())
    check_merged(tmp_path / "back", {name: values[None] for name, values in plain.values.items()}, [plain])
    base, found = read_numbers(model.root), read_numbers(tmp_path / "back")
    assert all(np.all(np.abs(found[n].values - base[n].values) <= base[n].steps) for n in model.quantised)
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in read_tensors(tmp_path / "back").items()}
    assert stored == {name: (each.dtype, each.shape) for name, each in read_tensors(model.root).items()}
    table = _quantisation(tmp_path / "back")
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", [128, 128])
    assert "lm_head" in table["modules_to_not_convert"]
    assert api.verify(tmp_path / "back").problems == ()


def test_int4_comes_back_from_bfloat16_in_its_own_bytes(tmp_path: Path) -> None:
    """Numbers that lie on a grid tell its scale."""
    model = kimi_k2_thinking(tmp_path / "a", 1)
    merge(conversion(model.root, "bf16"), tmp_path / "plain")
    merge(conversion(tmp_path / "plain", ["expert:int4", "same"]), tmp_path / "back")
    assert changed_bytes(tmp_path / "back", model.root) == set()


def test_a_part_is_converted_and_the_rest_is_copied(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1)
    merge(conversion(model.root, ["attention:bf16", "same"]), tmp_path / "out")
    found, wanted = read_tensors(tmp_path / "out"), read_tensors(model.root)
    freed = {name for name in model.quantised if ".self_attn." in name}
    for name, tensor in found.items():
        if name in freed:
            assert torch.equal(tensor, torch.from_numpy(model.values[name]).float().bfloat16()), name
        else:
            assert same_bytes(tensor, wanted[name]), name
    assert freed
    assert found.keys() == wanted.keys() - {f"{name}_scale_inv" for name in freed}
    listed = set(_quantisation(tmp_path / "out")["modules_to_not_convert"])
    assert {name.removesuffix(".weight") for name in freed} <= listed


@pytest.mark.parametrize("kind", slow_but(MAKERS, "gpt-oss"))
def test_quantised_parents_merge_into_bfloat16(kind: str, tmp_path: Path) -> None:
    one, other = (MAKERS[kind](tmp_path / name, seed) for seed, name in enumerate("ab"))
    merge(mean_of(one, other, dtype="bfloat16"), tmp_path / "out")
    assert "quantization_config" not in read_config(tmp_path / "out")
    turned = [QuantisedModel(each.root, _plain(each.values), frozenset()) for each in (one, other)]
    check_merged(tmp_path / "out", _plain(_mean(one, other)), turned)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["FP8 in U8", *slow_but(MAKERS, "gpt-oss")])
def test_a_quantised_base_takes_a_parent_of_another_kind(kind: str, tmp_path: Path) -> None:
    """In bfloat16, or FP8 with scales of any kind into FP8 with powers of two."""
    if kind == "FP8 in U8":
        one, other = deepseek_v3(tmp_path / "a", 1, scales="U8"), deepseek_v3(tmp_path / "b", 2)
    else:
        one, second = MAKERS[kind](tmp_path / "a", 1), MAKERS[kind](tmp_path / "b", 2)
        other = plain_twin(second, tmp_path / "c")
    merge(mean_of(one, other), tmp_path / "out")
    check_stored_alike(tmp_path / "out", one.root)
    check_merged(tmp_path / "out", _mean(one, other), [one, other])


@pytest.mark.parametrize("kind", slow_but(EXACT, "gpt-oss"))
def test_it_makes_no_difference_what_a_parent_is_stored_as(kind: str, tmp_path: Path) -> None:
    one, other = MAKERS[kind](tmp_path / "a", 1), MAKERS[kind](tmp_path / "b", 2)
    twins = [plain_twin(each, tmp_path / f"twin{number}") for number, each in enumerate((one, other))]
    merge(mean_of(*twins), tmp_path / "plain")
    merge(mean_of(twins[0], other), tmp_path / "mixed")
    assert changed_bytes(tmp_path / "mixed", tmp_path / "plain") == set()


def _state(root: Path) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """What transformers loads strictly, but for the layer for further tokens, which it never builds."""
    model, report = loaded(root)
    unexpected = report.pop("unexpected_keys", ())
    assert not report
    assert all(name.startswith("model.layers.2.") for name in unexpected)
    with torch.no_grad():
        return model.state_dict(), model.float()(_TOKENS).logits


def _decoded(root: Path) -> dict[str, Values]:
    return {name: numbers.values for name, numbers in read_numbers(root).items()}


def _check_loaded(state: Mapping[str, torch.Tensor], values: Mapping[str, Values]) -> None:
    seen = values.keys() & state.keys()
    fused = {name for name in state if ".experts." in name} - seen
    assert state.keys() == seen | fused
    for name in seen:
        assert np.array_equal(state[name].float().numpy(), values[name].astype(np.float32)), name
    for name in fused:
        block, _, word = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if word == "gate_up_proj" else ["down_proj"]
        experts = [
            np.concatenate([values[f"{block}.{expert}.{part}.weight"] for part in parts])
            for expert in range(len(state[name]))
        ]
        assert np.array_equal(state[name].float().numpy(), np.stack(experts).astype(np.float32)), name


def test_transformers_loads_a_merge_in_mxfp4(tmp_path: Path) -> None:
    models = [gpt_oss(tmp_path / name, seed) for seed, name in enumerate("ab")]
    merge(mean_of(*models), tmp_path / "out")
    state, logits = _state(tmp_path / "out")
    assert bool(logits.isfinite().all())
    _check_loaded(state, _plain(_decoded(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["F32", "ue8m0 F32", "F8_E8M0", "U8"], "U8"))
def test_transformers_loads_a_merge_in_block_fp8(kind: Any, tmp_path: Path) -> None:
    """Without ragged blocks, which it cannot load."""
    models = [deepseek_v3(tmp_path / name, s, scales=kind, ragged=False) for s, name in enumerate("ab")]
    merge(mean_of(*models), tmp_path / "out")
    state, logits = _state(tmp_path / "out")
    assert bool(logits.isfinite().all())
    _check_loaded(state, _decoded(tmp_path / "out"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["gpt-oss", "DeepSeek-V3"], "DeepSeek-V3"))
def test_a_conversion_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    """The output in bfloat16 against transformers' own decoding of the codes."""
    make = (
        gpt_oss
        if kind == "gpt-oss"
        else lambda root, seed: deepseek_v3(root, seed, scales="ue8m0 F32", ragged=False)
    )
    model = make(tmp_path / "a", 1)
    recipe = one_model(model.root, dtype="bfloat16")
    merge(recipe, tmp_path / "out")
    (wanted_state, wanted), (state, logits) = _state(model.root), _state(tmp_path / "out")
    assert wanted_state.keys() == state.keys()
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in wanted_state.items())
    assert torch.equal(logits, wanted)


UP = "model.layers.1.mlp.experts.2.up_proj"
EXPERTS = "model.layers.1.mlp.experts"
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


def _packed(root: Path) -> set[str]:
    found = read_tensors(root)
    endings = (".weight_scale", ".weight_scale_inv")
    return {name.removesuffix(ending) for name in found for ending in endings if name.endswith(ending)}


def _quantisation(root: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_config(root)["quantization_config"]
    return found


def _parts(root: Path, module: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        name.removeprefix(f"{module}."): (tensor.dtype, tuple(tensor.shape))
        for name, tensor in read_tensors(root).items()
        if name.startswith(f"{module}.")
    }


def _check_read_back(root: Path, again: Path) -> None:
    """A merge of a model with itself is the model, bytes and config, so that all of it is read."""
    assert api.verify(root).problems == ()
    merge(mean_of(root, root), again)
    assert changed_bytes(again, root) == set()
    assert read_config(again) == read_config(root)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", slow_but(PARTS, "mxfp4", "nvfp4", "fp8_tensor"))
def test_plain_parents_become_codes_that_are_read_back(form: str, parents: Parents, tmp_path: Path) -> None:
    merge(mean_of(*parents.plain, out_format=form), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(parents.plain, linear(1, 1)), parents.plain)
    assert _parts(tmp_path / "out", UP) == PARTS[form]
    modules = {name.removesuffix(".weight") for name in parents.quantised[0].quantised}
    assert _packed(tmp_path / "out") == modules
    table = _quantisation(tmp_path / "out")
    assert table["quant_method"] == "compressed-tensors"
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(table["ignore"])
    assert modules.isdisjoint(table["ignore"])
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_int4_is_what_kimi_has(parents: Parents, tmp_path: Path) -> None:
    """Codes of the merge in float32, the shape beside them, and a table of the same kind."""
    merge(mean_of(*parents.plain, out_format="int4"), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    assert found[f"{UP}.weight_shape"].tolist() == [128, 256]
    assert found["model.layers.0.self_attn.o_proj.weight_shape"].tolist() == [256, 128]
    values = [read_tensors(each.root)[f"{UP}.weight"].float() for each in parents.plain]
    quant_spec = usual_quant_spec(INT4, (128, 256))
    codes, scales, *_ = codec_of(INT4).encode(quant_spec, values[0] * 0.5 + values[1] * 0.5)
    assert torch.equal(found[f"{UP}.weight_packed"].view(torch.uint8).view(-1), codes)
    assert torch.equal(found[f"{UP}.weight_scale"].view(torch.uint8).view(-1), scales)
    kimi = read_config(kimi_k2_thinking(tmp_path / "kimi", 1).root)["quantization_config"]
    assert _quantisation(tmp_path / "out").keys() == kimi.keys()
    mine, theirs = (table["config_groups"]["group_0"] for table in (_quantisation(tmp_path / "out"), kimi))
    assert mine["weights"].items() <= theirs["weights"].items()
    assert {**mine, "weights": {}} == {**theirs, "weights": {}}


def test_codes_of_one_format_become_codes_of_another(parents: Parents, tmp_path: Path) -> None:
    models = parents.quantised
    merge(mean_of(*models, out_format="mxfp4"), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)
    assert _packed(tmp_path / "out") == {name.removesuffix(".weight") for name in models[0].quantised}
    assert not any(name.endswith("_scale_inv") for name in read_tensors(tmp_path / "out"))
    assert "weight_block_size" not in _quantisation(tmp_path / "out")


def test_a_shape_is_told_of_as_bytes_of_the_plan(parents: Parents) -> None:
    plan = api.plan(one_model(parents.plain[0], out_format="int4"))
    told = {line.name: line for line in tensor_lines(plan) if line.name.startswith(f"{UP}.")}
    assert {name.rpartition(".")[2]: line.disposition for name, line in told.items()} == dict.fromkeys(
        PARTS["int4"], "converted"
    )
    shape = told[f"{UP}.weight_shape"]
    assert (shape.sources, shape.expressions) == ((), (f"bytes {'80' + '00' * 8 + '01' + '00' * 6}",))


def test_equal_shapes_are_no_news(parents: Parents) -> None:
    plan = api.plan(mean_of(*parents.plain, out_format="int4"))
    constants = [plan.expressions[row["expression"]].is_constant for row in plan["ops"].to_pylist()]
    digests = {number: "the same" for number, is_constant in enumerate(constants) if is_constant}
    assert len(digests) == len(parents.quantised[0].quantised)
    assert found_duplicates(plan, digests, shared_bytes=None).unforeseen == ()


def test_the_other_tensors_of_a_quantised_base_become_like_their_neighbours(tmp_path: Path) -> None:
    """Modules that its table left plain are no longer listed."""
    models = [kimi_k2_thinking(tmp_path / name, seed) for seed, name in enumerate("ab")]
    merge(mean_of(*models, out_format="int4"), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)
    attention = "model.layers.0.self_attn.o_proj"
    assert _parts(tmp_path / "out", attention).keys() == PARTS["int4"].keys()
    listed = _quantisation(tmp_path / "out")["ignore"]
    assert "lm_head" in listed
    assert not any("self_attn" in each for each in listed)
    assert _quantisation(tmp_path / "out")["config_groups"] == _quantisation(models[0].root)["config_groups"]
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_scales_are_powers_of_two_where_those_of_the_base_are(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1, scales="ue8m0 F32")
    asked = [{"filter": "eh_proj", "value": "fp8_block"}, "same"]
    merge(mean_of(model, model, out_format=asked), tmp_path / "out")
    scales = read_tensors(tmp_path / "out")["model.layers.2.eh_proj.weight_scale_inv"]
    assert scales.dtype is torch.float32
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    assert _quantisation(tmp_path / "out") == _quantisation(model.root)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    root = tmp_path_factory.mktemp("gpt-oss")
    models = tuple(gpt_oss(root / f"mxfp4-{seed}", seed) for seed in (1, 2))
    return Parents(models, tuple(plain_twin(each, root / f"plain-{n}") for n, each in enumerate(models)))


def test_experts_of_gpt_oss_become_mxfp4_as_it_is_published(gpt: Parents, tmp_path: Path) -> None:
    merge(mean_of(*gpt.plain, out_format="mxfp4"), tmp_path / "out")
    found, published = read_tensors(tmp_path / "out"), read_tensors(gpt.quantised[0].root)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in published.items()
    }
    check_merged(tmp_path / "out", merged_values(gpt.plain, linear(1, 1)), gpt.plain)
    table = _quantisation(tmp_path / "out")
    assert table["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.router"} <= set(
        table["modules_to_not_convert"]
    )
    _check_read_back(tmp_path / "out", tmp_path / "again")


def test_mxfp4_in_bfloat16_becomes_the_bytes_that_it_was(gpt: Parents, tmp_path: Path) -> None:
    """All of its numbers are codes times powers of two, which bfloat16 holds."""
    recipe = one_model(gpt.plain[0].root)
    merge({**recipe, "out_format": "mxfp4"}, tmp_path / "out")
    assert changed_bytes(tmp_path / "out", gpt.quantised[0].root) == set()


def _said(recipe: Mapping[str, Any]) -> str:
    problems = api.plan(recipe).problems
    assert all(problem.remedy for problem in problems)
    return "\n".join(map(str, problems))


def test_what_a_format_cannot_hold_is_named_with_a_remedy(tmp_path: Path) -> None:
    """Columns that groups do not divide: a line before the other leaves those tensors out."""
    model = plain_twin(deepseek_v3(tmp_path / "a", 1), tmp_path / "plain")
    said = _said(mean_of(model, model, out_format="int4"))
    assert "3 tensors cannot be stored as int4: int4 needs columns that 32 divides" in said
    assert "model.layers.0.self_attn.kv_b_proj.weight [256, 208]" in said
    assert "{glob: 'model.layers.0.self_attn.kv_b_proj.weight', value: bf16}" in said
    asked = [{"glob": "*.kv_b_proj.weight", "value": "bf16"}, "int4"]
    assert _said(mean_of(model, model, out_format=asked)) == ""


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ("int4", "loaders take it for the weight of one module, a matrix, and no stack of them"),
        ([{"role": "attention", "value": "mxfp4"}], "gpt_oss has its experts in it and nothing else"),
    ],
)
def test_what_no_loader_takes_is_refused(asked: object, fault: str, gpt: Parents) -> None:
    said = _said(mean_of(*gpt.plain, out_format=asked))
    assert fault in said
    assert "choose another format" in said


def test_formats_that_no_table_says_together_are_refused_with_both(tmp_path: Path) -> None:
    model = kimi_k2_thinking(tmp_path / "a", 1)
    said = _said(mean_of(model, model, out_format=[{"role": "attention", "value": "fp8_block"}, "same"]))
    assert "stored as fp8_block (such as model.layers.0.self_attn." in said
    assert f"and as int4 (such as {EXPERTS}.0." in said
    assert "'out_format: fp8_block'" in said
    assert _said(mean_of(model, model, out_format="fp8_block")) == ""


@pytest.mark.parametrize("form", ["int4", "fp8_block"])
def test_embeddings_are_not_made_codes(form: str, parents: Parents) -> None:
    """They are no linear layers, and loaders look for codes of those alone."""
    said = _said(mean_of(*parents.plain, out_format=[{"role": "embedding", "value": form}]))
    assert f"tensors cannot be stored as {form}: loaders take codes for the weights of linear layers" in said
    assert "model.embed_tokens.weight" in said


def test_a_head_in_codes_is_a_head(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "plain", 1, tie=False)
    merge({**mean_of(model, model), "out_format": [{"role": "head", "value": "int4"}]}, tmp_path / "packed")
    assert "lm_head.weight_packed" in read_tensors(tmp_path / "packed")
    merge(mean_of(tmp_path / "packed", tmp_path / "packed"), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", tmp_path / "packed") == set()


def test_heads_of_other_tokens_are_not_made_codes(tmp_path: Path) -> None:
    small, large = (tiny_llama(tmp_path / str(vocab), 1, vocab=vocab) for vocab in (32, 40))
    recipe = mean_of(small, large, embedding_sizes="common")
    assert _said(recipe) == ""
    said = _said({**recipe, "out_format": [{"role": "head", "value": "int4"}]})
    assert "1 tensors have other rows than those that are stored" in said
    assert "lm_head.weight" in said


@pytest.mark.parametrize("kind", ["GPTQ", "FP8 without scales"])
def test_plain_numbers_are_not_made_of_codes_that_are_not_read(kind: str, tmp_path: Path) -> None:
    """Neither are they passed on as they are where plain ones are asked for."""
    twin = plain_twin(gpt_oss(tmp_path / "a", 1), tmp_path / "twin")
    tensors, config = read_tensors(twin.root), read_config(twin.root)
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
    recipe = one_model(root)
    assert _said({**recipe, "out_format": "same"}) == ""
    for asked in ("bf16", [{"role": "attention", "value": "bf16"}, "same"]):
        said = _said({**recipe, "out_format": asked})
        assert f"quantised as {'GPTQ' if kind == 'GPTQ' else 'other'}" in said


def _codes(root: Path) -> set[str]:
    return {name for name, tensor in read_tensors(root).items() if tensor.dtype is torch.float8_e4m3fn}


def test_experts_that_are_all_plain_are_listed_as_the_one_module_that_loaders_fuse(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1).root

    def listed(*lines: Any) -> set[str]:
        made = api.plan(mean_of(model, model, out_format=[*lines, "same"])).require()
        modules = made.manifest["config"]["quantization_config"].get("modules_to_not_convert") or ()
        return {name for name in modules if name.endswith(".experts")}

    experts = {name.partition(".experts.")[0] + ".experts" for name in _codes(model) if ".experts." in name}
    assert len(experts) > 1
    assert listed({"role": "expert", "value": "bf16"}) == experts
    assert listed({"glob": "*.experts.0.*", "value": "bf16"}) == listed() == set()


def test_same_is_stronger_than_dtype(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1)
    recipe = one_model(model.root, dtype="bfloat16")
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
        api.read_recipe(mean_of(Path("a"), Path("b"), out_format=asked))
    assert said in str(caught.value)


def test_tensors_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "a", 1)
    asked = [{"glob": "*layernorm*", "value": "fp8_block"}]
    found = api.plan(mean_of(model.root, model.root, out_format=asked)).problems
    assert [problem.where for problem in found] == ["recipe: out_format"]
    assert "model.layers.0.input_layernorm.weight [256]" in found[0].what


LAYER, MTP = "model.layers.0", "model.layers.1"
ATTENTION = {f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.indexer.wk"}
KEPT = f"{LAYER}.self_attn.indexer.weights_proj"


def _model(root: Path) -> Path:
    """A DeepSeek-V3.2 with a layer for further tokens, and all that is no matrix of a module."""
    shapes = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        f"{LAYER}.self_attn.q_proj.weight": (64, 64),
        f"{LAYER}.self_attn.q_proj.bias": (64,),
        f"{LAYER}.self_attn.sinks": (4, 64),
        f"{LAYER}.self_attn.indexer.wk.weight": (32, 64),
        f"{LAYER}.self_attn.conv1d.weight": (64, 1, 4),
        f"{LAYER}.input_layernorm.weight": (64,),
        f"{LAYER}.mlp.gate.weight": (2, 64),
        f"{LAYER}.mlp.gate.e_score_correction_bias": (2,),
        **{f"{each}.mlp.experts.{n}.up_proj.weight": (32, 64) for each in (LAYER, MTP) for n in (0, 1)},
        f"{MTP}.enorm.weight": (64,),
        f"{MTP}.eh_proj.weight": (64, 128),
        f"{MTP}.mlp.gate.weight": (2, 64),
        f"{MTP}.shared_head.head.weight": (32, 64),
    }
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    sizes = {"hidden_size": 64, "n_routed_experts": 2, "vocab_size": 32, "tie_word_embeddings": False}
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    specs[f"{KEPT}.weight"] = (DType.F32, (8, 64))
    return header_checkpoint(root, specs, {**config, **sizes})


def _coded(root: Path, asked: object) -> set[str]:
    names = good(one_model(root, out_format=asked)).names()
    return {name.removesuffix(".weight_scale_inv") for name in names if name.endswith("_scale_inv")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("selected") / "a")


def _experts(*layers: str) -> set[str]:
    return {f"{layer}.mlp.experts.{number}.up_proj" for layer in layers for number in (0, 1)}


def test_what_a_16_bit_model_has_in_float32_stays_so(root: Path) -> None:
    assert _coded(root, "fp8_block") == ATTENTION | _experts(LAYER, MTP)
    asked = [{"glob": f"{KEPT}.*", "value": "fp8_block"}, "same"]
    assert _coded(root, asked) == {KEPT}


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ({"role": "attention"}, ATTENTION),
        ({"role": "expert"}, _experts(LAYER, MTP)),
        ({"role": "mtp"}, _experts(MTP)),
        ({"role": "expert", "layers": 0}, _experts(LAYER)),
        ({"layers": 0}, ATTENTION | _experts(LAYER)),
        ({"role": ["router", "attention"]}, ATTENTION | {f"{LAYER}.mlp.gate", f"{MTP}.mlp.gate"}),
    ],
)
def test_a_role_speaks_of_matrices_of_modules(selector: dict[str, Any], wanted: set[str], root: Path) -> None:
    """Norms, biases and bare parameters of the same role stay as they are, and nobody has to list them."""
    assert _coded(root, [{**selector, "value": "fp8_block"}, "same"]) == wanted


def test_what_a_line_does_not_speak_of_is_for_the_next_one(root: Path) -> None:
    asked = [{"role": "attention", "value": "fp8_block"}, {"glob": "*.q_proj.bias", "value": "int4"}]
    (said,) = refusals(one_model(root, out_format=asked))
    assert "1 tensors cannot be stored as int4: loaders take it for the weight of one module" in said


@pytest.mark.parametrize("asked", [[{"role": "norm"}], [{"role": "router_bias"}]])
def test_a_line_that_speaks_of_no_matrix_is_told(asked: Sequence[dict[str, Any]], root: Path) -> None:
    (said,) = refusals(
        one_model(root, out_format=[*({**each, "value": "fp8_block"} for each in asked), "same"])
    )
    assert "this line holds for no tensor of the output" in said


def test_a_name_insists(root: Path) -> None:
    for selector in ({"glob": "*.input_layernorm.weight"}, {"filter": "input_layernorm", "role": "norm"}):
        (said,) = refusals(one_model(root, out_format=[{**selector, "value": "fp8_block"}, "same"]))
        assert "1 tensors cannot be stored as fp8_block: fp8_block is for matrices" in said
