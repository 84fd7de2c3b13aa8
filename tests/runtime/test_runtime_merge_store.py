"""A merge that is read as a model without being written: its files are those that ``submit`` writes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.chains import documents
from kits.checkpoint_maker import read_config, read_tensors
from kits.merge_cases import INLINE, Family, recipes
from kits.merges import make_models
from kits.quantised_merges import MAKERS, entries
from kits.tensor_scaled_models import nvfp4_llama

import raymerge
from raymerge.api import plan_for
from raymerge.checkpoints.source import Checkpoint
from raymerge.errors import OptionError
from raymerge.execute.in_memory import OpMaker
from raymerge.execute.op_cache import OpCache
from raymerge.planner.inputs.weights import Weights
from raymerge.runtime.driver.merge_store import open_merge

MIB = 1 << 20
SMALL = raymerge.RunOptions(inline=True, memory=64 * MIB)


@contextmanager
def _opened(recipe: Any, **more: Any) -> Iterator[Checkpoint]:
    with open_merge(plan_for(recipe, "merged"), SMALL, **more) as source:
        yield source.checkpoint


def _files(root: Path) -> dict[str, bytes]:
    """What was published, but for the model card and the record."""
    paths = (each for each in root.rglob("*") if each.is_file())
    files = {str(each.relative_to(root)): each.read_bytes() for each in paths}
    return {key: data for key, data in files.items() if key != "README.md" and not key.startswith("raymerge")}


def _check(recipe: Any, out: Path) -> None:
    expected = _files(Path(raymerge.submit(recipe, out, INLINE).output))
    with _opened(recipe) as checkpoint, checkpoint.open() as store:
        read = {each.key: store.read(each.key, 0, each.nbytes) for each in store.files()}
        beside = _files(Path(checkpoint.root))
        assert read == expected
        assert beside == {key: data for key, data in expected.items() if not key.endswith(".safetensors")}
        chance = random.Random(0)
        for key, data in expected.items():
            for _ in range(5):
                first = chance.randrange(len(data))
                nbytes = chance.randrange(len(data) - first)
                assert store.read(key, first, nbytes) == data[first : first + nbytes]


@pytest.mark.parametrize("method", ["ties", "passthrough"])
def test_its_files_are_those_of_submit(medium: Family, tmp_path: Path, method: str) -> None:
    _check({**recipes(medium)[method], "shard_size": "1MB"}, tmp_path / "out")


QUANTISED = {"NVFP4": nvfp4_llama, **{name: MAKERS[name] for name in ("DeepSeek-V3 F8_E8M0", "gpt-oss")}}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", QUANTISED)
def test_codes_are_read_with_their_scales(tmp_path: Path, name: str) -> None:
    parents = [QUANTISED[name](tmp_path / each, seed) for seed, each in enumerate(("one", "two"))]
    _check({"merge_method": "linear", "models": entries(parents, (0.6, 0.4))}, tmp_path / "out")


@pytest.mark.slow
def test_results_between_are_read_in_their_turn(tmp_path: Path) -> None:
    make_models(tmp_path)
    chain = documents(root=str(tmp_path))
    _check(chain, tmp_path / "out")
    streamed = dict(raymerge.stream(chain, SMALL))
    published = read_tensors(tmp_path / "out")
    assert {name: each.tolist() for name, each in streamed.items()} == {
        name: each.tolist() for name, each in published.items()
    }


def test_parents_in_memory_are_made_anew_whenever_they_are_read(small: Family) -> None:
    live = raymerge.InMemoryModel(read_tensors(small.base), read_config(small.base))
    recipe = {"merge_method": "linear", "models": [{"model": "live", "parameters": {"weight": 1}}]}
    with open_merge(plan_for(recipe, "merged", models={"live": live}), SMALL) as source:
        for _ in range(2):
            with Weights(source) as weights:
                norm = weights.load("model.norm.weight")
            assert torch.equal(norm, live.tensors["model.norm.weight"].float())
            live.tensors["model.norm.weight"].mul_(2)


def test_its_weights_are_read_one_by_one(small: Family, tmp_path: Path) -> None:
    recipe = recipes(small)["slerp"]
    published = read_tensors(Path(raymerge.submit(recipe, tmp_path / "out", INLINE).output))
    with open_merge(plan_for(recipe, "merged"), SMALL) as source, Weights(source) as weights:
        for name in weights.names():
            assert weights.load(name).tolist() == published[name].float().tolist()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ops that are made."""
    numbers: list[int] = []
    submit = OpMaker.submit

    def noting(self: OpMaker, ops: Any, windows: Any) -> Any:
        numbers.extend(ops)
        return submit(self, ops, windows)

    monkeypatch.setattr(OpMaker, "submit", noting)
    return numbers


def _weighted(family: Family, weight: float) -> Mapping[str, Any]:
    """A candidate of a search: the weight of the feed-forward networks."""
    graded = [{"filter": "mlp", "value": weight}, {"value": 0.5}]
    models = [{"model": str(each), "parameters": {"weight": graded}} for each in family.tunes[:2]]
    return {"merge_method": "task_arithmetic", "base_model": str(family.base), "models": models}


def test_a_candidate_makes_only_what_differs_from_the_one_before(medium: Family, made: list[int]) -> None:
    cache = OpCache(64 * MIB)
    for weight, share in ((0.25, "all"), (0.75, "mlp"), (0.25, "")):
        made.clear()
        with _opened(_weighted(medium, weight), cache=cache) as checkpoint, checkpoint.open() as store:
            plan = raymerge.plan(_weighted(medium, weight))
            names = plan["tensors"].column("name").to_pylist()
            of_ops = [names[each] for each in plan["ops"].column("tensor").to_pylist()]
            for each in checkpoint.tensors.values():
                store.read(each.key, each.offset, each.nbytes)
        expected = {op for op, name in enumerate(of_ops) if share == "all" or (share and share in name)}
        assert set(made) == expected


def test_a_change_of_a_source_makes_anew(small: Family, made: list[int]) -> None:
    cache = OpCache(64 * MIB)
    for _ in range(2):
        made.clear()
        with _opened(recipes(small)["linear"], cache=cache) as checkpoint, checkpoint.open() as store:
            (file,) = checkpoint.files
            store.read(file.key, 0, file.nbytes)
        (small.tunes[0] / "model.safetensors").touch()
        assert made


def test_a_range_makes_only_the_ops_that_it_lies_in(medium: Family, made: list[int]) -> None:
    with _opened(recipes(medium)["linear"]) as checkpoint, checkpoint.open() as store:
        tensor = checkpoint.tensors["model.norm.weight"]
        store.read(tensor.key, tensor.offset + 3, 5)
        store.read(tensor.key, tensor.offset, 8)
    assert len(made) == 1


def test_too_little_memory_is_refused_with_what_is_enough(small: Family) -> None:
    plans = plan_for(recipes(small)["linear"], "merged")
    with (
        pytest.raises(OptionError, match=r"too little to hold .* whole .* The smallest that works is \d+"),
        open_merge(plans, raymerge.RunOptions(memory=MIB)),
    ):
        pass
