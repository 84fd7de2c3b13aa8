"""Quantised parents in bfloat16, parents of several formats, and what transformers makes of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import slow_but
from kits.merge_cases import merge
from kits.quantised_loading import loaded
from kits.quantised_merges import (
    MAKERS,
    changed_bytes,
    check_merged,
    check_stored_alike,
    config_of,
    in_plain_layout,
    linear,
    merged_values,
    plain_twin,
    read_numbers,
    same_bytes,
)
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.quantised_numbers import Values

from raymerge.api import conversion

FEW = slow_but(MAKERS, "DeepSeek-V3 F32", "gpt-oss")
EXACT = ("DeepSeek-V3 ue8m0 F32", "DeepSeek-V3 U8", "gpt-oss")
"""Layouts whose scales are powers of two, so that bfloat16 holds whatever the codes mean."""
_TOKENS = torch.tensor([[3, 4, 5, 9]])


def _linear(*models: QuantisedModel, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(model.root), "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": entries, **more}


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
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(twin.root)


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
    assert found.keys() == wanted.keys() - {f"{name}_scale_inv" for name in freed}


@pytest.mark.parametrize("kind", FEW)
def test_quantised_parents_merge_into_bfloat16(kind: str, tmp_path: Path) -> None:
    one, other = (MAKERS[kind](tmp_path / name, seed) for seed, name in enumerate("ab"))
    merge(_linear(one, other, dtype="bfloat16"), tmp_path / "out")
    assert "quantization_config" not in config_of(tmp_path / "out")
    turned = [QuantisedModel(each.root, _plain(each.values), frozenset()) for each in (one, other)]
    check_merged(tmp_path / "out", _plain(_mean(one, other)), turned)


@pytest.mark.parametrize("kind", FEW)
def test_a_quantised_base_takes_a_parent_in_bfloat16(kind: str, tmp_path: Path) -> None:
    one, other = MAKERS[kind](tmp_path / "a", 1), MAKERS[kind](tmp_path / "b", 2)
    twin = plain_twin(other, tmp_path / "twin")
    merge(_linear(one, twin), tmp_path / "out")
    check_stored_alike(tmp_path / "out", one.root)
    check_merged(tmp_path / "out", _mean(one, twin), [one, twin])


@pytest.mark.parametrize("kind", EXACT)
def test_it_makes_no_difference_what_a_parent_is_stored_as(kind: str, tmp_path: Path) -> None:
    one, other = MAKERS[kind](tmp_path / "a", 1), MAKERS[kind](tmp_path / "b", 2)
    twins = [plain_twin(each, tmp_path / f"twin{number}") for number, each in enumerate((one, other))]
    merge(_linear(*twins), tmp_path / "plain")
    merge(_linear(twins[0], other), tmp_path / "mixed")
    assert changed_bytes(tmp_path / "mixed", tmp_path / "plain") == set()


def test_formats_of_two_kinds_merge(tmp_path: Path) -> None:
    """FP8 with scales of any kind into FP8 with powers of two."""
    one, other = deepseek_v3(tmp_path / "a", 1, scales="U8"), deepseek_v3(tmp_path / "b", 2)
    merge(_linear(one, other), tmp_path / "out")
    check_stored_alike(tmp_path / "out", one.root)
    check_merged(tmp_path / "out", _mean(one, other), [one, other])


# transformers


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
    merge(_linear(*models), tmp_path / "out")
    state, logits = _state(tmp_path / "out")
    assert bool(logits.isfinite().all())
    _check_loaded(state, _plain(_decoded(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["F32", "ue8m0 F32", "F8_E8M0", "U8"], "U8"))
def test_transformers_loads_a_merge_in_block_fp8(kind: Any, tmp_path: Path) -> None:
    """Without ragged blocks, which it cannot load."""
    models = [deepseek_v3(tmp_path / name, s, scales=kind, ragged=False) for s, name in enumerate("ab")]
    merge(_linear(*models), tmp_path / "out")
    state, logits = _state(tmp_path / "out")
    assert bool(logits.isfinite().all())
    _check_loaded(state, _decoded(tmp_path / "out"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt-oss", "DeepSeek-V3"])
def test_a_conversion_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    """The output in bfloat16 against transformers' own decoding of the codes."""
    make = (
        gpt_oss
        if kind == "gpt-oss"
        else lambda root, seed: deepseek_v3(root, seed, scales="ue8m0 F32", ragged=False)
    )
    model = make(tmp_path / "a", 1)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model.root)}], "dtype": "bfloat16"}
    merge(recipe, tmp_path / "out")
    (wanted_state, wanted), (state, logits) = _state(model.root), _state(tmp_path / "out")
    assert wanted_state.keys() == state.keys()
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in wanted_state.items())
    assert torch.equal(logits, wanted)
