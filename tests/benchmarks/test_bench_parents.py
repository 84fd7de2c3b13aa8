"""The models that the benchmark merges: real checkpoints, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.parents import Size, make_parents, weights_of
from benchmarks.recipes import METHODS, VERBATIM, numbers_of, recipe

from raymerge.api import plan

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


@pytest.mark.sample(5)
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
