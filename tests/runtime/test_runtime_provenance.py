"""The provenance that a checkpoint keeps: what it says, that equal merges have the same; and its paths."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.merge_cases import Family, make_family, merge, recipes
from safetensors.torch import save_file

from raymerge.api import submit
from raymerge.errors import CheckpointError
from raymerge.options import RunOptions
from raymerge.publish.provenance import Provenance, SourceFile, SourceRecord, TensorRecord
from raymerge.publish.record import PROVENANCE, STORY
from raymerge.recipes import parse_recipe

INLINE = RunOptions(inline=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def merged(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    merge({**recipes(family)["ties"], "seed": 7, "shard_size": 20_000}, out)
    return out


def told(root: Path) -> Provenance:
    return Provenance.from_json(json.loads((root / PROVENANCE).read_text()), "provenance.json")


def test_it_says_what_was_merged_by_what_and_how(family: Family, merged: Path) -> None:
    found = told(merged)
    manifest: dict[str, Any] = json.loads((merged / "raymerge" / "plan" / "manifest.json").read_text())
    assert found.plan == manifest["digest"]
    assert found.recipes == ((merged / "raymerge" / "recipe.yml").read_text(),)
    assert (found.method, found.seed) == ("ties", 7)
    assert found.versions.keys() == {"numpy", "python", "ray", "raymerge", "torch", "transformers"}
    assert found.numerics == json.loads((merged / "raymerge" / "numerics.json").read_text())
    assert [source.name for source in found.sources] == [str(family.base), *map(str, family.tunes)]
    assert [source.dispositions for source in found.sources] == [{"merged": 21}] * 4
    file = found.sources[0].files[0]
    assert (file.name, file.nbytes) == ("model.safetensors", (family.base / file.name).stat().st_size)


def test_every_tensor_has_its_digest(merged: Path) -> None:
    found, tensors = told(merged).tensors, read_tensors(merged)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].pieces, found[name].disposition) == (1, "merged")
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert found[name].digest == xxhash.xxh3_128_hexdigest(content), name


def test_what_is_copied_and_what_is_dropped_is_told(family: Family, tmp_path: Path) -> None:
    spans = [{"sources": [{"model": str(family.base), "layer_range": [0, 1]}]}]
    merge({"merge_method": "passthrough", "slices": spans}, tmp_path / "out")
    found = told(tmp_path / "out")
    assert {tensor.disposition for tensor in found.tensors.values()} == {"copied"}
    assert found.sources[0].dispositions == {"copied": 12, "dropped: outside_slices": 9}


def test_what_is_made_once_and_written_twice_has_its_digest_twice(family: Family, tmp_path: Path) -> None:
    span = {"sources": [{"model": str(family.base), "layer_range": [0, 1]}]}
    merge({"merge_method": "passthrough", "slices": [span, span]}, tmp_path / "out")
    found = told(tmp_path / "out").tensors
    one, two = (found[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert one.digest
    assert one == two


def test_every_other_file_has_its_digest(merged: Path) -> None:
    last = {"config.json", "model.safetensors.index.json"}
    names = {path.name for path in merged.iterdir() if path.is_file() and path.suffix != ".safetensors"}
    found = told(merged).files
    assert found.keys() == names - last
    for name, digest in found.items():
        assert digest == xxhash.xxh3_128_hexdigest((merged / name).read_bytes()), name


def test_equal_merges_have_equal_provenance(family: Family, merged: Path, tmp_path: Path) -> None:
    """Byte by byte, however they were run; only the story of the run differs."""
    recipe = {**recipes(family)["ties"], "seed": 7, "shard_size": 20_000}
    merge(recipe, tmp_path / "again", RunOptions(inline=True, memory=32 << 20, threads=1))
    assert (tmp_path / "again" / PROVENANCE).read_bytes() == (merged / PROVENANCE).read_bytes()
    story = json.loads((merged / STORY).read_text())
    assert story.keys() == {"finished", "host", "places", "seconds"}
    assert story["places"] == {name: name for name in (str(family.base), *map(str, family.tunes))}


def test_another_weight_is_another_provenance(family: Family, tmp_path: Path) -> None:
    found = []
    for weight in (0.5, 0.6):
        recipe = {**recipes(family)["ties"]}
        recipe["models"] = [
            {"model": str(tune), "parameters": {"weight": weight, "density": 0.5}} for tune in family.tunes
        ]
        merge(recipe, tmp_path / str(weight))
        found.append(told(tmp_path / str(weight)))
    assert found[0].plan != found[1].plan
    assert found[0].tensors != found[1].tensors


def test_a_chain_keeps_the_recipes_of_all_its_merges(family: Family, tmp_path: Path) -> None:
    one, two, _ = map(str, family.tunes)
    text = (
        f"name: first\nmerge_method: linear\nmodels:\n- {{model: {one}, parameters: {{weight: 1}}}}\n"
        f"- {{model: {two}, parameters: {{weight: 1}}}}\n---\nmerge_method: passthrough\n"
        "models: [{model: first}]\n"
    )
    (tmp_path / "recipe.yml").write_text(text)
    submit(tmp_path / "recipe.yml", tmp_path / "out", INLINE)
    found = told(tmp_path / "out")
    assert [parse_recipe(recipe).name for recipe in found.recipes] == ["first", None]
    assert found.sources[0].made_by


def test_a_source_in_the_hubs_cache_is_known_by_its_commit(tmp_path: Path) -> None:
    """Its large files are named by their SHA-256, so that is known without reading them."""
    commit, sha256 = "0123456789abcdef0123456789abcdef01234567", "a" * 64
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = tiny_llama(cache / "snapshots" / commit, 0)
    (snapshot / "model.safetensors").rename(cache / "blobs" / sha256)
    os.symlink(f"../../blobs/{sha256}", snapshot / "model.safetensors")
    merge({"merge_method": "passthrough", "models": [{"model": str(snapshot)}]}, tmp_path / "out")
    (source,) = told(tmp_path / "out").sources
    assert source.revision == commit
    assert source.files[0].sha256 == sha256
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"revision `{commit}`" in card


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("tensors"),
        lambda data: data.update(format=2),
        lambda data: data.update(seed="many"),
        lambda data: data["sources"][0].update(files=3),
        lambda data: data["tensors"].update(x={"digest": []}),
    ],
)
def test_what_is_no_provenance_is_refused(damage: Any, merged: Path) -> None:
    data = json.loads((merged / PROVENANCE).read_text())
    damage(data)
    with pytest.raises(CheckpointError, match="it is no provenance that this version of raymerge knows"):
        Provenance.from_json(data, "provenance.json")


def test_the_page_names_every_field() -> None:
    """The page's tables behind the one of files: the record, a source, its files, a tensor."""
    page = (ROOT / "docs" / "provenance.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| field \| means \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    named = [re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) for table in tables]
    records = (Provenance, SourceRecord, SourceFile, TensorRecord)
    assert named == [[field.name for field in fields(record)] for record in records]


# Paths


def test_no_absolute_path_gets_into_the_card(family: Family, tmp_path: Path) -> None:
    base, one, two = str(family.base), str(family.tunes[0]), str(family.tunes[1])
    text = (
        f"# parents are in {family.base.parent}, see /srv/private/notes.txt\n"
        f"merge_method: task_arithmetic\nbase_model: '{base}'\n"
        f'models:\n- {{model: "{one}", parameters: {{weight: 0.5}}}}\n'
        f"- model: {two}\n  parameters: {{weight: 0.5}}\n"
    )
    (tmp_path / "recipe.yml").write_text(text)
    submit(tmp_path / "recipe.yml", tmp_path / "out", INLINE)
    card = (tmp_path / "out" / "README.md").read_text()
    places = str(family.base.parent.parent), "/srv/private", str(tmp_path)
    assert not [place for place in places if place in card]
    assert "base_model" not in card.split("---")[1]
    assert f"base_model: '{family.base.parent.name}/base'" in card


def test_a_single_file_is_named_with_its_place(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_llama(tmp_path / "model", 0))
    for name in ("one", "two"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    models = [
        {"model": str(tmp_path / f"{name}.safetensors"), "parameters": {"weight": 0.5}}
        for name in ("one", "two")
    ]
    merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    story = json.loads((tmp_path / "out" / STORY).read_text())
    assert list(story["places"].values()) == [each["model"] for each in models]
