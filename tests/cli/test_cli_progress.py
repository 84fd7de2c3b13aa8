"""What is shown while a run goes on: progress, screens, terminals, messages."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.merges import MEAN, make_models, write_recipe
from rich.console import Console

from raymerge.cli.messages import failure_of, guarded, show_problems
from raymerge.cli.render.ending import Step, show_next
from raymerge.cli.render.next_steps import after_extraction, after_merge, after_sent
from raymerge.cli.render.progress import LiveProgress, PlainProgress, make_progress, summary, view
from raymerge.cli.render.screen import make_console, make_table, printable, put_json
from raymerge.cli.render.tally import Tally
from raymerge.errors import (
    AskedError,
    CheckpointError,
    HeldError,
    IncompleteError,
    OptionError,
    PlanError,
    Problem,
    ProfileError,
    RecipeError,
    TargetError,
    UnreadableError,
)
from raymerge.events import (
    Activity,
    DeviceFailed,
    Ended,
    Event,
    MemoryShort,
    OutputFailed,
    OutputKept,
    OutputsPublished,
    OutputsStarted,
    PartInHand,
    Planned,
    Published,
    RoomAwaited,
    SegmentDone,
    ShardDone,
    StageKept,
    StageReport,
    StageStarted,
    Started,
    StepKept,
    StepStarted,
    Stopping,
    StorageFailed,
    UnitDone,
    UnitProgress,
    Verified,
    WorkerLost,
    WorkerProgress,
)

PLANNED = Planned("d" * 40, 10, 4000, 10_000, 10, 5_000_000)
WORKERS = ("worker-0", "worker-1")
STARTED = Started(WORKERS, "cpu", 0, 0)
ENDING = (ShardDone("model.safetensors", 4000), Verified(10, 4000), Published("/somewhere/out", 61.0))
STAGE = StageStarted("router rows", 1, 2, 3, 3000, WORKERS, "cpu", 0, 0)
ONE_UNIT = StageStarted("rows", 1, 1, 1, 3000, WORKERS, "cpu", 0, 0)
REPORT = StageReport("router rows", {})
MERGE = (
    Planned("a" * 40, 10, 4000, 2000, 2, 5_000_000),
    Started(("worker-0",), "cpu", 0, 0),
    SegmentDone(0, "worker-0", 900, 100, 1000, 0.5),
    SegmentDone(1, "worker-0", 900, 100, 1000, 0.5),
    Verified(10, 4000),
    Published("/somewhere/out", 61.0),
)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _done(segment: int, worker: str = "worker-0", nbytes: int = 1000) -> SegmentDone:
    return SegmentDone(segment, worker, nbytes - 100, 100, nbytes, 0.5)


def _unit(number: int) -> UnitDone:
    return UnitDone(number, "worker-0", 1000, 200, 1000, 0.5)


def _fed(*events: Event, clock: Clock | None = None) -> Tally:
    tally = Tally(clock or Clock())
    for event in events:
        tally.take(event)
    return tally


def _said(*events: Event, seconds: float = 0.0) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    progress = PlainProgress(Console(file=stream, width=80), "out", clock=clock)
    for event in events:
        clock.now += seconds
        progress(event)
    return stream.getvalue().splitlines()


def _drawn(*parts: tuple[Event, ...]) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    drawn: list[str] = []
    with LiveProgress(console, "out") as progress:
        for events in parts:
            for event in events:
                progress(event)
            progress.refresh()
            drawn.append(stream.getvalue())
            stream.truncate(0)
            stream.seek(0)
    return drawn


def test_bytes_speed_and_time_left_add_up() -> None:
    clock = Clock()
    tally = _fed(PLANNED, STARTED, _done(0), _done(1), _done(2, "worker-1"), clock=clock)
    clock.now += 6
    mine = tally.workers["worker-0"]
    assert (mine.segments, mine.nbytes, tally.done_bytes) == (2, 2000, 3000)
    assert tally.rate_of(mine) == pytest.approx(2000 / 6)
    assert tally.fraction == pytest.approx(0.3)
    assert summary(tally) == "3.00 kB of 10.00 kB, 500 B/s, 0:14 left, 3 of 10 segments"
    empty = Tally()
    assert (empty.fraction, empty.rate, empty.seconds_left, empty.elapsed) == (0.0, 0.0, None, 0.0)


def test_resumed_bytes_count_as_done_and_not_for_the_speed() -> None:
    clock = Clock()
    tally = _fed(PLANNED, Started(("worker-0",), "cpu", 5, 5000), _done(7), clock=clock)
    clock.now += 5
    assert (tally.done_bytes, tally.done_segments) == (6000, 6)
    assert tally.rate == pytest.approx(200)
    assert tally.seconds_left == pytest.approx(20)


def test_the_time_left_is_not_guessed_and_follows_the_speed_of_late() -> None:
    """What a cache gives in the first seconds is forgotten; before anything is known nothing is said."""
    clock = Clock()
    large = replace(PLANNED, total_bytes=1_000_000, segments=1000)
    tally = _fed(large, STARTED, clock=clock)
    clock.now += 2
    tally.take(_done(0, nbytes=100_000))
    assert tally.seconds_left is None
    for segment in range(1, 61):
        clock.now += 1
        tally.take(_done(segment))
    # 1 kB a second by now; on the average it were 5 minutes.
    assert tally.seconds_left == pytest.approx(840, rel=0.05)
    slow = _fed(large, STARTED, clock=clock)
    clock.now += 60
    slow.take(_done(0))
    assert slow.seconds_left is None


def _in_hand(done: int, total: int = 1000, activity: Activity = "computing", part: int = 0) -> PartInHand:
    return PartInHand(part, activity, "model.layers.17.mlp.down_proj.weight", done, total)


def _told(worker: str, *parts: PartInHand) -> WorkerProgress:
    return WorkerProgress(worker, parts)


def test_bytes_of_segments_in_hand_count_once_and_not_those_of_a_lost_worker() -> None:
    tally = _fed(PLANNED, STARTED, _told("worker-0", _in_hand(400), _in_hand(500, part=1)))
    assert (tally.done_bytes, tally.moved_bytes) == (900, 900)
    tally.take(_done(1))
    assert (tally.done_bytes, tally.moved_bytes) == (1000, 1000)
    tally.take(_told("worker-0", _in_hand(700)))
    tally.take(_told("worker-1", _in_hand(200, part=2)))
    assert tally.done_bytes == 1900
    tally.take(WorkerLost("worker-1", "killed", (2,)))
    assert (tally.done_bytes, tally.moved_bytes) == (1900, 1700)
    tally.take(_done(0))
    tally.take(_done(2))
    assert tally.done_bytes == 3000


def _screen(tally: Tally, columns: int, lines: int = 30) -> list[str]:
    console = Console(record=True, width=columns, height=lines, file=io.StringIO())
    console.print(view(tally, console))
    return console.export_text().splitlines()


def test_a_screen_shows_what_each_worker_does_in_any_width() -> None:
    clock = Clock()
    tally = _fed(StepStarted("left", 2, 3), PLANNED, STARTED, clock=clock)
    clock.now += 10
    tally.take(_told("worker-0", _in_hand(620, activity="reading"), _in_hand(310)))
    tally.take(_told("worker-1", _in_hand(100, activity="writing")))
    title, bar, numbers, first, second = _screen(tally, 80)
    assert title == "merge 2 of 3: left"
    assert bar.endswith("10%")
    assert numbers.startswith("1.03 kB of 10.00 kB, 103 B/s, 1:27 left, 0 of 10 segments")
    assert first.split() == [
        "worker-0", "computing", "...rs.17.mlp.down_proj.weight", "31%", "0", "done", "93", "B/s"
    ]  # fmt: skip
    assert "writing" in second
    for columns in (20, 40, 60, 80, 200):
        drawn = _screen(tally, columns)
        assert max(map(len, drawn)) <= columns
        assert sum("worker-" in line and "B/s" in line for line in drawn) == 2
    assert "model.layers.17.mlp.down_proj.weight" in _screen(tally, 120)[3]


def test_of_a_hundred_workers_the_busiest_are_shown_and_the_others_counted() -> None:
    clock, names = Clock(), tuple(f"worker-{number}" for number in range(100))
    tally = _fed(replace(PLANNED, total_bytes=10**9), Started(names, "cuda", 0, 0), clock=clock)
    clock.now += 10
    for number, name in enumerate(names):
        tally.take(_told(name, _in_hand(1000 * (number + 1), 10**6)))
    drawn = _screen(tally, 80)
    assert len(drawn) <= 20
    assert [line.split()[0] for line in drawn if "computing" in line] == list(names[-12:])
    assert drawn[-1] == "and 88 others: 391.60 kB/s"
    assert len(_screen(tally, 80, lines=16)) <= 16
    tally.take(_told("worker-7", _in_hand(10**6, 10**6)))
    mixed = [line for line in _screen(tally, 80) if line.startswith("worker-")]
    assert len(mixed) == 12
    assert {len(line) for line in mixed} == {80}


def test_a_unit_of_a_stage_is_named_by_its_number() -> None:
    tally = _fed(STAGE, _told("worker-1", PartInHand(2, "computing", "", 500, 1000)), UnitProgress(500, 3000))
    assert tally.done_bytes == 500
    drawn = _screen(tally, 80)
    assert drawn[0] == "stage 1 of 2: router rows"
    assert "unit 2" in drawn[-1]
    assert "50%" in drawn[-1]


@given(data=st.data(), units=st.integers(1, 5), before=st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_what_is_done_of_a_stage_never_falls(data: st.DataObject, units: int, before: int) -> None:
    """Whatever is told of units in hand, and in whatever order they end."""
    total = (units + before) * 1000
    tally = _fed(StageStarted("rows", 1, 1, units + before, total, WORKERS, "cpu", before, before * 1000))
    begun, seen = [0] * units, 0
    for unit in data.draw(st.permutations(range(units))):
        for each in data.draw(st.lists(st.integers(0, units - 1), max_size=4)):
            begun[each] = data.draw(st.integers(begun[each], 1000))
            tally.take(UnitProgress(before * 1000 + sum(begun), total))
            assert seen <= tally.done_bytes <= total
            seen = tally.done_bytes
        begun[unit] = 1000
        tally.take(_unit(unit))
        assert seen <= tally.done_bytes <= total
        seen = tally.done_bytes
    assert tally.fraction == 1.0
    assert tally.done_segments == units + before


def test_the_bar_moves_within_a_unit_which_counts_once() -> None:
    clock = Clock()
    tally = _fed(ONE_UNIT, clock=clock)
    clock.now += 10
    assert summary(tally) == "0 B of 3.00 kB, 0:10 so far, 0 of 1 unit"
    tally.take(UnitProgress(1000, 3000))
    assert summary(tally) == "1.00 kB of 3.00 kB, 100 B/s, 0:20 left, 0 of 1 unit"
    tally = _fed(STAGE, _unit(0), UnitProgress(1600, 3000))
    assert (tally.done_bytes, tally.moved_bytes) == (1600, 1800)
    tally.take(_unit(1))
    assert (tally.done_bytes, tally.moved_bytes) == (2000, 2400)


def test_every_merge_and_stage_is_counted_by_itself() -> None:
    tally = _fed(StepStarted("left", 1, 2), *MERGE)
    assert (tally.fraction, tally.done_segments, tally.is_last) == (1.0, 2, False)
    tally.take(StepStarted("", 2, 2))
    assert (tally.fraction, tally.done_segments, tally.is_last) == (0.0, 0, True)
    assert (tally.workers, tally.started, tally.plan) == ({}, None, None)
    assert not _fed(StepKept("left", 1, 2)).is_last
    assert not _fed(StepStarted("left", 1, 2), STAGE).is_last
    begun = _fed(STAGE, UnitProgress(900, 3000), STAGE)
    assert (begun.done_bytes, begun.moved_bytes) == (0, 0)
    assert _fed(STAGE, _unit(0), StageKept("more", 2, 2)).total_segments == 0
    merging = _fed(STAGE, *map(_unit, range(3)), UnitProgress(900, 3000), REPORT, *MERGE[:2])
    assert (merging.part, merging.done_segments, merging.total_segments) == ("segment", 0, 2)
    assert (merging.done_bytes, list(merging.workers)) == (0, ["worker-0"])


def test_plain_lines_tell_beginning_and_end() -> None:
    planned = replace(PLANNED, notes=("'t' has no effect on linear",), made={"merged": 7, "copied": 3})
    assert _said(planned, STARTED, *map(_done, range(10)), *ENDING, seconds=0.2) == [
        "planned: 10 tensors, 4.00 kB; at most 5.00 MB of memory a worker",
        "  note: 't' has no effect on linear",
        "merging with 2 workers on cpu",
        "merged: 10.00 kB read and written at 5.00 kB/s",
        "  by 2 workers: 0 B to 10.00 kB each",
        "verified: 10 tensors, 4.00 kB, all as planned",
        "done: out",
        "  result  10 tensors, 4.00 kB: 7 merged, 3 copied",
        "  read    9.00 kB at 4.50 kB/s",
        "  wrote   1.00 kB at 500 B/s",
        "  time    1:01 with 2 workers on cpu, of it 2.0 s merging",
        f"  digest  {'d' * 40}",
    ]


def test_reads_of_a_sweep_are_told_apart_and_end_together() -> None:
    def read(number: int, *names: str) -> tuple[Event, ...]:
        published = (Published(f"/out/{name}", 1.0) for name in names)
        return OutputsStarted(names, number, 2), PLANNED, STARTED, *map(_done, range(10)), *published

    failed = OutputFailed("b", 2, "1.weight: it does not fit.\nAnother line.")
    end = OutputsPublished("/out", ("z", "a", "c"), 61.0)
    lines = _said(OutputKept("z"), *read(1, "a"), failed, *read(2, "c"), end)
    assert [line for line in lines if not line.startswith(("planned", "merg", "  by"))] == [
        "z: made already, and left as it is",
        "read 1 of 2, 1 output: a",
        "published: /out/a",
        "warning: b is given up, and others go on: 1.weight: it does not fit.",
        "read 2 of 2, 1 output: c",
        "published: /out/c",
        "done: out",
        "  outputs  3: z, a, c",
        "  time     1:01",
    ]


def test_the_end_tells_memory_against_the_plan_and_what_to_look_at() -> None:
    peaks = (10, 2_000_000, 4_000_000, *[0] * 7)
    made = [SegmentDone(segment, "worker-0", 900, 100, 1000, 0.5, peak) for segment, peak in enumerate(peaks)]
    lost, going_on = WorkerLost("worker-1", "killed", ()), Started(WORKERS, "cpu", 5, 5000)
    lines = _said(PLANNED, going_on, lost, *made[:5], *ENDING, seconds=1)
    assert "  memory   4.00 MB measured, 5.00 MB planned, the most of a worker" in lines
    assert "  look at  1 warning above" in lines
    assert "  read     4.50 kB at 750 B/s; the rest in an earlier run" in lines
    assert "memory  " not in "".join(_said(PLANNED, STARTED, *map(_done, range(10)), *ENDING))


def _put(*events: Event, steps: tuple[Step, ...] = ()) -> list[dict[str, object]]:
    stream = io.StringIO()
    with make_progress(stream, as_json=True, output="out", then=lambda: steps) as progress:
        for event in events:
            progress(event)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_ends_with_the_same_numbers_and_has_nothing_for_eyes_alone() -> None:
    steps = (Step("raymerge verify 'my out' --level load", "loads it"),)
    told = (StepStarted("left", 1, 2), *MERGE, StepStarted("", 2, 2), *MERGE)
    looks = (_told("worker-0", _in_hand(1)), Ended(3, "stopped"))
    put = _put(*told, *looks, steps=steps)
    assert [each["event"] for each in put] == [event.kind() for event in told]
    assert {"path": "/somewhere/out", "seconds": 61.0}.items() <= put[-1].items()
    assert put[-1]["next"] == [{"command": "raymerge verify 'my out' --level load", "does": "loads it"}]
    assert {"read_bytes": 1800, "written_bytes": 200, "verified_tensors": 10}.items() <= put[-1][
        "summary"
    ].items()  # type: ignore[attr-defined]
    assert not any("summary" in each for each in put[:-1])


@pytest.mark.parametrize(
    ("steps", "verbs"),
    [
        (
            after_sent("run-1", "s3://bucket/out", 0),
            ["report s3://bucket/out", *["verify s3://bucket/out"] * 2],
        ),
        (after_sent("run-1", "/of/the cluster", 0), ["status run-1"]),
        (
            after_merge("out", "base", num_merged=0),
            ["inspect out", "verify out --level load", "diff base out"],
        ),
        (after_merge("out", "base", is_reported=True), ["verify out --level load", "diff base out"]),
        (after_sent("run-1", "s3://bucket/out", 3), ["logs run-1"]),
        (after_extraction("an out", "tuned", "base", 8, 0.5), ["-c", "extract-lora tuned"]),
        (after_extraction("an out", "tuned", "base", 8, 0.01), ["-c"]),
    ],
)
def test_what_is_next_fits_what_was_made(steps: Iterator[Step], verbs: list[str]) -> None:
    commands = [shlex.split(step.command) for step in steps]
    for command, verb in zip(commands, verbs, strict=True):
        assert " ".join(command[1:]).startswith(verb)
    for command in commands:
        if command[0] == "python":
            compile(command[2], "command", "exec")
            assert '"an out"' in command[2]
        elif command[1] == "extract-lora":
            assert command[-4:] == ["-o", "an out-rank-16", "--rank", "16"]


def test_a_command_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``make quickstart`` nobody has activated the environment."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "an env" / "raymerge"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(program), "submit"])
    monkeypatch.setenv("PATH", "")
    steps = [Step("raymerge inspect out", "what is in it"), Step("python -c 'raymerge'", "another")]
    assert [line.split("  #")[0].strip() for line in _next_shown(steps)] == [
        "'an env/raymerge' inspect out",
        "python -c 'raymerge'",
    ]
    monkeypatch.setenv("PATH", str(program.parent))
    assert _next_shown(steps)[0].startswith("  raymerge inspect out")


def _next_shown(steps: list[Step]) -> list[str]:
    stream = io.StringIO()
    show_next(Console(file=stream, width=80), steps)
    return stream.getvalue().splitlines()[1:]


@pytest.mark.parametrize(("columns", "has_comment"), [(80, True), (40, False)])
def test_what_to_do_next_can_be_pasted_from_any_screen(columns: int, *, has_comment: bool) -> None:
    command = f"raymerge verify {'x' * 25} --level load"
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    show_next(console, [Step("raymerge inspect x", "what is in it"), Step(command, "loads it")])
    lines = console.export_text().splitlines()
    assert command in lines[2]
    assert ("# loads it" in lines[2]) is has_comment
    assert lines[1].split("  #")[0].strip() == "raymerge inspect x"


def test_plain_lines_come_now_and_then_and_at_the_latest_after_a_minute() -> None:
    lines = _said(PLANNED, STARTED, *map(_done, range(9)), seconds=2)
    assert [line.split(":")[0] for line in lines if "%" in line] == ["30%", "60%", "90%"]
    assert _said(PLANNED, STARTED, _done(0, nbytes=200), seconds=61)[-1].startswith(
        "2%: 200 B of 10.00 kB, 3"
    )
    lines = _said(STAGE, UnitProgress(100, 3000), UnitProgress(1500, 3000), seconds=30)
    assert lines[1:] == ["50%: 1.50 kB of 3.00 kB, 47 B/s, 0:32 left, 0 of 3 units"]
    assert _said(STAGE, _unit(0), seconds=70)[1].endswith("1 of 3 units")


def test_of_several_merges_and_stages_only_the_last_is_done() -> None:
    lines = _said(StepStarted("left", 1, 2), *MERGE[:-1], Published("/x", 3.0), StepStarted("", 2, 2), *MERGE)
    assert lines[0] == "merge 1 of 2: left"
    assert lines[5:7] == ["made in 3.0 s with 1 worker on cpu", "merge 2 of 2"]
    assert [line for line in lines if line.startswith("done: ")] == ["done: out"]
    assert lines[-2:] == ["  time    1:01 with 1 worker on cpu", f"  digest  {'a' * 40}"]
    kept = StageKept("order of experts", 2, 2)
    assert _said(STAGE, *map(_unit, range(3)), REPORT, kept, *MERGE, seconds=1)[:3] == [
        "stage 1 of 2: router rows",
        "made in 4.0 s with 2 workers on cpu",
        "stage 2 of 2: order of experts, made already",
    ]
    assert _said(StepKept("left", 1, 2)) == ["merge 1 of 2: left, made already"]


@pytest.mark.parametrize(
    ("event", "lines"),
    [
        (
            Started(WORKERS[:1], "cuda", 7, 7000),
            ["going on: 7 of 10 segments are done already, with 1 worker on cuda"],
        ),
        (
            WorkerLost("worker-0", "out of memory", (3, 4)),
            ["warning: worker-0 was lost (out of memory); 2 segments in hand pass to another"],
        ),
        (
            RoomAwaited("a worker needs CPUs: 4", 1800.0),
            ["waiting for the cluster to grow, 30:00 at most: a worker needs CPUs: 4"],
        ),
        (
            MemoryShort("worker-0", 7, 4_000_000, "no room"),
            [
                "warning: segment 7 ran out of memory on worker-0 (no room); it is made again alone, with "
                "4.00 MB"
            ],
        ),
        (Stopping(None), ["stopping: the segments in hand are finished first; Ctrl-C again stops at once"]),
        (Stopping(1.0), ["stopping: the segments in hand have 1 s to finish"]),
    ],
)
def test_what_happens_is_told(event: Event, lines: list[str]) -> None:
    assert _said(PLANNED, event)[1:] == lines


def test_the_same_fault_of_storage_or_of_a_gpu_is_told_once() -> None:
    stale, broken = "a.safetensors: Stale file handle (ESTALE)", "b.safetensors: Input/output error (EIO)"
    faults = [StorageFailed("worker-0", segment, {stale: 2}) for segment in range(3)]
    said = "storage failed for a moment, and was asked again: "
    lines = _said(*faults, StorageFailed("worker-1", 3, {broken: 1, stale: 1}))
    assert lines == [said + stale, said + broken]
    failing = [DeviceFailed(WORKERS[each % 2], each, "an illegal\x1b[2J access") for each in range(4)]
    instead = "was made on the CPU, and so is any other that it fails in"
    assert _said(*failing) == [
        f"warning: the GPU of worker-{each} failed (an illegal\\x1b[2J access); segment {each} {instead}"
        for each in range(2)
    ]


def test_the_live_view_has_a_bar_and_a_line_for_each_worker() -> None:
    lost = WorkerLost("worker-1", "killed", ())
    (drawn,) = _drawn((PLANNED, STARTED, _done(0), _done(1, "worker-1"), _done(2, "worker-2"), lost))
    assert "━" in drawn
    assert "3.00 kB of 10.00 kB" in drawn
    assert "worker-0" in drawn
    assert "worker-2" in drawn
    assert "1 done" in drawn
    assert "warning: worker-1 was lost" in drawn


def test_the_live_view_tells_how_long_one_waits() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveProgress(console, "out", clock=clock) as progress:
        progress.refresh()
        clock.now += 12
        progress.refresh()
        assert "Planning and starting the workers, 0:12 so far" in stream.getvalue()
        for event in MERGE[:4]:
            progress(event)
        progress.refresh()
    assert "publishing, " not in stream.getvalue()


def test_the_live_view_names_merge_and_stage_until_the_last_is_done() -> None:
    kept, left = StageKept("order of experts", 2, 2), StepStarted("left", 1, 2)
    drawn = _drawn(
        (),
        (left, STAGE, _unit(0), _unit(1)),
        (_unit(2),),
        (kept,),
        MERGE[:3],
        MERGE[3:5],
        (Published("/x", 3.0), StepStarted("", 2, 2)),
        MERGE,
    )
    expected = (
        "Planning and starting the workers", "2 of 3 units", "Concluding: router rows", "Starting",
        "1 of 2 segments", "Finishing, verifying and publishing", "Starting", "done: out",
    )  # fmt: skip
    for shown, words in zip(drawn, expected, strict=True):
        assert words in shown
    assert "merge 1 of 2: left" in drawn[1]
    assert "stage 1 of 2: router rows" in drawn[1]
    assert drawn[-1].index("verified") < drawn[-1].index("done: out")


def test_the_stream_decides_how_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    pipe = io.StringIO()

    def kind(*, as_json: bool = False) -> type[object]:
        with make_progress(pipe, as_json=as_json, output="out") as progress:
            return type(progress)

    assert kind() is PlainProgress
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(pipe, "isatty", lambda: True, raising=False)
    assert kind() is LiveProgress
    assert kind(as_json=True) not in (LiveProgress, PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert kind() is PlainProgress


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


class GoneReader(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def _printed(*renderables: object, width: int = 80) -> str:
    stream = io.StringIO()
    console = make_console(stream)
    console.width = width
    for renderable in renderables:
        console.print(renderable)
    return stream.getvalue()


def test_a_reader_that_went_away_is_an_error_of_its_own() -> None:
    with pytest.raises(BrokenPipeError, match="went away"):
        make_console(GoneReader()).print("text")


@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@settings(deadline=None, max_examples=20)
def test_a_table_never_exceeds_the_width_and_loses_nothing(rows: list[tuple[str, str]]) -> None:
    text = _printed(make_table(("", ""), rows), width=20)
    assert max(map(len, text.splitlines())) <= 20
    shown = sorted(each for each in text if not each.isspace())
    assert shown == sorted(each for row in rows for cell in row for each in cell)


def test_json_is_ascii_on_one_line() -> None:
    stream = io.StringIO()
    put_json(stream, {"name": "modèle\n\x1b", "size": 1})
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().isascii()
    assert json.loads(stream.getvalue()) == {"name": "modèle\n\x1b", "size": 1}


COMMAND = [sys.executable, "-c", "from raymerge.cli.main import main; main()"]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_models(tmp_path_factory.mktemp("terminal"))
    write_recipe(place, MEAN)
    return place


def _environment(**more: str) -> dict[str, str]:
    hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    return {key: value for key, value in os.environ.items() if key not in hidden} | more


def _on_a_terminal(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code and everything shown, with a pseudo-terminal as standard output and error."""
    ours, theirs = pty.openpty()
    environment = _environment(TERM="xterm", COLUMNS="80")
    process = subprocess.Popen([*COMMAND, *args], cwd=folder, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.slow
def test_a_merge_on_a_terminal_is_live_and_leaves_its_summary(folder: Path) -> None:
    code, shown = _on_a_terminal(folder, "submit", "recipe.yml", "-o", "live", "--inline")
    plain = ANSI.sub("", shown)
    assert code == 0, plain
    assert ANSI.search(shown)
    assert "Planning and starting the workers" in plain
    assert "verified: 30 tensors" in plain
    assert plain.index("verified: ") < plain.index("done: live") < plain.index("digest ")
    assert (folder / "live" / "config.json").is_file()


@pytest.mark.slow
def test_a_reader_that_leaves_gets_no_traceback(folder: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [*COMMAND, "plan", "recipe.yml", "--tensors"],
        cwd=folder, stdout=theirs, stderr=subprocess.PIPE, text=True, env=_environment(), check=False,
    )  # fmt: skip
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
def test_a_terminal_without_unicode_stops_nothing(folder: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "verify", "nöwhere"],
        cwd=folder, capture_output=True, env=_environment(PYTHONIOENCODING="ascii"), check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.isascii()
    assert b"  -> Check the path." in ended.stderr


PROBLEM = Problem("recipe.yml:3:5", "the weight is missing.", "Add it.")


def _raising(error: BaseException) -> int:
    raise error


def _because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _shown(problems: list[Problem], width: int = 80) -> str:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="utf-8", errors="replace")
    console = make_console(stream)
    console.width = width
    show_problems(console, problems)
    stream.flush()
    return buffer.getvalue().decode()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionError(PROBLEM), 2),
        (IncompleteError("stopped with 3 of 4 segments done."), 3),
        (KeyboardInterrupt(), 3),
        (PermissionError(13, "Permission denied", "some/place"), 2),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: _raising(error)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip()
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        *((kind(PROBLEM), True) for kind in (RecipeError, ProfileError, PlanError, TargetError)),
        (_because(PlanError(PROBLEM), PlanError(PROBLEM)), True),
        (AskedError("stopped with 3 of 4 segments done."), True),
        # All of these may go well when they are tried again, or elsewhere.
        (HeldError(PROBLEM), False),
        (OptionError(PROBLEM), False),
        (_because(TargetError(PROBLEM), UnreadableError(PROBLEM)), False),
        (_because(PlanError(PROBLEM), _because(PlanError(PROBLEM), CheckpointError(PROBLEM))), False),
        # A kind that nobody has thought of here.
        (IncompleteError("stopped with 3 of 4 segments done."), False),
    ],
)
def test_what_another_attempt_would_meet_again_is_told_apart(
    error: BaseException, is_final: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    guarded(lambda: _raising(error), as_json=True, when_final=lambda: shown.append(capsys.readouterr().out))
    # Whoever ends the process then has nothing left to say.
    assert [json.loads(text)["event"] for text in shown] == ["error"] * is_final


def test_a_bug_asks_to_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(lambda: _raising(KeyError("lost")))
    said = " ".join(capsys.readouterr().err.split())
    assert "bug in raymerge (KeyError: 'lost')" in said
    assert "RAYMERGE_TRACEBACK=1" in said


def test_an_error_as_json_is_one_event_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: _raising(PlanError([PROBLEM])), as_json=True) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    event = json.loads(shown.out)
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert event["problems"] == [
        {"where": "recipe.yml:3:5", "what": "the weight is missing.", "remedy": "Add it."}
    ]


def test_an_output_that_takes_nothing_for_the_moment_is_no_limit_on_processes() -> None:
    unwritten = failure_of(BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0))
    assert unwritten.message.startswith("what is printed here cannot be written")
    unforked = failure_of(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    assert unforked.message.startswith("no further thread or process may be started")


def test_a_problem_is_a_paragraph_with_the_remedy_behind_an_arrow() -> None:
    other = Problem("model/config.json", "it is not JSON.", "Mend it.")
    assert _shown([PROBLEM, other]).splitlines() == [
        "recipe.yml:3:5: the weight is missing.",
        "  → Add it.",
        "",
        "model/config.json: it is not JSON.",
        "  → Mend it.",
    ]


def test_yaml_in_a_remedy_keeps_its_lines_and_is_never_wrapped() -> None:
    long = "  - model: " + "x" * 100
    problem = Problem("recipe.yml", "it is wrong.", f"Write:\nslices:\n{long}\n")
    lines = _shown([problem], width=40).splitlines()
    assert lines[-2:] == ["    slices:", f"    {long}"]


def test_what_users_say_is_no_markup() -> None:
    text = "[bold]not bold[/bold] [link=x] :smile: [/]"
    shown = _shown([Problem(text, text, text)], width=200)
    assert shown.count(text) == 3


@given(st.text())
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in printable(text))


def test_escape_sequences_are_spelled_out() -> None:
    shown = _shown([Problem("model", "a tensor is called \x1b[2Jevil\x07.", "")])
    assert "\\x1b[2Jevil\\x07" in shown
    stream = io.StringIO()
    make_console(stream).print(make_table(("", ""), [("name", "\x1b[31mred")]))
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert guarded(lambda: _raising(BrokenPipeError())) == 3
        stream.write("lost")
    assert (tmp_path / "out").read_text(encoding="utf-8") == ""
