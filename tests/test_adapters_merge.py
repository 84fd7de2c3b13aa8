"""``MODEL+ADAPTER`` in a merge: what is written equals what peft would make of the model first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import (
    PREFIX,
    factor_tensors,
    lora_config,
    peft_merge,
    pickled_adapter,
    tiny_lora,
    write_adapter,
)
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.gpu_arithmetic import multiply_in_tf32
from kits.pickle_maker import Marker
from kits.s3_server import s3_server

import raymerge
from raymerge.device_numerics import full_float32
from raymerge.errors import OptionError, PlanError

Q = "model.layers.{}.self_attn.q_proj"
DOWN = "model.layers.{}.mlp.down_proj"


def _merge(recipe: Mapping[str, Any], out: Path, **options: Any) -> dict[str, torch.Tensor]:
    plain = json.loads(json.dumps(recipe, default=str))
    result = raymerge.submit(plain, out, raymerge.RunOptions(inline=True, **options))
    return read_tensors(result.output)


def _linear(*models: object, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(each), "parameters": {"weight": 1}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def _mean(*parents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: sum(each[name].double() for each in parents) / len(parents) for name in parents[0]}


def _check(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=3e-6, atol=3e-7)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama in float32."""
    return tiny_llama(tmp_path / "base", 1, dtype=torch.float32)


def test_an_adapter_is_added_before_models_are_merged(tmp_path: Path, base: Path) -> None:
    other = tiny_llama(tmp_path / "other", 2, dtype=torch.float32)
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    found = _merge(_linear(f"{base}+{lora}", other), tmp_path / "out")
    _check(found, _mean(peft_merge(read_tensors(base), lora), read_tensors(other)))


def test_a_model_with_its_adapter_alone_is_that_model_merged(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{lora}"}]}
    found = _merge(recipe, tmp_path / "out")
    _check(found, peft_merge(read_tensors(base), lora))
    untouched = Q.format(0).replace("q_proj", "k_proj") + ".weight"
    assert torch.equal(found[untouched], read_tensors(base)[untouched])


def test_a_pickled_adapter_gives_the_bytes_of_the_same_one_in_safetensors(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    pickled = pickled_adapter(lora, tmp_path / "pickled")
    for name, adapter in (("expected", lora), ("found", pickled)):
        _merge(_linear(f"{base}+{adapter}", base), tmp_path / name)
    with s3_server() as s3:
        s3.upload(pickled, "pickled")
        _merge(_linear(f"{base}+s3://{s3.bucket}/pickled", base), tmp_path / "far", storage=s3.options)
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "far" / "model.safetensors").read_bytes() == expected
    assert raymerge.verify(tmp_path / "found").problems == ()
    notes = raymerge.plan(_linear(f"{base}+{pickled}", base)).manifest["notes"]
    assert f"{pickled}: its tensors are read from a pickled file: adapter_model.bin." in notes
    assert raymerge.replay(tmp_path / "found").problems == ()


def test_a_pickled_adapter_is_refused_where_the_recipe_says_so_and_runs_no_code(
    tmp_path: Path, base: Path
) -> None:
    lora = pickled_adapter(tiny_lora(tmp_path / "lora", read_tensors(base), 3), tmp_path / "pickled")
    with pytest.raises(PlanError, match=r"adapter_model.bin, and pickled weights are refused"):
        raymerge.plan(_linear(f"{base}+{lora}", base, pickled_weights="refuse"))
    torch.save({"x": Marker(tmp_path / "ran")}, lora / "adapter_model.bin")
    with pytest.raises(PlanError, match="would run code or build other things"):
        raymerge.plan(_linear(f"{base}+{lora}", base))
    assert not (tmp_path / "ran").exists()


def test_adapters_are_multiplied_in_full_float32_whatever_the_process_has_set(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whose libraries take TF32 where they are allowed to."""
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{lora}"}]}
    expected = _merge(recipe, tmp_path / "expected")
    multiply_in_tf32(monkeypatch)
    with full_float32():
        torch.set_float32_matmul_precision("high")
        found = _merge(recipe, tmp_path / "out")
        assert torch.get_float32_matmul_precision() == "high"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    multiply_in_tf32(monkeypatch, is_forced=True)
    with pytest.raises(OptionError, match="NVIDIA_TF32_OVERRIDE"):
        _merge(recipe, tmp_path / "forced")
    assert not (tmp_path / "forced").exists()


def test_deltas_of_adapters_on_one_base(tmp_path: Path, base: Path) -> None:
    tensors = read_tensors(base)
    one, two = (tiny_lora(tmp_path / name, tensors, seed) for seed, name in enumerate(("one", "two")))
    recipe = _linear(f"{base}+{one}", f"{base}+{two}", base_model=str(base)) | {
        "merge_method": "task_arithmetic"
    }
    found = _merge(recipe, tmp_path / "out")
    merged = [peft_merge(tensors, each) for each in (one, two)]
    _check(found, {name: sum(m[name] for m in merged) - tensors[name].double() for name in tensors})


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_base_with_its_adapter_alone_is_the_result_of_deltas(
    tmp_path: Path, base: Path, weight: float
) -> None:
    """Recipes that ablate by an adapter write it so; the delta of the base to itself is 0."""
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    model = f"{base}+{lora}"
    source = {"model": model, "layer_range": [0, 3], "parameters": {"weight": weight}}
    recipe = {
        "base_model": model,
        "dtype": "float32",
        "merge_method": "task_arithmetic",
        "parameters": {"normalize": False, "scale": 2},
        "slices": [{"sources": [source]}],
    }
    _check(_merge(recipe, tmp_path / "out"), peft_merge(read_tensors(base), lora))


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 32}},
    ],
)
def test_scales_are_peft_s(tmp_path: Path, base: Path, config: dict[str, Any]) -> None:
    tensors, generator = read_tensors(base), torch.Generator().manual_seed(5)
    factors: dict[str, torch.Tensor] = {}
    for layer in range(3):
        q = 2 if "rank_pattern" in config else 4
        factors |= factor_tensors(Q.format(layer), (32, 32), q, generator)
        factors |= factor_tensors(DOWN.format(layer), (32, 64), 4, generator)
    settings = lora_config(target_modules=["q_proj", "down_proj"], **config)
    lora = write_adapter(tmp_path / "lora", factors, settings)
    _check(_merge(_linear(f"{base}+{lora}"), tmp_path / "out"), peft_merge(tensors, lora))


def test_dora_embeddings_and_saved_modules(tmp_path: Path, base: Path) -> None:
    tensors, generator = read_tensors(base), torch.Generator().manual_seed(6)
    factors = factor_tensors(Q.format(1), (32, 32), 4, generator)
    factors[f"{PREFIX}{Q.format(1)}.lora_magnitude_vector"] = torch.rand(32, generator=generator) + 0.5
    head = "lm_head.weight"
    factors[PREFIX + head] = torch.randn(64, 32, generator=generator)
    settings = lora_config(target_modules=[Q.format(1)], use_dora=True, modules_to_save=["lm_head"])
    lora = write_adapter(tmp_path / "lora", factors, settings)
    _check(_merge(_linear(f"{base}+{lora}"), tmp_path / "out"), peft_merge(tensors, lora))
    embedding = "model.embed_tokens"
    factors = {
        f"{PREFIX}{embedding}.lora_embedding_A": torch.randn(4, 64, generator=generator),
        f"{PREFIX}{embedding}.lora_embedding_B": torch.randn(32, 4, generator=generator),
    }
    lora = write_adapter(tmp_path / "rows", factors, lora_config(target_modules=["embed_tokens"]))
    _check(_merge(_linear(f"{base}+{lora}"), tmp_path / "out2"), peft_merge(tensors, lora))


def test_a_stack_takes_the_changes_of_its_layers(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    ranges = [[0, 2], [1, 2]]
    slices = [{"sources": [{"model": f"{base}+{lora}", "layer_range": each}]} for each in ranges]
    recipe = {"merge_method": "passthrough", "slices": slices}
    found = _merge(recipe, tmp_path / "out")
    merged = peft_merge(read_tensors(base), lora)
    for layer, source in enumerate((0, 1, 1)):
        torch.testing.assert_close(
            found[f"{Q.format(layer)}.weight"].double(),
            merged[f"{Q.format(source)}.weight"],
            rtol=1e-6,
            atol=1e-7,
        )
    notes = raymerge.plan(json.loads(json.dumps(recipe))).manifest["notes"]
    assert f"{lora} on {base}+{lora}: deltas applied 6 of 9; the recipe leaves out the tensors of 3" in notes


def test_adapters_of_single_experts_change_fused_tensors(tmp_path: Path) -> None:
    experts, width, hidden = 4, 16, 32
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": experts,
        "moe_intermediate_size": width,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    generator = torch.Generator().manual_seed(4)
    block = "model.layers.0.mlp.experts"
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, hidden, generator=generator),
        "lm_head.weight": torch.randn(64, hidden, generator=generator),
        "model.norm.weight": torch.randn(hidden, generator=generator),
        "model.layers.0.mlp.gate.weight": torch.randn(experts, hidden, generator=generator),
        f"{block}.gate_up_proj": torch.randn(experts, 2 * width, hidden, generator=generator),
        f"{block}.down_proj": torch.randn(experts, hidden, width, generator=generator),
    }
    base = write_checkpoint(tmp_path / "base", tensors, config)
    factors = factor_tensors(f"{block}.2.up_proj", (width, hidden), 4, generator)
    factors |= factor_tensors(f"{block}.1.down_proj", (hidden, width), 4, generator)
    lora = write_adapter(tmp_path / "lora", factors, lora_config(target_modules=["up_proj", "down_proj"]))
    found = _merge(_linear(f"{base}+{lora}"), tmp_path / "out")
    expected = {name: tensor.double() for name, tensor in tensors.items()}
    loaded = {name: tensor.double() for name, tensor in factors.items()}

    def delta(module: str) -> torch.Tensor:
        up = loaded[f"{PREFIX}{module}.lora_B.weight"]
        return 2.0 * up @ loaded[f"{PREFIX}{module}.lora_A.weight"]

    expected[f"{block}.gate_up_proj"][2, width:] += delta(f"{block}.2.up_proj")
    expected[f"{block}.down_proj"][1] += delta(f"{block}.1.down_proj")
    _check(found, expected)


def test_a_transposed_weight_takes_the_product_transposed(tmp_path: Path) -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 8,
    }
    config |= {"vocab_size": 32, "tie_word_embeddings": True}
    generator = torch.Generator().manual_seed(4)
    shapes = {"wte.weight": (32, 8), "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_proj.weight": (8, 8)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    base = write_checkpoint(tmp_path / "base", tensors, config)
    factors = factor_tensors("transformer.h.0.attn.c_attn", (24, 8), 4, generator)
    factors |= factor_tensors("transformer.h.0.attn.c_proj", (8, 8), 4, generator)
    settings = lora_config(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    lora = write_adapter(tmp_path / "lora", factors, settings)
    found = _merge(_linear(f"{base}+{lora}"), tmp_path / "out")
    prefixed = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    merged = peft_merge(prefixed, lora)
    _check(found, {name: merged[f"transformer.{name}"] for name in tensors})


def test_memory_and_workers_change_no_byte(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 1, hidden=256, layers=2)
    tensors = read_tensors(base)
    one, two = (
        tiny_lora(tmp_path / name, tensors, seed, dtype=torch.bfloat16)
        for seed, name in enumerate(("one", "two"))
    )
    recipe = _linear(f"{base}+{one}", f"{base}+{two}", base_model=str(base)) | {"merge_method": "ties"}
    digests = set()
    for number, options in enumerate(({}, {"memory": 26 << 20}, {"memory": 64 << 20})):
        _merge(recipe, tmp_path / f"out{number}", **options)
        path = tmp_path / f"out{number}" / "model.safetensors"
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_change_without_a_tensor_is_refused(tmp_path: Path, base: Path) -> None:
    deep = tiny_llama(tmp_path / "deep", 1, layers=4, dtype=torch.float32)
    lora = tiny_lora(tmp_path / "lora", read_tensors(deep), 3)
    with pytest.raises(PlanError) as caught:
        _merge(_linear(f"{base}+{lora}"), tmp_path / "out")
    text = str(caught.value)
    assert "9 of its 12 changes have a tensor to go to" in text
    assert "model.layers.3" in text
    assert not (tmp_path / "out").exists()


def test_a_product_of_another_size_is_refused(tmp_path: Path, base: Path) -> None:
    wide = tiny_llama(tmp_path / "wide", 1, hidden=64, dtype=torch.float32)
    lora = tiny_lora(tmp_path / "lora", read_tensors(wide), 3)
    with pytest.raises(
        PlanError, match=r"its product is \[64, 64\], but .*q_proj.weight of the model is \[32, 32\]"
    ):
        _merge(_linear(f"{base}+{lora}"), tmp_path / "out")


def test_an_adapter_in_place_of_a_model_is_recognised(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    with pytest.raises(PlanError, match="adapter"):
        _merge(_linear(lora, base), tmp_path / "out")
