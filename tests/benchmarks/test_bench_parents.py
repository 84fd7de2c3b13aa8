"""The models that the benchmark merges: real checkpoints, the same every time."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from benchmarks.parents import Size, make_parents, specs_of, weights_of
from benchmarks.recipes import METHODS, VERBATIM, numbers_of, recipe
from safetensors.torch import load_file

from raymerge.api import plan
from raymerge.checkpoints.source import open_checkpoint

SIZE = Size(hidden=64, width=96, layers=2, vocab=160)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    (root / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (root / "special_tokens_map.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> list[Path]:
    return make_parents(tmp_path_factory.mktemp("parents"), SIZE, tokenizer)


def test_parents_are_checkpoints_of_their_size(parents: list[Path]) -> None:
    specs = {spec.name: spec.shape for spec in specs_of(SIZE)}
    for parent in parents:
        loaded = load_file(weights_of(parent))
        assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == specs
        assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
        assert open_checkpoint(parent, "parent").config["hidden_size"] == SIZE.hidden


def test_the_same_bytes_are_made_every_time(parents: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    again = make_parents(tmp_path, SIZE, tokenizer)
    for one, two in zip(parents, again, strict=True):
        files = [path.relative_to(one) for path in sorted(one.iterdir())]
        assert [hashlib.md5((one / file).read_bytes()).digest() for file in files] == [
            hashlib.md5((two / file).read_bytes()).digest() for file in files
        ]


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
