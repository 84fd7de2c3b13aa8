"""Weights beside a model's own, in directories below it or in files that its index does not name, are merged
into files of the same names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.command_line import run_command
from kits.hub_server import hub_server
from kits.sentence_models import sentence_model
from safetensors.torch import load_file, save_file

from raymerge.api import plan, replay, submit, verify
from raymerge.errors import PlanError
from raymerge.options import RunOptions

INLINE = RunOptions(inline=True)
DENSE, NORM = "2_Dense/model.safetensors", "3_LayerNorm/model.safetensors"


@pytest.fixture(scope="module")
def sentence_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sentence")
    return sentence_model(root / "one", 1), sentence_model(root / "two", 2)


@pytest.fixture
def pair(sentence_models: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies that may be changed."""
    one, two = (Path(shutil.copytree(each, tmp_path / each.name)) for each in sentence_models)
    return one, two


def linear(models: Sequence[Path | str], **more: Any) -> dict[str, Any]:
    named = [{"model": str(each), "parameters": {"weight": 1}} for each in models]
    return {"merge_method": "linear", "models": named, **more}


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_mean(out: Path, models: Sequence[Path], directories: Sequence[str]) -> None:
    """That each directory holds the mean of those of the models, and no other has weights."""
    assert {str(path.parent.relative_to(out)) for path in out.rglob("*.safetensors")} == {*directories}
    for directory in directories:
        made, (one, two) = tensors_in(out / directory), (tensors_in(each / directory) for each in models)
        assert made.keys() == one.keys()
        for name, tensor in made.items():
            mean = (one[name].double() + two[name].double()) / 2
            torch.testing.assert_close(tensor, mean.to(tensor.dtype))


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)


def test_every_module_of_a_sentence_transformer_is_merged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    submit(linear(pair), out, INLINE)
    assert_mean(out, pair, [".", "2_Dense", "3_LayerNorm"])
    assert (out / "2_Dense/config.json").read_bytes() == (pair[0] / "2_Dense/config.json").read_bytes()
    assert verify(out).problems == ()
    assert replay(out).problems == ()
    damaged = bytearray((out / DENSE).read_bytes())
    (out / DENSE).write_bytes(damaged[:-4])
    assert any("2_Dense" in str(each) for each in verify(out).problems)


@pytest.mark.slow  # importing sentence_transformers takes seven seconds
def test_a_merged_sentence_transformer_encodes_as_the_mean_of_weights(
    sentence_models: tuple[Path, Path], tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    submit(linear(sentence_models), tmp_path / "out", INLINE)
    one, two, made = (
        SentenceTransformer(str(each), device="cpu") for each in (*sentence_models, tmp_path / "out")
    )
    with torch.no_grad():
        for own, other in zip(one.parameters(), two.parameters(), strict=True):
            own.add_(other).div_(2)
    texts = ["abc def", "a longer text", "z"]
    torch.testing.assert_close(
        torch.tensor(made.encode(texts)), torch.tensor(one.encode(texts)), rtol=0, atol=1e-6
    )


def test_a_recipe_sets_methods_and_dtype_of_parts_by_their_paths(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    one, _ = pair
    weights = [{"filter": "2_Dense/linear", "value": 1}, {"value": 0.5}]
    models = [{"model": str(each), "parameters": {"weight": weights if each == one else 1}} for each in pair]
    models[1]["parameters"] = {"weight": [{"filter": "2_Dense/linear", "value": 0}, {"value": 0.5}]}
    submit({"merge_method": "linear", "models": models, "dtype": "float16"}, tmp_path / "out", INLINE)
    dense, norm = (load_file(tmp_path / "out" / key) for key in (DENSE, NORM))
    assert torch.equal(dense["linear.weight"], load_file(one / DENSE)["linear.weight"].half())
    assert not torch.equal(norm["norm.weight"], load_file(one / NORM)["norm.weight"].half())
    assert norm["norm.weight"].dtype is torch.float16


def test_a_part_that_a_model_lacks_is_refused_by_name_or_kept(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = pair
    (two / NORM).unlink()
    with pytest.raises(PlanError, match=r"it lacks 2 tensors.*3_LayerNorm/norm\.bias"):
        plan(linear(pair)).require()
    with pytest.raises(PlanError, match=r"have no place in the output.*3_LayerNorm/norm\.bias"):
        plan(linear([two, one])).require()
    submit(linear(pair, base_model=str(one), missing_tensors="copy_base"), tmp_path / "out", INLINE)
    assert (tmp_path / "out" / NORM).exists()
    made = load_file(tmp_path / "out" / NORM)
    assert all(torch.equal(tensor, made[name]) for name, tensor in load_file(one / NORM).items())


def test_a_model_of_static_embeddings_has_no_weights_at_its_top(tmp_path: Path) -> None:
    models = []
    for name in ("one", "two"):
        write(
            tmp_path / name / "0_StaticEmbedding/model.safetensors", {"embedding.weight": torch.randn(9, 4)}
        )
        module = {"path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}
        (tmp_path / name / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", **module}]))
        models.append(tmp_path / name)
    submit(linear(models), tmp_path / "out", INLINE)
    assert_mean(tmp_path / "out", models, ["0_StaticEmbedding"])
    assert verify(tmp_path / "out").problems == ()


def test_a_diffusion_pipeline_is_merged_component_by_component(tmp_path: Path) -> None:
    models = [tmp_path / "one", tmp_path / "two"]
    for model in models:
        for number in (1, 2):
            key = f"unet/diffusion_pytorch_model-0000{number}-of-00002.safetensors"
            write(model / key, {f"down.{number}.weight": torch.randn(4, 4)})
        shards = {f"down.{n}.weight": f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)}
        index = {"metadata": {"total_size": 128}, "weight_map": shards}
        (model / "unet/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
        write(model / "vae/diffusion_pytorch_model.safetensors", {"conv.weight": torch.randn(3, 3)})
        write(model / "vae/diffusion_pytorch_model.fp16.safetensors", {"conv.weight": torch.randn(3, 3)})
        (model / "model_index.json").write_text("{}")
    submit(linear(models, shard_size=64), tmp_path / "out", INLINE)
    for model in models:
        (model / "vae/diffusion_pytorch_model.fp16.safetensors").unlink()
    assert_mean(tmp_path / "out", models, ["unet", "vae"])
    made = json.loads((tmp_path / "out/unet/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert made == index
    assert verify(tmp_path / "out").problems == ()


def test_files_beside_an_index_and_nested_models_keep_their_own_files(tmp_path: Path) -> None:
    models = [tiny_llama(tmp_path / name, seed, files=2) for seed, name in enumerate(("one", "two"))]
    for model in models:
        predictor = {"mtp.fc.weight": torch.randn(4, 4), "mtp.norm.weight": torch.randn(4)}
        write(model / "mtp.safetensors", predictor)
        tiny_llama(model / "draft", 7 + len(model.name))
        write(model / "original/model.safetensors", predictor)
    (tmp_path / "recipe.yml").write_text(json.dumps(linear(models)))
    shown = run_command("plan", "recipe.yml", cwd=tmp_path, env={"COLUMNS": "200"}).text
    for word in ("mtp.safetensors", "draft/model.safetensors", "original release"):
        assert word in shown
    submit(linear(models), tmp_path / "out", INLINE)
    assert_mean(tmp_path / "out", models, [".", "draft"])
    index = tmp_path / "out/model.safetensors.index.json"
    if index.exists():
        assert not any("mtp" in name for name in json.loads(index.read_text())["weight_map"])
    assert load_file(tmp_path / "out/mtp.safetensors").keys() == predictor.keys()


def test_two_files_with_one_name_are_refused(pair: tuple[Path, Path]) -> None:
    shutil.copy(pair[1] / "model.safetensors", pair[1] / "copy.safetensors")
    with pytest.raises(PlanError, match=r"two/copy\.safetensors: holds tensors that other weights"):
        plan(linear(pair)).require()


def test_modules_in_pickled_files_are_read_where_the_recipe_reads_them(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for model in pair:
        torch.save(load_file(model / DENSE), model / "2_Dense/pytorch_model.bin")
    safe = [Path(shutil.copytree(each, tmp_path / "safe" / each.name)) for each in pair]
    for model in pair:
        (model / DENSE).unlink()
    submit(linear(pair), tmp_path / "out", INLINE)
    assert_mean(tmp_path / "out", safe, [".", "2_Dense", "3_LayerNorm"])
    with pytest.raises(PlanError, match=r"2_Dense/pytorch_model\.bin"):
        plan(linear(pair, pickled_weights="refuse")).require()


def test_modules_of_models_on_the_hub_are_fetched(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with hub_server(tmp_path / "cache") as hub:
        for model in pair:
            hub.push(f"org/{model.name}", model)
        submit(linear(["org/one", "hf://org/two"]), tmp_path / "out", INLINE)
    assert_mean(tmp_path / "out", pair, [".", "2_Dense", "3_LayerNorm"])
