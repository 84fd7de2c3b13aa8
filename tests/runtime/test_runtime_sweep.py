"""Several outputs of one submission: the bytes of their separate runs, and what one of them fails with."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, write_checkpoint
from kits.driver_process import driver, wait_for_receipts
from kits.merge_cases import (
    INLINE,
    LEAST_MEMORY,
    EventLog,
    Family,
    digests,
    make_family,
    merge,
    recipes,
    staging_of,
)
from kits.recipe_maker import linear
from kits.s3_server import S3Server

from raymerge.api import plan, read_sweep, submit, submit_sweep
from raymerge.deploy.targets.local import PlaceRuns
from raymerge.deploy.targets.target import RunReport, RunState
from raymerge.errors import CheckpointError, DiskSpaceError, IncompleteError, NonFiniteError, TargetError
from raymerge.events import (
    OutputFailed,
    OutputKept,
    OutputsPublished,
    OutputsStarted,
    Planned,
    Published,
    SegmentDone,
    StageStarted,
    Started,
    StepStarted,
)
from raymerge.merge_plan.memory import LEAST_BLOCK, project
from raymerge.options import RunOptions
from raymerge.publish.lease import StopRequest, myself
from raymerge.runtime.driver import sweep_run
from raymerge.runtime.driver.chained_merges import Disk
from raymerge.runtime.driver.run import RunResult
from raymerge.storage.local.store import LocalStore

REPLACE = RunOptions(inline=True, replace=True)


Made = dict[str, tuple[str, dict[str, str]]]
"""By output, the plan's digest and those of the files."""


@pytest.fixture(scope="module")
def recipe(medium: Family) -> dict[str, Any]:
    """Four outputs, which share some of their numbers."""
    ties = recipes(medium)["ties"]
    models = [{**each, "parameters": {"weight": "$w", "density": "$d"}} for each in ties["models"]]
    return {**ties, "models": models, "sweep": {"w": [0.2, 0.6], "d": [0.4, 0.8]}}


@pytest.fixture(scope="module")
def apart(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _separate(recipe, tmp_path_factory.mktemp("separate"))


def _separate(recipe: dict[str, Any], root: Path) -> Made:
    """Of a run of each plain recipe alone."""
    made = {}
    for output in read_sweep(recipe) or ():
        (plain,) = output.recipes
        merged = merge(plain, root / "apart" / output.name)
        made[output.name] = merged.result.digest, digests(root / "apart" / output.name)
    assert made
    return made


def _together(results: Mapping[str, RunResult]) -> Made:
    return {name: (result.digest, digests(Path(result.output))) for name, result in results.items()}


def _signalling(number: int, *, after: int) -> EventLog:
    def signals(event: object) -> None:
        if isinstance(event, SegmentDone) and len(events.of(SegmentDone)) == after:
            signal.raise_signal(number)

    events = EventLog(signals)
    return events


def test_outputs_are_those_of_separate_runs(recipe: dict[str, Any], apart: Made, tmp_path: Path) -> None:
    events = EventLog()
    results = submit_sweep(recipe, tmp_path / "outs", INLINE, on_event=events)
    assert _together(results) == apart
    (planned,), (started,) = events.of(Planned), events.of(Started)
    done = events.of(SegmentDone)
    assert sorted(event.segment for event in done) == list(range(planned.segments))
    assert started.done_segments == 0
    assert sum(event.planned_bytes for event in done) == planned.total_bytes
    written = sum(result.verdict.nbytes for result in results.values())
    assert planned.output_bytes == written >= sum(event.written_bytes for event in done) > 0.9 * written
    assert [event.names for event in events.of(OutputsStarted, OutputsPublished)] == [tuple(results)] * 2
    assert {Path(event.path).name for event in events.of(Published)} == set(results)


def test_a_stopped_sweep_goes_on_with_what_each_output_lacks(
    recipe: dict[str, Any], apart: Made, tmp_path: Path
) -> None:
    first = _signalling(signal.SIGINT, after=9)
    with pytest.raises(IncompleteError, match=r"0 of 4 outputs are published.*\nw0.2-d0.4.* and 1 more: "):
        submit_sweep(recipe, tmp_path / "outs", INLINE, on_event=first)
    done = len(first.of(SegmentDone))
    # One of them loses what it had.
    lost = staging_of(tmp_path / "outs" / "w0.6-d0.4")
    (lost / "raymerge" / "ledger.jsonl").unlink()
    again = EventLog()
    results = submit_sweep(recipe, tmp_path / "outs", INLINE, on_event=again)
    assert _together(results) == apart
    (planned,), (started,) = again.of(Planned), again.of(Started)
    assert started.done_segments == 0
    assert len(again.of(SegmentDone)) == planned.segments > done >= 9
    expected = planned.output_bytes - 3 * sum(event.written_bytes for event in first.of(SegmentDone)) / 4
    written = sum(event.written_bytes for event in again.of(SegmentDone))
    assert 0.9 * expected < written < expected


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=[pytest.mark.ray, pytest.mark.slow])])
def test_one_output_that_is_not_finite_does_not_lose_the_others(
    workers: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if workers:
        request.getfixturevalue("ray_cluster")
    for name, value in (("base", 1.0), ("tune", 3.0)):
        tensors = {f"{number}.weight": torch.full((256, 512), value) for number in range(8)}
        write_checkpoint(
            tmp_path / name,
            {each: tensor.to(torch.float16) for each, tensor in tensors.items()},
            {"architectures": ["Odd"], "model_type": "odd"},
        )
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / "tune"), "parameters": {"weight": "$w"}}],
        "sweep": {"w": [0.5, 5e6, 2.0]},
    }
    events, options = EventLog(), RunOptions(inline=not workers, workers=workers)
    with pytest.raises(NonFiniteError, match=r"^w5000000\.0: [0-7]\.weight: ") as caught:
        submit_sweep(recipe, tmp_path / "outs", options, on_event=events)
    assert caught.value.exit_code == 2
    assert [event.name for event in events.of(OutputFailed)] == ["w5000000.0"]
    assert sorted(each.name for each in (tmp_path / "outs").glob("w*")) == ["w0.5", "w2.0"]
    for weight, value in ((0.5, 2.0), (2.0, 5.0)):
        made = read_tensors(tmp_path / "outs" / f"w{weight}")
        assert [tensor.unique().tolist() for tensor in made.values()] == [[value]] * 8
    (planned,) = events.of(Planned)
    assert sorted(event.segment for event in events.of(SegmentDone)) == [*range(planned.segments)]


def test_a_disk_that_is_full_for_one_output_is_met_again_for_that_one(
    recipe: dict[str, Any], apart: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = LocalStore.sync

    def full(self: LocalStore, key: str) -> None:
        if ".w0.6-d0.8.raymerge-" in self.location(key):
            raise DiskSpaceError("no room")
        sync(self, key)

    monkeypatch.setattr(LocalStore, "sync", full)
    with pytest.raises(
        IncompleteError, match=r"3 of 4 outputs are published.*\nw0.6-d0.8: no room"
    ) as caught:
        submit_sweep(recipe, tmp_path / "outs", INLINE)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    again = EventLog()
    results = submit_sweep(recipe, tmp_path / "outs", INLINE, on_event=again)
    assert {event.name for event in again.of(OutputKept)} == set(results) - {"w0.6-d0.8"}
    assert [event.names for event in again.of(OutputsStarted)] == [("w0.6-d0.8",)]
    assert _together(results) == apart


def test_outputs_that_are_there_are_kept_or_replaced(
    recipe: dict[str, Any], apart: Made, tmp_path: Path
) -> None:
    small = {**recipe, "sweep": {"w": [0.2, 0.6], "d": [0.4]}}
    first = submit_sweep(small, tmp_path / "outs", INLINE)
    times = {name: os.stat(result.output).st_ino for name, result in first.items()}
    again = submit_sweep(small, tmp_path / "outs", INLINE)
    assert _without_order(again) == _without_order(first)
    assert {name: os.stat(result.output).st_ino for name, result in again.items()} == times
    touched = tmp_path / "outs" / "w0.6-d0.4" / "model.safetensors"
    touched.write_bytes(touched.read_bytes()[:-1] + b"\0")
    with pytest.raises(TargetError, match=r"w0\.6-d0\.4: this directory is not empty"):
        submit_sweep(small, tmp_path / "outs", INLINE)
    events = EventLog()
    results = submit_sweep(small, tmp_path / "outs", REPLACE, on_event=events)
    assert [event.name for event in events.of(OutputKept)] == ["w0.2-d0.4"]
    assert _together(results) == {name: apart[name] for name in results}


def _without_order(results: Mapping[str, RunResult]) -> list[Any]:
    def facts(result: RunResult) -> Any:
        receipts = {receipt.segment: receipt for receipt in result.receipts}
        return result.output, result.digest, result.verdict, receipts, result.duplicates

    return [(name, facts(result)) for name, result in results.items()]


def test_outputs_whose_tensors_lie_otherwise_are_read_apart(recipe: dict[str, Any], tmp_path: Path) -> None:
    mixed = {**recipe, "sweep": {"w": [0.2, 0.6], "d": [0.4], "to": ["float32", "bfloat16"]}, "dtype": "$to"}
    events = EventLog()
    results = submit_sweep(mixed, tmp_path / "outs", INLINE, on_event=events)
    assert [len(event.names) for event in events.of(OutputsStarted)] == [2, 2]
    assert _together(results) == _separate(mixed, tmp_path)


def _of_two_merges(family: Family, path: Path, last: Mapping[str, Any]) -> Path:
    """A sweep whose outputs use the result ``first``."""
    models = [{"model": str(tune), "parameters": {"weight": 1.0}} for tune in family.tunes[:2]]
    first = {"name": "first", "merge_method": "linear", "models": models}
    path.write_text("---\n".join(json.dumps(each) + "\n" for each in (first, last)), encoding="utf-8")
    return path


def _weighted(medium: Family) -> dict[str, Any]:
    models = [
        {"model": "first", "parameters": {"weight": 1.0}},
        {"model": str(medium.tunes[0]), "parameters": {"weight": "$w"}},
    ]
    return {"merge_method": "linear", "models": models, "sweep": {"w": [0.2, 0.6]}}


def _files_separately(path: Path, root: Path) -> Made:
    made: Made = {}
    for output in read_sweep(path) or ():
        plain, place = root / f"{output.name}.yml", root / "apart" / output.name
        plain.write_text(output.text, encoding="utf-8")
        made[output.name] = merge(str(plain), place).result.digest, digests(place)
    assert made
    return made


@pytest.mark.slow
def test_what_several_outputs_are_made_of_is_made_once(medium: Family, tmp_path: Path) -> None:
    path = _of_two_merges(medium, tmp_path / "recipe.yml", _weighted(medium))
    events = EventLog()
    results = submit_sweep(path, tmp_path / "outs", INLINE, on_event=events)
    assert [event.names for event in events.of(OutputsStarted)] == [("w0.2", "w0.6")]
    assert [event.name for event in events.of(StepStarted)] == ["first", ""]
    assert [each.name for each in tmp_path.iterdir() if "outs" in each.name] == ["outs"]
    assert sorted(os.listdir(tmp_path / "outs")) == ["w0.2", "w0.6"]
    assert _together(results) == _files_separately(path, tmp_path)
    submit_sweep(path, tmp_path / "outs", INLINE, on_event=events)
    assert len(events.of(OutputKept)) == 2
    assert len(events.of(StepStarted)) == 2


@pytest.mark.slow
def test_equal_stages_of_outputs_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = make_family(tmp_path / "models")
    mixture = {
        "base_model": str(family.base),
        "gate_mode": "random",
        "seed": "$seed",
        "experts": [{"source_model": "first"}, {"source_model": str(family.tunes[2])}],
        "dtype": "$to",
        "sweep": {"seed": [0, 7], "to": ["float16", "bfloat16"]},
    }
    path = _of_two_merges(family, tmp_path / "recipe.yml", mixture)
    events, disks = EventLog(), list[Disk]()
    monkeypatch.setattr(sweep_run, "check_disk", lambda disk, *_, **__: disks.append(disk))
    options = replace(INLINE, keep_intermediates=True)
    results = submit_sweep(path, tmp_path / "outs", options, on_event=events)
    assert [len(event.names) for event in events.of(OutputsStarted)] == [4]
    assert len(events.of(StageStarted)) == 2
    assert _together(results) == _files_separately(path, tmp_path)
    steps = (tmp_path / "outs" / ".raymerge.steps").rglob("*.safetensors")
    assert disks[0].results == sum(each.stat().st_size for each in steps)


def test_a_result_between_that_fails_is_not_tried_for_each_output(medium: Family, tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    shutil.copytree(medium.tunes[1], harmed)
    tensors = read_tensors(harmed)
    write_checkpoint(
        harmed, {**tensors, "model.norm.weight": torch.full((256,), math.nan)}, read_config(harmed)
    )
    family = replace(medium, tunes=(medium.tunes[0], harmed, medium.tunes[2]))
    path = _of_two_merges(family, tmp_path / "recipe.yml", _weighted(family))
    events = EventLog()
    with pytest.raises(NonFiniteError, match=r"^w0\.2, w0\.6: .*: model\.norm\.weight: "):
        submit_sweep(path, tmp_path / "outs", INLINE, on_event=events)
    assert [event.name for event in events.of(StepStarted)] == ["first"]
    assert [event.name for event in events.of(OutputFailed)] == ["w0.2", "w0.6"]


def test_a_request_to_stop_one_output_stops_the_sweep(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.publish.lease._ASK_SECONDS", 0.0)

    def ask(event: object) -> None:
        if isinstance(event, Started):
            StopRequest(tmp_path / "outs" / "w0.2-d0.8").make(myself(""))

    with pytest.raises(IncompleteError, match="segments done"):
        submit_sweep(recipe, tmp_path / "outs", INLINE, on_event=EventLog(ask))
    assert not list((tmp_path / "outs").glob("*stop*"))


def test_each_output_has_a_journal_of_its_own(recipe: dict[str, Any], tmp_path: Path) -> None:
    results = submit_sweep(recipe, tmp_path / "outs", INLINE)
    for name, result in results.items():
        journal = tmp_path / "outs" / name / "raymerge" / "events.jsonl"
        told = [json.loads(line) for line in journal.read_text().splitlines()]
        assert told[0]["event"] == "planned"
        assert told[0]["digest"] == result.digest
        done = [each for each in told if each["event"] == "segment_done"]
        assert len(done) == told[0]["segments"]
        moved = sum(each["read_bytes"] + each["written_bytes"] for each in done)
        assert 0.95 * told[0]["total_bytes"] < moved <= told[0]["total_bytes"]
        assert [re.sub(".*/", "", each["path"]) for each in told if each["event"] == "published"] == [name]


def test_outputs_are_read_in_groups_that_fit_the_memory(
    recipe: dict[str, Any], apart: Made, tmp_path: Path
) -> None:
    (alone, *_) = read_sweep(recipe) or ()
    least = project(plan(alone.recipes[0]), LEAST_MEMORY).least_budget
    seen: list[RunReport] = []

    def look(event: object) -> None:
        if isinstance(event, SegmentDone) and not seen:
            seen.append(PlaceRuns().report(str(tmp_path / "outs")))

    events, options = EventLog(look), RunOptions(inline=True, memory=least + 5 * LEAST_BLOCK // 2)
    results = submit_sweep(recipe, tmp_path / "outs", options, on_event=events)
    groups = events.of(OutputsStarted)
    assert [(len(event.names), event.number, event.total) for event in groups] == [(2, 1, 2), (2, 2, 2)]
    (report,) = seen
    assert report.state is RunState.RUNNING
    states = {each.run: each.state for each in report.outputs}
    assert states == {
        **dict.fromkeys(groups[0].names, RunState.RUNNING),
        **dict.fromkeys(groups[1].names, RunState.QUEUED),
    }
    assert {each.details.get("segments", "")[:5] for each in report.outputs} == {"1 of ", ""}
    assert _together(results) == apart


@pytest.mark.slow
def test_a_killed_sweep_goes_on(recipe: dict[str, Any], apart: Made, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    for count in (3, 8):
        with driver(str(path), tmp_path / "outs") as process:
            wait_for_receipts(tmp_path / "outs" / "w0.2-d0.4", count)
            process.kill()
    events = EventLog()
    made = _together(submit_sweep(path, tmp_path / "outs", INLINE, on_event=events))
    # The texts of a file's recipes are written otherwise than those of a mapping's.
    key = "model.safetensors"
    assert {name: (digest, files[key]) for name, (digest, files) in made.items()} == {
        name: (digest, files[key]) for name, (digest, files) in apart.items()
    }
    assert all(event.done_segments >= 8 for event in events.of(Started))


@pytest.mark.slow
def test_outputs_in_an_object_store_are_kept_there_too(
    recipe: dict[str, Any], apart: Made, s3: S3Server
) -> None:
    sweep = {**recipe, "sweep": {"w": [0.2, 0.6], "d": [0.8]}}

    def stop(event: object) -> None:
        if isinstance(event, Published):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit_sweep(sweep, s3.place("outs"), INLINE, on_event=EventLog(stop))
    events = EventLog()
    results = submit_sweep(sweep, s3.place("outs"), INLINE, on_event=events)
    assert [event.name for event in events.of(OutputKept)] == ["w0.2-d0.8"]
    for name, result in results.items():
        assert result.digest == apart[name][0]
        weights = s3.objects(f"outs/{name}/")[f"outs/{name}/model.safetensors"]
        assert hashlib.sha256(weights).hexdigest() == apart[name][1]["model.safetensors"]


def test_a_source_that_is_changed_costs_only_the_outputs_that_read_it(tmp_path: Path) -> None:
    family = make_family(tmp_path / "models", hidden=160)
    sweep = {
        "sweep": {"parent": [str(each) for each in family.tunes], "label": ["a", "b", "c"], "zip": True},
        "outputs": "with-{label}",
        **linear(family.base, "$parent"),
    }
    harmed = family.tunes[2] / "model.safetensors"

    def harm(event: object) -> None:
        if isinstance(event, Started):
            os.truncate(harmed, harmed.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=r"with-c: .*the file was changed while it was merged"):
        submit_sweep(sweep, tmp_path / "outs", INLINE, on_event=harm)
    for label, tune in zip("ab", family.tunes, strict=False):
        submit(linear(family.base, tune), tmp_path / label, INLINE)
        files = (tmp_path / each / "model.safetensors" for each in (label, f"outs/with-{label}"))
        assert len({each.read_bytes() for each in files}) == 1
    assert not (tmp_path / "outs" / "with-c").exists()
