"""Base models that are not read layer by layer, and what is said of them before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.layer_streams import KINDS, altered, make_base, open_base
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaModel

from raymerge.errors import PlanError
from raymerge.planner.inputs.sources import Source
from raymerge.stages.router.streamed import LayerStream


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base("llama", tmp_path_factory.mktemp("llama") / "model")


def refusal(base: Source) -> str:
    """Why a base is not streamed."""
    with pytest.raises(PlanError) as caught:
        LayerStream(base).check()
    assert all(problem.where == base.name and problem.remedy for problem in caught.value.problems)
    return str(caught.value)


def test_a_family_that_transformers_does_not_know(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "new", model_type="nimbus")
    assert "says model_type 'nimbus', which the installed transformers does not know." in refusal(base)
    base = altered(llama, tmp_path / "own", model_type="nimbus", auto_map={"AutoConfig": "nimbus.Config"})
    assert "does not know; its own code (auto_map) is not run" in refusal(base)


def test_code_beside_a_known_family_is_not_run(llama: Source, tmp_path: Path) -> None:
    own = {"AutoModelForCausalLM": "modeling_own.Model", "AutoConfig": "modeling_own.Config"}
    LayerStream(altered(llama, tmp_path / "own", auto_map=own)).check()


def test_a_config_that_cannot_be_built(llama: Source, tmp_path: Path) -> None:
    said = refusal(altered(llama, tmp_path / "model", hidden_act="none of them"))
    assert "transformers cannot build LlamaForCausalLM of its config" in said


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    tensors = {"shared.weight": torch.randn(64, 32)}
    config = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}
    said = refusal(open_base(write_checkpoint(tmp_path / "t5", tensors, {**config, **sizes})))
    assert "is an encoder with a decoder" in said
    assert "no model for causal language of the kind t5" in said


def test_quantised_tensors(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = torch.ones(1, 1)
    base = altered(llama, tmp_path / "fp8", state, quantization_config={"quant_method": "fp8"})
    assert "holds tensors that are quantised" in refusal(base)


def test_tensors_that_are_not_there_or_of_another_shape(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    for layer in range(3):
        del state[f"model.layers.{layer}.mlp.up_proj.weight"]
        state[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.ones(5, 32)
    said = refusal(altered(llama, tmp_path / "holes", state))
    assert (
        "6 tensors of LlamaForCausalLM are not in it by name and shape: model.layers.0.mlp.gate_proj" in said
    )
    assert "save_pretrained" in said


def test_another_number_of_layers_than_the_config_says(llama: Source, tmp_path: Path) -> None:
    assert "model.layers.3." in refusal(altered(llama, tmp_path / "four", num_hidden_layers=4))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba", "layers without a feed-forward network in whose place experts could come: 0, 1, 2."),
        ("rwkv", "cannot be run layer by layer"),
    ],
)
def test_families_whose_layers_are_no_chain(tmp_path: Path, name: str, why: str) -> None:
    assert why in refusal(make_base(name, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("jamba", "0, 2"),
        ("bamba", "0, 2"),
        ("granitemoehybrid", "0, 2"),
        ("falcon_h1", "0, 1, 2"),
        ("zamba2", "0, 1, 2"),
        ("nemotron_h", "0"),
    ],
)
def test_state_spaces_whose_memory_is_not_known(tmp_path: Path, name: str, layers: str) -> None:
    said = refusal(make_base(name, tmp_path / "model"))
    assert f"layers with a state space ({KINDS[name].architecture}), whose memory cannot be foretold" in said
    assert f"foretold: {layers}." in said


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "minimax"])
def test_linear_attention_and_convolutions_are_no_state_spaces(tmp_path: Path, name: str) -> None:
    LayerStream(make_base(name, tmp_path / "model")).check()


def test_buffers_that_nothing_computes(llama: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "raymerge.stages.router.streamed_model.compute_buffers", lambda *_, but, **__: [] if but else ["x"]
    )
    assert "nothing says how to compute its buffers layer 0: x, layer 1: x" in refusal(llama)


@pytest.mark.parametrize(("special", "padding"), [(0, None), (5, 5)])
def test_a_family_that_looks_for_special_tokens(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: int, padding: int | None
) -> None:
    """Calls are found with zeros, so layers must not be called otherwise with them, or with padding."""
    base = altered(llama, tmp_path / "model", pad_token_id=padding)
    LayerStream(base).check()
    forward = LlamaModel.forward

    def looking(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, input_ids, position_ids=(input_ids != special).cumsum(1), **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", looking)
    assert "its layers are called with more that depends on the tokens" in refusal(base)


def test_a_file_of_tensors_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    assert "it has no model_type" in refusal(open_base(path))


def test_a_check_inputs_no_weights_and_needs_none(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    LayerStream(base).check()
    assert LayerStream(base).least_budget(5) > 0
