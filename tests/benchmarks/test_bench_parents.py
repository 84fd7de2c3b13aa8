"""The models that the benchmark merges: real checkpoints, the same every time."""

from __future__ import annotations

import hashlib
from itertools import combinations
from pathlib import Path

import pytest
import torch
from benchmarks.parents import SIZES, Size, config_of, make_parents, make_sparse, specs_of, weights_of
from benchmarks.recipes import METHODS, VERBATIM, numbers_of, recipe
from safetensors.torch import load_file

from raymerge.api import plan
from raymerge.checkpoints.source import open_checkpoint

SIZE = Size(hidden=64, width=96, layers=2, vocab=160)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of a tokenizer."""
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    (root / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (root / "special_tokens_map.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> list[Path]:
    """Four small ones."""
    return make_parents(tmp_path_factory.mktemp("parents"), SIZE, tokenizer)


def test_parents_are_checkpoints_of_their_size(parents: list[Path]) -> None:
    specs = {spec.name: spec.shape for spec in specs_of(SIZE)}
    for parent in parents:
        loaded = load_file(weights_of(parent))
        assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == specs
        assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
        assert open_checkpoint(parent, "parent").config["hidden_size"] == SIZE.hidden


def test_fine_tunes_are_near_the_base_and_differ(parents: list[Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    base, *tunes = [load_file(weights_of(parent))[name].float() for parent in parents]
    assert 0.018 < base.std() < 0.022
    for tune in tunes:
        assert 0.0005 < (tune - base).std() < 0.002
    for one, two in combinations(tunes, 2):
        assert abs(torch.corrcoef(torch.stack([(one - base).flatten(), (two - base).flatten()]))[0, 1]) < 0.1


def test_norms_are_about_one(parents: list[Path]) -> None:
    for parent in parents:
        norm = load_file(weights_of(parent))["model.norm.weight"].float()
        assert 0.9 < norm.mean() < 1.1


def test_the_same_bytes_are_made_every_time(parents: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    again = make_parents(tmp_path, SIZE, tokenizer)
    for one, two in zip(parents, again, strict=True):
        files = [path.relative_to(one) for path in sorted(one.iterdir())]
        assert [hashlib.md5((one / file).read_bytes()).digest() for file in files] == [
            hashlib.md5((two / file).read_bytes()).digest() for file in files
        ]


def test_what_is_there_is_kept_and_what_is_absent_is_made(tokenizer: Path, tmp_path: Path) -> None:
    tiny = Size(hidden=64, width=64, layers=1, vocab=64)
    places = make_parents(tmp_path, tiny, tokenizer)
    before = [weights_of(place).stat().st_mtime_ns for place in places]
    content = weights_of(places[2]).read_bytes()
    (places[2] / "config.json").unlink()
    assert make_parents(tmp_path, tiny, tokenizer) == places
    after = [weights_of(place).stat().st_mtime_ns for place in places]
    assert [one == two for one, two in zip(before, after, strict=True)] == [True, True, False, True]
    assert weights_of(places[2]).read_bytes() == content


def test_sizes_are_what_they_are_called() -> None:
    nbytes = {name: sum(spec.nbytes for spec in specs_of(size)) for name, size in SIZES.items()}
    assert nbytes["1GB"] == 1_084_297_216
    assert nbytes["tiny"] < 1_000_000
    assert 9e6 < nbytes["10MB"] < 12e6
    assert 0.22e9 < nbytes["0.25GB"] < 0.28e9
    assert 13.4e9 < nbytes["7B"] < 13.6e9
    assert all(size.layers % 2 == 0 and size.hidden % 64 == 0 for size in SIZES.values())


def test_a_sparse_checkpoint_takes_no_room(tmp_path: Path) -> None:
    place = make_sparse(tmp_path / "7B", SIZES["7B"])
    files = sorted(place.glob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) > 13.4e9
    assert sum(file.stat().st_blocks * 512 for file in files) < 1e6
    assert open_checkpoint(place, "7B").config == config_of(SIZES["7B"])


@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_can_be_carried_out(method: str, parents: list[Path]) -> None:
    made = plan(recipe(method, parents, SIZE.layers)).require()
    nbytes = sum(made["shards"].column("nbytes").to_pylist())
    of_parent = weights_of(parents[0]).stat().st_size
    if method in VERBATIM:
        assert nbytes > of_parent
    else:
        assert abs(nbytes - of_parent) <= 4096
    sources = {Path(source["name"]) for source in made.manifest["sources"]}
    assert {parents[number] for number in numbers_of(method)} <= sources
