"""The kit's own promises: what it makes is real, repeatable, and has the sizes it names."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import (
    V3_CONFIG,
    V3_NBYTES,
    V3_NUM_FILES,
    V3_NUM_TENSORS,
    deepseek_v3_names,
    deepseek_v3_specs,
    llama_config,
    read_tensors,
    sparse_checkpoint,
    tiny_llama,
    write_checkpoint,
)

from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import main_dtype, open_checkpoint
from raymerge.dtypes import DType


class TestTinyLlama:
    @pytest.mark.parametrize("tie", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_transformers_loads_it_whole(self, tmp_path: Path, tie: bool, dtype: torch.dtype) -> None:
        from transformers import LlamaForCausalLM

        root = tiny_llama(tmp_path, 3, tie=tie, dtype=dtype, files=2)
        model, report = LlamaForCausalLM.from_pretrained(root, dtype=dtype, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        with torch.no_grad():
            logits = model(torch.tensor([[1, 5, 9]])).logits
        assert logits.shape == (1, 3, 64)
        assert torch.isfinite(logits).all()

    def test_the_seed_alone_decides(self, tmp_path: Path) -> None:
        one, again, other = (
            read_tensors(tiny_llama(tmp_path / str(n), seed)) for n, seed in enumerate((1, 1, 2))
        )
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])

    def test_a_child_lies_near_its_base(self, tmp_path: Path) -> None:
        base = tiny_llama(tmp_path / "base", 1, dtype=torch.float32)
        child = tiny_llama(tmp_path / "child", 2, base=base, scale=0.001, dtype=torch.float32)
        parents = read_tensors(base)
        for name, tensor in read_tensors(child).items():
            distance = (tensor - parents[name]).abs().max()
            assert 0 < distance < 0.01

    def test_sizes_are_as_asked(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1, layers=5, hidden=16, vocab=10)
        checkpoint = open_checkpoint(root, "m")
        assert checkpoint.config == llama_config(layers=5, hidden=16, vocab=10)
        assert len(checkpoint.tensors) == 3 + 9 * 5
        assert checkpoint.tensors["model.embed_tokens.weight"].shape == (10, 16)
        assert main_dtype(checkpoint) is DType.BF16


class TestWriteCheckpoint:
    def test_files_index_and_extras(self, tmp_path: Path) -> None:
        tensors = {f"x{number}": torch.full((2,), float(number)) for number in range(5)}
        root = write_checkpoint(tmp_path / "m", tensors, {"a": 1}, files=3, extra={"t/x": "t", "b": b"\x00"})
        assert json.loads((root / "config.json").read_text()) == {"a": 1}
        assert json.loads((root / "model.safetensors.index.json").read_text())["metadata"] == {
            "total_size": 40
        }
        assert (root / "t" / "x").read_text() == "t"
        assert (root / "b").read_bytes() == b"\x00"
        assert read_tensors(root).keys() == tensors.keys()
        assert len(open_checkpoint(root, "m").files) == 3


class TestSparse:
    def test_headers_are_true_and_the_data_is_a_hole(self, tmp_path: Path) -> None:
        headers = [[TensorSpec("a", DType.F8_E4M3, (10**6, 10**5))], [TensorSpec("b", DType.BF16, (3,))]]
        root = sparse_checkpoint(tmp_path, headers, {"a": 1})
        checkpoint = open_checkpoint(root, "m")
        assert [tensor.nbytes for tensor in checkpoint.tensors.values()] == [10**11, 6]
        assert sum(path.stat().st_blocks for path in root.iterdir()) * 512 < 10**6

    def test_a_single_file_has_no_index(self, tmp_path: Path) -> None:
        root = sparse_checkpoint(tmp_path, [[TensorSpec("a", DType.F32, ())]], {"a": 1})
        assert sorted(path.name for path in root.iterdir()) == ["config.json", "model.safetensors"]


class TestDeepSeekV3:
    def test_both_totals_are_those_of_the_model(self) -> None:
        files = deepseek_v3_specs()
        specs = [spec for file in files for spec in file]
        assert len(files) == V3_NUM_FILES == 163
        assert all(files)
        assert len(specs) == len({spec.name for spec in specs}) == V3_NUM_TENSORS == 91_991
        assert sum(spec.nbytes for spec in specs) == V3_NBYTES == 688_574_839_360

    def test_kinds_are_those_of_the_model(self) -> None:
        specs = {spec.name: spec for file in deepseek_v3_specs() for spec in file}
        scales = [name for name in specs if name.endswith("_scale_inv")]
        assert len(scales) == 45_808
        assert all(specs[name].dtype is DType.F32 for name in scales)
        assert all(specs[name.removesuffix("_scale_inv")].dtype is DType.F8_E4M3 for name in scales)
        narrow = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
        assert specs[narrow].shape == (576, 7168)
        assert specs[narrow + "_scale_inv"].shape == (5, 56)
        assert specs["model.layers.60.mlp.gate.e_score_correction_bias"].dtype is DType.F32
        assert "model.layers.61.eh_proj.weight" in specs
        assert "model.layers.2.mlp.gate.weight" not in specs

    def test_opens_in_seconds(self, tmp_path: Path) -> None:
        root = sparse_checkpoint(tmp_path, deepseek_v3_specs(), V3_CONFIG, names=deepseek_v3_names())
        started = time.process_time()
        checkpoint = open_checkpoint(root, "v3")
        # Processor seconds: about 1 when measured alone; the bound leaves room for a busy machine.
        assert time.process_time() - started < 6
        assert len(checkpoint.tensors) == V3_NUM_TENSORS
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == V3_NBYTES
        assert len(checkpoint.files) == V3_NUM_FILES
        assert checkpoint.notes == ()
        assert main_dtype(checkpoint) is DType.BF16
        names = list(checkpoint.tensors)
        assert names.index("model.layers.9.mlp.experts.99.up_proj.weight") < names.index(
            "model.layers.10.mlp.experts.0.up_proj.weight"
        )
