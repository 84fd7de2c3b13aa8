"""``MODEL+ADAPTER`` in a merge: what is written equals what peft would make of the model first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
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
from kits.checkpoint_maker import llama_config, llama_shapes, read_tensors, tiny_llama, write_checkpoint
from kits.gpu_arithmetic import multiply_in_tf32
from kits.merges import check_close, mean_of, merge_here
from kits.pickle_maker import Marker
from kits.s3_server import s3_server
from kits.tokenizer_maker import word_level
from tokenizers import Tokenizer

import raymerge
from raymerge.device_numerics import full_float32
from raymerge.errors import OptionError, PlanError

Q = "model.layers.{}.self_attn.q_proj"
DOWN = "model.layers.{}.mlp.down_proj"


def _mean(*parents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: sum(each[name].double() for each in parents) / len(parents) for name in parents[0]}


def _check_alone(model: Path, lora: Path, out: Path) -> None:
    found = merge_here(mean_of(f"{model}+{lora}"), out)
    check_close(found, peft_merge(read_tensors(model), lora))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "base", 1, dtype=torch.float32)


def test_an_adapter_is_added_before_models_are_merged(tmp_path: Path, base: Path) -> None:
    other = tiny_llama(tmp_path / "other", 2, dtype=torch.float32)
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    found = merge_here(mean_of(f"{base}+{lora}", other), tmp_path / "out")
    check_close(found, _mean(peft_merge(read_tensors(base), lora), read_tensors(other)))


def test_a_pickled_adapter_gives_the_bytes_of_the_same_one_in_safetensors(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    pickled = pickled_adapter(lora, tmp_path / "pickled")
    for name, adapter in (("expected", lora), ("found", pickled)):
        merge_here(mean_of(f"{base}+{adapter}", base), tmp_path / name)
    with s3_server() as s3:
        s3.upload(pickled, "pickled")
        merge_here(mean_of(f"{base}+s3://{s3.bucket}/pickled", base), tmp_path / "far", storage=s3.options)
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "far" / "model.safetensors").read_bytes() == expected
    assert raymerge.verify(tmp_path / "found").problems == ()
    notes = raymerge.plan(mean_of(f"{base}+{pickled}", base)).manifest["notes"]
    assert f"{pickled}: its tensors are read from a pickled file: adapter_model.bin." in notes
    assert raymerge.replay(tmp_path / "found").problems == ()


def test_a_pickled_adapter_is_refused_where_the_recipe_says_so_and_runs_no_code(
    tmp_path: Path, base: Path
) -> None:
    lora = pickled_adapter(tiny_lora(tmp_path / "lora", read_tensors(base), 3), tmp_path / "pickled")
    with pytest.raises(PlanError, match=r"adapter_model.bin, and pickled weights are refused"):
        raymerge.plan(mean_of(f"{base}+{lora}", base, pickled_weights="refuse"))
    torch.save({"x": Marker(tmp_path / "ran")}, lora / "adapter_model.bin")
    with pytest.raises(PlanError, match="would run code or build other things"):
        raymerge.plan(mean_of(f"{base}+{lora}", base))
    assert not (tmp_path / "ran").exists()


def test_adapters_are_multiplied_in_full_float32_whatever_the_process_has_set(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whose libraries take TF32 where they are allowed to."""
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{lora}"}]}
    expected = merge_here(recipe, tmp_path / "expected")
    multiply_in_tf32(monkeypatch)
    with full_float32():
        torch.set_float32_matmul_precision("high")
        found = merge_here(recipe, tmp_path / "out")
        assert torch.get_float32_matmul_precision() == "high"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    multiply_in_tf32(monkeypatch, is_forced=True)
    with pytest.raises(OptionError, match="NVIDIA_TF32_OVERRIDE"):
        merge_here(recipe, tmp_path / "forced")
    assert not (tmp_path / "forced").exists()


def test_deltas_of_adapters_on_one_base(tmp_path: Path, base: Path) -> None:
    tensors = read_tensors(base)
    one, two = (tiny_lora(tmp_path / name, tensors, seed) for seed, name in enumerate(("one", "two")))
    recipe = mean_of(f"{base}+{one}", f"{base}+{two}", base_model=str(base)) | {
        "merge_method": "task_arithmetic"
    }
    found = merge_here(recipe, tmp_path / "out")
    merged = [peft_merge(tensors, each) for each in (one, two)]
    check_close(found, {name: sum(m[name] for m in merged) - tensors[name].double() for name in tensors})


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
    check_close(merge_here(recipe, tmp_path / "out"), peft_merge(read_tensors(base), lora))


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 32}},
    ],
)
def test_scales_are_peft_s(tmp_path: Path, base: Path, config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    factors: dict[str, torch.Tensor] = {}
    for layer in range(3):
        q = 2 if "rank_pattern" in config else 4
        factors |= factor_tensors(Q.format(layer), (32, 32), q, generator)
        factors |= factor_tensors(DOWN.format(layer), (32, 64), 4, generator)
    settings = lora_config(target_modules=["q_proj", "down_proj"], **config)
    lora = write_adapter(tmp_path / "lora", factors, settings)
    _check_alone(base, lora, tmp_path / "out")


def test_dora_embeddings_and_saved_modules(tmp_path: Path, base: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    factors = factor_tensors(Q.format(1), (32, 32), 4, generator)
    factors[f"{PREFIX}{Q.format(1)}.lora_magnitude_vector"] = torch.rand(32, generator=generator) + 0.5
    head = "lm_head.weight"
    factors[PREFIX + head] = torch.randn(64, 32, generator=generator)
    settings = lora_config(target_modules=[Q.format(1)], use_dora=True, modules_to_save=["lm_head"])
    lora = write_adapter(tmp_path / "lora", factors, settings)
    _check_alone(base, lora, tmp_path / "out")
    embedding = "model.embed_tokens"
    factors = {
        f"{PREFIX}{embedding}.lora_embedding_A": torch.randn(4, 64, generator=generator),
        f"{PREFIX}{embedding}.lora_embedding_B": torch.randn(32, 4, generator=generator),
    }
    lora = write_adapter(tmp_path / "rows", factors, lora_config(target_modules=["embed_tokens"]))
    _check_alone(base, lora, tmp_path / "out2")


def test_a_stack_takes_the_changes_of_its_layers(tmp_path: Path, base: Path) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 3)
    ranges = [[0, 2], [1, 2]]
    slices = [{"sources": [{"model": f"{base}+{lora}", "layer_range": each}]} for each in ranges]
    recipe = {"merge_method": "passthrough", "slices": slices}
    found = merge_here(recipe, tmp_path / "out")
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
    found = merge_here(mean_of(f"{base}+{lora}"), tmp_path / "out")
    expected = {name: tensor.double() for name, tensor in tensors.items()}
    loaded = {name: tensor.double() for name, tensor in factors.items()}

    def delta(module: str) -> torch.Tensor:
        up = loaded[f"{PREFIX}{module}.lora_B.weight"]
        return 2.0 * up @ loaded[f"{PREFIX}{module}.lora_A.weight"]

    expected[f"{block}.gate_up_proj"][2, width:] += delta(f"{block}.2.up_proj")
    expected[f"{block}.down_proj"][1] += delta(f"{block}.1.down_proj")
    check_close(found, expected)


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
    found = merge_here(mean_of(f"{base}+{lora}"), tmp_path / "out")
    prefixed = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    merged = peft_merge(prefixed, lora)
    check_close(found, {name: merged[f"transformer.{name}"] for name in tensors})


def test_memory_and_workers_change_no_byte(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 1, hidden=256, layers=2)
    tensors = read_tensors(base)
    one, two = (
        tiny_lora(tmp_path / name, tensors, seed, dtype=torch.bfloat16)
        for seed, name in enumerate(("one", "two"))
    )
    recipe = mean_of(f"{base}+{one}", f"{base}+{two}", base_model=str(base)) | {"merge_method": "ties"}
    digests = set()
    for number, options in enumerate(({}, {"memory": 26 << 20}, {"memory": 64 << 20})):
        merge_here(recipe, tmp_path / f"out{number}", **options)
        path = tmp_path / f"out{number}" / "model.safetensors"
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_change_without_a_tensor_is_refused(tmp_path: Path, base: Path) -> None:
    deep = tiny_llama(tmp_path / "deep", 1, layers=4, dtype=torch.float32)
    lora = tiny_lora(tmp_path / "lora", read_tensors(deep), 3)
    with pytest.raises(PlanError) as caught:
        merge_here(mean_of(f"{base}+{lora}"), tmp_path / "out")
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
        merge_here(mean_of(f"{base}+{lora}"), tmp_path / "out")


# Beside what else a recipe may ask for: tokenizers, rules, other names, tied heads

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WORDS = ("<unk>", "the", "a", "red", "house")
OTHERS = ("<unk>", "house", "red", "green", "the")
"""Words of two vocabularies, by id."""
HIDDEN = 8


def _notes(recipe: Mapping[str, Any]) -> str:
    return "\n".join(raymerge.plan(json.loads(json.dumps(recipe, default=str))).manifest["notes"])


def _refusal(recipe: Mapping[str, Any], out: Path) -> str:
    with pytest.raises(PlanError) as caught:
        merge_here(recipe, out)
    assert not out.exists()
    return str(caught.value)


def _tokenizer(words: tuple[str, ...]) -> dict[str, str]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    return {"tokenizer.json": json.dumps(word_level(words)), "tokenizer_config.json": json.dumps(config)}


def _speaker(root: Path, seed: int, words: tuple[str, ...], *, tie: bool = False) -> Path:
    """A Llama of one layer in float32 with a row for each word, and its tokenizer."""
    config = llama_config(layers=1, hidden=HIDDEN, vocab=len(words), tie=tie, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in llama_shapes(config).items()}
    return write_checkpoint(root, tensors, config, extra=_tokenizer(words))


def _embedding_lora(root: Path, rows: int, seed: int, **config: Any) -> Path:
    generator = torch.Generator().manual_seed(seed)
    module = f"{PREFIX}{EMBEDDING.removesuffix('.weight')}"
    factors = {
        f"{module}.lora_embedding_A": torch.randn(4, rows, generator=generator),
        f"{module}.lora_embedding_B": torch.randn(HIDDEN, 4, generator=generator),
    }
    return write_adapter(root, factors, lora_config(target_modules=["embed_tokens"], **config))


def _grown_lora(root: Path, rows: int, seed: int) -> Path:
    """An adapter that holds embedding and head whole, of a vocabulary of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = factor_tensors("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN), 4, generator)
    tensors |= {PREFIX + name: torch.randn(rows, HIDDEN, generator=generator) for name in (EMBEDDING, HEAD)}
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    return write_adapter(root, tensors, lora_config(**saved))


def _by_word(
    ids: Mapping[str, int], *parents: tuple[tuple[str, ...], Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The mean of models by words, where a word that one lacks is its row in the other."""
    first = parents[0][1]
    mean = {name: torch.stack([each[name].double() for _, each in parents]).mean(dim=0)
            for name in first if name not in (EMBEDDING, HEAD)}  # fmt: skip
    for name in {EMBEDDING, HEAD} & first.keys():
        rows = torch.zeros(len(ids), HIDDEN, dtype=torch.float64)
        for word, number in ids.items():
            own = [each[name][words.index(word)].double() for words, each in parents if word in words]
            rows[number] = torch.stack(own).mean(dim=0)
        mean[name] = rows
    return mean


def _ids(out: Path) -> dict[str, int]:
    found: dict[str, int] = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    return found


class TestTokenizers:
    @pytest.mark.parametrize("source", ["union", "base"])
    def test_rows_that_an_adapter_changes_are_matched_by_token(self, tmp_path: Path, source: str) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora = _embedding_lora(tmp_path / "lora", len(OTHERS), 3)
        recipe = mean_of(one, f"{two}+{lora}", base_model=str(one), tokenizer_source=source)
        found = merge_here(recipe, tmp_path / "out")
        ids = _ids(tmp_path / "out")
        assert len(ids) == (6 if source == "union" else 5)
        check_close(
            found, _by_word(ids, (WORDS, read_tensors(one)), (OTHERS, peft_merge(read_tensors(two), lora)))
        )
        assert "deltas applied 1 of 1" in _notes(recipe)

    @pytest.mark.parametrize("place", [0, 1])
    def test_saved_rows_of_the_tokenizer_beside_the_adapter(self, tmp_path: Path, place: int) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora, grown = _grown_lora(tmp_path / "lora", 7, 3), (*WORDS, "blue", "sky")
        for name, text in _tokenizer(grown).items():
            (lora / name).write_text(text)
        models: list[object] = [two]
        models.insert(place, f"{one}+{lora}")
        found = merge_here(mean_of(*models, tokenizer_source="union"), tmp_path / "out")
        ids = _ids(tmp_path / "out")
        assert len(ids) == 8
        own = (grown, peft_merge(read_tensors(one), lora))
        check_close(found, _by_word(ids, own, (OTHERS, read_tensors(two))))

    @pytest.mark.parametrize(("rows", "source"), [(7, "union"), (4, "base")])
    def test_saved_rows_that_no_tokenizer_numbers(self, tmp_path: Path, rows: int, source: str) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora = _grown_lora(tmp_path / "lora", rows, 3)
        recipe = mean_of(f"{one}+{lora}", two, tokenizer_source=source)
        text = _refusal(recipe, tmp_path / "out")
        assert f"{lora}: the embedding that it holds whole has {rows} rows where the model has 5" in text

    def test_more_rows_without_another_model(self, tmp_path: Path) -> None:
        one = _speaker(tmp_path / "one", 1, WORDS)
        lora = _grown_lora(tmp_path / "lora", 7, 3)
        _check_alone(one, lora, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 7

    def test_more_rows_than_another_model(self, tmp_path: Path) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora = _grown_lora(tmp_path / "lora", 7, 3)
        text = _refusal(mean_of(f"{one}+{lora}", two), tmp_path / "out")
        assert f"{two}: 2 of its tensors have 5 rows, one for each token, where {one}+{lora} has 7" in text
        recipe = mean_of(two, f"{one}+{lora}", embedding_sizes="common")
        found = merge_here(recipe, tmp_path / "out")
        merged = peft_merge(read_tensors(one), lora)
        mean = (merged[HEAD][:5] + read_tensors(two)[HEAD].double()) / 2
        torch.testing.assert_close(found[HEAD].double(), mean, rtol=3e-6, atol=3e-7)


class TestRules:
    def test_attention_with_its_adapter_and_the_mean_of_the_rest(self, tmp_path: Path) -> None:
        one = tiny_llama(tmp_path / "one", 1, dtype=torch.float32)
        two = tiny_llama(tmp_path / "two", 2, dtype=torch.float32)
        lora = tiny_lora(tmp_path / "lora", read_tensors(one), 3)
        rule = {"role": "attention", "merge_method": "passthrough", "sources": [f"{one}+{lora}"]}
        recipe = mean_of(f"{one}+{lora}", two, methods=[rule])
        merged, other = peft_merge(read_tensors(one), lora), read_tensors(two)
        expected = {
            name: tensor if "self_attn" in name else (tensor + other[name].double()) / 2
            for name, tensor in merged.items()
        }
        check_close(merge_here(recipe, tmp_path / "out"), expected)
        assert "deltas applied 9 of 9" in _notes(recipe)

    def test_changes_that_a_rule_leaves_out_are_counted(self, tmp_path: Path) -> None:
        one = tiny_llama(tmp_path / "one", 1, dtype=torch.float32)
        lora = tiny_lora(tmp_path / "lora", read_tensors(one), 3)
        rule = {"role": "attention", "merge_method": "passthrough", "sources": [str(one)]}
        recipe = mean_of(one, f"{one}+{lora}", methods=[rule])
        own, merged = read_tensors(one), peft_merge(read_tensors(one), lora)
        expected = {
            name: tensor.double() if "self_attn" in name else (tensor + merged[name]) / 2
            for name, tensor in own.items()
        }
        check_close(merge_here(recipe, tmp_path / "out"), expected)
        assert "deltas applied 3 of 9; the recipe leaves out the tensors of 6" in _notes(recipe)


TEXT = "language_model.model."
TOWER = "vision_tower.vision_model.encoder."
MODULES = ("self_attn.q_proj", "self_attn.v_proj")


def _pictures(root: Path, *, layers: int = 2, tower_layers: int = 3) -> Path:
    """A model with a text stack and a tower whose layers have modules of the same names and shapes."""
    text = llama_config(layers=layers, hidden=HIDDEN, vocab=16, dtype=torch.float32)
    shapes = {f"language_model.{name}": shape for name, shape in llama_shapes(text).items()}
    blocks = [f"{TOWER}layers.{layer}.self_attn" for layer in range(tower_layers)]
    shapes |= {f"{block}.{x}_proj.weight": (HIDDEN, HIDDEN) for block in blocks for x in "qkv"}
    shapes |= {"multi_modal_projector.linear_1.weight": (HIDDEN, HIDDEN)}
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": tower_layers},
        "torch_dtype": "float32",
    }
    return write_checkpoint(root, tensors, config)


def _renamed(root: Path, model: Path, modules: Mapping[str, str]) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter under other names of the model's modules, and the model as peft would change it."""
    tensors, generator = read_tensors(model), torch.Generator().manual_seed(5)
    factors: dict[str, torch.Tensor] = {}
    for module in modules.values():
        rows, columns = tensors[f"{module}.weight"].shape
        factors |= factor_tensors(module, (rows, columns), 4, generator)
    config = lora_config(target_modules=list(modules.values()))
    merged = peft_merge(tensors, write_adapter(root / "plain", factors, config))
    renamed: dict[str, torch.Tensor] = {}
    for other, own in modules.items():
        for part in ("lora_A.weight", "lora_B.weight"):
            renamed[f"{PREFIX}{other}.{part}"] = factors[f"{PREFIX}{own}.{part}"]
    return write_adapter(root / "renamed", renamed, config), merged


def _layers(
    other: str, own: str, layers: Iterable[int], modules: Sequence[str] = MODULES[:1]
) -> dict[str, str]:
    return {f"{other}layers.{n}.{m}": f"{own}layers.{n}.{m}" for n in layers for m in modules}


class TestNames:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("other", "own", "layers"),
        [
            ("model.language_model.", TEXT, range(2)),
            ("language_model.", TEXT, range(2)),
            ("", TEXT, [0]),
            ("language_model.transformer.", TEXT, [0]),
            ("vision_tower.encoder.", TOWER, range(3)),
            ("model.vision_model.encoder.", TOWER, range(3)),
        ],
    )
    def test_a_stack_in_another_place(
        self, tmp_path: Path, other: str, own: str, layers: Iterable[int]
    ) -> None:
        model = _pictures(tmp_path / "model")
        lora, merged = _renamed(tmp_path, model, _layers(other, own, layers))
        check_close(merge_here(mean_of(f"{model}+{lora}"), tmp_path / "out"), merged)

    def test_both_stacks_and_what_has_no_number(self, tmp_path: Path) -> None:
        model = _pictures(tmp_path / "model")
        modules = _layers("model.language_model.", TEXT, range(2))
        modules |= _layers(f"model.{TOWER}", TOWER, range(3), MODULES)
        modules |= {"model.multi_modal_projector.linear_1": "multi_modal_projector.linear_1"}
        lora, merged = _renamed(tmp_path, model, modules)
        recipe = mean_of(f"{model}+{lora}")
        check_close(merge_here(recipe, tmp_path / "out"), merged)
        assert "deltas applied 9 of 9" in _notes(recipe)

    @pytest.mark.parametrize("layers", [(0, 1, 2), (2,)])
    def test_a_layer_that_only_the_tower_has_is_not_the_text_s(
        self, tmp_path: Path, layers: tuple[int, ...]
    ) -> None:
        model = _pictures(tmp_path / "model")
        lora, _ = _renamed(tmp_path, model, _layers("model.language_model.", TOWER, layers))
        text = _refusal(mean_of(f"{model}+{lora}"), tmp_path / "out")
        assert f"{len(layers) - 1} of its {len(layers)} changes have a tensor to go to" in text
        assert "these have none: model.language_model.layers.2.self_attn.q_proj" in text

    @pytest.mark.parametrize("start", ["encoder.", "talker.model."])
    def test_words_that_name_another_stack(self, tmp_path: Path, start: str) -> None:
        model = _pictures(tmp_path / "model")
        lora, _ = _renamed(tmp_path, model, _layers(start, TEXT, [0]))
        assert "0 of its 1 changes have a tensor" in _refusal(mean_of(f"{model}+{lora}"), tmp_path / "out")


class TestModules:
    """Changes in modules that a recipe does not name."""

    @staticmethod
    def _both(root: Path, model: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        names = [f"{TEXT}layers.0.{MODULES[0]}", f"{TOWER}layers.0.{MODULES[0]}"]
        return _renamed(root, model, {name: name for name in names})

    @staticmethod
    def _recipe(base: object, model: object, **text: Any) -> dict[str, Any]:
        entries = {"models": [{"model": str(model), "parameters": {"weight": 1}}]}
        return {
            "merge_method": "linear",
            "base_model": str(base),
            "modules": {"text_decoder": text or entries},
        }

    def test_a_change_that_would_be_left_out_is_refused(self, tmp_path: Path) -> None:
        model = _pictures(tmp_path / "model")
        lora, _ = self._both(tmp_path, model)
        text = _refusal(self._recipe(model, f"{model}+{lora}"), tmp_path / "out")
        assert f"{lora}: 1 tensors that it changes are in the module 'vision_tower' of {model}+{lora}" in text
        assert f"Name 'vision_tower' below 'modules' too, make {model}+{lora} the base_model" in text

    def test_what_is_copied_from_the_base_has_its_changes(self, tmp_path: Path) -> None:
        model = _pictures(tmp_path / "model")
        lora, merged = self._both(tmp_path, model)
        recipe = self._recipe(f"{model}+{lora}", f"{model}+{lora}")
        check_close(merge_here(recipe, tmp_path / "out"), merged)
        assert "deltas applied 2 of 2" in _notes(recipe)


class TestTiedHeads:
    def test_the_head_follows_the_embedding(self, tmp_path: Path) -> None:
        one = _speaker(tmp_path / "one", 1, WORDS, tie=True)
        lora = _embedding_lora(tmp_path / "lora", len(WORDS), 3)
        _check_alone(one, lora, tmp_path / "out")
        assert HEAD not in read_tensors(tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True

    def test_with_a_model_that_has_a_head_of_its_own(self, tmp_path: Path) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS, tie=True), _speaker(tmp_path / "two", 2, WORDS)
        lora = _embedding_lora(tmp_path / "lora", len(WORDS), 3)
        found = merge_here(mean_of(f"{one}+{lora}", two), tmp_path / "out")
        merged, other = peft_merge(read_tensors(one), lora), read_tensors(two)
        merged[HEAD] = merged[EMBEDDING]
        check_close(found, {name: (tensor + other[name].double()) / 2 for name, tensor in merged.items()})

    @pytest.mark.parametrize("stored", [True, False])
    def test_a_head_that_an_adapter_would_part_from_it(self, tmp_path: Path, stored: bool) -> None:
        one = _speaker(tmp_path / "one", 1, WORDS, tie=True)
        tensors = read_tensors(one)
        if stored:
            tensors[HEAD] = tensors[EMBEDDING]
            write_checkpoint(one, tensors, json.loads((one / "config.json").read_text()))
        factors = factor_tensors("lm_head", (len(WORDS), HIDDEN), 4, torch.Generator().manual_seed(1))
        lora = write_adapter(tmp_path / "lora", factors, lora_config(target_modules=["lm_head"]))
        text = _refusal(mean_of(f"{one}+{lora}", extra_tensors="drop"), tmp_path / "out")
        assert f"{lora}: lm_head: it changes the head, which {one}+{lora} has only as its embedding" in text
        saved = _grown_lora(tmp_path / "saved", len(WORDS), 3)
        text = _refusal(mean_of(f"{one}+{saved}", extra_tensors="drop"), tmp_path / "out")
        assert f"{saved}: lm_head.weight: it changes the head" in text
        assert len(text.splitlines()) == 1
