"""DeepSeek-V4 with its experts in MXFP4: merged, put together of two models, and converted without loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, write_checkpoint
from kits.deepseek_v4_headers import V41_CONFIG, scale_name, v4_shapes, v4_specs
from kits.expert_models import submitted
from kits.float64_merges import linear
from kits.merge_cases import INLINE, Merged, merge
from kits.quantised_merges import (
    changed_bytes,
    check_merged,
    check_stored_alike,
    entries,
    merged_values,
    read_numbers,
    same_bytes,
)
from kits.quantised_models import QuantisedModel, deepseek_v4
from kits.recipe_maker import linear as mean_of
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from raymerge.api import AuditOptions, audit, conversion, verify
from raymerge.events import EncodingErrorsFound
from raymerge.merge_plan.report import ConversionProof

EXPERT = "layers.1.ffn.experts.2.w1.weight"
TABLE = "layers.0.ffn.gate.tid2eid"
BLOCK = 128


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantisedModel, QuantisedModel]:
    root = tmp_path_factory.mktemp("v4")
    return deepseek_v4(root / "a", 1), deepseek_v4(root / "b", 2)


def test_two_models_merge_within_half_a_code(
    models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    recipe = {"merge_method": "linear", "models": entries(models, (0.3, 0.7))}
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", models[0].root)
    check_merged(tmp_path / "out", merged_values(models, linear(0.3, 0.7)), models)
    assert read_config(tmp_path / "out") == read_config(models[0].root)
    assert verify(tmp_path / "out").problems == ()
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).num_problems
    stored, numbers = read_tensors(tmp_path / "out"), read_numbers(tmp_path / "out")
    for name in models[0].quantised:
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[scale_name(name)], torch.float32)
        assert torch.equal(theirs, torch.from_numpy(numbers[name].values).float()), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_v41", [False, True])
def test_a_model_merged_with_itself_is_itself(
    is_v41: bool, models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    root = _v41(tmp_path / "model") if is_v41 else models[0].root
    merge(mean_of(root, root), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", root) == set()
    assert read_config(tmp_path / "out") == read_config(root)


def _v41(root: Path) -> Path:
    """Random codes and scales."""
    random, tensors = np.random.default_rng(4), dict[str, torch.Tensor]()
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}
    for named in v4_shapes(V41_CONFIG):
        for spec in v4_specs(*named, block=32):
            dtype = dtypes.get(spec.dtype.value)
            if dtype is None:
                kind = torch.float32 if spec.dtype.value == "F32" else torch.bfloat16
                tensors[spec.name] = torch.from_numpy(random.standard_normal(spec.shape)).to(kind)
                continue
            high = 0x7F if spec.dtype.value == "F8_E4M3" else 256
            low, high = (110, 130) if spec.dtype.value == "F8_E8M0" else (0, high)
            tensors[spec.name] = torch.from_numpy(random.integers(low, high, spec.shape, np.uint8)).view(
                dtype
            )
    return write_checkpoint(root, tensors, V41_CONFIG, files=2)


def test_experts_of_one_model_come_verbatim_into_a_merge_of_the_rest(
    models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    one, other = models
    rule = {"glob": "*.ffn.experts.*", "merge_method": "passthrough", "sources": [str(other.root)]}
    merge(mean_of(one, other, methods=[rule]), tmp_path / "out")
    merged, donor = read_tensors(tmp_path / "out"), read_tensors(other.root)
    taken = {name for name in merged if ".ffn.experts." in name}
    assert any(name.endswith(".scale") for name in taken)
    assert any(name.startswith("mtp.") for name in taken)
    assert all(same_bytes(merged[name], donor[name]) for name in taken)
    rest = {name: each for name, each in merged_values(models, linear(0.5, 0.5)).items() if name not in taken}
    numbers = read_numbers(tmp_path / "out")
    for name, (values,) in rest.items():
        error = np.abs(numbers[name].values - values)
        assert np.all(error <= numbers[name].steps / 2 + 3e-6 * np.abs(values).max()), name
    assert read_config(tmp_path / "out") == read_config(one.root)


def test_tables_of_experts_follow_a_permutation(
    models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    (tmp_path / "base").symlink_to(models[0].root)
    out = submitted(tmp_path, "out", {"keep": [2, 0, 3, 1]})
    merged, parent = read_tensors(out), read_tensors(models[0].root)
    assert torch.equal(merged[TABLE], torch.tensor([1, 3, 0, 2]).int()[parent[TABLE].long()])
    for leaf in ("weight", "scale"):
        taken = parent[f"mtp.0.ffn.experts.3.w2.{leaf}"]
        assert same_bytes(merged[f"mtp.0.ffn.experts.2.w2.{leaf}"], taken)
    assert read_config(out) == read_config(models[0].root)
    assert not audit(out, AuditOptions(1.0), INLINE).num_problems


def _proof(merged: Merged) -> ConversionProof:
    (event,) = merged.of(EncodingErrorsFound)
    assert event.proof is not None
    assert event.proof == merged.result.encoding_errors.proof
    return event.proof


def _num_blocks(model: QuantisedModel) -> int:
    shapes = [values.shape for name, values in model.values.items() if ".ffn.experts." in name]
    return sum(-(-rows // BLOCK) * -(-columns // BLOCK) for rows, columns in shapes)


def test_experts_become_fp8_without_loss_and_the_run_proves_it(
    models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    model = models[0]
    merged = merge(conversion(model.root, "fp8_block"), tmp_path / "out")
    numbers, stored = read_numbers(tmp_path / "out"), read_tensors(tmp_path / "out")
    assert stored[EXPERT].dtype is torch.float8_e4m3fn
    assert stored[scale_name(EXPERT)].dtype is torch.float8_e8m0fnu
    assert all(np.array_equal(numbers[name].values, values) for name, values in model.values.items())
    experts = sum(".ffn.experts." in name for name in model.values)
    assert _proof(merged) == ConversionProof(experts, _num_blocks(model), 0, 0, None)
    config = read_config(model.root)
    assert read_config(tmp_path / "out") == {**config, "expert_dtype": "fp8"}
    assert verify(tmp_path / "out").problems == ()


def _with_spread(root: Path, exponents: int) -> Path:
    """A copy whose first block of one expert has scales so far apart: a row of 6, and a row of halves."""
    model = deepseek_v4(root, 1)
    tensors = read_tensors(model.root)
    codes, scales = (tensors[name].view(torch.uint8).clone() for name in (EXPERT, scale_name(EXPERT)))
    scales[:, :4] = 120
    codes[0, :16], scales[0, 0] = 0x77, 120
    codes[1, :16], scales[1, 0] = 0x11, 120 - exponents
    tensors |= {EXPERT: codes.view(torch.int8), scale_name(EXPERT): scales.view(torch.float8_e8m0fnu)}
    return write_checkpoint(root.with_name("spread"), tensors, read_config(root))


@pytest.mark.slow
@pytest.mark.parametrize(("exponents", "inexact"), [(14, 0), (15, 1)])
def test_a_block_with_scales_too_far_apart_is_told(exponents: int, inexact: int, tmp_path: Path) -> None:
    """0.5 under 2 ** -22 of 6 under 2 ** -7 is half the least of float8 e4m3."""
    root = _with_spread(tmp_path / "model", exponents)
    before = read_numbers(root)
    merged = merge(conversion(root, "fp8_block"), tmp_path / "out")
    proof, after = _proof(merged), read_numbers(tmp_path / "out")
    lost = {name: np.abs(each.values - before[name].values).max() for name, each in after.items()}
    assert {name for name, error in lost.items() if error} == ({EXPERT} if inexact else set())
    assert (proof.inexact_tensors, proof.inexact_blocks) == (inexact, inexact)
    if inexact:
        assert proof.worst is not None
        assert (proof.worst.name, proof.worst.inexact_blocks) == (EXPERT, 1)
        assert proof.worst.largest_error == lost[EXPERT] == 0.5 * 2.0 ** (120 - 15 - 127)
        record = json.loads((tmp_path / "out" / "raymerge" / "encoding_errors.json").read_text())
        (tensor,) = [each for each in record["tensors"] if each["inexact_blocks"]]
        assert tensor["name"] == EXPERT


def test_a_merge_has_no_proof(models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path) -> None:
    merged = merge(mean_of(*models), tmp_path / "out")
    (event,) = merged.of(EncodingErrorsFound)
    assert event.proof is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["bf16", ["expert:bf16", "same"]])
def test_experts_in_bfloat16_leave_no_word_of_fp4(
    form: Any, models: tuple[QuantisedModel, QuantisedModel], tmp_path: Path
) -> None:
    merge(conversion(models[0].root, form), tmp_path / "out")
    stored, config = read_tensors(tmp_path / "out"), read_config(tmp_path / "out")
    assert np.array_equal(stored[EXPERT].double().numpy(), models[0].values[EXPERT])
    assert "fp4" not in json.dumps(config)
    assert ("quantization_config" in config) == (form != "bf16")
    assert verify(tmp_path / "out").problems == ()


def test_experts_become_mxfp4_as_the_family_has_them(tmp_path: Path) -> None:
    """Of a base variant, whose experts are FP8, nothing else changes."""
    model = deepseek_v4(tmp_path / "model", 1, experts="fp8")
    merge(conversion(model.root, ["expert:mxfp4", "same"]), tmp_path / "out")
    stored, before = read_tensors(tmp_path / "out"), read_tensors(model.root)
    assert stored.keys() == before.keys()
    for name, tensor in stored.items():
        if ".ffn.experts." not in name:
            assert same_bytes(tensor, before[name]), name
        elif name.endswith(".weight"):
            rows, columns = before[name].shape
            assert (tensor.dtype, tensor.shape) == (torch.int8, (rows, columns // 2))
            assert stored[scale_name(name)].shape == (rows, columns // 32)
    config = read_config(tmp_path / "out")
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert verify(tmp_path / "out").problems == ()
