"""How one run is measured, and how programs take turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from benchmarks import groups
from benchmarks.groups import Group, Program, Results, run_group, turned
from benchmarks.measure import ProgramError, Sample, run_seconds
from benchmarks.measure import measure as measured

SAMPLE = Sample(wall=2.0, run=1.0, cpu=1.0, peak=1, own=1)
SAYS = """
import json, sys, time
def say(**event): print(json.dumps(event), flush=True)
print("{no event")
say(event="planned", projected_peak=1000)
held = bytearray(64 << 20)
held[::4096] = b"x" * len(held[::4096])
time.sleep(0.2)
say(event="segment_done", seconds=0.15)
say(event="segment_done", seconds=0.01)
say(event="published")
time.sleep(0.2)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_the_work_is_timed_apart_from_the_process() -> None:
    sample = measured(_python(SAYS), environment=os.environ)
    assert 0.15 <= sample.run < sample.wall - 0.15
    assert sample.projected == 1000
    assert 64 << 20 <= sample.own <= sample.peak < 200 << 20
    assert 0 < sample.cpu < 2


def test_shared_memory_counts_and_mapped_files_do_not(tmp_path: Path) -> None:
    """As mergekit's inputs are mapped, and an object store's memory is shared."""
    file = tmp_path / "mapped"
    file.write_bytes(b"x" * (96 << 20))
    code = f"""
import mmap, time
shared = mmap.mmap(-1, 48 << 20)
shared[::4096] = b"x" * len(shared[::4096])
with open({str(file)!r}, "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    assert mapped[::4096]
time.sleep(0.2)
"""
    sample = measured(_python(code), environment=os.environ)
    assert 48 << 20 <= sample.own < 96 << 20
    assert sample.peak >= 144 << 20


def test_a_failure_tells_what_was_said() -> None:
    code = "import sys; print('last line'); sys.exit('what is wrong')"
    with pytest.raises(ProgramError, match=r"ended with 1\nwhat is wrong\nlast line"):
        measured(_python(code), environment=os.environ)


def test_stages_before_the_merge_are_work() -> None:
    events = [
        (1.0, "planned", 0.0),
        (3.0, "unit_done", 0.5),
        (4.0, "segment_done", 2.0),
        (5.0, "published", 1.0),
        (9.0, "published", 1.0),
    ]
    told = [(at, {"event": name, "seconds": seconds}) for at, name, seconds in events]
    assert run_seconds(told, 20.0) == 7.0
    assert run_seconds(told[:3], 20.0) == 20.0
    assert run_seconds([], 20.0) == 20.0


def _named(name: str, output: Path) -> Sequence[str]:
    return [name, str(output)]


def _group(*names: str, **fields: object) -> Group:
    programs = [Program(name, partial(_named, name)) for name in names]
    return Group("group", tuple(programs), **fields)  # type: ignore[arg-type]


def _run(
    group: Group,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Sequence[str]], object] = list[str],
) -> tuple[Results, list[str]]:
    order: list[str] = []

    def stand_in(command: Sequence[str], *, environment: object) -> Sample:
        order.append(command[0])
        act(command)
        return SAMPLE

    monkeypatch.setattr(groups, "measure", stand_in)
    results = Results()
    said: list[str] = []
    run_group(group, results, place, rounds=2, environment={}, say=said.append)
    assert len(said) == len(order)
    return results, order


def test_programs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, order = _run(_group("a", "b", "c"), tmp_path, monkeypatch)
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert len(results.of("group", "c")) == 2
    assert turned((), 3) == ()


def test_a_slow_program_runs_once_and_a_broken_one_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(command: Sequence[str]) -> None:
        if command[0] == "broken":
            raise ProgramError("it broke")

    programs = (
        Program("slow", lambda _: ["slow"], rounds=1),
        Program("broken", lambda _: ["broken"]),
        Program("ours", lambda _: ["ours"]),
    )
    results, order = _run(Group("group", programs), tmp_path, monkeypatch, act)
    assert order == ["slow", "broken", "ours", "ours"]
    assert results.of("group", "broken") == ()
    assert results.failures == {("group", "broken"): "it broke"}
