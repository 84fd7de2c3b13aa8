"""What an output place tells of its runs, be it a directory or in an object store; and requests to stop."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kits.marks import slow_but
from kits.merge_cases import INLINE, Family, recipes
from kits.s3_server import S3Server, s3_server

from raymerge.api import submit
from raymerge.cli.runs import place_text
from raymerge.deploy.targets.local import PlaceRuns, report_of
from raymerge.deploy.targets.sending import RunNote, RunNotes
from raymerge.deploy.targets.target import RunState, is_run_name, new_run_name
from raymerge.errors import IncompleteError, TransientError
from raymerge.events import Ended, Event, Planned, SegmentDone, Started, Stopping, Verified, WorkerProgress
from raymerge.execute.segment import SegmentRunner
from raymerge.publish import record
from raymerge.publish.lease import LeaseFile, LeaseHolder, StopRequest, lease_view, leased, myself
from raymerge.publish.record import JOURNAL, Journal
from raymerge.publish.run_records import LocalRecords, RemoteRecords, SweepRecord, records_of, seconds_taken
from raymerge.storage.retry import KEPT

PLANNED = Planned("d" * 40, 4, 1000, 3000, 8, 1 << 20)
DONE = SegmentDone(0, "worker-0", 10, 10, 20, 0.1)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=slow_but(["directory", "object store"], "object store"))
def place(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "directory" else s3.place(tmp_path.name)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have every segment wait before it is made."""
    made, pause = SegmentRunner.made, [0.0]

    def waiting(*args: Any, **more: Any) -> Any:
        time.sleep(pause[0])
        return made(*args, **more)

    monkeypatch.setattr(SegmentRunner, "made", waiting)
    monkeypatch.setattr("raymerge.publish.lease._ASK_STORE_SECONDS", 0.1)
    monkeypatch.setattr("raymerge.publish.lease._ASK_SECONDS", 0.1)

    def set_pause(seconds: float) -> None:
        pause[0] = seconds

    return set_pause


@pytest.mark.slow
def test_a_place_tells_of_its_runs(place: str, medium: Family, slow: Callable[[float], None]) -> None:
    recipe, runs, errors = recipes(medium)["linear"], PlaceRuns(), list[BaseException]()
    assert runs.report(place).state is RunState.UNKNOWN

    def make() -> None:
        try:
            submit(recipe, place, INLINE, on_event=events.append)
        except BaseException as error:
            errors.append(error)

    slow(0.3)
    events: list[Event] = []
    thread = threading.Thread(target=make)
    thread.start()
    while not any(isinstance(event, Started) for event in events):
        assert thread.is_alive(), errors
        time.sleep(0.05)
    report = runs.report(place)
    assert report.state is RunState.RUNNING
    assert str(myself("").pid) in report.message
    stopped = runs.stop(place)
    thread.join()
    assert stopped.state is RunState.STOPPED
    assert "Submit it again" in stopped.message
    assert [type(error) for error in errors] == [IncompleteError]
    assert [event.is_asked for event in events if isinstance(event, Stopping)] == [True]
    slow(0.0)
    submit(recipe, place, INLINE)
    report = runs.report(place)
    assert (report.state, report.details["exit_code"]) == (RunState.SUCCEEDED, "0")
    assert runs.stop(place).state is RunState.SUCCEEDED
    told = [json.loads(line)["event"] for line in runs.logs(place, follow=True)]
    assert {"planned", "started", "segment_done", "verified"} <= set(told)


def test_a_request_is_for_one_process_alone(tmp_path: Path) -> None:
    request, me = StopRequest(tmp_path / "out"), myself("")
    assert not request.is_made()
    request.make(replace(me, pid=me.pid + 1))
    request = StopRequest(tmp_path / "out")
    assert not request.is_made()
    assert list(tmp_path.iterdir()) == []
    request = StopRequest(tmp_path / "out")
    request.make(myself("another lease of this process"))
    assert request.is_made()
    assert not request.is_made()
    assert list(tmp_path.iterdir()) == []
    # It is looked for now and then alone.
    request.make(me)
    assert not request.is_made()


def test_a_request_that_comes_too_late_goes_with_the_run(medium: Family, tmp_path: Path) -> None:
    place = tmp_path / "out"

    def ask(event: Event) -> None:
        if isinstance(event, Verified):
            StopRequest(place).make(myself(""))

    submit(recipes(medium)["linear"], place, INLINE, on_event=ask)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_request_that_is_no_file_asks_nobody(tmp_path: Path) -> None:
    (tmp_path / "target").write_text(json.dumps(asdict(myself(""))))
    (tmp_path / ".out.raymerge-stop").symlink_to(tmp_path / "target")
    assert not StopRequest(tmp_path / "out").is_made()


def test_a_lease_is_looked_at_without_being_taken(tmp_path: Path) -> None:
    place = tmp_path / "out"
    assert lease_view(place) is None
    with leased(LeaseFile(place), "digest"):
        hold = lease_view(place)
        assert hold is not None
        assert hold.is_alive
        assert hold.holder is not None
        assert hold.holder.pid == myself("").pid
    assert lease_view(place) is None
    # What is made before it is held by itself.
    with leased(LeaseFile(tmp_path / ".out.raymerge.steps"), "digest"):
        report = report_of(LocalRecords(str(place)))
    assert report.state is RunState.RUNNING
    assert "it has not begun to write the output yet" in report.message


def test_a_holder_far_away_is_waited_for(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place, key, beats = s3.place("far"), "far/raymerge/lease.json", itertools.count()
    holder = asdict(LeaseHolder("r", "w", "another machine", "far", 7, "1", "you", "today"))

    def beat() -> None:
        s3.put(key, json.dumps({"holder": holder, "beats": next(beats)}).encode())

    beat()
    hold = RemoteRecords(place, dead_seconds=0.6).hold()
    assert hold is not None
    assert not hold.is_alive
    # From here on it beats once between two looks.
    monkeypatch.setattr(s3, "before", lambda *asked: beat() if asked == ("GET", key) else None)
    hold = RemoteRecords(place).hold()
    assert hold is not None
    assert hold.is_alive
    # Another's lease that shows nothing is not waited for then.
    s3.put("far/raymerge/steps-lease.json", json.dumps({"holder": holder, "beats": 0}).encode())
    began = time.monotonic()
    hold = RemoteRecords(place, dead_seconds=60.0).hold()
    assert hold is not None
    assert hold.is_alive
    assert time.monotonic() - began < 30.0
    assert "process 7 of you on far" in report_of(RemoteRecords(place)).message


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_stopped_before_it_writes_the_output_is_told(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out"
    if is_replaced:
        (place / "raymerge").mkdir(parents=True)
        (place / "raymerge" / "run.json").write_text('{"finished": "2026-01-01T00:00:00+00:00"}')
    with ExitStack() as held:
        held.enter_context(leased(LeaseFile(place), "digest"))
        monkeypatch.setattr(LocalRecords, "ask_to_stop", lambda *_: held.close())
        stopped = PlaceRuns().stop(str(place))
    assert stopped.state is RunState.STOPPED
    assert f"process {myself('').pid}" in stopped.message
    assert "has stopped before it began to write the output. Submit it again" in stopped.message
    state = RunState.SUCCEEDED if is_replaced else RunState.UNKNOWN
    assert PlaceRuns().report(str(place)).state is state


def test_the_place_of_a_sweep_tells_of_its_outputs(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = tmp_path / "outs"
    for place in (str(outs), s3.place("outs")):
        record = SweepRecord(place)
        record.write({"a": {}, "b": {"exit_code": 2, "message": "too large"}})
        report = PlaceRuns().report(place)
        assert report.state is RunState.FAILED
        assert [(each.run, each.state) for each in report.outputs] == [
            ("a", RunState.QUEUED),
            ("b", RunState.FAILED),
        ]
        assert report.outputs[1].message == "too large"
        record.write({"b": {"exit_code": 3, "message": "no room"}})
        assert PlaceRuns().report(place).state is RunState.STOPPED
        record.remove()
        assert PlaceRuns().report(place).state is RunState.UNKNOWN
    SweepRecord(str(outs)).write({"a": {}, "b": {}})
    with ExitStack() as held:
        held.enter_context(leased(LeaseFile(outs / "b"), "digest"))
        assert PlaceRuns().report(str(outs)).state is RunState.RUNNING
        monkeypatch.setattr(LocalRecords, "ask_to_stop", lambda *_: held.close())
        stopped = PlaceRuns().stop(str(outs))
    assert stopped.state is RunState.STOPPED
    assert stopped.message.startswith("0 of 2 outputs are published.")


def test_what_ended_before_it_wrote_the_output_is_told(s3: S3Server, tmp_path: Path) -> None:
    place = tmp_path / "out"
    (tmp_path / ".out.raymerge.steps").mkdir()
    beside = PlaceRuns().report(str(place))
    assert (beside.state, "is kept beside it. Submit it again" in beside.message) == (RunState.STOPPED, True)
    holder = asdict(LeaseHolder("r", "w", "another machine", "far", 7, "1", "you", "today"))
    s3.put("dead/raymerge/steps-lease.json", json.dumps({"holder": holder, "beats": 1}).encode())
    dead = report_of(RemoteRecords(s3.place("dead"), dead_seconds=0.1))
    assert dead.state is RunState.FAILED
    assert "process 7 of you on far, since today died" in dead.message
    assert "it had not begun to write the output. Submit it again" in dead.message


def test_an_object_store_knows_which_run_has_published(s3: S3Server) -> None:
    records = RemoteRecords(s3.place("known"))
    assert seconds_taken(records, "raymerge-0") is None
    s3.put("known/raymerge/run.json", b'{"run": "raymerge-0", "seconds": 1.5}')
    s3.put("known/raymerge/begun", b"{}")
    s3.put("known/config.json", b"{}")
    # It is published with the end of the mark.
    assert seconds_taken(records, "raymerge-0") is None
    s3.client().delete_object(Bucket=s3.bucket, Key="known/raymerge/begun")
    assert seconds_taken(records, "raymerge-0") == 1.5
    assert seconds_taken(records, "raymerge-1") is None


@pytest.mark.parametrize("verb", ["report", "stop", "logs"])
def test_a_store_that_is_away_is_no_reason_to_go_on_with_anything(verb: str) -> None:
    def away(place: str) -> LocalRecords:
        raise TransientError(f"{place}: reading failed. {KEPT}")

    runs = PlaceRuns(away)
    with pytest.raises(TransientError, match="ask again later") as found:
        list(runs.logs("s3://b/x", follow=False)) if verb == "logs" else getattr(runs, verb)("s3://b/x")
    assert KEPT not in str(found.value)


def test_a_file_address_is_the_place_that_it_says(tmp_path: Path) -> None:
    place = tmp_path / "a b"
    address = f"file://{tmp_path}/a%20b"
    assert place_text(address) == str(place)
    with leased(LeaseFile(place), "digest"):
        report = PlaceRuns().report(address)
    assert report.state is RunState.RUNNING


def test_a_journal_is_bounded_and_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_FULL_BYTES", 3000)
    monkeypatch.setattr(record, "_MOST_BYTES", 6000)
    told: list[Event] = []
    with Journal(told.append) as kept:
        kept(PLANNED)
        kept.open(tmp_path)
        # What is told for eyes alone, many times a second, is not written.
        kept(WorkerProgress("worker-0", ()))
        for _ in range(100):
            kept(DONE)
        kept(Stopping(1.0))
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    assert [lines[0]["event"], lines[-1]["event"]] == ["planned", "stopping"]
    assert 5 < len(lines) < 30
    assert len(told) == 103
    assert "worker_progress" not in {each["event"] for each in lines}
    for _ in range(100):
        with Journal(told.append) as kept:
            kept.open(tmp_path)
            kept(PLANNED)
    assert (tmp_path / JOURNAL).stat().st_size < 6500
    # Where nothing can be written, the run goes on all the same.
    with Journal(told.append) as kept:
        kept.open(tmp_path / "absent")
        kept(PLANNED)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / JOURNAL).symlink_to(tmp_path / "elsewhere")
    with Journal(told.append) as kept:
        kept.open(tmp_path / "linked")
        kept(PLANNED)
    assert not (tmp_path / "elsewhere").exists()
    # One that is no file is not waited for.
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / JOURNAL)
    opening = threading.Thread(target=Journal(told.append).open, args=(tmp_path / "pipe",), daemon=True)
    opening.start()
    opening.join(30)
    assert not opening.is_alive()


def test_the_logs_are_those_of_the_newest_run(tmp_path: Path) -> None:
    place = tmp_path / "out"

    def record(directory: Path, time: str, key: str) -> None:
        (directory / "raymerge").mkdir(parents=True)
        (directory / "raymerge" / JOURNAL).write_text(json.dumps({"time": time, "event": key}) + "\n")

    left = tmp_path / ".out.raymerge-0123456789abcdef"
    record(left, "2026-01-01T00:00:01+00:00", "left")
    (left / "raymerge" / "ledger.jsonl").write_text("{}\n")
    runs = PlaceRuns()
    assert [json.loads(line)["event"] for line in runs.logs(str(place), follow=False)] == ["left"]
    record(place, "2026-01-01T00:00:02+00:00", "published")
    story = place / "raymerge" / "run.json"
    story.write_text(json.dumps({"finished": "2026-01-01T00:00:02+00:00"}))
    assert [json.loads(line)["event"] for line in runs.logs(str(place), follow=False)] == ["published"]
    story.write_text(json.dumps({"finished": "2026-01-01T00:00:00+00:00"}))
    assert [json.loads(line)["event"] for line in runs.logs(str(place), follow=False)] == ["left"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(IncompleteError("worn out"), 3, "worn out"), (KeyboardInterrupt(), 3, "KeyboardInterrupt"),
     (ValueError("s3cret"), 1, "ValueError")],
)  # fmt: skip
def test_a_journal_says_what_ended_the_run(
    error: BaseException, code: int, said: str, tmp_path: Path
) -> None:
    told: list[Event] = []

    def make() -> None:
        with Journal(told.append) as kept:
            kept.open(tmp_path)
            raise error

    with pytest.raises(type(error)):
        make()
    (line,) = map(json.loads, (tmp_path / JOURNAL).read_text().splitlines())
    # What it took is reckoned from such times.
    assert "." in line["time"]
    assert (line["event"], line["exit_code"], line["message"]) == ("ended", code, said)
    assert told == [Ended(code, said)]


def test_broken_records_are_no_reason_to_fail(tmp_path: Path) -> None:
    record = tmp_path / ".out.raymerge-0123456789abcdef" / "raymerge"
    record.mkdir(parents=True)
    (record / "ledger.jsonl").write_bytes(b'{"receipt": {"segment": 1}}\n{"receipt": []}\n\xff[[[\n')
    (record / JOURNAL).write_bytes(b'{"event": "planned", "segments": "many"}\n' + b"[" * 100_000)
    report = report_of(LocalRecords(str(tmp_path / "out")))
    assert (report.state, report.details["segments"]) == (RunState.STOPPED, "1")
    assert list(records_of(str(tmp_path / "out")).begun()("absent")) == []  # type: ignore[misc]


def test_notes_are_kept_for_some_hundreds_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.deploy.targets.sending._MOST_NOTES", 3)
    notes, names = RunNotes(tmp_path / "deep" / "runs"), [new_run_name() for _ in range(5)]
    assert notes.of_output("/out") is None
    for number, name in enumerate(names):
        notes.keep(RunNote(name, "job", "http://head:8265", f"/out{number % 2}", "", "now"))
        time.sleep(0.01)
    assert notes.of_run(names[0]) is None
    found = notes.of_output("/out0")
    assert found is not None
    assert found.run == names[4]
    assert (tmp_path / "deep" / "runs").stat().st_mode & 0o077 == 0
    (tmp_path / "deep" / "runs" / f"{names[4]}.json").write_text('{"run": 1}')
    assert notes.of_run(names[4]) is None
    RunNotes(tmp_path / "deep" / "runs" / f"{names[3]}.json").keep(found)
    assert all(map(is_run_name, names))
    assert not any(map(is_run_name, ("raymerge-", "raymerge-0123456789aX", "out", "raymerge-0123456789abc")))
