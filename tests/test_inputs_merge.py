"""Merges of pickled weights and of files of tensors, from the inputs to a verified checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.merge_cases import digests, merge
from kits.pickle_maker import PICKLE, pickled_twin, save_pickles
from safetensors.torch import load_file, save_file

from raymerge.api import read_recipe, verify
from raymerge.planner.inputs.sources import open_models
from raymerge.planner.merges import build_plan

METHODS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"weight": 0.5},
    "ties": {"weight": 0.7, "density": 0.5},
    "dare_ties": {"weight": 0.7, "density": 0.5},
}


# Pickled weights


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "files"), [("linear", 1), ("ties", 3), ("dare_ties", 3)])
def test_pickled_weights_give_the_bytes_of_safetensors(method: str, files: int, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 0)
    tunes = [tiny_llama(tmp_path / f"tune{seed}", seed, base=base) for seed in (1, 2)]
    twins = [pickled_twin(tune, tmp_path / f"{tune.name}-bin", files=files) for tune in tunes]
    asked = {"merge_method": method, "base_model": str(base)}
    for name, models in (("plain", tunes), ("pickled", twins)):
        entries = [{"model": str(model), "parameters": METHODS[method]} for model in models]
        merge({**asked, "models": entries}, tmp_path / name)
    key = "model.safetensors"
    assert (tmp_path / "pickled" / key).read_bytes() == (tmp_path / "plain" / key).read_bytes()
    assert verify(tmp_path / "pickled").problems == ()
    assert not list((tmp_path / "pickled").glob("*.bin*"))


def test_a_pickled_model_gives_config_and_companions(tmp_path: Path) -> None:
    plain = tiny_llama(tmp_path / "plain", 1, tie=True)
    pickled = pickled_twin(plain, tmp_path / "pickled")
    # Tied as transformers saved it: two names of one storage.
    tensors = read_tensors(plain)
    save_pickles(pickled, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    (pickled / "training_args.bin").write_bytes(b"")
    merge({"merge_method": "passthrough", "models": [{"model": str(pickled)}]}, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names
    assert not any(name.endswith(".bin") for name in names)


def test_a_pickle_that_changes_under_the_merge_is_another_plan(tmp_path: Path) -> None:
    model = pickled_twin(tiny_llama(tmp_path / "plain", 1), tmp_path / "pickled")
    recipe = read_recipe({"merge_method": "passthrough", "models": [{"model": str(model)}]})
    before = build_plan(recipe, open_models(recipe).require(), version="0").digest
    assert build_plan(recipe, open_models(recipe).require(), version="0").digest == before
    tensors = {name: tensor + 1 for name, tensor in read_tensors(tmp_path / "plain").items()}
    torch.save(tensors, model / PICKLE)
    assert build_plan(recipe, open_models(recipe).require(), version="0").digest != before


# Files of tensors


def put(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{n}.attn.weight": torch.randn(16, 16, generator=generator) for n in range(4)}
    tensors |= {f"blocks.{n}.norm.bias": torch.randn(16, generator=generator).bfloat16() for n in range(4)}
    tensors |= {"ids": torch.arange(5), "in.weight": torch.randn(8, 16, generator=generator)}
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return put(tmp_path / "in" / "one.safetensors", 1), put(tmp_path / "in" / "two.safetensors", 2)


def mean(*models: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": entries, **more}


def test_files_are_merged_by_name(files: tuple[Path, Path], tmp_path: Path) -> None:
    result = merge(mean(*files), tmp_path / "out").result
    assert result.verdict.problems == ()
    assert result.verdict.against_plan
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "model.safetensors",
        "raymerge",
    }
    one, two, found = *map(load_file, files), load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == one.keys()
    for name, tensor in found.items():
        assert tensor.dtype == one[name].dtype
        wanted = ((one[name].double() + two[name].double()) / 2).to(tensor.dtype)
        torch.testing.assert_close(tensor, wanted)


def test_several_shards_get_an_index(files: tuple[Path, Path], tmp_path: Path) -> None:
    merge(mean(*files, shard_size=2000), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(files[0]).keys()
    assert verify(tmp_path / "out").files > 1
    assert verify(tmp_path / "out").problems == ()


def test_the_result_can_be_merged_again(files: tuple[Path, Path], tmp_path: Path) -> None:
    """By its directory, and as a merge of the same recipe file."""
    merge(mean(*files, shard_size=2000), tmp_path / "left")
    merge(mean(tmp_path / "left", files[1]), tmp_path / "twice")
    left = {"name": "left", **mean(*files, shard_size=2000)}
    last = mean(files[0], files[1])
    last["models"][0]["model"] = "left"
    merge([left, last], tmp_path / "chained")  # type: ignore[arg-type]
    key = "model.safetensors"
    assert digests(tmp_path / "twice")[key] == digests(tmp_path / "chained")[key]


def test_pickled_files_are_merged_where_that_is_allowed(files: tuple[Path, Path], tmp_path: Path) -> None:
    pickle = tmp_path / "in" / "two.ckpt"
    torch.save({"state_dict": load_file(files[1]), "epoch": 3}, pickle)
    merge(mean(files[0], pickle), tmp_path / "pickled")
    merge(mean(*files), tmp_path / "plain")
    key = "model.safetensors"
    assert (tmp_path / "pickled" / key).read_bytes() == (tmp_path / "plain" / key).read_bytes()
