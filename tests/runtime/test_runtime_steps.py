"""Results between in a directory that the user names, towards outputs in an object store and elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kits.chains import documents
from kits.checkpoint_maker import tiny_llama
from kits.kubernetes_profiles import SHARED, kubernetes_profile
from kits.merge_cases import INLINE, NOT_REPRODUCED, EventLog, digests
from kits.permuted_experts import MIXTRAL, make_model, moved, store
from kits.s3_server import S3Server

from raymerge.api import AuditOptions, audit, plan_for, replay, submit
from raymerge.deploy.manifests import check
from raymerge.deploy.profiles.sections import RunSettings
from raymerge.deploy.targets.sending import sending_problems
from raymerge.errors import IncompleteError, OptionError, TargetError
from raymerge.events import (
    Event,
    SegmentDone,
    ShardDone,
    StageStarted,
    Started,
    StepKept,
    StepStarted,
    Stopping,
)
from raymerge.options import RunOptions
from raymerge.publish import lease
from raymerge.publish.output_place import steps_directory
from raymerge.publish.run_records import records_of
from raymerge.runtime.driver import chained_merges
from raymerge.runtime.driver import run as run_module
from raymerge.runtime.driver.chained_merges import check_disk, kept_steps, place_problems
from raymerge.storage.addresses import StoreOptions, with_options

Recipes = list[dict[str, Any]]


@pytest.fixture
def chain(tmp_path: Path) -> Recipes:
    """Three merges, of which the last writes several shards."""
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / "models" / name, seed, hidden=64, vocab=64, layers=1)
    *before, last = documents(root=str(tmp_path / "models"))
    return [*before, {**last, "shard_size": "40KB"}]


@pytest.fixture
def staged(tmp_path: Path) -> Recipes:
    """Experts of one model are matched with those of what another merge makes."""
    model = make_model(MIXTRAL, 1)
    moves = [model, moved(model, MIXTRAL, 2), moved(model, MIXTRAL, 3)]
    roots = [store(tmp_path / f"mixtral{number}", each, MIXTRAL) for number, each in enumerate(moves)]

    def entry(place: Path | str) -> dict[str, Any]:
        return {
            "model": {"model": str(place), "override_architecture": "Mixture"},
            "parameters": {"weight": 0.5},
        }

    def merge(*models: Path | str, **more: Any) -> dict[str, Any]:
        return {"merge_method": "linear", "models": [entry(each) for each in models], **more}

    return [merge(roots[0], roots[1], align="experts", name="left"), merge("left", roots[2], align="experts")]


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return tmp_path / "steps"


@pytest.fixture
def options(steps: Path) -> RunOptions:
    return replace(INLINE, steps=str(steps))


def _digests(s3: S3Server) -> dict[str, str]:
    found = {key.removeprefix("out/"): data for key, data in s3.objects("out/").items()}
    return {key: hashlib.sha256(data).hexdigest() for key, data in found.items() if key not in NOT_REPRODUCED}


def _submit(
    recipes: Recipes,
    output: str | Path,
    options: RunOptions,
    on_event: Callable[[Event], object] = lambda _: None,
) -> EventLog:
    events = EventLog(on_event)
    submit(recipes, output, options, on_event=events)
    return events


def _names(events: EventLog) -> list[tuple[str, str]]:
    steps = events.of(StepStarted, StepKept)
    return [(event.name, "made" if isinstance(event, StepStarted) else "kept") for event in steps]


def _broken_in(name: str) -> EventLog:
    """Ends a submission after the first part of a merge."""

    def end(event: Event) -> None:
        if isinstance(event, SegmentDone) and [each.name for each in events.of(StepStarted)][-1:] == [name]:
            raise IncompleteError("as the test has it")

    events = EventLog(end)
    return events


def _began(events: EventLog) -> int:
    """Segments of the last merge that were done when it went on."""
    return int(events.of(Started)[-1].done_segments)


# The bytes


@pytest.mark.slow
def test_stages_and_merges_towards_a_store_give_the_bytes_of_a_local_output(
    s3: S3Server, staged: Recipes, options: RunOptions, steps: Path, tmp_path: Path
) -> None:
    _submit(staged, tmp_path / "out", INLINE)
    events = _submit(staged, s3.place("out"), replace(options, scratch=str(tmp_path / "scratch")))
    assert len(events.of(StageStarted)) == 2
    assert _digests(s3) == digests(tmp_path / "out")
    assert set(s3.objects("out/raymerge/stages/")) == {
        f"out/raymerge/stages/{path.name}" for path in (tmp_path / "out" / "raymerge" / "stages").iterdir()
    }
    assert list(steps.iterdir()) == []


def test_a_local_output_may_have_its_steps_elsewhere(
    chain: Recipes, options: RunOptions, steps: Path, tmp_path: Path
) -> None:
    (tmp_path / "outs").mkdir()
    output, held = tmp_path / "outs" / "out", []

    def look(event: Event) -> None:
        if isinstance(event, SegmentDone) and not held:
            held.append((records_of(str(output)).hold(), sorted(path.name for path in steps.iterdir())))

    _submit(chain, output, replace(options, keep_intermediates=True), look)
    ((hold, there),) = held
    assert hold is not None
    assert hold.is_alive
    root = steps_directory(output, str(steps))
    assert there == [f".{root.name}.raymerge.lock", root.name]
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in root.iterdir()) == ["left", "right"]
    merges = plan_for(chain, output, options)
    assert kept_steps(merges, output, str(steps)) == {"left", "right"}
    assert kept_steps(merges, output) == frozenset()
    _submit(chain, tmp_path / "usual", INLINE)
    assert digests(output) == digests(tmp_path / "usual")


# Stopping and going on


def test_a_stopped_submission_goes_on_and_elsewhere_without_its_steps_too(
    s3: S3Server, chain: Recipes, options: RunOptions, steps: Path, tmp_path: Path
) -> None:
    """What is made between is made again there, with the same bytes, and shards in the store stay."""
    place: Any = s3.place("out")
    events = _broken_in("")
    with pytest.raises(IncompleteError, match="as the test has it"):
        _submit(chain, place, options, events)
    assert _names(events) == [("left", "made"), ("right", "made"), ("", "made")]
    events = _broken_in("")
    with pytest.raises(IncompleteError, match="as the test has it"):
        _submit(chain, place, options, events)
    assert _names(events) == [("left", "kept"), ("right", "kept"), ("", "made")]
    first = _began(events)
    assert first >= 1
    assert "out/model.safetensors.index.json" not in s3.objects("out/")
    shutil.rmtree(steps)
    events = _submit(chain, place, replace(options, steps=str(tmp_path / "another machine")))
    assert _names(events) == [("left", "made"), ("right", "made"), ("", "made")]
    assert _began(events) > first
    assert len({each.shard for each in events.of(ShardDone)}) > 2
    _submit(chain, tmp_path / "local", INLINE)
    assert _digests(s3) == digests(tmp_path / "local")
    assert not [key for key in s3.objects("out/") if "lease" in key]


def test_who_makes_what_comes_before_holds_the_place_and_can_be_stopped(
    s3: S3Server, chain: Recipes, options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the request comes with the last part of a merge, the next one does not begin."""
    monkeypatch.setattr(lease, "_ASK_STORE_SECONDS", 0.0)
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(threading.Thread, "start", _run_at_once(threading.Thread.start))
    place, events = s3.place("out"), EventLog()

    def look(event: Event) -> None:
        events.append(event)
        if not isinstance(event, SegmentDone):
            return
        records = records_of(place)
        hold = records.hold()
        assert hold is not None
        assert hold.is_alive
        assert hold.holder is not None
        if len(events.of(SegmentDone)) == 1:
            with pytest.raises(TargetError, match="another run makes this very checkpoint here now"):
                submit(chain, place, replace(options, steps=str(tmp_path / "others")))
        records.ask_to_stop(hold.holder)

    with pytest.raises(IncompleteError, match=r"stopped with left made\. It is kept"):
        submit(chain, place, options, on_event=look)
    assert _names(events) == [("left", "made")]
    assert s3.objects("out/") == {}
    assert records_of(place).hold() is None

    def ask(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepStarted) and event.number == event.total:
            hold = records_of(place).hold()
            assert hold is not None
            assert hold.holder is not None
            records_of(place).ask_to_stop(hold.holder)

    # One that comes before the last merge has cleared its place is for that merge too.
    events.clear()
    with suppress(IncompleteError):
        submit(chain, place, options, on_event=ask)
    last = max(n for n, each in enumerate(events) if isinstance(each, StepStarted))
    assert [each.is_asked for each in events[last:] if isinstance(each, Stopping)] == [True]
    assert "out/raymerge/stop.json" not in s3.objects("out/")


def _run_at_once(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Threads that look for a request have looked when they are started."""

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "stop request":
            thread.join()

    return started


# What can be proved of it


@pytest.mark.slow
def test_what_was_kept_is_audited_and_used_again(
    s3: S3Server, chain: Recipes, options: RunOptions, steps: Path
) -> None:
    place, keeping = s3.place("out"), replace(options, keep_intermediates=True)
    _submit(chain, place, keeping)
    kept = audit(place, AuditOptions(1.0, seed=3, steps=str(steps)), INLINE)
    assert (kept.problems, kept.skipped) == ((), ())
    without = audit(place, AuditOptions(0.01, seed=3), INLINE)
    assert without.problems == ()
    assert sum(each.tensors for each in without.skipped) == without.tensors
    assert replay(place).problems == ()
    before = _digests(s3)
    with pytest.raises(TargetError, match="this place is not empty"):
        _submit(chain, place, options)
    events = _submit(chain, place, replace(options, replace=True))
    assert _names(events) == [("left", "kept"), ("right", "kept"), ("", "made")]
    assert _digests(s3) == before
    assert list(steps.iterdir()) == []


# Where they may be


def test_every_output_has_a_directory_of_its_own(tmp_path: Path) -> None:
    def named(output: str, endpoint: str | None = None) -> Path:
        place = with_options(output, StoreOptions(endpoint=endpoint))
        return steps_directory(place, str(tmp_path))

    outputs = [
        "s3://b/out",
        "s3://c/out",
        "gs://b/out",
        "/x/out",
        "/y/out",
        "s3://b/a b/ö",
        "s3://b/" + "x" * 300,
    ]
    places = [named(each) for each in outputs] + [named("s3://b/out", "https://minio.example")]
    assert len({*places}) == len(places)
    assert [named(each) for each in outputs] == places[:-1]
    assert named("s3://b/out/") == places[0]
    assert {each.parent for each in places} == {tmp_path}
    assert places[0].name.startswith("out-")
    assert max(len(each.name) for each in places) < 100


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("out", "lies inside the output place"),
        ("out/below", "lies inside the output place"),
        ("models/one", "lies inside the source"),
        ("file", "file is a file. Choose another --steps."),
    ],
)
def test_a_directory_that_would_do_harm_is_refused(
    named: str, said: str, chain: Recipes, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=said):
        _submit(chain, tmp_path / "out", replace(INLINE, steps=str(tmp_path / named)))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_does_not_look_at_a_directory_that_may_be_of_another_machine(
    chain: Recipes, options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges = plan_for(chain, tmp_path / "out", options)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert list(place_problems(tmp_path / "out", options, merges)) == []
    with pytest.raises(
        OptionError, match=rf"steps: you may not write in {tmp_path}\. Choose another --steps"
    ):
        _submit(chain, tmp_path / "out", options)


def test_a_result_that_was_kept_is_no_source_of_what_removes_it(
    chain: Recipes, options: RunOptions, steps: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _submit(chain, output, replace(options, keep_intermediates=True))
    left = steps_directory(output, str(steps)) / "left"
    again = [*chain[:2], {**chain[2], "models": [*chain[2]["models"], {"model": str(left)}]}]
    again[2] = {**again[2], "merge_method": "linear", "parameters": {"weight": 1}}
    del again[2]["base_model"]
    with pytest.raises(OptionError, match="for results between holds the source"):
        _submit(again, output, replace(options, replace=True))


def test_file_systems_are_told_apart(tmp_path: Path) -> None:
    assert chained_merges._is_one_disk(tmp_path / "steps" / "x", tmp_path / "out")
    assert not chained_merges._is_one_disk(tmp_path / "steps" / "x", Path("/proc/self/out"))


def test_each_file_system_has_room_for_what_goes_there(
    s3: S3Server, chain: Recipes, options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path: 1 << 30}
    usage = shutil.disk_usage(tmp_path)

    def asked(place: Path) -> Any:
        return usage._replace(free=next(free[each] for each in (place, *place.parents) if each in free))

    monkeypatch.setattr(shutil, "disk_usage", asked)
    monkeypatch.setattr(chained_merges, "_is_one_disk", lambda *_: False)
    disk = chained_merges.Disk(steps=5000, results=4000, output=3000)
    steps, output = tmp_path / "steps" / "x", tmp_path / "outs" / "out"
    for place in (steps.parent, output.parent):
        place.mkdir()
    free |= {steps.parent: 5000, output.parent: 3000}
    check_disk(disk, steps, output, is_chosen=True)
    free[output.parent] = 2999
    with pytest.raises(OptionError, match=r"outs: the output takes .*another -o"):
        check_disk(disk, steps, output, is_chosen=True)
    check_disk(disk, steps, "s3://b/out", is_chosen=True)
    monkeypatch.setattr(chained_merges, "_is_one_disk", lambda *_: True)
    free[steps.parent] = 7000
    check_disk(disk, steps, output, is_chosen=True)
    free[steps.parent] = 6999
    with pytest.raises(OptionError, match=r"steps: the output, with what is made before it, takes .*--steps"):
        check_disk(disk, steps, output, is_chosen=True)
    free[steps.parent] = 1000
    with pytest.raises(OptionError, match=r"steps: what is made before the output takes .*another --steps"):
        _submit(chain, s3.place("out"), options)
    assert s3.objects("out/") == {}


def test_several_merges_are_not_sent_to_a_store_without_a_directory(chain: Recipes) -> None:
    """Nor with one that the cluster does not have; on Kubernetes, which no volume of its pods holds."""
    text = yaml.safe_dump_all(chain)

    def told(output: str, **run: str) -> str:
        return "\n".join(map(str, sending_problems(text, "r.yml", output, run=RunSettings(**run))))

    assert "-o: this recipe has results between" in told("s3://b/x")
    assert "--steps: 'below' is relative to a directory of this machine" in told("s3://b/x", steps="below")
    assert told("s3://b/x", steps="/mnt/x") == told("/mnt/out") == ""
    profile = kubernetes_profile({"volumes": [SHARED]})
    with pytest.raises(OptionError, match="-o: this recipe has results between"):
        check(profile, text, "s3://b/x", "raymerge-0123456789ab")
    run = RunSettings(steps="/mnt/other")
    with pytest.raises(OptionError, match="/mnt/other is on no volume"):
        check(profile.model_copy(update={"run": run}), text, "s3://b/x", "raymerge-0123456789ab")
