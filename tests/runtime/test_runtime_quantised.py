"""A merge of quantised models gives the same bytes, however it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.marks import slow_but
from kits.merge_cases import INLINE, digests, least_memory, merge
from kits.quantised_merges import MAKERS

from raymerge.api import plan, read_recipe, submit
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.merge_plan import segments
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import open_sources
from raymerge.runtime.driver.run import Run

KINDS = ("DeepSeek-V3 F32", "DeepSeek-V3 U8", "Kimi-K2-Thinking", "gpt-oss")
Recipes = Mapping[str, dict[str, Any]]


def _recipes(parents: Sequence[Path]) -> Recipes:
    """Block by block, with statistics of whole matrices, and into another format."""
    base, *tuned = map(str, parents)
    entries = [{"model": each, "parameters": {"weight": 0.5, "density": 0.4}} for each in tuned]
    pair = [{"model": each, "parameters": {"weight": 0.5}} for each in tuned]
    return {
        "linear": {"merge_method": "linear", "models": pair},
        "ties": {"merge_method": "ties", "base_model": base, "models": entries},
        "bfloat16": {"merge_method": "linear", "models": pair, "dtype": "bfloat16"},
    }


@pytest.fixture(scope="module", params=slow_but(KINDS, "Kimi-K2-Thinking"))
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipes, Path]:
    """Recipes of three parents, and a folder with their outputs, made inline with the usual memory."""
    root = tmp_path_factory.mktemp("parents")
    parents = [MAKERS[request.param](root / name, seed).root for seed, name in enumerate(("base", "a", "b"))]
    for name, recipe in (recipes := _recipes(parents)).items():
        merge(recipe, root / "out" / name)
    return recipes, root / "out"


@pytest.mark.parametrize("count", [1, 2])
def test_threads_change_no_byte(count: int, cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    for name, recipe in recipes.items():
        merge(recipe, tmp_path / name, RunOptions(inline=True, threads=count))
        assert digests(tmp_path / name) == digests(expected / name)


def test_the_least_memory_changes_no_byte(cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    for name, recipe in recipes.items():
        merge(recipe, tmp_path / name, RunOptions(inline=True, memory=least_memory(recipe)))
        assert digests(tmp_path / name) == digests(expected / name)


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [1 << 12, 1 << 40])
def test_where_rows_are_cut_changes_no_byte_of_the_weights(
    most_bytes: int, cases: tuple[Recipes, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into single bands of blocks, and not at all."""
    monkeypatch.setattr(segments, "_segment_target", lambda _: most_bytes)
    recipes, expected = cases
    counts = set()
    for name, recipe in recipes.items():
        done = merge(recipe, tmp_path / name, RunOptions(inline=True, memory=least_memory(recipe)))
        counts.add(done.of(Planned)[0].segments > 20)
        for file, digest in digests(expected / name).items():
            if file.endswith(".safetensors"):
                assert digests(tmp_path / name)[file] == digest
    assert counts == {most_bytes == 1 << 12}


@pytest.mark.slow
@pytest.mark.ray
def test_ray_workers_change_no_byte(cases: tuple[Recipes, Path], tmp_path: Path, ray_cluster: Any) -> None:
    from raymerge.runtime.workers.ray_pool import RayPool

    recipes, expected = cases
    options = RunOptions(workers=2, memory=256 << 20)
    pool = RayPool(options, lambda _: None)
    try:
        pool.start()
        for name, recipe in recipes.items():
            options = replace(options, memory=max(256 << 20, least_memory(recipe)))
            sources = open_sources(read_recipe(recipe))
            run = Run(plan(recipe), sources, tmp_path / name, options, on_event=lambda _: None)
            run.carry_out(pool)
            assert digests(tmp_path / name) == digests(expected / name)
    finally:
        pool.close()


def test_an_aborted_run_is_resumed(cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    done = 0

    def abort(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if done == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipes["ties"], tmp_path / "out", INLINE, on_event=abort)
    assert not (tmp_path / "out").exists()
    merged = merge(recipes["ties"], tmp_path / "out")
    # Receipts are recorded in groups, so one that was not told of yet may be in the ledger, too.
    kept = merged.of(Started)[0].done_segments
    assert kept >= 2
    assert len(merged.of(SegmentDone)) == merged.of(Planned)[0].segments - kept
    assert digests(tmp_path / "out") == digests(expected / "ties")
