"""What goes on beside a run whose output is in an object store, and must neither hold it up nor end it."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.s3_server import S3Server, s3_server

from raymerge.api import submit
from raymerge.deploy.targets.local import report_of
from raymerge.errors import IncompleteError, OptionError, TargetError
from raymerge.events import Event, SegmentDone
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.publish import remote_lease, remote_staging, shard_work, stop_request
from raymerge.publish.lease import myself
from raymerge.publish.remote_lease import RemoteLease, leased, look
from raymerge.publish.run_records import RemoteRecords, journal_lines
from raymerge.publish.stop_request import StopRequest
from raymerge.storage.addresses import StoreOptions
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.temporary import OwnDirectory

INLINE = RunOptions(inline=True)
KEY = "raymerge/lease.json"
PATIENCE_SECONDS = 20.0
"""How long a test waits for what should take a moment."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    yield server
    server.calm()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A merge into several shards."""
    model = tiny_llama(tmp_path_factory.mktemp("model") / "a", 0, hidden=64, layers=2)
    entry = {"model": str(model), "parameters": {"weight": 0.5}}
    return {"merge_method": "linear", "models": [entry], "shard_size": "60KB"}


@pytest.fixture
def place(s3: S3Server, tmp_path: Path) -> str:
    return s3.place(tmp_path.name)


def _told(records: RemoteRecords) -> list[str]:
    return [json.loads(line)["event"] for line in journal_lines(records, follow=False)]


def _until(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


# The journal


@pytest.mark.slow
def test_the_end_of_a_run_is_told(recipe: dict[str, Any], place: str) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise IncompleteError("as the test has it")

    with pytest.raises(IncompleteError):
        submit(recipe, place, INLINE, on_event=fail)
    records = RemoteRecords(place)
    report = report_of(records)
    assert (report.details["exit_code"], "as the test has it" in report.message) == ("3", True)
    assert _told(records)[-2:] == ["segment_done", "ended"]
    # Whoever goes on from there, goes on with the journal too.
    submit(recipe, place, INLINE)
    told = _told(records)
    assert (told.count("ended"), told[-1]) == (1, "published")


def test_a_journal_that_is_refused_ends_nothing(s3: S3Server, recipe: dict[str, Any], place: str) -> None:
    s3.fail("forbid", method="PUT", key="events.jsonl", times=1000)
    with pytest.raises(IncompleteError, match="as the test has it"):
        submit(recipe, place, INLINE, on_event=_fail_at_the_first_segment)
    assert s3.asked("PUT", "events.jsonl")


def _fail_at_the_first_segment(event: Event) -> None:
    if isinstance(event, SegmentDone):
        raise IncompleteError("as the test has it")


def test_a_journal_is_there_while_the_first_shard_is_made(
    s3: S3Server, recipe: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_staging, "_PAUSE_SECONDS", 0.02)
    told = list[bool]()

    def wait(method: str, key: str) -> None:
        if method == "PUT" and "-of-" in key and not told:
            told.append(True)
            _until(lambda: bool(s3.asked("PUT", "events.jsonl")))

    s3.before = wait
    submit(recipe, place, INLINE)
    assert told


# Requests to stop


def test_a_store_that_hangs_keeps_nobody_who_asks_for_requests(
    s3: S3Server, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_request, "_LOOK_SECONDS_IN_STORE", 0.0)
    monkeypatch.setattr(stop_request, "_REQUEST_SECONDS", 0.2)
    looked, go_on = threading.Event(), threading.Event()

    def hang(method: str, key: str) -> None:
        if key.endswith("stop.json") and method == "GET":
            looked.set()
            go_on.wait(PATIENCE_SECONDS)

    StopRequest.in_store(ObjectWriter(place)).make(myself(""))
    request = StopRequest.in_store(place)
    s3.before = hang
    # It comes back while the store has not answered.
    assert not request.is_made()
    assert looked.wait(PATIENCE_SECONDS)
    assert not request.is_made()
    go_on.set()
    _until(request.is_made)
    _until(lambda: not s3.objects(f"{tmp_path.name}/"))
    assert not request.is_made()


@pytest.mark.slow
def test_a_request_that_comes_too_late_stays_nowhere(
    s3: S3Server, recipe: dict[str, Any], place: str
) -> None:
    def ask(method: str, key: str) -> None:
        if method == "PUT" and key.endswith(".index.json"):
            s3.before = None
            StopRequest.in_store(ObjectWriter(place)).make(myself(""))

    s3.before = ask
    submit(recipe, place, INLINE)
    assert s3.before is None
    assert not [key for key in s3.objects() if key.endswith("stop.json")]


# The lease


def _beats(s3: S3Server, place: str) -> int:
    found = ObjectWriter(place).get(KEY)
    assert found is not None
    return int(json.loads(found[0])["beats"])


def test_a_request_that_hangs_does_not_cost_the_lease(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(remote_lease, "_REQUEST_SECONDS", 0.3)
    with leased(ObjectWriter(place), KEY, "digest") as lease:
        _until(lambda: _beats(s3, place) > 0)
        s3.fail("hang", method="PUT", key="lease.json", seconds=2 * PATIENCE_SECONDS)
        _until(lambda: not any(fault.times for fault in s3.faults))
        before = _beats(s3, place)
        _until(lambda: _beats(s3, place) > before)
        lease.confirm()


def test_nothing_ends_the_beats_but_the_end(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_lease, "BEAT_SECONDS", 0.02)
    written, failures = RemoteLease._has_written, iter([ValueError("credentials"), KeyError("expired")])

    def fail(self: RemoteLease) -> bool:
        if (error := next(failures, None)) is not None:
            raise error
        return written(self)

    monkeypatch.setattr(RemoteLease, "_has_written", fail)
    with leased(ObjectWriter(place), KEY, "digest"):
        _until(lambda: _beats(s3, place) > 1)


def test_a_process_that_slept_looks_whether_it_still_has_the_lease(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_lease, "BEAT_SECONDS", 1000.0)
    writer = ObjectWriter(place)
    with leased(writer, KEY, "digest") as lease:
        lease.check()
        writer.delete([KEY])
        # The last beat was just now.
        lease.check()
        monkeypatch.setattr(remote_lease, "_STALE_SECONDS", 0.0)
        with pytest.raises(IncompleteError, match="the lease of this run is gone, it was removed"):
            lease.check()
        # A store that is away says nothing of it.
        s3.fail("error", key="lease.json", times=1000)
        lease.check()
        s3.calm()


def test_a_store_that_refuses_to_write_what_is_not_there(place: str) -> None:
    class Refusing(ObjectWriter):
        def put_new(self, key: str, data: bytes) -> str | None:
            return None

    waits: list[float] = []
    with pytest.raises(TargetError, match="this store has no conditional writes"):
        remote_lease._acquired(Refusing(place), KEY, myself(""), waits.append)
    assert waits == [remote_lease._LOOK_SECONDS] * 4
    assert look(ObjectWriter(place), KEY) is None


# The directory for shards


@pytest.mark.slow
def test_a_worker_sweeps_and_looks_for_room_where_it_is(
    recipe: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    left = OwnDirectory(str(scratch))
    (left.path / "shard").write_bytes(b"x")
    # As the system does where a process is killed.
    os.close(left._descriptor)
    room = SimpleNamespace(free=10)
    monkeypatch.setattr("raymerge.publish.staging.shutil.disk_usage", lambda _: room)
    options = RunOptions(inline=True, scratch=str(scratch))
    with pytest.raises(OptionError, match=r"at a time\) takes .*choose another --scratch"):
        submit(recipe, place, options)
    assert list(scratch.iterdir()) == []


def test_control_directories_of_killed_drivers_are_swept(
    recipe: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    left, other = (OwnDirectory() for _ in range(2))
    (left.path / "output").mkdir()
    # As the system does where a process is killed.
    os.close(left._descriptor)
    submit(recipe, place, INLINE)
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == [other.path.parent]
    other.remove()


def test_a_key_of_aws_is_refused_where_there_is_none(recipe: dict[str, Any]) -> None:
    options = RunOptions(inline=True, storage=StoreOptions(kms_key="alias/models"))
    with pytest.raises(OptionError, match=r"kms_key: it is a key of AWS, and nothing at gs://b/out would"):
        submit(recipe, "gs://b/out", options)


def test_a_directory_needs_no_scratch(recipe: dict[str, Any], tmp_path: Path) -> None:
    options = RunOptions(inline=True, scratch=str(tmp_path / "scratch"))
    with pytest.raises(OptionError, match="--scratch"):
        submit(recipe, tmp_path / "out", options)
    assert list(tmp_path.iterdir()) == []


# The store


def test_a_store_that_drops_what_is_put_down_with_objects_is_refused_at_once(
    s3: S3Server, recipe: dict[str, Any], place: str, tmp_path: Path
) -> None:
    s3.drops = "x-amz-meta-"
    with pytest.raises(TargetError, match=r"objects here do not keep their metadata, by which a run knows"):
        submit(recipe, place, INLINE)
    assert s3.objects(f"{tmp_path.name}/") == {}


# What is there once


def test_how_shards_are_made_is_worked_out_once(
    recipe: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, times = shard_work._makers, []

    def counted(plan: Plan) -> Any:
        times.append(plan.digest)
        return found(plan)

    monkeypatch.setattr(shard_work, "_makers", counted)
    submit(recipe, place, INLINE)
    assert len(times) == 1


@pytest.mark.slow
def test_what_a_killed_process_tried_with_is_not_published(
    s3: S3Server, recipe: dict[str, Any], place: str, tmp_path: Path
) -> None:
    s3.put(f"{tmp_path.name}/raymerge/probe-0123", b"")
    submit(recipe, place, INLINE)
    assert not [key for key in s3.objects() if "/probe-" in key]
