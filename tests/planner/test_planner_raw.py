"""Files of tensors as sources: opened, planned by names, and refused where a config would be needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.pickle_maker import PICKLE, pickled_twin
from safetensors.torch import save_file

from raymerge.api import plan, read_recipe
from raymerge.errors import CheckpointError, PlanError
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.sources import names_file, open_raw, open_reference, open_sources, opener_of
from raymerge.recipes import ModelReference


def put(path: Path, seed: int = 0, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> str:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{n}.attn.weight": torch.randn(4, 4, generator=generator) for n in range(layers)}
    tensors["in.weight"] = torch.randn(8, 4, generator=generator)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return put(tmp_path / "one.safetensors", 1), put(tmp_path / "two.safetensors", 2)


def recipe(*models: str, **more: Any) -> dict[str, Any]:
    entries = [{"model": model, "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": entries, **more}


def refusal(asked: Mapping[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        open_sources(read_recipe(asked))
    assert all(problem.remedy for problem in caught.value.problems)
    return "\n".join(map(str, caught.value.problems))


def settings_by_layer(made: Plan) -> dict[str, float]:
    """The parameter ``t`` of every tensor of a slerp."""
    names = made["tensors"].column("name").to_pylist()
    return {
        names[row["tensor"]]: made.expressions[row["expression"]].bind(keys=(), shape=()).number("t")
        for row in made["rows"].to_pylist()
    }


class TestOpened:
    def test_a_file_of_this_machine(self, files: tuple[str, str]) -> None:
        found = open_reference(ModelReference(files[0]))
        assert found.is_single_file
        assert (found.name, found.config) == (files[0], {})
        assert open_reference(ModelReference(f"file://{files[0]}")).root == found.root

    def test_home_is_understood(self, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(Path(files[0]).parent))
        assert names_file(ModelReference("~/one.safetensors"))
        assert open_reference(ModelReference("~/one.safetensors")).tensors

    @pytest.mark.parametrize("path", ["x" * 5000, "no/such.safetensors", "nul\0", ""])
    def test_what_is_no_file_is_none(self, path: str) -> None:
        assert not names_file(ModelReference(path))

    def test_a_directory_is_none(self, tmp_path: Path) -> None:
        assert not names_file(ModelReference(str(tmp_path)))

    def test_it_has_no_revisions(self, files: tuple[str, str]) -> None:
        with pytest.raises(CheckpointError, match="'main' is asked for, but this is a file"):
            open_raw(files[0], files[0], revision="main", pickled=False)

    @pytest.mark.parametrize("name", ["config.json", "model.gguf", "model.safetensors.index.json"])
    def test_other_files_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("{}")
        with pytest.raises(CheckpointError, match=r"does not end in \.safetensors"):
            open_reference(ModelReference(str(tmp_path / name)))

    @pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth", "x.ckpt"])
    def test_pickled_ones_only_if_they_are_allowed(self, tmp_path: Path, name: str) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / name)
        reference = ModelReference(str(tmp_path / name))
        with pytest.raises(CheckpointError, match=r"pickled_weights: refuse.*x\.safetensors"):
            open_reference(reference, pickled=False)
        assert list(open_reference(reference).tensors) == ["a"]

    def test_the_recipe_decides_how_models_are_opened(self, tmp_path: Path) -> None:
        model = pickled_twin(tiny_llama(tmp_path / "one", 1), tmp_path / "two")
        asked = recipe(str(model))
        (source,) = open_sources(read_recipe(asked))
        assert [file.key for file in source.checkpoint.files] == [PICKLE]
        refusing = {**asked, "pickled_weights": "refuse"}
        assert "(pickled_weights: refuse)" in refusal(refusing)
        with pytest.raises(CheckpointError):
            opener_of(read_recipe(refusing))(ModelReference(str(model)))

    def test_there_is_no_config_to_disagree_with(self, tmp_path: Path) -> None:
        save_file(
            {"model.layers.0.w": torch.ones(2), "model.layers.7.v": torch.ones(3)}, tmp_path / "x.safetensors"
        )
        assert list(config_problems(open_reference(ModelReference(str(tmp_path / "x.safetensors"))))) == []


class TestPlanned:
    def test_gradients_follow_the_numbers_of_layers(self, files: tuple[str, str]) -> None:
        models = [{"model": file} for file in files]
        parameters = {"t": [0, 1]}
        asked = {"merge_method": "slerp", "base_model": files[0], "models": models, "parameters": parameters}
        found = settings_by_layer(plan(asked).require())
        assert [found[f"blocks.{n}.attn.weight"] for n in range(3)] == pytest.approx([0, 0.5, 1])

    def test_head_and_embedding_are_tensors_like_any_other(self, tmp_path: Path) -> None:
        one = tiny_llama(tmp_path / "one", 1) / "model.safetensors"
        two = tiny_llama(tmp_path / "two", 2) / "model.safetensors"
        weights = [{"filter": "lm_head", "value": 1.0}, {"value": 0.5}]
        models = [
            {"model": str(one), "parameters": {"weight": 0.5}},
            {"model": str(two), "parameters": {"weight": weights}},
        ]
        made = plan({"merge_method": "linear", "models": models}).require()
        assert made.manifest["config"] == {}
        assert "lm_head.weight" in made["tensors"].column("name").to_pylist()

    def test_a_tensor_that_one_file_lacks_is_told(self, tmp_path: Path, files: tuple[str, str]) -> None:
        more = put(tmp_path / "more.safetensors", 3, layers=4)
        assert "blocks.3.attn.weight" in "\n".join(map(str, plan(recipe(files[0], more)).problems))
        assert not plan(recipe(files[0], more, extra_tensors="drop")).problems


class TestRefused:
    def test_beside_models(self, tmp_path: Path, files: tuple[str, str]) -> None:
        model = str(tiny_llama(tmp_path / "model", 1))
        text = refusal(recipe(model, *files))
        assert f"recipe: models[1].model: {files[0]} has tensors only, while {model} is a model" in text
        assert f"recipe: models[2].model: {files[1]} has tensors only" in text
        assert len(text.splitlines()) == 2

    def test_beside_a_base_that_is_a_model(self, tmp_path: Path, files: tuple[str, str]) -> None:
        model = str(tiny_llama(tmp_path / "model", 1))
        assert "has tensors only" in refusal(recipe(*files, base_model=model))

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("tokenizer", {"source": "union"}, "has no tokenizer"),
            ("tokenizer_source", "union", "has no tokenizer"),
            ("chat_template", "auto", "has no tokenizer, so a chat template has no place"),
        ],
    )
    def test_what_needs_a_tokenizer(self, files: tuple[str, str], key: str, value: Any, said: str) -> None:
        text = refusal(recipe(*files, **{key: value}))
        assert text.startswith(f"recipe: {key}: '{key}' is given, but {files[0]} {said}")

    def test_slices(self, files: tuple[str, str]) -> None:
        sources = [{"model": file, "layer_range": [0, 1], "parameters": {"weight": 1}} for file in files]
        text = refusal({"merge_method": "linear", "slices": [{"sources": sources}]})
        assert "'slices' is given" in text
        assert "has no config that counts its layers" in text

    def test_modules(self, files: tuple[str, str]) -> None:
        module = {"models": [{"model": files[0], "parameters": {"weight": 1}}]}
        text = refusal({"merge_method": "linear", "modules": {"text_decoder": module}})
        assert "has no config that tells the parts of a model" in text

    def test_everything_at_once(self, tmp_path: Path, files: tuple[str, str]) -> None:
        model = str(tiny_llama(tmp_path / "model", 1))
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"")
        text = refusal(recipe(model, files[0], str(broken), chat_template="auto"))
        assert "has tensors only" in text
        assert "too few for a safetensors file" in text
        assert "a chat template has no place" in text
