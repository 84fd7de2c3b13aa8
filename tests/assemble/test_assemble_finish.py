"""The end of a directory: shards checked, companions copied, the card, the config, and the index last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import TOKENIZER_FILES, tiny_llama

from raymerge.api import plan, read_recipe
from raymerge.checkpoints.files import INDEX_FILE
from raymerge.errors import VerificationError
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.sources import Source, open_sources
from raymerge.publish.finish import check_shards, finish_companions, finish_config, finished_files, parents_of
from raymerge.storage.local.store import LocalStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "base", 1)


def _planned(model: Path, **changes: Any) -> tuple[Plan, tuple[Source, ...]]:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}], **changes}
    return plan(recipe).require(), open_sources(read_recipe(recipe))


def _shards_written(made: Plan, root: Path) -> LocalStore:
    """A directory whose shards have their planned headers and sizes, and no data."""
    root.mkdir()
    store = LocalStore(root)
    for shard in made["shards"].to_pylist():
        store.create(shard["name"], shard["nbytes"])
        store.write_at(shard["name"], 0, shard["header"])
    return store


@pytest.fixture
def several(model: Path) -> tuple[Plan, tuple[Source, ...]]:
    """A plan with more than one shard."""
    made = _planned(model, shard_size=20_000)
    assert len(made[0]["shards"]) > 2
    return made


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _scribble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(_remove, "it is absent"), (_cut, "bytes long, the plan says"), (_scribble, "not the planned one")],
)
def test_every_harmed_shard_is_named(
    harm: Callable[[Path], None], said: str, several: tuple[Plan, tuple[Source, ...]], tmp_path: Path
) -> None:
    store = _shards_written(several[0], tmp_path / "out")
    check_shards(several[0], store)
    names = several[0]["shards"].column("name").to_pylist()
    for name in names[:2]:
        harm(tmp_path / "out" / name)
    with pytest.raises(VerificationError) as caught:
        check_shards(several[0], store)
    assert [problem.where for problem in caught.value.problems] == names[:2]
    assert all(said in problem.what for problem in caught.value.problems)


def test_companions_and_the_card_are_written(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model)
    donor = sources[0].checkpoint
    target = _shards_written(made, tmp_path / "out")
    finish_companions(
        made, LocalStore(model), target, companions=donor.companions, parents=parents_of(sources)
    )
    for name in TOKENIZER_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert made.digest in card
    assert "`passthrough`" in card
    assert "base`" in card
    assert f"Seed: {made.manifest['seed']}." in card


def _finished(made: Plan, sources: tuple[Source, ...], root: Path) -> list[str]:
    """Finish the config; the names that were written, in order."""
    store = _shards_written(made, root)
    written: list[str] = []
    original = store.write_atomic

    def noting(key: str, data: bytes) -> None:
        written.append(key)
        original(key, data)

    store.write_atomic = noting  # type: ignore[method-assign]
    donor = sources[0].checkpoint
    finish_config(made, LocalStore(Path(donor.root)), store, donor_config=donor.config)
    return written


def test_an_unchanged_config_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "odd"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    text = json.dumps(json.loads((model / "config.json").read_text()), indent=7, sort_keys=True) + "\n\n"
    (source / "config.json").write_text(text)
    assert _finished(*_planned(source), tmp_path / "out") == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == text


def test_a_changed_config_is_written_anew(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model, dtype="float32")
    _finished(made, sources, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == made.manifest["config"]
    assert config["torch_dtype"] == "float32"


def test_tensors_without_a_config_get_none(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model / "model.safetensors", shard_size=20_000)
    assert _finished(made, sources, tmp_path / "out") == [INDEX_FILE]
    names = finished_files(made, sources[0].checkpoint.companions)
    assert names == {*made["shards"].column("name").to_pylist(), INDEX_FILE, "README.md"}


def test_the_index_comes_last_and_names_every_tensor(
    several: tuple[Plan, tuple[Source, ...]], tmp_path: Path
) -> None:
    made, sources = several
    assert _finished(made, sources, tmp_path / "out") == ["config.json", INDEX_FILE]
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    shards = made["shards"].column("name").to_pylist()
    wanted = {row["name"]: shards[row["shard"]] for row in made["tensors"].to_pylist()}
    assert index["weight_map"] == wanted
    assert index["metadata"]["total_size"] == sum(made["tensors"].column("nbytes").to_pylist())
