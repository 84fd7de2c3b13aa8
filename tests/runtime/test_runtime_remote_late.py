"""Requests that arrive in an object store long after they were sent: they change nothing that came meanwhile.

A machine that was suspended sends again what was under way; here the proxy holds such a request back, until
another recipe was merged and published at the same place.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moto.s3.models as moto_s3
import pytest
import torch
from kits.marks import slow_but
from kits.merge_cases import INLINE, Family, merge, recipes
from kits.s3_server import S3Server, s3_server

from raymerge.api import plan, submit
from raymerge.device_numerics import Fallback
from raymerge.errors import IncompleteError, TransientError
from raymerge.events import Event, SegmentDone, ShardDone
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.options import RunOptions
from raymerge.publish import shard_work
from raymerge.publish.remote_staging import RemoteStaging
from raymerge.publish.shard_work import ShardsRunner, shard_orders
from raymerge.publish.stop_request import StopRequest
from raymerge.runtime.driver import interruptions, run
from raymerge.storage.objects import writer as object_stream
from raymerge.storage.retry import RetryPolicy

INDEX = "out/model.safetensors.index.json"
LEASE = "out/raymerge/lease.json"
BEGUN = "out/raymerge/begun"
LEDGER = "out/raymerge/ledger.jsonl"
MANIFEST = "out/raymerge/plan/manifest.json"
FIRST = "out/model-00001-of-00003.safetensors"
_PART = 4 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, empty."""
    server.empty()
    yield server
    server.calm()
    assert server.abort_uploads("out/") == []


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 30 kB are uploads of several parts, as large ones are."""
    monkeypatch.setattr(object_stream, "SMALLEST_PART", _PART)
    monkeypatch.setattr(moto_s3, "S3_UPLOAD_PART_MIN_SIZE", 1)


@pytest.fixture(scope="module")
def recipe(small: Family) -> dict[str, Any]:
    """A merge into a few shards."""
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
            merge(recipe, s3.place("out"), replace(INLINE, replace=True))  # type: ignore[arg-type]
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
        merge(recipe, s3.place("out"), INLINE)  # type: ignore[arg-type]
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
        merge(recipe, s3.place("out"), INLINE)  # type: ignore[arg-type]
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
        merge(recipe, s3.place("out"), INLINE)  # type: ignore[arg-type]
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
    merge(another, s3.place("out"), replace(INLINE, replace=True))  # type: ignore[arg-type]
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
    merge(recipe, s3.place("out"), INLINE)  # type: ignore[arg-type]
    discard = RemoteStaging.discard

    def discard_late(self: RemoteStaging) -> None:
        monkeypatch.setattr(RemoteStaging, "discard", discard)
        _overtaken(s3, another, lambda method, _: method == "POST")
        discard(self)

    monkeypatch.setattr(RemoteStaging, "discard", discard_late)
    with pytest.raises(IncompleteError, match="the lease of this run is gone"):
        merge(recipe, s3.place("out"), replace(INLINE, replace=True))  # type: ignore[arg-type]
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
    merge(recipe, s3.place("out"), INLINE)  # type: ignore[arg-type]
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

        def made(self, segment: int, device: torch.device, note: str, **_: Any) -> Receipt:
            if device.type == "cuda":
                raise torch.OutOfMemoryError("as the test has it")
            return Receipt(segment, 1, 1, 0.1, "w", {}, note=note)

    segments = SimpleNamespace(fitting=lambda _: Failing(), settled=lambda receipt: receipt)
    runner = ShardsRunner(
        segments,  # type: ignore[arg-type]
        shard_orders(plan(recipe)),
        lambda order, *, stamp, checks: _Sink(told, stamp),  # type: ignore[return-value]  # noqa: ARG005
        lambda: None,
        "mark",
        RetryPolicy(),
    )
    receipt = runner.run(0)
    assert told == ["mark-cuda dropped", "mark-cpu whole"]
    assert receipt.report["stamp"] == "mark-cpu"
    assert "too little memory" in receipt.note


# Stops


def test_what_is_made_is_passed_on_no_further_once_the_run_ends(recipe: dict[str, Any]) -> None:
    """However much a lane has in hand, and however long the store takes for each piece."""
    orders, sent = shard_orders(plan(recipe)), list[int]()
    stream = SimpleNamespace(write=lambda offset, _: sent.append(offset), abort=lambda: None)

    class Passing(SegmentRunner):
        def __init__(self) -> None:
            self._fallback = Fallback(torch.device("cpu"))

        def made(self, *_: Any, sink: Any, **__: Any) -> Receipt:
            for offset in (11, 12, 13):
                sink.write_extent(orders[0].name + UNFINISHED, offset, memoryview(b"x"))
                runner.abort()
            raise AssertionError

    segments = SimpleNamespace(fitting=lambda _: Passing(), abort=lambda: None)
    writer, patience = SimpleNamespace(stream=lambda *_, **__: stream), RetryPolicy()
    into = partial(shard_work.StreamSink, writer)  # type: ignore[arg-type]
    runner = ShardsRunner(segments, orders, into, lambda: None, "mark", patience)  # type: ignore[arg-type]
    with pytest.raises(IncompleteError, match="since the run ends"):
        runner.run(0)
    assert sent == [0, 11]

    def fail() -> None:
        raise OSError(errno.EIO, "as the test has it")

    with pytest.raises(TransientError, match="failed once"):
        patience.have(fail, path="out", doing="writing", again=lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("has_scratch", [False, True])
@pytest.mark.usefixtures("parts")
def test_a_stop_does_not_wait_for_uploads(
    s3: S3Server, medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_scratch: bool
) -> None:
    """Shards in hand are cut short, and made again by the next run."""
    recipe = {**recipes(medium)["linear"], "shard_size": "1MB"}
    monkeypatch.setattr(object_stream, "SMALLEST_PART", 64 << 10)
    monkeypatch.setattr(shard_work, "_AT_ONCE", 64 << 10)
    monkeypatch.setattr(run, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(interruptions, "GRACE_SECONDS", 0.0)
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
        merge(recipe, s3.place("out"), options)  # type: ignore[arg-type]
    assert not [key for key in s3.objects("out/") if key.endswith(".safetensors")]
