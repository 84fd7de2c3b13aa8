"""Verify finds every kind of damage, and passes what is sound."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.merge_cases import Family, make_family, merge, recipes
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, audit, verify
from raymerge.errors import VerificationError
from raymerge.options import RunOptions
from raymerge.verifier.structure import RECORD_PLAN

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("sources"), files=3)


@pytest.fixture
def merged(sources: Family, tmp_path: Path) -> Path:
    """A published checkpoint of several shards."""
    merge({**recipes(sources)["ties"], "shard_size": 20_000}, tmp_path / "out")
    assert len(_shards(tmp_path / "out")) > 2
    return tmp_path / "out"


def _shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def _said(root: Path) -> str:
    return "\n".join(str(problem) for problem in verify(root).problems)


# What is sound


def test_a_merged_checkpoint_passes_against_its_plan(merged: Path) -> None:
    verdict = verify(merged)
    assert verdict.problems == ()
    assert verdict.against_plan
    assert verdict.files == len(_shards(merged))
    assert verdict.tensors == len(read_tensors(merged))
    assert verdict.nbytes == sum(path.stat().st_size for path in _shards(merged))
    assert verdict.require() is verdict


def test_the_sources_themselves_pass_without_a_plan(sources: Family) -> None:
    for root in (sources.base, *sources.tunes):
        verdict = verify(root)
        assert verdict.problems == ()
        assert not verdict.against_plan


@pytest.mark.parametrize("tie", [True, False])
def test_tied_and_untied_models_pass(tie: bool, tmp_path: Path) -> None:
    assert verify(tiny_llama(tmp_path / "model", 1, tie=tie)).problems == ()


def test_a_model_of_an_unknown_family_passes(tmp_path: Path) -> None:
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd", "num_hidden_layers": 7}
    root = write_checkpoint(tmp_path / "odd", {"some.weight": torch.ones(3)}, config)
    assert verify(root).problems == ()


# What is damaged


def _truncate(root: Path) -> None:
    shard = _shards(root)[1]
    os.truncate(shard, shard.stat().st_size - 1)


def _lengthen(root: Path) -> None:
    with _shards(root)[0].open("ab") as file:
        file.write(b"\0")


def _rename_tensor(root: Path) -> None:
    shard = _shards(root)[0]
    tensors = load_file(shard)
    tensors["model.stranger.weight"] = tensors.pop(sorted(tensors)[0])
    save_file(tensors, shard, metadata={"format": "pt"})


def _drop_tensor(root: Path) -> None:
    """From the shard and from the index alike, so that only the plan knows."""
    shard = _shards(root)[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    _edit(root / INDEX, lambda index: index["weight_map"].pop(name))


def _add_tensor(root: Path) -> None:
    shard = _shards(root)[0]
    save_file({**load_file(shard), "model.extra.weight": torch.ones(2)}, shard, metadata={"format": "pt"})
    _edit(root / INDEX, lambda index: index["weight_map"].update({"model.extra.weight": shard.name}))


def _change_dtype(root: Path) -> None:
    shard = _shards(root)[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].half()
    save_file(tensors, shard, metadata={"format": "pt"})


def _change_shape(root: Path) -> None:
    shard = _shards(root)[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.dim() == 2)
    tensors[name] = tensors[name].flatten()
    save_file(tensors, shard, metadata={"format": "pt"})


def _remove_shard(root: Path) -> None:
    _shards(root)[-1].unlink()


def _index_lacks_a_tensor(root: Path) -> None:
    _edit(root / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def _index_invents_a_tensor(root: Path) -> None:
    shard = _shards(root)[0].name
    _edit(root / INDEX, lambda index: index["weight_map"].update({"model.ghost.weight": shard}))


def _index_names_the_wrong_shard(root: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        here = index["weight_map"]["model.norm.weight"]
        other = next(name for name in sorted(set(index["weight_map"].values())) if name != here)
        index["weight_map"]["model.norm.weight"] = other

    _edit(root / INDEX, change)


def _remove_index(root: Path) -> None:
    (root / INDEX).unlink()


def _extra_shard(root: Path) -> None:
    save_file({"model.left.over": torch.ones(2)}, root / "model.safetensors", metadata={"format": "pt"})


def _second_set(root: Path) -> None:
    """Every name once more, in a file that no index speaks of."""
    save_file(read_tensors(root), root / "copy.safetensors", metadata={"format": "pt"})


def _wrong_total(root: Path) -> None:
    _edit(
        root / INDEX, lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] - 2)
    )


def _edit_vocabulary(root: Path) -> None:
    _edit(root / "tokenizer.json", lambda content: content.update(version="2.0"))


def _edit_generation(root: Path) -> None:
    _edit(root / "generation_config.json", lambda content: content.update(temperature=0.1))


def _delete_companion(root: Path) -> None:
    (root / "special_tokens_map.json").unlink()


def _add_companion(root: Path) -> None:
    (root / "added_tokens.json").write_text('{"<evil>": 7}')


def _add_adapter(root: Path) -> None:
    """transformers lays an adapter that it finds over the model."""
    (root / "adapter_config.json").write_text("{}")


def _lose_the_provenance(root: Path) -> None:
    (root / "raymerge" / "provenance.json").unlink()


def _remove_config(root: Path) -> None:
    (root / "config.json").unlink()


def _break_config(root: Path) -> None:
    (root / "config.json").write_text("{")


def _tamper_with_the_plan(root: Path) -> None:
    _edit(root / RECORD_PLAN / "manifest.json", lambda manifest: manifest.update(seed=77))


def _lose_a_table(root: Path) -> None:
    (root / RECORD_PLAN / "tensors.arrow").unlink()


def _lose_the_plan(root: Path) -> None:
    shutil.rmtree(root / RECORD_PLAN)


def _lose_the_record(root: Path) -> None:
    shutil.rmtree(root / RECORD_PLAN.parent)
    (root / RECORD_PLAN).mkdir(parents=True)


def _swap_two_tensors(root: Path) -> None:
    """Two norms of one shape change places in their file, by its header."""
    for shard in _shards(root):
        content = shard.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        norms = [entry for name, entry in sorted(header.items()) if "layernorm" in name]
        if len(norms) > 1:
            one, other = norms[:2]
            assert one["shape"] == other["shape"]
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
            changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
            assert len(changed) == length
            shard.write_bytes(content[:8] + changed + content[8 + length :])
            return
    raise AssertionError("no shard has two of them")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_swap_two_tensors, "the plan says"),
        (_truncate, "model-00002-of-"),
        (_lengthen, "model-00001-of-"),
        (_rename_tensor, "model.stranger.weight"),
        (_drop_tensor, "1 tensors of the plan are missing"),
        (_add_tensor, "model.extra.weight: the plan has no such tensor"),
        (_change_dtype, "the plan says"),
        (_change_shape, "the plan says"),
        (_remove_shard, ".safetensors"),
        (_index_lacks_a_tensor, "model.norm.weight"),
        (_index_invents_a_tensor, "model.ghost.weight"),
        (_index_names_the_wrong_shard, "model.norm.weight"),
        (_remove_index, "no model.safetensors.index.json, so that no loader finds them"),
        (_extra_shard, "model.safetensors"),
        (_second_set, "copy.safetensors: the merge writes no such file"),
        (_wrong_total, f"{INDEX}: it is not the index that the plan makes"),
        (_edit_vocabulary, "tokenizer.json: its bytes are not those that were published"),
        (_edit_generation, "generation_config.json: its bytes are not those that were published"),
        (_delete_companion, "special_tokens_map.json: is missing"),
        (_add_companion, "added_tokens.json: the merge writes no such file"),
        (_add_adapter, "adapter_config.json: the merge writes no such file"),
        (_lose_the_provenance, "provenance.json: is missing"),
        (_remove_config, "config.json"),
        (_break_config, "config.json"),
        (_tamper_with_the_plan, "the saved plan"),
        (_lose_a_table, "the saved plan cannot be read"),
        (_lose_the_plan, "the saved plan cannot be read"),
        (_lose_the_record, "the saved plan cannot be read"),
    ],
)
def test_damage_is_found_and_never_raised(damage: Callable[[Path], None], said: str, merged: Path) -> None:
    damage(merged)
    verdict = verify(merged)
    assert verdict.problems
    assert said in _said(merged)
    with pytest.raises(VerificationError) as caught:
        verdict.require()
    assert caught.value.problems == verdict.problems


def test_what_no_loader_reads_may_be_added_and_the_card_edited(merged: Path) -> None:
    (merged / "README.md").write_text("Our model.")
    for key in ("LICENSE", "docs/eval.md", "images/loss.png", ".gitattributes", "model-Q4_K_M.gguf"):
        (merged / key).parent.mkdir(exist_ok=True)
        (merged / key).write_bytes(b"x")
    assert verify(merged).problems == ()


def test_an_audit_goes_on_where_only_companions_were_changed(merged: Path) -> None:
    _edit_vocabulary(merged)
    found = audit(merged, AuditOptions(sample=1.0), RunOptions(inline=True))
    assert [str(each.where).rpartition("/")[2] for each in found.problems] == ["tokenizer.json"]
    assert found.recomputed > 0


def test_a_second_set_beside_weights_without_a_plan_is_found(plain: Path) -> None:
    assert verify(plain).problems == ()
    _second_set(plain)
    assert "copy.safetensors: is no part of the weights" in _said(plain)


def test_a_config_that_is_not_the_planned_one_is_found(merged: Path) -> None:
    _edit(merged / "config.json", lambda config: config.update(hidden_act="gelu"))
    assert "config.json: it is not the config that the plan says" in _said(merged)


def test_an_absent_directory_is_a_verdict(tmp_path: Path) -> None:
    verdict = verify(tmp_path / "nowhere")
    assert "there is no such directory" in str(verdict.problems[0])


# Configs that do not fit, without a plan to compare with


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", 3)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 4, "num_hidden_layers is 4, but model.layers has 3 layers"),
        ("torch_dtype", "float32", "it says float32, but most tensors are bfloat16"),
        ("vocab_size", 65, "vocab_size is 65, but model.embed_tokens.weight has 64 rows"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_found(
    field: str, value: object, said: str, plain: Path
) -> None:
    _edit(plain / "config.json", lambda config: config.update({field: value}))
    assert said in _said(plain)


def test_an_untied_config_without_a_head_is_found(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_llama(tmp_path / "tied", 1, tie=True))
    root = write_checkpoint(tmp_path / "model", tensors, llama_config(tie=False))
    assert "tie_word_embeddings is false, but lm_head.weight is not stored" in _said(root)


def test_several_problems_are_told_at_once(plain: Path) -> None:
    _edit(plain / "config.json", lambda config: config.update(num_hidden_layers=9, vocab_size=99))
    assert len(verify(plain).problems) == 3
