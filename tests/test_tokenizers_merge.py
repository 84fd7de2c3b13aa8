"""Recipes with a tokenizer, merged: rows by token, the files beside them, and the config that fits both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from kits.adapter_maker import PREFIX, lora_config, write_adapter
from kits.checkpoint_maker import llama_config, llama_shapes, read_tensors, write_checkpoint
from kits.merges import mean_of, merge_here
from kits.tokenizer_maker import word_level
from tokenizers import Tokenizer

import raymerge
from raymerge.errors import PlanError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ONE = ("<unk>", "the", "a", "red", "house")
TWO = ("<unk>", "house", "red", "green", "the")
"""Words of two vocabularies, by id: some in both, some moved, some in one only."""


def _tokenizer_files(words: tuple[str, ...], added: tuple[str, ...] = ()) -> dict[str, str]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    return {
        "tokenizer.json": json.dumps(word_level(words, added=added)),
        "tokenizer_config.json": json.dumps(config),
    }


def _model(
    root: Path,
    seed: int,
    words: tuple[str, ...],
    *,
    added: tuple[str, ...] = (),
    tie: bool = False,
    spare: int = 0,
) -> Path:
    """A Llama of one layer in float32 with a row for each token and ``spare`` rows more."""
    config = llama_config(layers=1, hidden=8, vocab=len(words) + len(added) + spare, tie=tie)
    config["torch_dtype"] = "float32"
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in llama_shapes(config).items()}
    return write_checkpoint(root, tensors, config, extra=_tokenizer_files(words, added))


def _ids(out: Path) -> dict[str, int]:
    found: dict[str, int] = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    return found


def test_a_union_matches_rows_by_token(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "two", 2, TWO)
    found = merge_here(mean_of(one, two, tokenizer_source="union"), tmp_path / "out")
    ids = _ids(tmp_path / "out")
    assert [ids[word] for word in ONE] == [0, 1, 2, 3, 4]
    assert ids["green"] == 5
    mine, theirs = read_tensors(one), read_tensors(two)
    for name in (EMBEDDING, HEAD):
        assert found[name].shape == (6, 8)
        for word, number in ids.items():
            rows = [
                model[name][words.index(word)]
                for model, words in ((mine, ONE), (theirs, TWO))
                if word in words
            ]
            torch.testing.assert_close(found[name][number], sum(rows) / len(rows))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 6


def test_a_draft_model_in_a_directory_would_keep_its_rows_and_is_refused(tmp_path: Path) -> None:
    models = [_model(tmp_path / name, 1, words) for name, words in (("one", ONE), ("two", TWO))]
    for model, words in zip(models, (ONE, TWO), strict=True):
        _model(model / "draft", 3, words)
    recipe = mean_of(*models, tokenizer_source="union")
    with pytest.raises(PlanError, match=r"2 tensors in directories below it.*draft/lm_head\.weight"):
        raymerge.plan(recipe).require()


def test_padding_is_the_mean_of_all_rows(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "two", 2, TWO)
    tokenizer = {"source": "union", "pad_to_multiple_of": 8}
    found = merge_here(mean_of(one, two, tokenizer=tokenizer), tmp_path / "out")[EMBEDDING]
    assert found.shape == (8, 8)
    torch.testing.assert_close(found[6:], found[:6].mean(dim=0).expand(2, 8))


def test_the_base_s_vocabulary_with_rows_of_another_order(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "two", 2, TWO)
    recipe = mean_of(one, two, base_model=str(two), tokenizer_source="base")
    found = merge_here(recipe, tmp_path / "out")[EMBEDDING]
    mine, theirs = read_tensors(one)[EMBEDDING], read_tensors(two)[EMBEDDING]
    torch.testing.assert_close(found[1], (mine[4] + theirs[1]) / 2)
    torch.testing.assert_close(found[3], theirs[3])
    kept = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert kept == (two / "tokenizer.json").read_bytes()


def test_tied_models_stay_tied(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", 1, ONE, tie=True)
    two = _model(tmp_path / "two", 2, TWO, added=("<|turn|>",), tie=True)
    found = merge_here(mean_of(one, two, tokenizer_source="union"), tmp_path / "out")
    assert HEAD not in found
    assert found[EMBEDDING].shape == (7, 8)
    torch.testing.assert_close(
        found[EMBEDDING][_ids(tmp_path / "out")["<|turn|>"]], read_tensors(two)[EMBEDDING][5]
    )


def test_rows_that_are_chosen_and_forced(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "two", 2, TWO)
    tokens = {
        "green": {"source": {"kind": "zero"}},
        "red": {"source": {"kind": "model_token", "model": str(one), "token": "the"}, "force": True},
        "new": {"source": {"kind": "model_token", "model": str(two), "token_id": 3}},
    }
    recipe = mean_of(one, two, tokenizer={"source": "union", "tokens": tokens})
    found = merge_here(recipe, tmp_path / "out")[EMBEDDING]
    ids, mine, theirs = _ids(tmp_path / "out"), read_tensors(one)[EMBEDDING], read_tensors(two)[EMBEDDING]
    torch.testing.assert_close(found[ids["green"]], theirs[3] / 2)
    torch.testing.assert_close(found[ids["red"]], mine[1])
    torch.testing.assert_close(found[ids["new"]], theirs[3])


def test_a_model_that_only_gives_its_tokenizer(tmp_path: Path) -> None:
    one, other = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "other", 3, ONE)
    giver = _model(tmp_path / "giver", 2, TWO)
    found = merge_here(mean_of(one, other, tokenizer_source=str(giver)), tmp_path / "out")[EMBEDDING]
    assert _ids(tmp_path / "out") == {word: number for number, word in enumerate(TWO)}
    mean = (read_tensors(one)[EMBEDDING] + read_tensors(other)[EMBEDDING]) / 2
    torch.testing.assert_close(found[1], mean[4])
    torch.testing.assert_close(found[3], read_tensors(giver)[EMBEDDING][3])
    plan = raymerge.plan(mean_of(one, other, tokenizer_source=str(giver)))
    fates = {row["rule"] for row in plan["dispositions"].to_pylist() if row["source"] == 2}
    assert fates == {"method", "config_only"}


def test_without_a_tokenizer_the_files_are_copied_and_spare_rows_kept(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE, spare=3), _model(tmp_path / "two", 2, ONE, spare=3)
    found = merge_here(mean_of(one, two), tmp_path / "out")
    assert found[EMBEDDING].shape == (8, 8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (one / name).read_bytes()


def test_a_chat_template_of_any_length_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "one", 1, ONE), _model(tmp_path / "two", 2, TWO)
    template = "{% for m in messages %}" + "{{ m['content'] }} / " * 400 + "{% endfor %}"
    for number, more in enumerate(({}, {"tokenizer_source": "union"})):
        place = tmp_path / f"out{number}"
        merge_here(mean_of(one, two, chat_template=template, **more), place)
        config = json.loads((place / "tokenizer_config.json").read_text())
        stored = place / "chat_template.jinja"
        assert template == (stored.read_text() if stored.exists() else config["chat_template"])


@pytest.mark.parametrize("method", ["ties", "slerp"])
def test_memory_changes_no_byte(tmp_path: Path, method: str) -> None:
    words = ("<unk>", *(f"w{n}" for n in range(3000)))
    shuffled = ("<unk>", *(f"w{(7 * n) % 3300}" for n in range(3200)))
    one, two = _model(tmp_path / "one", 1, words), _model(tmp_path / "two", 2, shuffled)
    recipe = mean_of(one, two, base_model=str(one), tokenizer={"source": "union", "pad_to_multiple_of": 128})
    recipe |= {"merge_method": method}
    if method == "slerp":
        recipe["parameters"] = {"t": 0.4}
        recipe["models"] = [{"model": str(one)}, {"model": str(two)}]
    elif method != "linear":
        recipe["models"][1]["parameters"]["density"] = 0.5
    digests = set()
    for number, memory in enumerate((24 << 20, 256 << 20)):
        merge_here(recipe, tmp_path / f"out{number}", memory=memory)
        weights = (tmp_path / f"out{number}" / "model.safetensors").read_bytes()
        digests.add(hashlib.sha256(weights).hexdigest())
    assert len(digests) == 1


def test_rows_that_only_the_base_has_are_renumbered_with_the_rest(tmp_path: Path) -> None:
    bias = "lm_head.bias"
    one = _with_bias(_model(tmp_path / "plain", 1, TWO), tmp_path / "one", bias)
    two = _model(tmp_path / "two", 2, ONE)
    recipe = mean_of(one, two, base_model=str(one), missing_tensors="copy_base", tokenizer_source=str(two))
    found = merge_here(recipe, tmp_path / "out")
    own = read_tensors(one)[bias]
    assert found[HEAD].shape == (5, 8)
    assert found[bias].tolist() == [own[TWO.index(word)] if word != "a" else 0.0 for word in ONE]


def test_common_cuts_what_only_the_base_has(tmp_path: Path) -> None:
    bias = "lm_head.bias"
    one = _with_bias(_model(tmp_path / "plain", 1, ONE, spare=3), tmp_path / "one", bias)
    two = _model(tmp_path / "two", 2, ONE)
    more = {"missing_tensors": "copy_base", "base_model": str(one)}
    found = merge_here(mean_of(one, two, embedding_sizes="common", **more), tmp_path / "out")
    assert torch.equal(found[bias], read_tensors(one)[bias][:5])
    short = _shorter(one, tmp_path / "short", bias)
    recipe = mean_of(short, two, embedding_sizes="pad", **{**more, "base_model": str(short)})
    with pytest.raises(PlanError, match=r"would not have the same tokens in the same order: lm_head\.bias"):
        merge_here(recipe, tmp_path / "pad")


def test_a_text_model_whose_module_is_not_named_is_renumbered_too(tmp_path: Path) -> None:
    one, two = (
        _seeing(tmp_path / key, n, words) for n, (key, words) in enumerate((("one", ONE), ("two", TWO)))
    )
    entries = [{"model": str(each), "parameters": {"weight": 1}} for each in (one, two)]
    modules = {"vision_tower": {"models": entries}}
    recipe = {
        "merge_method": "linear",
        "base_model": str(one),
        "modules": modules,
        "tokenizer_source": "union",
    }
    found = merge_here(recipe, tmp_path / "out")
    mine, theirs = read_tensors(one), read_tensors(two)
    for name in (f"language_model.{EMBEDDING}", f"language_model.{HEAD}"):
        assert torch.equal(found[name], torch.cat([mine[name], theirs[name][[TWO.index("green")]]]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 6


def _with_bias(model: Path, root: Path, name: str) -> Path:
    tensors, config = read_tensors(model), json.loads((model / "config.json").read_text())
    tensors[name] = torch.arange(1.0, 1.0 + len(tensors[HEAD]))
    files = {key: (model / key).read_text() for key in ("tokenizer.json", "tokenizer_config.json")}
    return write_checkpoint(root, tensors, config, extra=files)


def _shorter(model: Path, root: Path, bias: str) -> Path:
    tensors, config = read_tensors(model), json.loads((model / "config.json").read_text())
    tensors |= {name: tensors[name][:4].clone() for name in (EMBEDDING, HEAD, bias)}
    return write_checkpoint(root, tensors, {**config, "vocab_size": 4})


def _seeing(root: Path, seed: int, words: tuple[str, ...]) -> Path:
    """A model with a text decoder and a layer that sees."""
    text = llama_config(layers=1, hidden=8, vocab=len(words)) | {"torch_dtype": "float32"}
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"language_model.{name}": shape for name, shape in llama_shapes(text).items()}
    shapes["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = (8, 8)
    config = {"model_type": "llava", "text_config": text, "vision_config": {"num_hidden_layers": 1}}
    config |= {"architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "float32"}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write_checkpoint(root, tensors, config, extra=_tokenizer_files(words))


def test_a_chosen_tokenizers_end_of_text_is_written_everywhere(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", 1, ONE, added=("</s>",))
    two = _model(tmp_path / "two", 2, TWO, added=("</s>", "<|im_end|>"))
    for root, eos in ((one, "</s>"), (two, "<|im_end|>")):
        place = root / "tokenizer_config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "eos_token": eos}))
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (one / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}))
    merge_here(mean_of(one, two, tokenizer={"source": str(two)}), tmp_path / "out")
    ids = _ids(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ids["<|im_end|>"]
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [ids["<|im_end|>"], ids["</s>"], ids["<unk>"]]


# Adapters that bring an embedding


def _grown(root: Path, rows: int, words: tuple[str, ...] | None) -> Path:
    """An adapter with an embedding and a head of its own, and the tokenizer of that."""
    generator = torch.Generator().manual_seed(rows)
    tensors = {PREFIX + name: torch.randn(rows, 8, generator=generator) for name in (EMBEDDING, HEAD)}
    write_adapter(root, tensors, lora_config(modules_to_save=["embed_tokens", "lm_head"]))
    for key, text in (_tokenizer_files(words) if words is not None else {}).items():
        (root / key).write_text(text)
    return root


def test_an_adapters_tokenizer_is_not_left_behind(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", 1, ONE)
    adapter = _grown(tmp_path / "adapter", 6, (*ONE, "new"))
    recipe = mean_of(f"{one}+{adapter}")
    with pytest.raises(PlanError, match="it brings an embedding and a tokenizer of its own"):
        merge_here(recipe, tmp_path / "out")
    recipe |= {"tokenizer_source": "base", "base_model": f"{one}+{adapter}"}
    assert merge_here(recipe, tmp_path / "out")[EMBEDDING].shape == (6, 8)
    assert _ids(tmp_path / "out")["new"] == 5
    same = _grown(tmp_path / "same", 5, ONE)
    assert merge_here(mean_of(f"{one}+{same}"), tmp_path / "as-is")[EMBEDDING].shape == (5, 8)


@pytest.mark.parametrize("tie", [False, True])
def test_layers_of_models_with_other_vocabularies_are_stacked(tmp_path: Path, tie: bool) -> None:
    """The first slice gives the embedding, the last one the head; both go by the one vocabulary."""
    one, two = (
        _model(tmp_path / "one", 1, ONE, tie=tie),
        _model(tmp_path / "two", 2, TWO, added=("<|x|>",), tie=tie),
    )
    slices = [{"sources": [{"model": str(each), "layer_range": [0, 1]}]} for each in (one, two)]
    recipe = {"merge_method": "passthrough", "slices": slices, "tokenizer_source": "union"}
    found = merge_here(recipe, tmp_path / "out")
    ids, mine, theirs = _ids(tmp_path / "out"), read_tensors(one), read_tensors(two)
    words = (*TWO, "<|x|>")
    assert found[EMBEDDING].shape == found[HEAD].shape == (7, 8)
    last = theirs[EMBEDDING] if tie else theirs[HEAD]
    for word, number in ids.items():
        if word in ONE:
            torch.testing.assert_close(found[EMBEDDING][number], mine[EMBEDDING][ONE.index(word)])
        if word in words:
            torch.testing.assert_close(found[HEAD][number], last[words.index(word)])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"]) == (7, 2)
    assert config["tie_word_embeddings"] is False
