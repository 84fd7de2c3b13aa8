"""The load level: transformers takes a checkpoint with strict keys, or the verdict says which it does not."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.expert_models import save
from kits.model_types import ModelType
from kits.model_types_decoders import DECODERS
from kits.model_types_others import ENCODERS, TWO_SIDED
from kits.quantised_models import deepseek_v3, gpt_oss, kimi_k2_thinking
from safetensors.torch import load_file, save_file

import raymerge
from raymerge.verifier.load import LoadVerdict, load_checkpoint

ENOUGH = 4 << 30
KINDS = {kind.name: kind for kind in (*DECODERS, *ENCODERS, *TWO_SIDED)}
# One of each way to store and to build: plain, tied, biases, fused and single experts, recurrent, two-sided.
SAMPLE = (
    *("gemma2", "gpt2", "qwen3_moe", "mixtral", "dbrx", "falcon_h1"),
    *("bert", "switch_transformers", "whisper"),
)


def said(verdict: LoadVerdict) -> str:
    return "\n".join(map(str, verdict.problems))


def passed(verdict: LoadVerdict, word: str) -> tuple[str, ...]:
    return next(each.names for each in verdict.passed if word in each.why)


@pytest.mark.parametrize("kind", [KINDS[name] for name in SAMPLE], ids=SAMPLE)
def test_models_that_transformers_knows_load_and_run(kind: ModelType, tmp_path: Path) -> None:
    save(kind.build(0), tmp_path)
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.tensors == len(read_tensors(tmp_path))
    reads_text = kind.name != "whisper"
    assert verdict.ran is reads_text
    assert reads_text or "was not run" in verdict.note


def test_experts_that_are_stored_together_load_as_well(tmp_path: Path) -> None:
    save(KINDS["qwen3_moe"].build(0), tmp_path, fused=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_tensors(tmp_path)
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran


def test_a_large_model_is_compared_and_not_loaded(tmp_path: Path) -> None:
    verdict = load_checkpoint(tiny_llama(tmp_path / "model", 0), memory=1 << 20)
    assert verdict.problems == ()
    assert not verdict.ran
    assert verdict.needed_nbytes > 1 << 20
    assert verdict.note.startswith("only names and shapes were compared: loading takes ")


def _lack(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.extra_proj.weight"] = torch.zeros(2)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = float("inf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lack, "model.layers.1.mlp.up_proj.weight of LlamaForCausalLM would be random"),
        (_add, "model.layers.1.mlp.extra_proj.weight would be left out"),
        (_reshape, "model.layers.1.mlp.up_proj.weight is [32, 64] and not [64, 32]"),
        (_spoil, "has NaN or infinity"),
    ],
)
def test_what_transformers_would_pass_over_is_a_problem(
    change: Callable[[dict[str, torch.Tensor]], None], words: str, tmp_path: Path
) -> None:
    file = tiny_llama(tmp_path / "model", 0) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    assert words in said(load_checkpoint(tmp_path / "model", memory=ENOUGH))


def test_an_expert_that_is_missing_is_found(tmp_path: Path) -> None:
    """It goes together with others into one key of the model, which is there all the same."""
    save(KINDS["qwen3_moe"].build(0), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    found = said(load_checkpoint(tmp_path, memory=0))
    assert "model.layers.1.mlp.experts.gate_up_proj cannot be put together of its tensors (" in found
    assert "Traceback" not in found
    assert "would be random" not in found


def test_layers_of_prediction_are_listed_and_not_hidden(tmp_path: Path) -> None:
    verdict = load_checkpoint(deepseek_v3(tmp_path, 0).root, memory=0)
    assert verdict.problems == ()
    names = passed(verdict, "predict further tokens")
    assert "model.layers.2.eh_proj.weight" in names
    assert all(name.startswith("model.layers.2.") for name in names)


def test_scales_are_keys_of_their_own(tmp_path: Path) -> None:
    """Block FP8 is compared as codes with scales, whether this machine can compute with them or not."""
    root = deepseek_v3(tmp_path / "whole", 0).root
    tensors = read_tensors(root)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    write_checkpoint(tmp_path / "lacking", tensors, json.loads((root / "config.json").read_text()))
    found = said(load_checkpoint(tmp_path / "lacking", memory=0))
    assert "o_proj.weight_scale_inv of DeepseekV3ForCausalLM would be random" in found


def test_mxfp4_is_decoded_and_run(tmp_path: Path) -> None:
    verdict = load_checkpoint(gpt_oss(tmp_path, 0).root, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran
    assert (verdict.model_class, len(verdict.tokens)) == ("GptOssForCausalLM", 8)


# What is not loadable here


def test_a_model_that_is_not_known_is_no_success(tmp_path: Path) -> None:
    verdict = load_checkpoint(kimi_k2_thinking(tmp_path, 0).root, memory=ENOUGH)
    assert not verdict.ran
    assert "it is not loadable here: its config says model_type 'kimi_k2'" in said(verdict)
    assert "Use --level audit" in said(verdict)


def test_files_of_tensors_are_not_loadable(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "raymerge" / "plan").mkdir(parents=True)
    write_json(tmp_path / "raymerge" / "plan" / "manifest.json", {"config": {}})
    assert "it has no config.json" in said(load_checkpoint(tmp_path, memory=ENOUGH))


_CODE = """\
from pathlib import Path

(Path(__file__).parent / "ran").touch()
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_model"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a model that only its own code knows; where that was run, there is a file ``ran``."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    root = tiny_llama(tmp_path / "model", 0)
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {"model_type": "own_model", "architectures": ["OwnForCausalLM"], "auto_map": code}
    write_json(root / "config.json", llama_config() | config)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    return root


def test_code_of_a_checkpoint_is_not_run_unasked(own_code: Path) -> None:
    verdict = load_checkpoint(own_code, memory=ENOUGH)
    assert "its own code (auto_map) is not run" in said(verdict)
    assert "--trust-remote-code" in said(verdict)
    assert not list(own_code.parent.rglob("ran"))


def test_code_of_a_checkpoint_is_run_when_asked(own_code: Path) -> None:
    verdict = load_checkpoint(own_code, memory=ENOUGH, trust_remote_code=True)
    assert verdict.problems == ()
    assert (verdict.model_class, verdict.ran) == ("OwnForCausalLM", True)
    assert list(own_code.parent.rglob("ran"))


def test_code_beside_a_known_model_is_not_run(tmp_path: Path) -> None:
    """Even when asked: transformers has the model itself."""
    root = tiny_llama(tmp_path / "model", 0)
    config: dict[str, Any] = json.loads((root / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    write_json(root / "config.json", config)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    assert load_checkpoint(root, memory=ENOUGH, trust_remote_code=True).ran
    assert not list(tmp_path.rglob("ran"))


def test_a_broken_checkpoint_is_a_verdict(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.zeros(2)}, llama_config())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors" in said(load_checkpoint(tmp_path, memory=ENOUGH))


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has no tokenizer of its own for this model, and asks on the terminal unless told."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *texts: asked.append(texts) or "y")
    root = tmp_path / "model"
    save(KINDS["arcee"].build(0), root)
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["modeling_own.Own", None]}}
    write_json(root / "tokenizer_config.json", own)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    for may in (False, True):
        verdict = load_checkpoint(root, memory=ENOUGH, trust_remote_code=may)
        assert (verdict.problems, verdict.ran) == ((), True)
    assert asked == []
    assert not list(tmp_path.rglob("ran"))


def test_transformers_is_told_everywhere_whether_code_may_be_run() -> None:
    """Where a call that reads a model's directory leaves it out, transformers asks."""
    calls = [
        (file.name, call)
        for file in Path(raymerge.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
    ]
    # A quantiser is made of a table, and reads no file.
    calls = [(name, call) for name, call in calls if ast.unparse(call.func) != "quantizers.from_config"]
    assert len(calls) >= 6
    for name, call in calls:
        given = {each.arg for each in call.keywords}
        assert "trust_remote_code" in given or None in given, f"{name}: {ast.unparse(call)}"


def test_a_tokenizer_that_does_not_load_is_told(tmp_path: Path) -> None:
    save(KINDS["phi3"].build(0), tmp_path)
    (tmp_path / "tokenizer.json").write_text("junk", encoding="utf-8")
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran
    assert "its tokenizer does not load here" in verdict.note
