"""Progress: what events add up to, and the three ways in which they are shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from raymerge.cli.render.progress import JsonProgress, LiveProgress, PlainProgress, make_progress, summary
from raymerge.cli.render.tally import Tally
from raymerge.events import (
    DeviceFailed,
    Event,
    MemoryShort,
    NodeOfNoUse,
    Planned,
    Published,
    RoomAwaited,
    SegmentDone,
    ShardDone,
    Started,
    Stopping,
    StorageFailed,
    Verified,
    WorkerLeft,
    WorkerLost,
)

PLANNED = Planned("d" * 40, 10, 4000, 10_000, 10, 5_000_000)
STARTED = Started(("worker-0", "worker-1"), "cpu", 0, 0)
ENDING = (ShardDone("model.safetensors", 4000), Verified(10, 4000), Published("/somewhere/out", 61.0))


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _done(segment: int, worker: str = "worker-0", nbytes: int = 1000) -> SegmentDone:
    return SegmentDone(segment, worker, nbytes - 100, 100, nbytes, 0.5)


def _fed(clock: Clock, *events: Event) -> Tally:
    tally = Tally(clock)
    for event in events:
        tally.take(event)
    return tally


def _plain(clock: Clock) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(Console(file=stream, width=80), "out", clock=clock), stream


def test_what_a_plan_notes_is_printed_once() -> None:
    progress, stream = _plain(Clock())
    with progress:
        for event in (replace(PLANNED, notes=("'t' has no effect on linear",)), STARTED):
            progress(event)
    assert stream.getvalue().count("note: 't' has no effect on linear\n") == 1


def test_an_empty_tally_knows_nothing() -> None:
    tally = Tally()
    assert (tally.fraction, tally.speed(0), tally.seconds_left, tally.elapsed) == (0.0, 0.0, None, 0.0)


def test_bytes_speed_and_time_left_add_up() -> None:
    clock = Clock()
    tally = _fed(clock, PLANNED, STARTED, _done(0), _done(1, "worker-1"))
    clock.now += 4
    assert tally.done_bytes == 2000
    assert tally.fraction == pytest.approx(0.2)
    assert tally.speed(tally.made_bytes) == pytest.approx(500)
    assert tally.seconds_left == pytest.approx(16)
    assert summary(tally) == "2.00 kB of 10.00 kB, 500 B/s, 0:16 left, 2 of 10 segments"


def test_a_worker_has_its_own_count_and_speed() -> None:
    clock = Clock()
    tally = _fed(clock, PLANNED, STARTED, _done(0), _done(1), _done(2, "worker-1"))
    clock.now += 2
    mine = tally.workers["worker-0"]
    assert (mine.segments, mine.nbytes, tally.speed(mine.nbytes)) == (2, 2000, 1000)


def test_resumed_bytes_count_as_done_and_not_for_the_speed() -> None:
    clock = Clock()
    tally = _fed(clock, PLANNED, Started(("worker-0",), "cpu", 5, 5000), _done(7))
    clock.now += 1
    assert tally.done_bytes == 6000
    assert tally.done_segments == 6
    assert tally.speed(tally.made_bytes) == pytest.approx(1000)
    assert tally.seconds_left == pytest.approx(4)


def test_bytes_read_again_for_statistics_count_for_the_speed_and_not_as_progress() -> None:
    clock = Clock()
    tally = _fed(clock, PLANNED, STARTED, SegmentDone(0, "worker-0", 2900, 100, 1000, 0.5))
    clock.now += 1
    assert tally.done_bytes == 1000
    assert tally.speed(tally.made_bytes) == pytest.approx(3000)
    assert tally.seconds_left == pytest.approx(9)


def test_a_replacement_worker_joins_and_a_lost_one_is_marked() -> None:
    lost = WorkerLost("worker-0", "killed", (3,))
    tally = _fed(Clock(), PLANNED, STARTED, lost, _done(3, "worker-2"))
    assert tally.workers["worker-0"].is_lost
    assert tally.workers["worker-2"].segments == 1


@given(sizes=st.lists(st.integers(100, 10_000), max_size=10), before=st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_the_part_done_never_falls_and_never_passes_the_whole(sizes: list[int], before: int) -> None:
    tally = _fed(Clock(), PLANNED, Started(("worker-0",), "cpu", before, before * 1000))
    last = tally.fraction
    for segment, nbytes in enumerate(sizes[: 10 - before]):
        tally.take(SegmentDone(segment, "worker-0", nbytes, 0, 1000, 0.5))
        assert last <= tally.fraction <= 1
        last = tally.fraction
    if tally.done_segments == PLANNED.segments:
        assert tally.fraction == 1


def test_json_is_one_event_a_line() -> None:
    stream = io.StringIO()
    events = (PLANNED, STARTED, _done(0), WorkerLost("worker-0", "killed", (3, 4)), *ENDING)
    with JsonProgress(stream) as progress:
        for event in events:
            progress(event)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all(datetime.fromisoformat(line.pop("time")).tzinfo for line in lines)
    assert lines == [json.loads(json.dumps(event.to_json())) for event in events]
    assert [line["event"] for line in lines] == [
        "planned", "started", "segment_done", "worker_lost", "shard_done", "verified", "published",
    ]  # fmt: skip


def test_plain_lines_tell_beginning_and_end() -> None:
    clock = Clock()
    progress, stream = _plain(clock)
    with progress:
        for event in (PLANNED, STARTED, *map(_done, range(9))):
            progress(event)
        clock.now += 2
        for event in (_done(9), *ENDING):
            progress(event)
    assert stream.getvalue().splitlines() == [
        "planned: 10 tensors, 4.00 kB; at most 5.00 MB of memory a worker",
        "merging with 2 workers on cpu",
        "merged: 10.00 kB read and written at 5.00 kB/s",
        "  worker-0: 10 segments, 10.00 kB, 5.00 kB/s",
        "  worker-1: 0 segments, 0 B, 0 B/s",
        "verified: 10 tensors, 4.00 kB, all as planned",
        "done: out",
        "  in 1:01 with 2 workers on cpu",
        f"  digest {'d' * 40}",
    ]


def test_plain_lines_come_now_and_then() -> None:
    clock = Clock()
    progress, stream = _plain(clock)
    progress(PLANNED)
    progress(STARTED)
    for segment in range(9):
        clock.now += 2
        progress(_done(segment))
    told = [line.split(":")[0] for line in stream.getvalue().splitlines() if "%" in line]
    assert told == ["30%", "60%", "90%"]


def test_a_slow_run_is_not_silent() -> None:
    clock = Clock()
    progress, stream = _plain(clock)
    progress(PLANNED)
    progress(STARTED)
    clock.now += 61
    progress(_done(0, nbytes=200))
    assert "2%: 200 B of 10.00 kB, 3 B/s" in stream.getvalue()


def test_going_on_is_said() -> None:
    progress, stream = _plain(Clock())
    progress(PLANNED)
    progress(Started(("worker-0",), "cuda", 7, 7000))
    assert "going on: 7 of 10 segments are done already, with 1 worker on cuda" in stream.getvalue()


@pytest.mark.parametrize(("segments", "said"), [((3, 4), "2 segments in hand pass"), ((), "nothing in hand")])
def test_a_lost_worker_is_a_warning(segments: tuple[int, ...], said: str) -> None:
    progress, stream = _plain(Clock())
    progress(WorkerLost("worker-0", "out of memory", segments))
    assert stream.getvalue().startswith("warning: worker-0 was lost (out of memory); ")
    assert said in stream.getvalue()


def test_a_cluster_that_has_to_grow_first_is_told() -> None:
    progress, stream = _plain(Clock())
    progress(RoomAwaited("a worker needs CPUs: 4", 1800.0))
    assert stream.getvalue() == "waiting for the cluster to grow, 30:00 at most: a worker needs CPUs: 4\n"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (WorkerLeft("worker-3"), "worker-3 has nothing more to do and leaves"),
        (
            NodeOfNoUse("10.0.0.2", "the output place is not to be found"),
            "warning: workers on 10.0.0.2, which joined, get no segments: the output place is not to be "
            "found",
        ),
    ],
)
def test_what_becomes_of_workers_is_told(event: Event, said: str) -> None:
    progress, stream = _plain(Clock())
    progress(event)
    assert stream.getvalue() == said + "\n"


def test_a_segment_that_runs_out_of_memory_is_a_warning() -> None:
    progress, stream = _plain(Clock())
    progress(MemoryShort("worker-0", 7, 4_000_000, "no room"))
    said = "warning: segment 7 ran out of memory on worker-0 (no room); it is made again alone, with 4.00 MB"
    assert stream.getvalue() == said + "\n"


def test_storage_that_fails_is_told_once_for_each_fault() -> None:
    progress, stream = _plain(Clock())
    for segment in range(3):
        progress(StorageFailed("worker-0", segment, {"a.safetensors: Stale file handle (ESTALE)": 2}))
    progress(StorageFailed("worker-1", 3, {"b.safetensors: Input/output error (EIO)": 1}))
    assert stream.getvalue().splitlines() == [
        "storage failed for a moment, and was asked again: a.safetensors: Stale file handle (ESTALE)",
        "storage failed for a moment, and was asked again: b.safetensors: Input/output error (EIO)",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "stopping: the segments in hand are finished first; Ctrl-C again stops at once\n"),
        (1.0, "stopping: the segments in hand have 1 s to finish\n"),
    ],
)
def test_a_stop_says_what_is_waited_for(seconds: float | None, said: str) -> None:
    progress, stream = _plain(Clock())
    progress(Stopping(seconds))
    assert stream.getvalue() == said


def test_the_live_view_has_a_bar_and_a_line_for_each_worker() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveProgress(console, "out") as progress:
        for event in (PLANNED, STARTED, _done(0), _done(1, "worker-1"), WorkerLost("worker-1", "killed", ())):
            progress(event)
        progress.refresh()
    drawn = stream.getvalue()
    assert "━" in drawn
    assert "2.00 kB of 10.00 kB" in drawn
    assert "worker-0" in drawn
    assert "1 segment " in drawn
    assert "warning: worker-1 was lost" in drawn


def test_the_live_view_waits_before_and_finishes_after() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveProgress(console, "out") as progress:
        progress.refresh()
        for event in (PLANNED, STARTED, *map(_done, range(10))):
            progress(event)
        progress.refresh()
        for event in ENDING:
            progress(event)
    drawn = stream.getvalue()
    assert "Planning and starting the workers" in drawn
    assert "Finishing, verifying and publishing" in drawn
    assert drawn.index("verified") < drawn.index("done: out")


def test_the_stream_decides_how_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    pipe = io.StringIO()
    assert isinstance(make_progress(pipe, as_json=True, output="out"), JsonProgress)
    assert isinstance(make_progress(pipe, as_json=False, output="out"), PlainProgress)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(pipe, "isatty", lambda: True, raising=False)
    assert isinstance(make_progress(pipe, as_json=False, output="out"), LiveProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(pipe, as_json=False, output="out"), PlainProgress)


def test_why_a_device_was_chosen_is_said() -> None:
    progress, stream = _plain(Clock())
    reason = "reading takes 0:30, and the GPU would not help"
    progress(PLANNED)
    progress(Started(("worker-0", "worker-1"), "cpu", 0, 0, 4, reason))
    assert f"merging with 2 workers of 4 threads on cpu: {reason}\n" in stream.getvalue()
    for event in ENDING:
        progress(event)
    assert "in 1:01 with 2 workers of 4 threads on cpu\n" in stream.getvalue()


def test_a_gpu_that_fails_is_told_once_a_worker() -> None:
    progress, stream = _plain(Clock())
    for event in (PLANNED, STARTED):
        progress(event)
    for segment, worker in enumerate(("worker-0", "worker-1", "worker-0", "worker-1")):
        progress(DeviceFailed(worker, segment, "an illegal\x1b[2J access"))
        progress(_done(segment, worker))
    told = [line for line in stream.getvalue().splitlines() if "failed" in line]
    said = "failed (an illegal\\x1b[2J access)"
    instead = "was made on the CPU, and so is any other that it fails in"
    assert told == [
        f"warning: the GPU of worker-{each} {said}; segment {each} {instead}" for each in range(2)
    ]


def test_the_largest_peak_stands_beside_the_projection() -> None:
    clock = Clock()
    progress, stream = _plain(clock)
    for event in (PLANNED, STARTED):
        progress(event)
    for segment, peak in enumerate((10, 2_000_000, 4_000_000, *[0] * 7)):
        clock.now += 1
        progress(SegmentDone(segment, "worker-0", 900, 100, 1000, 0.5, peak))
    assert "\n  peak: 4.00 MB of 5.00 MB a worker\n" in stream.getvalue()


def test_a_peak_that_nobody_measured_is_not_shown() -> None:
    progress, stream = _plain(Clock())
    for event in (PLANNED, STARTED, *(_done(segment) for segment in range(10))):
        progress(event)
    assert "merged:" in stream.getvalue()
    assert "peak" not in stream.getvalue()
