"""The disk that stages take, told and looked for before anything starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.gate_stages import reading_base, stage_of, three_experts
from kits.permuted_experts import MIXTRAL, make_model, moved, store
from kits.stage_maker import UNITS, PieceWork, gate_stage, run_chain, staged, with_stage

from raymerge.api import plan_for
from raymerge.errors import IncompleteError, OptionError
from raymerge.execute.threads import one_thread
from raymerge.options import RunOptions
from raymerge.runtime.driver.chained_merges import Chain, stage_lines, steps_directory
from raymerge.runtime.driver.disk_space import disk_nbytes
from raymerge.runtime.driver.run import InlinePool
from raymerge.runtime.driver.stage_work import StageWork, work_of

KEEP = RunOptions(inline=True, keep_intermediates=True)
CPU = torch.device("cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A copy of one model."""
    root = tiny_llama(tmp_path / "models" / "one", 0, hidden=32, layers=1)
    return {"merge_method": "passthrough", "models": [{"model": str(root)}]}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where the result goes, alone in its directory."""
    (tmp_path / "outs").mkdir()
    return tmp_path / "outs" / "out"


def _leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_stage_without_room_is_refused_before_the_first_byte(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(monkeypatch, 50 << 20)
    run_chain(staged(recipe, output), output, KEEP)
    shutil.rmtree(output)
    shutil.rmtree(steps_directory(output))
    with pytest.raises(
        OptionError, match=r"what is made before it, takes 104\.87 MB, and 52\.43 MB are free"
    ):
        run_chain(staged(recipe, output), output, KEEP, spill_nbytes=100 << 20)
    assert list(output.parent.iterdir()) == []


def test_what_was_begun_is_not_looked_at_again(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space is taken by now, and nobody knows how much of it."""
    with pytest.raises(IncompleteError):
        run_chain(staged(recipe, output), output, KEEP, fails_with=OSError(5, "once"), spill_nbytes=1 << 30)
    _leave(monkeypatch, 50 << 20)
    run_chain(staged(recipe, output), output, KEEP, spill_nbytes=1 << 30)


def test_results_stay_until_the_output_is_there(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)
    merge = with_stage(merge, gate_stage(merge.sources[0], name="second"), output)
    result = merge.stages[0].layout.nbytes
    written = sum(merge.plan["shards"].column("nbytes").to_pylist())
    taken = {"router-rows": 5 * result, "second": 5 * result}

    def wanted() -> int:
        steps = steps_directory(output)
        return disk_nbytes(
            [merge], lambda _: output, steps, staging_of=lambda each: taken[each.name]
        ).together

    assert wanted() == 2 * result + written
    taken["second"] = 100 * written
    assert wanted() == result + 100 * written
    (steps_directory(output) / "second").mkdir(parents=True)
    assert wanted() == result + written
    (steps_directory(output) / ".router-rows.raymerge-0123456789abcdef").mkdir(parents=True)
    assert wanted() == written


def test_results_between_count_too(tmp_path: Path, recipe: dict[str, Any], output: Path) -> None:
    last = {"merge_method": "passthrough", "models": [{"model": "between"}], "name": "last"}
    merges = plan_for([{**recipe, "name": "between"}, last], output)
    written = [sum(merge.plan["shards"].column("nbytes").to_pylist()) for merge in merges]
    steps = steps_directory(output)

    def wanted() -> int:
        places = {"between": steps / "between", "last": output}
        found = disk_nbytes(merges, lambda each: places[str(each.recipe.name)], steps, staging_of=lambda _: 0)
        return found.together

    assert wanted() == sum(written)
    # What is not to go on goes before it is begun anew.
    other = output.with_name(f".{output.name}.raymerge-0123456789abcdef")
    other.mkdir(parents=True)
    with (other / "model.safetensors.unfinished").open("wb") as file:
        file.write(bytes(1 << 14))
        os.fsync(file.fileno())
    assert wanted() <= sum(written) - (1 << 14)
    shutil.rmtree(other)
    (steps / "between").mkdir(parents=True)
    assert wanted() == written[1]


def test_what_units_in_hand_take_goes_by_their_number(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)

    def disk(options: RunOptions) -> int | None:
        lines, _ = stage_lines(merge, options, works=lambda stage: PieceWork(stage, spill_nbytes=1 << 20))
        return lines[0].disk_bytes

    alone = disk(KEEP)
    assert alone is not None
    assert disk(RunOptions(workers=2)) == alone + (1 << 20)
    assert disk(RunOptions(workers=99)) == alone + ((UNITS - 1) << 20)
    assert disk(RunOptions(address="ray://somewhere")) == alone + ((UNITS - 1) << 20)


def _most_taken(work: StageWork, staging: Path, budget: int) -> int:
    """Bytes that the files of a stage take at most, looked at after each layer."""
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in staging.rglob("*") if path.is_file()))

    staging.mkdir()
    with one_thread():
        for number in range(work.num_units):
            work.unit(number, staging=staging, device=CPU, budget=budget, tell=look)
        work.conclude(staging)
    look(0)
    return most


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("unit_tokens", [20, 1 << 16])
@pytest.mark.parametrize("mode", ["ridge", "hidden", "random"])
def test_router_rows_take_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, unit_tokens: int, *, spills: bool
) -> None:
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", unit_tokens)
    work = work_of(stage_of(reading_base(tmp_path / "base"), mode, three_experts()))
    budget = work.least_budget() + (0 if spills else 1 << 30)
    told = work.staging_nbytes(budget=budget, busy=1)
    most = _most_taken(work, tmp_path / "staging", budget)
    assert 0.7 * told <= most <= told
    assert work.staging_nbytes(budget=budget, busy=2) >= told


def test_aligned_experts_take_their_result(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 1)
    roots = [
        store(tmp_path / "one", model, MIXTRAL),
        store(tmp_path / "two", moved(model, MIXTRAL, 2), MIXTRAL),
    ]
    models = [
        {"model": {"model": str(root), "override_architecture": "Mixture"}, "parameters": {"weight": 0.5}}
        for root in roots
    ]
    recipe = {"merge_method": "linear", "models": models, "align": "experts"}
    (merge,) = plan_for(recipe, tmp_path / "out")
    (line,), problems = stage_lines(merge, KEEP)
    assert (line.disk_bytes, problems) == (merge.stages[0].layout.nbytes, ())
    pool = InlinePool("cpu")
    pool.start()
    Chain([merge], tmp_path / "out", KEEP, on_event=lambda _: None).carry_out(pool)
