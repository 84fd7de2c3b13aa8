"""The lease of an output place: who may make it, who is told to wait, and who inherits from the dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import Family, merge, recipes

from raymerge.errors import HeldError, IncompleteError, TargetError
from raymerge.events import Event, SegmentDone
from raymerge.publish import lease as lease_module
from raymerge.publish.lease import Lease, LeaseFile, check_unheld, myself
from raymerge.runtime.workers.pool import InlinePool

ELSEWHERE = {"machine": "another boot pid:[1]", "host": "node-7", "pid": 12, "began": "5"}
"""A process whose end nobody here can see."""


def leased(place: Path, what: str) -> AbstractContextManager[Lease]:
    return lease_module.leased(LeaseFile(place), what)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease_module, "DEAD_SECONDS", 0.2)
    monkeypatch.setattr(lease_module.LeaseFile, "look_seconds", 0.01)


@pytest.fixture(params=["all", "no locks", "no links", "neither"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system below the place can do."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if request.param in ("no locks", "neither"):
        monkeypatch.setattr(fcntl, "flock", unsupported)
    if request.param in ("no links", "neither"):
        monkeypatch.setattr(os, "link", unsupported)


def lease_file(place: Path) -> Path:
    return place.parent / f".{place.name}.raymerge.lock"


def left_by(place: Path, *, age: float = 0.0, **facts: Any) -> Path:
    """A lease that another process holds, or has left."""
    with leased(place, "plan"):
        holder = json.loads(lease_file(place).read_text())
    lease_file(place).write_text(json.dumps({**holder, "run": "other", **facts}))
    now = time.time()
    os.utime(lease_file(place), (now - age, now - age))
    return lease_file(place)


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir())


@pytest.mark.usefixtures("file_system")
def test_one_holds_it_and_the_other_is_told_who(place: Path) -> None:
    with leased(place, "plan"):
        with pytest.raises(TargetError) as caught, leased(place, "plan"):
            pass
        with pytest.raises(TargetError, match="makes another checkpoint here now"), leased(place, "other"):
            pass
    said = str(caught.value)
    assert "another run makes this very checkpoint here now" in said
    me = myself("plan")
    assert f"process {os.getpid()} of {me.user} on {me.host}, since 20" in said
    assert "Wait for it, or stop it" in said
    assert names(place) == []
    with leased(place, "plan"):
        assert names(place) == [".out.raymerge.lock"]


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("facts", [{}, {"began": "1"}], ids=["ended", "its number has another now"])
def test_a_dead_process_of_this_machine_is_inherited_from_at_once(place: Path, facts: dict[str, Any]) -> None:
    left_by(place, pid=os.getpid() if facts else ended_process(), **facts)
    began = time.monotonic()
    with leased(place, "plan") as lease:
        lease.confirm()
    assert time.monotonic() - began < lease_module.DEAD_SECONDS / 3
    assert names(place) == []


def test_a_process_that_nobody_has_buried_is_dead(place: Path) -> None:
    """The first process of many containers buries none."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    left_by(place, pid=process.pid)
    with leased(place, "plan"):
        process.wait()


@pytest.mark.usefixtures("patient")
def test_a_copy_of_this_machine_under_another_name_is_another(place: Path) -> None:
    """It has the same boot and the same numbers, and its processes are not seen here."""
    left_by(place, pid=ended_process(), host="a-copy")
    began = time.monotonic()
    check_unheld(LeaseFile(place), "plan")
    with leased(place, "plan"):
        assert time.monotonic() - began > lease_module.DEAD_SECONDS / 2


@pytest.mark.usefixtures("file_system", "patient")
def test_who_shows_nothing_elsewhere_is_inherited_from_after_a_while(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file system's clock; ours may be years away from that."""
    left_by(place, **ELSEWHERE)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    began = time.monotonic()
    with leased(place, "plan") as lease:
        assert time.monotonic() - began > 0.15
        lease.confirm()
    monkeypatch.undo()
    left_by(place, age=100, **ELSEWHERE)
    with leased(place, "plan"):
        pass
    assert names(place) == []


@pytest.mark.usefixtures("file_system", "patient")
def test_who_shows_life_elsewhere_is_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "DEAD_SECONDS", 20.0)
    path = left_by(place, **ELSEWHERE)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    said = r"process 12 of .* on node-7, .* takes over 20 s later"
    with ThreadPoolExecutor(1) as thread:
        thread.submit(beat)
        try:
            with pytest.raises(TargetError, match=said), leased(place, "plan"):
                pass
        finally:
            ended.set()
    assert json.loads(path.read_text())["run"] == "other"
    assert names(place) == [".out.raymerge.lock"]


@pytest.mark.usefixtures("file_system")
def test_of_many_who_come_for_a_dead_one_one_inherits(place: Path) -> None:
    ended = ended_process()
    for _ in range(3):
        left_by(place, pid=ended)
        taken = _come_together(place, 8)
        assert sum(taken) == 1
        assert names(place) == []


def _come_together(place: Path, count: int) -> list[bool]:
    """Who gets the lease of those who want it at one moment, and all at once."""
    start, end = threading.Barrier(count), threading.Barrier(count)

    def come(_: int) -> bool:
        start.wait()
        try:
            with leased(place, "plan") as lease:
                end.wait()
                lease.confirm()
        except TargetError:
            end.wait()
            return False
        return True

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(come, range(count)))


@pytest.mark.usefixtures("file_system", "patient")
def test_one_who_died_while_it_inherited_is_in_nobodys_way(place: Path) -> None:
    left_by(place, pid=ended_process())
    for name in ("turn", "0badcafe"):
        left = place.parent / f".out.raymerge.lock.{name}"
        left.write_text("")
        os.utime(left, (1, 1))
    with leased(place, "plan"):
        pass
    assert names(place) == []


@pytest.mark.parametrize("content", ["", "[1]", '{"pid": 3}', "\0\xff"])
@pytest.mark.usefixtures("patient")
def test_a_lease_that_says_nothing_counts_by_its_age(place: Path, content: str) -> None:
    lease_file(place).write_text(content)
    with leased(place, "plan"):
        pass
    lease_file(place).write_text(content)
    with lease_file(place).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        os.utime(lease_file(place), (1, 1))
        with pytest.raises(TargetError, match="another run holds it"), leased(place, "plan"):
            pass


@pytest.mark.usefixtures("patient")
def test_it_is_touched_for_as_long_as_it_is_held(place: Path) -> None:
    with leased(place, "plan"):
        os.utime(lease_file(place), (1, 1))
        _until(lambda: lease_file(place).stat().st_mtime > 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("by", ["another", "nobody"])
def test_a_holder_that_was_taken_over_finds_out_and_leaves_the_lease(place: Path, by: str) -> None:
    with leased(place, "plan") as lease:
        lease.check()
        if by == "another":
            other = place.with_name("other")
            left_by(other, **ELSEWHERE).replace(lease_file(place))
        else:
            lease_file(place).unlink()
        with pytest.raises(IncompleteError, match="the lease of this run is gone"):
            lease.confirm()
        _until(lambda: _has_noticed(lease))
    assert names(place) == ([".out.raymerge.lock"] if by == "another" else [])


def test_its_file_is_made_as_the_user_wants_files_made(place: Path) -> None:
    before = os.umask(0o027)
    try:
        with leased(place / "deeper", "plan"):
            assert lease_file(place / "deeper").stat().st_mode & 0o777 == 0o640
            assert place.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def _until(is_so: Callable[[], bool]) -> None:
    end_at = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_at
        time.sleep(0.01)


def _has_noticed(lease: Lease) -> bool:
    try:
        lease.check()
    except IncompleteError:
        return True
    return False


def test_a_look_takes_nothing(place: Path) -> None:
    check_unheld(LeaseFile(place), "plan")
    left_by(place, pid=ended_process())
    check_unheld(LeaseFile(place), "plan")
    left_by(place, **ELSEWHERE)
    check_unheld(LeaseFile(place), "plan")
    assert names(place) == [".out.raymerge.lock"]
    lease_file(place).unlink()
    with leased(place, "plan"), pytest.raises(TargetError, match="this very checkpoint here now"):
        check_unheld(LeaseFile(place), "plan")


# Runs


def test_a_place_that_is_held_is_told_of_before_workers_start(
    linear: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InlinePool, "start", lambda _: pytest.fail("a worker was started"))
    with leased(place, ""), pytest.raises(HeldError, match="another run makes another checkpoint here now"):
        merge(linear, place)


@pytest.fixture(scope="module")
def linear(medium: Family) -> dict[str, Any]:
    return recipes(medium)["linear"]


def test_a_run_that_was_taken_over_publishes_nothing(
    linear: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 1000.0)

    def taken_over(event: Event) -> None:
        if isinstance(event, SegmentDone):
            lease_file(place).write_text(json.dumps({**_facts(), **ELSEWHERE}))

    from raymerge.api import submit
    from raymerge.options import RunOptions

    with pytest.raises(IncompleteError, match=r"another run took it over: process 12 .* on node-7"):
        submit(linear, place, RunOptions(inline=True), on_event=taken_over)
    assert not place.exists()
    lease_file(place).unlink()
    merge(linear, place)


def _facts() -> dict[str, Any]:
    return {"run": "other", "what": "", "user": "else", "since": "now"}


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.mkdir],
    ids=["link", "pipe", "directory"],
)
def test_what_can_be_no_lease_is_named(place: Path, make: Callable[[Path], None]) -> None:
    make(lease_file(place))
    with pytest.raises(TargetError, match=r"raymerge\.lock is no file.*Remove it"), leased(place, "plan"):
        pass
    assert names(place) == [lease_file(place).name]


@pytest.mark.usefixtures("patient")
def test_a_lease_from_the_future_is_taken_over_once_it_stays_as_it_is(place: Path) -> None:
    """As after a clock was set back."""
    left_by(place, age=-3600.0, **ELSEWHERE)
    with leased(place, "plan") as lease:
        lease.confirm()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("facts", [{"pid": True}, {"pid": 10**20}, {"pid": -1}], ids=str)
def test_a_holder_that_cannot_be_is_none(place: Path, facts: dict[str, Any]) -> None:
    left_by(place, age=10.0, **facts)
    with leased(place, "plan") as lease:
        lease.confirm()
