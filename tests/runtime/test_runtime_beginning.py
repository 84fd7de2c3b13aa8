"""What is thrown away is believed by nobody, and workers of a run that is gone do no harm to the next."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.merge_cases import INLINE, Family, digests, make_family, merge, recipes

from raymerge.api import plan_for, submit
from raymerge.errors import IncompleteError
from raymerge.events import Event, SegmentDone, ShardDone, Started
from raymerge.options import RunOptions
from raymerge.publish.attempt import MARK, check_begun, mark_of, remove_thrown_away, throw_away
from raymerge.publish.shards import Shards
from raymerge.runtime.driver.run import InlinePool, Run
from raymerge.runtime.workers.pool import Runner
from raymerge.storage.local.store import LocalStore

REPLACE = RunOptions(inline=True, replace=True)


class Crash(BaseException):
    """A process that ends here; nothing in raymerge catches it."""


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """Models that a test may change."""
    return make_family(tmp_path / "models", hidden=64)


@pytest.fixture
def recipe(family: Family) -> dict[str, Any]:
    return {**recipes(family)["linear"], "shard_size": 60_000}


def _record(output: Path) -> Path:
    (root,) = output.parent.glob(f".{output.name}.raymerge-*")
    return root / "raymerge"


def _stopped(recipe: dict[str, Any], output: Path, options: RunOptions = INLINE) -> None:
    """A driver that ends at its first segment."""

    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise Crash

    with pytest.raises(Crash):
        submit(recipe, output, options, on_event=stop)


def _worker_that_is_left(recipe: dict[str, Any], output: Path) -> tuple[Runner, int]:
    """A worker with its sources open, whose driver is gone; and how many segments there are."""
    planned = plan_for(recipe, output)[-1]
    pool = InlinePool("cpu", 1)
    run = Run(planned.plan, planned.sources, output, INLINE, on_event=lambda _: None)
    ledger = run._staging.prepare(run._conditions(pool), replace=False)
    Shards(planned.plan, LocalStore(run._staging.root)).take_up(ledger)
    runner = run._segment_work(pool).open(torch.device("cpu"), "left")
    runner.run(0)
    return runner, len(planned.plan["segments"])


def _replace_numbers(path: Path) -> None:
    """Another file with the same header takes the place of a source."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.with_name("other").write_bytes(data[:begin] + data[begin + 64 :] + data[begin : begin + 64])
    path.with_name("other").replace(path)


def test_a_worker_that_was_given_up_writes_nothing_into_the_next_run(
    family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """It has the old source open, and the next run of the same plan is over another."""
    worker, segments = _worker_that_is_left(recipe, tmp_path / "out")
    assert segments > 4
    _replace_numbers(Path(family.tunes[0]) / "model.safetensors")
    said: list[str] = []

    def write(event: Event) -> None:
        if isinstance(event, ShardDone) and not said:
            for segment in range(1, segments):
                with pytest.raises(IncompleteError) as caught:
                    worker.run(segment)
                said.append(str(caught.value))

    submit(recipe, tmp_path / "out", REPLACE, on_event=write)
    worker.close()
    assert all("is no longer the run that the worker writes for" in each for each in said)
    merge(recipe, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_a_run_that_goes_on_keeps_its_mark_and_one_that_begins_has_another(
    family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stopped(recipe, output)
    first = mark_of(_record(output))
    assert len(first) == 32
    _stopped(recipe, output)
    assert mark_of(_record(output)) == first
    _replace_numbers(Path(family.tunes[0]) / "model.safetensors")
    _stopped(recipe, output, REPLACE)
    second = mark_of(_record(output))
    assert len(second) == 32 != first
    assert second != first
    with pytest.raises(IncompleteError, match="another began there, or it is published"):
        check_begun(_record(output), first)
    merge(recipe, output)
    assert not (output / "raymerge" / MARK).exists()


def test_what_is_thrown_away_is_gone_by_its_name_before_anything_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, begun = tmp_path / "out", tmp_path / ".out.raymerge-0123"
    (begun / "raymerge").mkdir(parents=True)
    (begun / "raymerge" / "ledger.jsonl").write_text("{}")

    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(Crash):
            throw_away(begun, place)
    assert list(tmp_path.glob(".out.raymerge-*")) == []
    (left,) = tmp_path.iterdir()
    assert (left / "raymerge" / "ledger.jsonl").exists()
    remove_thrown_away(tmp_path / "other")
    assert left.exists()
    remove_thrown_away(place)
    throw_away(begun, place)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_thrown_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    (tmp_path / ".out.raymerge-0123").mkdir()
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        throw_away(tmp_path / ".out.raymerge-0123", tmp_path / "out")


def _spoil(family: Family) -> None:
    """The last number of a source is no number."""
    file = Path(family.tunes[0]) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\xff\xff\xff\xff")


def test_a_death_while_a_run_is_discarded_leaves_no_receipts(
    family: Family, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(family)

    def dies(*_: object, **__: object) -> None:
        raise Crash

    def harm(event: Event) -> None:
        if isinstance(event, SegmentDone):
            monkeypatch.setattr(shutil, "rmtree", dies)

    with pytest.raises(Crash):
        submit(recipe, tmp_path / "out", INLINE, on_event=harm)
    assert list(tmp_path.glob(".out.raymerge-*")) == []


@pytest.mark.parametrize("when", [Started, SegmentDone])
def test_who_lost_the_place_throws_nothing_away_and_finishes_nothing(
    when: type[Event], family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The other run may be at work in the directory."""
    output = tmp_path / "out"
    if when is Started:
        _spoil(family)

    def lose(event: Event) -> None:
        if isinstance(event, when):
            lease = tmp_path / ".out.raymerge.lock"
            lease.write_text(json.dumps({**json.loads(lease.read_text()), "run": "other"}))

    with pytest.raises(IncompleteError, match="the lease of this run is gone"):
        submit(recipe, output, INLINE, on_event=lose)
    names = [path.name for path in _record(output).parent.iterdir()]
    assert any(name.endswith(".part") for name in names)
    assert not any(name.endswith(".safetensors") for name in names)


def test_a_guard_is_asked_after_each_opening_to_write_and_before_any_byte(tmp_path: Path) -> None:
    calls: list[bool] = []

    def guard() -> None:
        calls.append(True)
        if len(calls) > 1:
            raise IncompleteError("no more")

    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"1234")
    with LocalStore(tmp_path, guard=guard) as store:
        store.read("a", 0, 4)
        store.write_at("a", 0, b"x")
        store.write_at("a", 1, b"y")
        attempts: tuple[Callable[[], None], ...] = (
            lambda: store.write_at("b", 0, b"x"),
            lambda: store.write_extent("b", 0, memoryview(b"xy")),
            lambda: store.append("b", b"x"),
            lambda: store.sync("b"),
        )
        for attempt in attempts:
            with pytest.raises(IncompleteError, match="no more"):
                attempt()
    assert (tmp_path / "a").read_bytes() == b"xy34"
    assert (tmp_path / "b").read_bytes() == b"1234"
    assert len(calls) == 5
