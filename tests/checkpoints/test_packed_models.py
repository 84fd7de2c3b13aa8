"""The tiny quantised models are what they are made to look like, and are read as what they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.quantised_loading import loaded
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.quantised_numbers import ScaleKind

from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4
from raymerge.checkpoints.source import Checkpoint, open_checkpoint

KINDS: tuple[ScaleKind, ...] = ("F32", "ue8m0 F32", "F8_E8M0", "U8")


def look(model: QuantisedModel) -> tuple[Checkpoint, QuantisedWeights]:
    """A model's checkpoint and what of it is packed."""
    checkpoint = open_checkpoint(model.root, "a model")
    return checkpoint, packed_tensors(checkpoint, [checkpoint.config["quantization_config"]])


MAKERS: dict[str, tuple[Callable[[Path, int], QuantisedModel], Format, int]] = {
    "DeepSeek-V3": (deepseek_v3, FP8_BLOCK, 8 + 20 + 20),
    "Kimi-K2-Thinking": (kimi_k2_thinking, INT4, 12),
    "gpt-oss": (gpt_oss, MXFP4, 4),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_published_layout_is_found_whole(tmp_path: Path, name: str) -> None:
    make, form, count = MAKERS[name]
    model = make(tmp_path / "a", 1)
    checkpoint, found = look(model)
    assert not found.faults
    assert not found.unknown
    assert found.tensors.keys() == model.quantised
    assert len(found.tensors) == count
    assert {packed.packing.format for packed in found.tensors.values()} == {form}
    assert found.members.keys() == checkpoint.tensors.keys() - (model.values.keys() - model.quantised)
    shapes = {name: packed.packing.shape for name, packed in found.tensors.items()}
    assert shapes == {name: model.values[name].shape for name in model.quantised}


@pytest.mark.parametrize("name", MAKERS)
def test_partners_are_found_in_other_files(tmp_path: Path, name: str) -> None:
    checkpoint, found = look(MAKERS[name][0](tmp_path / "a", 1))
    assert sorted(each.key for each in checkpoint.files) == [
        f"model-{number:05d}-of-000004.safetensors" for number in range(1, 5)
    ]
    pairs = [(packed.codes, packed.scales) for packed in found.tensors.values()]
    apart = [checkpoint.tensors[codes].key != checkpoint.tensors[scales].key for codes, scales in pairs]
    assert any(apart)
    assert not all(apart)


def test_transformers_loads_gpt_oss_strictly_and_reads_the_same_values(tmp_path: Path) -> None:
    """Without a GPU, triton and its kernels it decodes while it loads, into [E, columns, rows]."""
    made = gpt_oss(tmp_path / "a", 1)
    model, report = loaded(made.root)
    assert not report
    state = model.state_dict()
    assert state.keys() == made.values.keys()
    for name, values in made.values.items():
        expected = values.transpose(0, 2, 1) if name in made.quantised else values
        assert np.array_equal(state[name].double().numpy(), expected), name
    assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_deepseek_v3_and_reads_the_same_values(tmp_path: Path, kind: ScaleKind) -> None:
    """All but the layer for further tokens, which it never builds."""
    made = deepseek_v3(tmp_path / "a", 1, scales=kind, ragged=False)
    model, report = loaded(made.root)
    assert report.keys() == {"unexpected_keys"}
    assert all(name.startswith("model.layers.2.") for name in report["unexpected_keys"])
    state = model.state_dict()
    seen = made.values.keys() & state.keys()
    assert len(seen) == len(state) - 2
    for name in seen:
        assert np.array_equal(state[name].float().numpy(), made.values[name].astype(np.float32)), name
    experts = [f"model.layers.1.mlp.experts.{expert}" for expert in range(4)]
    down = np.stack([made.values[f"{expert}.down_proj.weight"] for expert in experts])
    fused = state["model.layers.1.mlp.experts.down_proj"].float().numpy()
    assert np.array_equal(fused, down.astype(np.float32))
    assert model.float()(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
