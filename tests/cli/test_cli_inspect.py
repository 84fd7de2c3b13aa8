"""``raymerge inspect``: what it prints at 80 columns and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoint_maker import llama_config, sparse_checkpoint, tiny_llama
from kits.command_line import Outcome, run_command
from kits.golden import check_golden

import raymerge
from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError


def _inspect(folder: Path, *args: str) -> Outcome:
    return run_command("inspect", *args, cwd=folder, env={"COLUMNS": "80"})


def _experts(root: Path) -> Path:
    """A quantised mixture of experts in many files."""
    block = "model.layers.{}.mlp"
    headers = [
        [
            TensorSpec(f"{block.format(layer)}.gate.weight", DType.BF16, (4, 8)),
            TensorSpec(f"{block.format(layer)}.shared_experts.up_proj.weight", DType.BF16, (6, 8)),
            *(
                TensorSpec(f"{block.format(layer)}.experts.{expert}.up_proj.weight{suffix}", dtype, shape)
                for expert in range(4)
                for suffix, dtype, shape in (("", DType.F8_E4M3, (6, 8)), ("_scale_inv", DType.F32, (1, 1)))
            ),
        ]
        for layer in range(10)
    ]
    config = {
        "architectures": ["SomeoneForCausalLM"],
        "model_type": "someone",
        "num_hidden_layers": 10,
        "quantization_config": {"quant_method": "fp8"},
    }
    return sparse_checkpoint(root, headers, config)


def test_a_dense_model_reads_as_it_was_looked_at(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, tie=True)
    outcome = _inspect(tmp_path, "model")
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    check_golden("inspect-dense", outcome.text)


def test_quantised_experts_read_as_they_were_looked_at(tmp_path: Path) -> None:
    _experts(tmp_path / "model")
    check_golden("inspect-experts", _inspect(tmp_path, "model").text)


def test_the_json_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "model", 0)
    monkeypatch.chdir(tmp_path)
    found = json.loads(_inspect(tmp_path, "model", "--json").text)
    assert found == json.loads(json.dumps(raymerge.inspect("model").to_json()))
    assert found["architectures"] == llama_config()["architectures"]


@pytest.mark.parametrize("model", ["nowhere/at/all", "a@b@c"])
def test_a_model_that_is_not_there_is_refused(model: str, tmp_path: Path) -> None:
    outcome = _inspect(tmp_path, model)
    assert outcome.code == 2
    assert outcome.text.startswith(model)
    assert "Traceback" not in outcome.text


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Give the model alone"):
        raymerge.inspect("model+adapter")
