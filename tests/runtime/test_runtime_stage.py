"""Stages before a merge: what is made, kept, done again, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits import stage_maker
from kits.chains import documents
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import one_in, slow_but
from kits.merge_cases import INLINE, EventLog, digests, flip
from kits.stage_maker import UNITS, PieceWork, gate_stage, run_chain, staged, with_stage

from raymerge.api import plan_for, verify
from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    NonFiniteError,
    OptionError,
    PlanError,
    Problem,
    TargetError,
    VerificationError,
)
from raymerge.events import (
    DeviceFailed,
    Event,
    Planned,
    Published,
    SegmentDone,
    StageKept,
    StageReport,
    StageStarted,
    Started,
    StepKept,
    StepStarted,
    Stopping,
    UnitDone,
)
from raymerge.options import RunOptions
from raymerge.planner.explain import StageLine
from raymerge.planner.inputs.sources import RESULT_FILE, ExpertPrompts, GateSpec, make_stage
from raymerge.planner.merges import PlannedMerge
from raymerge.publish.lease import StopRequest, myself
from raymerge.publish.record import agree, check_agreement
from raymerge.publish.staging import is_untouched
from raymerge.runtime.driver.chained_merges import MergeJob, kept_steps, stage_lines, steps_directory
from raymerge.runtime.driver.stage_run import is_stage_made, with_stage_results
from raymerge.runtime.driver.versions import is_whole, stage_record
from raymerge.runtime.workers.pool import InlinePool
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.worker import MergeWorker

KEEP = RunOptions(inline=True, keep_intermediates=True)
AGAIN = RunOptions(inline=True, keep_intermediates=True, replace=True)
TWO = RunOptions(workers=2, memory=16 << 20)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The mean of two models that a test may change, in ``tmp_path / "models"``."""
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / "models" / name, seed, hidden=32, layers=1)
    models = [{"model": str(tmp_path / "models" / name)} for name in ("one", "two")]
    return {"merge_method": "linear", "models": [{**e, "parameters": {"weight": 0.5}} for e in models]}


def _run(
    merges: Any,
    output: Path,
    options: RunOptions = KEEP,
    on_event: Callable[[Event], object] = lambda _: None,
    **settings: Any,
) -> EventLog:
    events = EventLog(on_event)
    run_chain(merges, output, options, on_event=events, **settings)
    return events


def _run_staged(recipe: Any, output: Path, *options: Any, seed: int = 0, **settings: Any) -> EventLog:
    return _run(staged(recipe, output, seed=seed), output, *options, **settings)


def _break_off(recipe: Any, output: Path, **settings: Any) -> None:
    """A run that ends within the stage, with two units done."""
    with pytest.raises(IncompleteError):
        _run_staged(recipe, output, fails_with=OSError(5, "once"), **settings)


def _staging(output: Path) -> Path:
    (found,) = steps_directory(output).glob(".router-rows-*.raymerge-*/units-*")
    return found


def _result(output: Path, name: str = "router-rows") -> Path:
    """The newest of the results of this name."""
    root = steps_directory(output)
    made = sorted(root.glob(f"{name}-*"), key=lambda each: each.stat().st_mtime)
    return made[-1] if made else root / name


# What is made


def test_a_stage_leaves_the_planned_file_and_its_report(recipe: dict[str, Any], output: Path) -> None:
    merges = staged(recipe, output)
    events = _run(merges, output)
    (stage,) = merges[0].stages
    place = _result(output)
    header = stage.layout.header
    assert (place / RESULT_FILE).read_bytes()[: len(header)] == header
    assert [path.name for path in sorted(place.iterdir())] == [RESULT_FILE, "raymerge"]
    assert read_tensors(place)["router.0"][:, 0].int().tolist() == list(range(UNITS))
    record = stage_record(place)
    assert record["report"] == {"rows": UNITS}
    assert json.loads((output / "raymerge" / "stages" / f"{stage.directory}.json").read_text()) == record
    assert (record["digest"], record["result"]["nbytes"]) == (stage.digest, stage.layout.nbytes)
    assert verify(output).problems == ()
    assert events.of(StepStarted, StepKept) == []


def test_events_tell_how_the_stage_goes(recipe: dict[str, Any], output: Path) -> None:
    events = _run_staged(recipe, output)
    kinds = [type(event) for event in events]
    assert kinds[: UNITS + 3] == [StageStarted, *[UnitDone] * UNITS, StageReport, Planned]
    (started,) = events.of(StageStarted)
    assert (started.number, started.total, started.units, started.total_bytes) == (1, 1, UNITS, 1000)
    assert (started.workers, started.device, started.done_units) == (("inline",), "cpu", 0)
    done = events.of(UnitDone)
    # The costly ones come first.
    assert [event.unit for event in done] == [3, 2, 1, 0]
    assert [event.planned_bytes for event in done] == [400, 300, 200, 100]
    assert events.of(StageReport)[0].report == {"rows": UNITS}


@pytest.mark.slow
def test_nothing_is_left_beside_the_output_unless_it_is_asked_for(
    recipe: dict[str, Any], output: Path
) -> None:
    _run_staged(recipe, output, INLINE)
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    first = digests(output)
    _run_staged(recipe, output, AGAIN)
    assert digests(output) == first
    assert sorted(path.name for path in output.parent.iterdir()) == [".out.raymerge.steps", "out"]
    assert [path.name for path in steps_directory(output).iterdir()] == [_result(output).name]


def test_units_compute_with_one_thread(recipe: dict[str, Any], output: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    _run_staged(recipe, output, threads_file=str(tmp_path / "threads"))
    assert (tmp_path / "threads").read_text().split() == ["1"] * UNITS
    assert torch.get_num_threads() == before


def test_more_workers_than_parts_are_not_asked_for(recipe: dict[str, Any], output: Path) -> None:
    merges = staged(recipe, output)
    assert len(merges[0].plan["segments"]) == 1
    assert MergeJob(merges, output, KEEP, on_event=lambda _: None, works=PieceWork).most_segments == UNITS


# The work of real stages


def _random_rows(merge: PlannedMerge, output: Path) -> PlannedMerge:
    """The merge with a stage of random router rows, as a recipe asks for them."""
    experts = tuple(ExpertPrompts(f"expert {number}") for number in range(2))
    spec = GateSpec(merge.sources[0], "random", experts, (), (0,), 32, 5, 1.0, 0.01, ())
    rows = [TensorSpec("router.0", DType.F32, (2, 32))]
    stage = make_stage(
        name="rows", title="random rows", place="r.yml:1:1", spec=spec, tensors=rows, version="0"
    )
    return with_stage(merge, stage, output)


# What is kept, and what is done again


def _is_kept(merges: Any, output: Path, **settings: Any) -> bool:
    events = _run(merges, output, AGAIN, **settings)
    assert len(events.of(StageReport)) == 1
    assert len(events.of(StageStarted)) + len(events.of(StageKept)) == 1
    return bool(events.of(StageKept))


def test_what_is_there_is_kept(recipe: dict[str, Any], output: Path) -> None:
    _run_staged(recipe, output)
    before = digests(output)
    assert _is_kept(staged(recipe, output), output)
    assert digests(output) == before


@pytest.mark.slow
def test_another_stage_of_that_name_takes_its_place(recipe: dict[str, Any], output: Path) -> None:
    _run_staged(recipe, output)
    assert not _is_kept(staged(recipe, output, seed=1), output)
    assert _is_kept(staged(recipe, output, seed=1), output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    one_in(
        2,
        [
            lambda place: flip(place / RESULT_FILE),
            lambda place: (place / RESULT_FILE).unlink(),
            lambda place: (place / "raymerge" / "stage.json").unlink(),
            lambda place: (place / "raymerge" / "stage.json").write_text("[]"),
            lambda place: (place / "raymerge" / "ledger.jsonl").unlink(),
            shutil.rmtree,
        ],
    ),
)
def test_what_is_not_sound_is_made_again(
    harm: Callable[[Path], object], recipe: dict[str, Any], output: Path
) -> None:
    _run_staged(recipe, output)
    before = digests(output)
    content = (_result(output) / RESULT_FILE).read_bytes()
    harm(_result(output))
    assert not _is_kept(staged(recipe, output), output)
    assert (_result(output) / RESULT_FILE).read_bytes() == content
    assert digests(output) == before


@pytest.mark.slow
def test_a_source_that_was_written_again_is_read_again(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    """The headers are the same, and so is the digest of the stage."""
    _run_staged(recipe, output)
    root = tmp_path / "models" / "one"
    tensors = {name: tensor * 2 for name, tensor in read_tensors(root).items()}
    write_checkpoint(root, tensors, json.loads((root / "config.json").read_text()))
    before = (_result(output) / RESULT_FILE).read_bytes()
    merges = staged(recipe, output)
    assert not is_stage_made(_result(output), merges[0].stages[0])
    assert not _is_kept(merges, output)
    assert (_result(output) / RESULT_FILE).read_bytes() != before


@pytest.mark.slow
def test_other_numerics_make_it_again(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run_staged(recipe, output)
    (stage,) = staged(recipe, output)[0].stages
    monkeypatch.setattr(InlinePool, "numerics", {"device": "cpu", "torch": "another"})
    assert is_stage_made(_result(output), stage)
    assert not is_stage_made(_result(output), stage, InlinePool("cpu").stage_numerics)
    assert not _is_kept(staged(recipe, output), output)


# Sources with results


def test_a_merge_reads_the_result_that_is_there(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)
    assert merge.sources[0].prepared[0].files[0].version == ""
    with pytest.raises(CheckpointError, match=r"router-rows from one' is absent.*Give the command again"):
        with_stage_results(merge.sources, steps_directory(output))
    _run([merge], output)
    (prepared,) = with_stage_results(merge.sources, steps_directory(output))[0].prepared
    content = (_result(output) / RESULT_FILE).read_bytes()
    assert prepared.files[0].version == xxhash.xxh3_128_hexdigest(content)
    assert prepared.tensors == merge.sources[0].prepared[0].tensors
    path = _result(output) / RESULT_FILE
    path.write_bytes(path.read_bytes().replace(b"router", b"rooter"))
    with pytest.raises(CheckpointError, match="no longer what was prepared"):
        with_stage_results(merge.sources, steps_directory(output))


@pytest.mark.slow
def test_a_result_that_changes_while_it_is_merged_is_an_error(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    """What was made of it is not gone on with, whatever comes next: made again, the result looks the same."""

    def harm(event: Event) -> None:
        assert not isinstance(event, SegmentDone)
        if isinstance(event, Started):
            flip(_result(output) / RESULT_FILE)

    with pytest.raises(CheckpointError, match=r"router-rows from one: model\.safetensors: the file was chan"):
        _run_staged(recipe, output, on_event=harm)
    assert not output.exists()
    events = _run_staged(recipe, output)
    assert [event.done_segments for event in events.of(Started)] == [0]
    assert len(events.of(UnitDone)) == UNITS
    _run_staged(recipe, tmp_path / "fresh")
    assert digests(output) == digests(tmp_path / "fresh")


def test_a_source_that_changes_during_the_stage_is_an_error(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    def touch(event: Event) -> None:
        if isinstance(event, UnitDone):
            os.utime(tmp_path / "models" / "one" / "model.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"one: model\.safetensors: the file was changed"):
        _run_staged(recipe, output, on_event=touch)
    assert not _result(output).exists()
    with pytest.raises(
        TargetError, match=r"router-rows from one was begun .*versions > .* is \"1\".*--replace"
    ):
        _run_staged(recipe, output)
    _run_staged(recipe, output, AGAIN)


# Several merges


@pytest.fixture
def chain(recipe: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    return documents(root=str(tmp_path / "models"))


def _with_stages(chain: list[dict[str, Any]], output: Path) -> tuple[PlannedMerge, ...]:
    """A stage over a model before the second merge, and one over a result before the third."""
    first, second, third = plan_for(chain, output)
    second = with_stage(second, gate_stage(second.sources[0], name="early"), output)
    (used,) = (source for source in third.sources if source.reference.path == "right")
    return first, second, with_stage(third, gate_stage(used, name="late"), output)


def test_stages_stand_before_the_merges_that_use_them(chain: list[dict[str, Any]], output: Path) -> None:
    events = _run(_with_stages(chain, output), output)
    told = events.of(StepStarted, StageStarted, Published)
    assert [getattr(each, "name", getattr(each, "title", "")) for each in told] == [
        "left", "", "right", "early from one", "", "", "late from right", "",
    ]  # fmt: skip
    assert _recorded(output) == {"early", "late"}
    assert _recorded(steps_directory(output) / "right") == {"early"}


def _recorded(place: Path) -> set[str]:
    """Names of the stages that the record of a merge has the reports of."""
    return {path.stem.rpartition("-")[0] for path in (place / "raymerge" / "stages").iterdir()}


def test_a_merge_is_kept_with_its_stages(chain: list[dict[str, Any]], output: Path) -> None:
    merges = _with_stages(chain, output)
    assert kept_steps(merges, output) == frozenset()
    _run(merges, output)
    before = digests(output)
    assert kept_steps(_with_stages(chain, output), output) == {"left", "right"}
    events = _run(_with_stages(chain, output), output, AGAIN)
    assert [event.name for event in events.of(StepKept)] == ["left", "right"]
    assert [event.title for event in events.of(StageKept)] == ["late from right"]
    flip(_result(output, "early") / RESULT_FILE)
    assert kept_steps(_with_stages(chain, output), output) == {"left"}
    events = _run(_with_stages(chain, output), output, AGAIN)
    # It has the same bytes, and so has what was made of it.
    assert [event.title for event in events.of(StageStarted)] == ["early from one"]
    assert [event.title for event in events.of(StageKept)] == ["late from right"]
    assert digests(output) == before


@pytest.mark.slow
def test_a_stage_over_a_result_reads_what_was_made_anew(chain: list[dict[str, Any]], output: Path) -> None:
    _run(_with_stages(chain, output), output)
    before = (_result(output, "late") / RESULT_FILE).read_bytes()
    chain[1]["models"][1]["parameters"]["weight"] = -3
    events = _run(_with_stages(chain, output), output, AGAIN)
    assert [event.title for event in events.of(StageStarted)] == ["late from right"]
    assert (_result(output, "late") / RESULT_FILE).read_bytes() != before


@pytest.mark.slow
def test_a_stage_over_a_result_is_looked_at_once_that_is_there(
    chain: list[dict[str, Any]], output: Path
) -> None:
    *_, third = merges = _with_stages(chain, output)
    lines = stage_lines(third, KEEP, works=lambda stage: PieceWork(stage, objection="it is odd."))
    assert lines == ((StageLine("late from right", None, None, None, None),), ())
    (only,) = [merge for merge in merges if merge.stages and merge is not third]
    with pytest.raises(PlanError, match="it is odd"):
        _run([merges[0], only, third], output, objection="it is odd.")
    assert not steps_directory(output).exists()
    plain = (*plan_for(chain, output)[:2], third)
    with pytest.raises(PlanError, match="it is odd"):
        _run(plain, output, objection="it is odd.")
    assert sorted(path.name for path in steps_directory(output).iterdir()) == ["left", "right"]


# Before anything is made


def test_objections_come_before_the_first_byte_all_at_once(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)
    merge = with_stage(merge, gate_stage(merge.sources[1], name="second"), output)
    with pytest.raises(PlanError) as caught:
        _run([merge], output, RunOptions(inline=True, memory=1 << 18), objection="it is odd.")
    said = [problem.what for problem in caught.value.problems]
    assert any("too little for" in what for what in said)
    assert said.count("it is odd.") == 1
    assert list(output.parent.iterdir()) == []


def test_too_little_memory_names_the_stage(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kits.stage_maker.LEAST_BUDGET", 64 << 20)
    with pytest.raises(OptionError) as caught:
        _run_staged(recipe, output, RunOptions(inline=True, memory=32 << 20))
    (problem,) = caught.value.problems
    assert problem.where == "--memory"
    assert "too little for router-rows from one" in problem.what
    assert f"{64 << 20} bytes" in problem.remedy
    (merge,) = staged(recipe, output)
    line = StageLine("router-rows from one", UNITS, 1000, 64 << 20, None)
    assert stage_lines(merge, RunOptions(memory=32 << 20), works=PieceWork) == ((line,), (problem,))
    line = replace(line, disk_bytes=2 * merge.stages[0].layout.nbytes)
    assert stage_lines(merge, RunOptions(memory=128 << 20), works=PieceWork) == ((line,), ())


# What goes wrong


def test_bad_values_discard_what_was_begun(recipe: dict[str, Any], output: Path) -> None:
    error = NonFiniteError(Problem("one: a.weight", "it holds NaN.", "Mend it."))
    with pytest.raises(NonFiniteError):
        _run_staged(recipe, output, fails_with=error)
    assert list(steps_directory(output).iterdir()) == []
    _run_staged(recipe, output)


@pytest.mark.parametrize(
    ("number", "raised"), slow_but([(5, IncompleteError), (13, TargetError)], (13, TargetError))
)
def test_what_the_system_refuses_is_told_as_in_a_merge(
    number: int, raised: type[Exception], recipe: dict[str, Any], output: Path
) -> None:
    with pytest.raises(raised):
        _run_staged(recipe, output, fails_with=OSError(number, os.strerror(number)))
    (started,) = _run_staged(recipe, output).of(StageStarted)
    assert started.done_units == 2
    assert started.done_bytes == 700


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "the GPU has too little memory: CUDA out of memory."),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `f`\nmore"),
            "the GPU failed: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `f`",
        ),
    ],
)
def test_a_unit_that_a_gpu_fails_at_is_done_on_the_processor(
    error: Exception, reason: str, recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", lambda _: None)
    monkeypatch.setattr(InlinePool, "stage_numerics", {"device": "cuda"})
    monkeypatch.setattr("raymerge.device_numerics.choose_device", lambda _: torch.device("cuda"))
    events = _run_staged(recipe, output, pool=InlinePool("cuda"), gpu_fails_with=error)
    assert events.of(DeviceFailed)[0] == DeviceFailed("inline", 1, reason)
    assert {each.unit for each in events.of(UnitDone)} == set(range(UNITS))
    assert read_tensors(_result(output))["router.0"][:, 0].int().tolist() == list(range(UNITS))


def test_a_result_with_another_header_is_not_published(recipe: dict[str, Any], output: Path) -> None:
    with pytest.raises(VerificationError, match=r"recipe\.yml:3:1: router-rows .* another header"):
        _run_staged(recipe, output, wrong_header=True)
    assert not _result(output).exists()
    assert not output.exists()


@pytest.mark.parametrize("harm", slow_but([Path.unlink, flip, lambda path: os.truncate(path, 8)], flip))
def test_a_piece_that_is_not_what_was_left_is_made_again(
    harm: Callable[[Path], object], recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    """As after a power cut on a storage that did not keep what it had promised."""
    _break_off(recipe, output)
    harm(_staging(output) / "piece-3.bin")
    events = _run_staged(recipe, output)
    (started,) = events.of(StageStarted)
    assert (started.done_units, started.done_bytes) == (1, 300)
    assert sorted(event.unit for event in events.of(UnitDone)) == [0, 1, 3]
    _run_staged(recipe, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")


def test_a_piece_that_was_lost_is_out_of_the_ledger_before_it_is_made_again(
    recipe: dict[str, Any], output: Path
) -> None:
    """Else a later run would believe the receipt of bytes that are half written."""
    _break_off(recipe, output)
    staging = _staging(output)
    piece = (staging / "piece-3.bin").read_bytes()
    (staging / "piece-3.bin").unlink()
    _break_off(recipe, output, threads_file="/dev/full")
    (staging / "piece-3.bin").write_bytes(piece)
    (started,) = _run_staged(recipe, output).of(StageStarted)
    assert started.done_units == 1


def test_what_was_begun_for_another_recipe_is_discarded(recipe: dict[str, Any], output: Path) -> None:
    _break_off(recipe, output)
    _break_off(recipe, output, seed=1)
    assert _staging(output).is_dir()


# Stopping and going on


@pytest.mark.parametrize("after", slow_but([1, UNITS], UNITS))
def test_ctrl_c_stops_after_the_units_in_hand(after: int, recipe: dict[str, Any], output: Path) -> None:
    """Also in the last unit: the merge is not begun."""

    def stop(event: Event) -> None:
        if isinstance(event, UnitDone) and len(events.of(UnitDone)) == after:
            signal.raise_signal(signal.SIGINT)

    events = EventLog(stop)
    with pytest.raises(IncompleteError, match=r"stopped with \d of 4 units done of: router-rows") as caught:
        _run_staged(recipe, output, on_event=events)
    assert caught.value.exit_code == 3
    done = len(events.of(UnitDone))
    assert after <= done <= after + 1
    assert len(events.of(Stopping)) == 1
    events = _run_staged(recipe, output)
    (started,) = events.of(StageStarted)
    assert started.done_units == done
    assert len(events.of(UnitDone)) == UNITS - done
    assert verify(output).problems == ()


def test_a_request_beside_the_output_stops_a_stage_too(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.publish.lease._ASK_SECONDS", 0.0)

    def ask(event: Event) -> None:
        if isinstance(event, UnitDone) and len(events.of(UnitDone)) == 1:
            StopRequest(output).make(myself(""))

    events = EventLog(ask)
    with pytest.raises(IncompleteError, match=r"stopped with \d of 4 units done"):
        _run_staged(recipe, output, on_event=events, pause=0.1)
    assert len(events.of(Stopping)) == 1
    _run_staged(recipe, output)
    assert verify(output).problems == ()


# On Ray


@pytest.mark.slow
@pytest.mark.ray
def test_the_work_of_a_real_stage_travels(
    recipe: dict[str, Any], output: Path, tmp_path: Path, ray_cluster: Any
) -> None:
    del ray_cluster
    pool = RayPool(TWO, lambda _: None)
    contents: list[bytes] = []
    for place, used in ((output, pool), (tmp_path / "inline", InlinePool("cpu"))):
        used.start()
        merge = _random_rows(plan_for(recipe, place)[0], place)
        MergeJob([merge], place, KEEP, on_event=lambda _: None).carry_out(used)
        used.close()
        contents.append((_result(place, "rows") / RESULT_FILE).read_bytes())
    assert contents[0] == contents[1]


@pytest.fixture
def cluster(ray_cluster: Any) -> Iterator[Any]:
    """The cluster, whose workers get the stage's work itself: they cannot import this file's kit."""
    ray_cluster.cloudpickle.register_pickle_by_value(stage_maker)
    yield ray_cluster
    ray_cluster.cloudpickle.unregister_pickle_by_value(stage_maker)


def _on_ray(merges: Any, output: Path, options: RunOptions = TWO, **settings: Any) -> EventLog:
    events = EventLog()
    run_chain(merges, output, options, on_event=events, pool=RayPool(options, events), **settings)
    return events


@pytest.mark.slow
@pytest.mark.ray
def test_one_or_two_workers_make_the_same_bytes(
    recipe: dict[str, Any], output: Path, tmp_path: Path, cluster: Any
) -> None:
    del cluster
    events = _on_ray(staged(recipe, output), output, pause=0.5)
    assert {event.worker for event in events.of(UnitDone)} == {"worker-0", "worker-1"}
    _on_ray(staged(recipe, tmp_path / "one"), tmp_path / "one", RunOptions(workers=1, memory=16 << 20))
    _run_staged(recipe, tmp_path / "inline", INLINE)
    assert digests(output) == digests(tmp_path / "one") == digests(tmp_path / "inline")


ELSEWHERE = {"device": "cuda", "torch": "another"}


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, another version of transformers is installed."""

    def install() -> None:
        monkeypatch.setattr("raymerge.device_numerics.kernels_of", lambda _: {"transformers": "99"})

    return install


def _break_off_merge(recipe: Any, output: Path) -> None:
    """A run that ends within the merge, with a segment done."""

    def end(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise IncompleteError("as after kill -9")

    with pytest.raises(IncompleteError):
        _run_staged(recipe, output, on_event=end)


# What a stage is made under


def test_units_of_another_version_are_not_gone_on_with(
    recipe: dict[str, Any], output: Path, other_kernels: Callable[[], None]
) -> None:
    _break_off(recipe, output)
    other_kernels()
    with pytest.raises(TargetError, match=r"numerics > transformers was .*, is \"99\".*--replace") as caught:
        _run_staged(recipe, output)
    assert caught.value.exit_code == 2
    assert len(list(_staging(output).glob("piece-*.bin"))) == 2
    before = _staging(output).name
    _break_off(recipe, output, options=AGAIN)
    # Workers that are left from before write by that name.
    assert _staging(output).name != before
    (started,) = _run_staged(recipe, output, AGAIN).of(StageStarted)
    assert started.done_units == 2


@pytest.mark.slow
def test_a_good_result_is_not_thrown_away_by_mistake(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off_merge(recipe, output)
    before = digests(_result(output))
    monkeypatch.setattr(InlinePool, "numerics", ELSEWHERE)
    with pytest.raises(TargetError) as caught:
        _run_staged(recipe, output)
    merge, stage = caught.value.problems
    assert "an unfinished run of this recipe was begun under other conditions: numerics" in merge.what
    assert 'device was "cpu", is "cuda"' in stage.what
    assert digests(_result(output)) == before
    monkeypatch.undo()
    events = _run_staged(recipe, output)
    assert len(events.of(StageKept)) == 1
    assert [event.done_segments for event in events.of(Started)] == [1]


@pytest.mark.slow
def test_a_merge_goes_on_though_its_stage_is_made_again(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    _break_off_merge(recipe, output)
    shutil.rmtree(_result(output))
    events = _run_staged(recipe, output)
    assert len(events.of(UnitDone)) == UNITS
    assert [event.done_segments for event in events.of(Started)] == [1]
    _run_staged(recipe, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")


def test_what_nobody_has_made_yet_is_not_compared() -> None:
    old = {"numerics": {"device": "cpu"}, "versions": [_holding("a", "1"), _holding("b", "2")]}
    new = {"numerics": {"device": "cpu"}, "versions": [_holding("a", "1"), _holding("b", "")]}
    assert not agree(old, new)
    check_agreement(old, new, where="out", what="it")
    check_agreement(None, new, where="out", what="it")
    changed = {**new, "versions": [_holding("a", "9"), _holding("b", "")]}
    with pytest.raises(TargetError, match=r'out: it was begun .*a > files > f > 2 was "1", is "9"'):
        check_agreement(old, changed, where="out", what="it")


def _holding(name: str, found: str) -> dict[str, Any]:
    return {"name": name, "files": [["f", found]]}


# A result that something wrote to


def _write_again(place: Path) -> None:
    """What a worker does that was given up, and is still at its unit: the same bytes once more."""
    path = place / RESULT_FILE
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(1, 1))


def test_a_result_with_the_same_bytes_is_kept(recipe: dict[str, Any], output: Path) -> None:
    _run_staged(recipe, output)
    _write_again(_result(output))
    assert not is_untouched(_result(output))
    assert is_whole(_result(output))
    assert len(_run_staged(recipe, output, AGAIN).of(StageKept)) == 1
    assert is_untouched(_result(output))


@pytest.mark.slow
def test_a_worker_that_was_given_up_does_no_harm_after_the_stage(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    def write(event: Event) -> None:
        if isinstance(event, SegmentDone):
            _write_again(_result(output))

    _run_staged(recipe, output, on_event=write)
    _run_staged(recipe, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")


def test_what_dead_workers_left_is_gone_before_units_are_done(recipe: dict[str, Any], output: Path) -> None:
    _break_off(recipe, output)
    staging = _staging(output)
    for name in ("progress-1", ".progress-1.0123456789ab", ".piece-0.bin.0123456789ab.tmp"):
        (staging / name).write_text("1")
    (staging / "spill-1-abc").mkdir()
    (staging / "spill-1-abc" / "hidden_states.bin").write_text("1")
    seen: list[list[str]] = []

    def look(event: Event) -> None:
        if isinstance(event, StageStarted):
            seen.append(sorted(path.name for path in staging.iterdir()))

    _run_staged(recipe, output, on_event=look)
    assert seen == [["piece-2.bin", "piece-3.bin"]]


def test_units_without_a_ledger_are_nobodys(recipe: dict[str, Any], output: Path) -> None:
    """As from a worker that began its unit after the stage was over."""
    _break_off(recipe, output)
    (_staging(output).parent / "raymerge" / "ledger.jsonl").unlink()
    (started,) = _run_staged(recipe, output).of(StageStarted)
    assert started.done_units == 0


# On Ray


def _odd() -> type[Any]:
    """Defined in here, so that Ray sends the class itself to workers that cannot import this file."""

    class Odd(MergeWorker):
        def ready(self) -> dict[str, Any]:
            return {**super().ready(), "kernels": {"processor": f"of {self._name}"}}

    return Odd


@pytest.mark.slow
@pytest.mark.ray
def test_unequal_processors_are_refused_for_stages_and_not_for_merges(
    recipe: dict[str, Any], output: Path, cluster: Any
) -> None:
    del cluster
    pool = RayPool(TWO, lambda _: None, worker=_odd())
    with pytest.raises(OptionError, match=r"differ in processor or transformers .*of worker-0.*of worker-1"):
        run_chain(staged(recipe, output), output, TWO, pool=pool, pause=1.0)
    assert not _result(output).exists()
    run_chain(plan_for(recipe, output), output, TWO, pool=RayPool(TWO, lambda _: None, worker=_odd()))
