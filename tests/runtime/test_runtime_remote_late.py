"""Requests that arrive in an object store long after they were sent: they change nothing that came meanwhile.

A machine that was suspended sends again what was under way; here the proxy holds such a request back, until
another recipe was merged and published at the same place.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moto.s3.models as moto_s3
import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.marks import slow_but
from kits.merge_cases import INLINE, Family, merge, recipes
from kits.s3_server import MotoServer, S3Server

from raymerge.api import plan, submit
from raymerge.deploy.targets.local import PlaceRuns
from raymerge.deploy.targets.target import RunState
from raymerge.device_numerics import Fallback
from raymerge.errors import IncompleteError, OptionError, TargetError, TransientError
from raymerge.events import Event, PartInHand, SegmentDone, ShardDone
from raymerge.execute.receipts import UNFINISHED, Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.publish import lease as lease_module
from raymerge.publish import object_shards, record
from raymerge.publish.lease import LeaseHolder, LeaseObject, StopRequest, leased, myself
from raymerge.publish.object_shards import ShardOrder, ShardsRunner, ShardTarget, shard_orders
from raymerge.publish.staging import RemoteStaging
from raymerge.runtime.driver import run as run_module
from raymerge.runtime.workers import pool
from raymerge.storage.addresses import StoreOptions
from raymerge.storage.objects import writer as object_stream
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.temporary import OwnDirectory

INDEX = "out/model.safetensors.index.json"
LEASE = "out/raymerge/lease.json"
BEGUN = "out/raymerge/begun"
LEDGER = "out/raymerge/ledger.jsonl"
MANIFEST = "out/raymerge/plan/manifest.json"
FIRST = "out/model-00001-of-00003.safetensors"
_PART = 4 << 10


@pytest.fixture
def parts(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 30 kB are uploads of several parts, as large ones are."""
    if not isinstance(server, MotoServer):
        pytest.skip("it takes no parts of less than 5 MiB, as S3 itself")
    monkeypatch.setattr(object_stream, "SMALLEST_PART", _PART)
    monkeypatch.setattr(moto_s3, "S3_UPLOAD_PART_MIN_SIZE", 1)


@pytest.fixture(scope="module")
def recipe(small: Family) -> dict[str, Any]:
    return {**recipes(small)["linear"], "shard_size": "30KB"}


@pytest.fixture(scope="module")
def another(recipe: dict[str, Any]) -> dict[str, Any]:
    """A merge into shards of the same names and sizes, with other bytes in them."""
    return {**recipe, "models": [{**each, "parameters": {"weight": 0.2}} for each in recipe["models"]]}


def _overtaken(s3: S3Server, recipe: dict[str, Any], held: Callable[[str, str], bool]) -> dict[str, bytes]:
    """What was published by another run while a request of a first run, whose lease had run out, was held.

    The first run is submitted, and its end awaited, when that request has arrived after all.
    """
    published: dict[str, bytes] = {}

    def take_over(method: str, key: str) -> None:
        if not published and held(method, key):
            s3.before = None
            s3.client().delete_object(Bucket=s3.bucket, Key=LEASE)
            merge(recipe, s3.place("out"), replace(INLINE, replace=True))
            published.update(s3.objects("out/"))

    s3.before = take_over
    return published


def _same(s3: S3Server, published: dict[str, bytes]) -> None:
    found = s3.objects("out/")
    assert published
    assert {key for key in published if found.get(key) != published[key]} == set()


@pytest.mark.slow
def test_a_shard_of_one_part_that_comes_late_is_refused(
    s3: S3Server, recipe: dict[str, Any], another: dict[str, Any]
) -> None:
    published = _overtaken(s3, another, lambda method, key: (method, key) == ("PUT", FIRST))
    with pytest.raises(IncompleteError):
        merge(recipe, s3.place("out"), INLINE)
    _same(s3, published)
    assert 412 in {each.status for each in s3.asked("PUT", FIRST)}


@pytest.mark.usefixtures("parts")
def test_an_upload_that_is_completed_late_was_aborted(
    s3: S3Server, recipe: dict[str, Any], another: dict[str, Any]
) -> None:
    posted: list[str] = []

    def completes(method: str, key: str) -> bool:
        posted.extend([key] if (method, key) == ("POST", FIRST) else [])
        return len(posted) == 2

    published = _overtaken(s3, another, completes)
    with pytest.raises(IncompleteError):
        merge(recipe, s3.place("out"), INLINE)
    _same(s3, published)
    assert 404 in {each.status for each in s3.asked("POST", FIRST)}


@pytest.mark.parametrize("held", slow_but([INDEX, "out/config.json", MANIFEST, BEGUN, LEDGER], BEGUN, LEDGER))
def test_a_small_file_that_comes_late_is_refused(s3: S3Server, recipe: dict[str, Any], held: str) -> None:
    published: dict[str, bytes] = {}

    def publish_another(method: str, key: str) -> None:
        if (method, key) == ("PUT", held) and not published:
            for each in s3.objects("out/"):
                s3.client().delete_object(Bucket=s3.bucket, Key=each)
            s3.put(held, b"another's")
            published.update(s3.objects("out/"))

    s3.before = publish_another
    with pytest.raises(IncompleteError, match="the lease of this run is gone"):
        merge(recipe, s3.place("out"), INLINE)
    assert s3.objects("out/") == published


@pytest.mark.slow
def test_uploads_are_aborted_once_their_run_is_known_to_be_gone(
    s3: S3Server, recipe: dict[str, Any], another: dict[str, Any]
) -> None:
    """Before that, a worker might begin one, find the mark of its run, and complete it any time later."""
    with pytest.raises(IncompleteError):
        submit(recipe, s3.place("out"), INLINE, on_event=_fail_at_the_first_segment)
    old = s3.objects(BEGUN)[BEGUN]
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key=FIRST)
    marks: list[bytes] = []

    def look(method: str, key: str) -> None:
        if (method, key) == ("DELETE", FIRST):
            marks.append(s3.objects(BEGUN)[BEGUN])

    s3.before = look
    merge(another, s3.place("out"), replace(INLINE, replace=True))
    assert len(marks) == 1
    assert marks[0] not in (old, b"")


def _fail_at_the_first_segment(event: Event) -> None:
    if isinstance(event, SegmentDone):
        raise IncompleteError("as the test has it")


@pytest.mark.slow
def test_of_deletions_that_come_late_only_the_first_takes_anything(
    s3: S3Server, recipe: dict[str, Any], another: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who replaces a checkpoint looks at its lease between those."""
    merge(recipe, s3.place("out"), INLINE)
    discard = RemoteStaging.discard

    def discard_late(self: RemoteStaging) -> None:
        monkeypatch.setattr(RemoteStaging, "discard", discard)
        _overtaken(s3, another, lambda method, _: method == "POST")
        discard(self)

    monkeypatch.setattr(RemoteStaging, "discard", discard_late)
    with pytest.raises(IncompleteError, match="the lease of this run is gone"):
        merge(recipe, s3.place("out"), replace(INLINE, replace=True))
    left = s3.objects("out/")
    assert INDEX not in left
    assert len([key for key in left if "-of-" in key]) == 3
    assert MANIFEST in left


# Makings of one run


@pytest.mark.slow
def test_a_shard_that_another_kind_of_device_made_is_made_again(s3: S3Server, recipe: dict[str, Any]) -> None:
    """A worker with a GPU was given up, and its shard comes after the processor's, which has the receipt."""
    late: list[bytes] = []

    def come_late(event: Event) -> None:
        if isinstance(event, ShardDone) and not late:
            late.append(s3.objects(FIRST)[FIRST][:-2] + b"xy")
            stamp = f"{s3.objects(BEGUN)[BEGUN].decode()}-cuda"
            s3.client().put_object(Bucket=s3.bucket, Key=FIRST, Body=late[0], Metadata={"raymerge": stamp})

    with pytest.raises(IncompleteError, match=r"00001-of-00003\.safetensors: is not the object that was"):
        submit(recipe, s3.place("out"), INLINE, on_event=come_late)
    assert INDEX not in s3.objects("out/")
    s3.calm()
    merge(recipe, s3.place("out"), INLINE)
    made = [each.key for each in s3.asked("PUT", ".safetensors") if each.status == 200]
    assert [key for key in made if "-of-" in key] == [FIRST]
    assert s3.objects(FIRST)[FIRST] != late[0]


class _Sink:
    """Takes nothing, and tells what became of it."""

    def __init__(self, told: list[str], stamp: str) -> None:
        self._told = told
        self._stamp = stamp

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._told.append(f"{self._stamp} {'whole' if kind is None else 'dropped'}")

    def finish(self) -> None:
        return


def test_a_shard_says_on_what_device_it_was_made(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", lambda _: None)

    class Failing(SegmentRunner):
        def __init__(self) -> None:
            self._fallback = Fallback(torch.device("cuda"))

        def made(self, segment: int, device: torch.device, note: str, **_: Any) -> dict[int, Receipt]:
            if device.type == "cuda":
                raise torch.OutOfMemoryError("as the test has it")
            return {0: Receipt(segment, 1, 1, 0.1, "w", {}, note=note)}

    def into(_: ShardOrder, *, stamp: str, **__: Any) -> Any:
        return _Sink(told, stamp)

    segments = SimpleNamespace(fitting=lambda _: Failing(), settled=lambda receipt: receipt)
    runner = ShardsRunner(
        segments,  # type: ignore[arg-type]
        [ShardTarget(shard_orders(plan(recipe)), into, "mark")],
        (1,),
        RetryPolicy(),
    )
    receipt = runner.run(0)
    assert told == ["mark-cuda dropped", "mark-cpu whole"]
    assert receipt.report["stamp"] == "mark-cpu"
    assert "too little memory" in receipt.note


def test_a_shard_in_hand_counts_the_steps_that_are_made_and_the_one_in_hand(recipe: dict[str, Any]) -> None:
    order, seen = shard_orders(plan(recipe))[0], list[PartInHand]()

    class Making(SegmentRunner):
        def __init__(self) -> None:
            self._fallback = Fallback(torch.device("cpu"))

        def made(self, segment: int, *_: Any, **__: Any) -> dict[int, Receipt]:
            seen.extend(runner.in_hand())
            return {0: Receipt(segment, 30, 10, 0.1, "w", {})}

    class Sink(_Sink):
        def finish(self) -> None:
            seen.extend(runner.in_hand())

    step = PartInHand(order.segments[0], "reading", "a.weight", 5, 40)
    steps = len(order.steps)
    segments = SimpleNamespace(
        fitting=lambda _: Making(), settled=lambda receipt: receipt, in_hand=lambda: () if seen else (step,)
    )
    runner = ShardsRunner(
        segments,  # type: ignore[arg-type]
        [ShardTarget((order,), lambda *_, **__: Sink([], ""), "mark")],  # type: ignore[return-value]
        (40 * steps,),
        RetryPolicy(),
    )
    runner.run(0)
    assert seen[0] == PartInHand(0, "reading", "a.weight", 5, 40 * steps)
    # Whole, and on its way to the store.
    assert seen[-1] == PartInHand(0, "writing", order.name, 40 * steps, 40 * steps)
    assert runner.in_hand() == ()


# Stops


def test_what_is_made_is_passed_on_no_further_once_the_run_ends(recipe: dict[str, Any]) -> None:
    """However much a lane has in hand, and however long the store takes for each piece."""
    orders, sent = shard_orders(plan(recipe)), list[int]()
    stream = SimpleNamespace(write=lambda offset, _: sent.append(offset), abort=lambda: None)

    class Passing(SegmentRunner):
        def __init__(self) -> None:
            self._fallback = Fallback(torch.device("cpu"))

        def made(self, *_: Any, sinks: Any, **__: Any) -> dict[int, Receipt]:
            for offset in (11, 12, 13):
                sinks[0].write_extent(orders[0].name + UNFINISHED, offset, memoryview(b"x"))
                runner.abort()
            raise AssertionError

    segments = SimpleNamespace(fitting=lambda _: Passing(), abort=lambda: None)
    writer, retry_policy = SimpleNamespace(stream=lambda *_, **__: stream), RetryPolicy()
    into = partial(object_shards.ShardSink, writer, guard=lambda: None)  # type: ignore[arg-type]
    runner = ShardsRunner(segments, [ShardTarget(orders, into, "mark")], (1,), retry_policy)  # type: ignore[arg-type]
    with pytest.raises(IncompleteError, match="since the run ends"):
        runner.run(0)
    assert sent == [0, 11]

    def fail() -> None:
        raise OSError(errno.EIO, "as the test has it")

    with pytest.raises(TransientError, match="failed once"):
        retry_policy.have(fail, path="out", doing="writing", again=lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("has_scratch", [False, True])
@pytest.mark.usefixtures("parts")
def test_a_stop_does_not_wait_for_uploads(
    s3: S3Server, medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_scratch: bool
) -> None:
    recipe = {**recipes(medium)["linear"], "shard_size": "1MB"}
    monkeypatch.setattr(object_stream, "SMALLEST_PART", 64 << 10)
    monkeypatch.setattr(object_shards, "_AT_ONCE", 64 << 10)
    monkeypatch.setattr(pool, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.0)
    is_begun, is_heeded, abort = threading.Event(), threading.Event(), ShardsRunner.abort

    def hold(method: str, key: str) -> None:
        if method == "PUT" and "-of-" in key:
            is_begun.set()
            assert is_heeded.wait(60)

    def heed(self: ShardsRunner) -> None:
        abort(self)
        is_heeded.set()

    monkeypatch.setattr(StopRequest, "is_made", lambda _: is_begun.is_set())
    monkeypatch.setattr(ShardsRunner, "abort", heed)
    s3.before = hold
    scratch = str(tmp_path / "scratch") if has_scratch else None
    options = RunOptions(inline=True, scratch=scratch)
    with pytest.raises(IncompleteError, match="stopped at once"):
        merge(recipe, s3.place("out"), options)
    assert not [key for key in s3.objects("out/") if key.endswith(".safetensors")]


KEY = "raymerge/lease.json"
PATIENCE_SECONDS = 20.0
"""How long a test waits for what should take a moment."""


@pytest.fixture
def place(s3: S3Server, tmp_path: Path) -> str:
    return s3.place(tmp_path.name)


def _until(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


# The journal


def test_a_journal_that_is_refused_ends_nothing(s3: S3Server, recipe: dict[str, Any], place: str) -> None:
    s3.fail("forbid", method="PUT", key="events.jsonl", times=1000)
    with pytest.raises(IncompleteError, match="as the test has it"):
        submit(recipe, place, INLINE, on_event=_fail_at_the_first_segment)
    assert s3.asked("PUT", "events.jsonl")


def test_a_journal_is_there_while_the_first_shard_is_made(
    s3: S3Server, recipe: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_PAUSE_SECONDS", 0.02)
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
    monkeypatch.setattr(lease_module, "_ASK_STORE_SECONDS", 0.0)
    looked, go_on = threading.Event(), threading.Event()

    def hang(method: str, key: str) -> None:
        if key.endswith("stop.json") and method == "GET":
            looked.set()
            go_on.wait(PATIENCE_SECONDS)

    StopRequest(ObjectWriter(place)).make(myself(""))
    request = StopRequest(ObjectWriter(place, seconds=0.2))
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
            StopRequest(ObjectWriter(place)).make(myself(""))

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
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "_REQUEST_SECONDS", 0.3)
    with leased(LeaseObject(ObjectWriter(place), KEY), "digest") as lease:
        _until(lambda: _beats(s3, place) > 0)
        s3.fail("hang", method="PUT", key="lease.json", seconds=2 * PATIENCE_SECONDS)
        _until(lambda: not any(fault.times for fault in s3.faults))
        before = _beats(s3, place)
        _until(lambda: _beats(s3, place) > before)
        lease.confirm()


def test_nothing_ends_the_beats_but_the_end(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    written, failures = LeaseObject.beat, iter([ValueError("credentials"), KeyError("expired")])

    def fail(self: LeaseObject, me: LeaseHolder) -> bool:
        if (error := next(failures, None)) is not None:
            raise error
        return written(self, me)

    monkeypatch.setattr(LeaseObject, "beat", fail)
    with leased(LeaseObject(ObjectWriter(place), KEY), "digest"):
        _until(lambda: _beats(s3, place) > 1)


def test_a_process_that_slept_looks_whether_it_still_has_the_lease(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 1000.0)
    writer = ObjectWriter(place)
    with leased(LeaseObject(writer, KEY), "digest") as lease:
        lease.check()
        writer.delete([KEY])
        # The last beat was just now.
        lease.check()
        monkeypatch.setattr(lease_module, "_STALE_SECONDS", 0.0)
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
        lease_module._acquire(LeaseObject(Refusing(place), KEY), myself(""), waits.append)
    assert waits == [lease_module.LeaseObject.look_seconds] * 4
    assert LeaseObject(ObjectWriter(place), KEY).look() is None


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
    staging = RemoteStaging(place, plan(recipe))
    assert not left.path.exists()
    del staging
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
    if not isinstance(s3, MotoServer):
        pytest.skip("it refuses requests from which signed headers were dropped")
    s3.drops = "x-amz-meta-"
    with pytest.raises(TargetError, match=r"objects here do not keep their metadata, by which a run knows"):
        submit(recipe, place, INLINE)
    assert s3.objects(f"{tmp_path.name}/") == {}


# What is there once


@pytest.mark.slow
def test_what_a_killed_process_tried_with_is_not_published(
    s3: S3Server, recipe: dict[str, Any], place: str, tmp_path: Path
) -> None:
    s3.put(f"{tmp_path.name}/raymerge/probe-0123", b"")
    submit(recipe, place, INLINE)
    assert not [key for key in s3.objects() if "/probe-" in key]


CONFIG = "place/config.json"
PLACE_MANIFEST = "place/raymerge/plan/manifest.json"
REPLACING = replace(INLINE, replace=True)


@pytest.fixture(scope="module")
def family_plan(recipe: dict[str, Any]) -> Plan:
    return plan(recipe)


@pytest.mark.parametrize("place", ["", "place"])
def test_a_bucket_without_a_checkpoint_is_left_alone(
    s3: S3Server, recipe: dict[str, Any], place: str
) -> None:
    prefix = f"{place}/" if place else ""
    for key in ("data/precious.tar", "raymerge/notes.txt", "raymerge/begun", "other/config.json"):
        s3.put(f"{prefix}{key}", b"mine")
    before = s3.objects()
    for options in (INLINE, REPLACING):
        with pytest.raises(TargetError, match="4 other files here, such as data/precious"):
            merge(recipe, s3.place(place), options)
    assert s3.objects() == before


@pytest.mark.parametrize(
    ("key", "is_recorded"),
    [
        ("thesis.docx", True),
        ("thesis.docx", False),
        ("other-team/data.txt", True),
        ("other-team/model.safetensors", True),
        ("additional_chat_templates/x/data.txt", True),
        ("raymerge/models/config.json", True),
        ("raymerge/notes.txt", False),
    ],
)
def test_what_is_no_part_of_a_checkpoint_stops_its_replacement(
    s3: S3Server, family_plan: Plan, key: str, is_recorded: bool
) -> None:
    for each in ("config.json", "model.safetensors", key):
        s3.put(f"place/{each}", b"{}")
    if is_recorded:
        s3.put(PLACE_MANIFEST, b'{"digest": "of another"}')
    before = s3.objects()
    with pytest.raises(TargetError, match=f"files here are no part of the checkpoint, such as {key}"):
        RemoteStaging(s3.place("place"), family_plan).check(replace=True)
    assert s3.objects() == before


def test_what_a_run_copied_is_replaced_and_what_comes_meanwhile_stays(
    s3: S3Server, family_plan: Plan, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "one", 0, hidden=32, layers=1)
    for each in ("assets/deep/logo.txt", "additional_chat_templates/x.jinja", "voices.dat"):
        (model / each).parent.mkdir(parents=True, exist_ok=True)
        (model / each).write_text("of the model")
    case = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 1}}]}
    merge(case, s3.place("place"), INLINE)
    assert {"place/assets/deep/logo.txt", "place/additional_chat_templates/x.jinja"} <= {*s3.objects()}
    staging = RemoteStaging(s3.place("place"), family_plan)
    staging.check(replace=True)
    assert "place/voices.dat" in s3.objects()
    late = {"place/late/data.txt": b"mine", "place/late.docx": b"mine"}
    for key, content in late.items():
        s3.put(key, content)
    staging.discard()
    assert s3.objects() == late


@pytest.mark.slow
def test_what_others_keep_below_a_place_outlives_a_run_there(s3: S3Server, recipe: dict[str, Any]) -> None:
    others = ("place/below/old.safetensors", "place/raymerge/below/notes.txt")

    def keep(method: str, key: str) -> None:
        if key == PLACE_MANIFEST and method == "PUT":
            for each in others:
                s3.put(each, b"mine")

    s3.before = keep
    merge(recipe, s3.place("place"), INLINE)
    assert {*others, CONFIG} <= {*s3.objects()}


def test_what_a_run_left_that_came_no_further_is_nothing(s3: S3Server, family_plan: Plan) -> None:
    for each in ("stop.json", "events.jsonl"):
        s3.put(f"place/raymerge/{each}", b"{}")
    RemoteStaging(s3.place("place"), family_plan).check(replace=False)


# What is told of it


def test_a_run_that_was_killed_before_it_began_is_told(s3: S3Server) -> None:
    place = s3.place("place")
    assert PlaceRuns().report(place).state is RunState.UNKNOWN
    s3.put(PLACE_MANIFEST, b"{}")
    report = PlaceRuns().report(place)
    assert (report.state, "nobody makes it" in report.message) == (RunState.STOPPED, True)
    s3.put(CONFIG, b"{}")
    assert PlaceRuns().report(place).state is RunState.UNKNOWN


@pytest.mark.slow
def test_a_store_that_refuses_says_so_itself(s3: S3Server) -> None:
    place, runs = s3.place("place").replace("//models/", "//absent/"), PlaceRuns()
    for ask in (runs.report, runs.stop, lambda run: list(runs.logs(run, follow=False))):
        with pytest.raises(TargetError, match="there is no bucket 'absent'") as found:
            ask(place)
        assert "endpoint=" not in str(found.value)
        assert "your rights there" not in str(found.value)
        assert not isinstance(found.value, OptionError)
