"""One run of one program: its wall time, its processor time, and the memory of all its processes; and the
machine that it runs on."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_SAMPLE_SECONDS = 0.03
_LINGER_SECONDS = 15.0
_MOST_SECONDS = 1800
_PARTS = ("unit_done", "segment_done")
_BEGINS, _ENDS = "started", "published"
_TICKS = os.sysconf("SC_CLK_TCK")


class ProgramError(Exception): ...


@dataclass(frozen=True, slots=True)
class Sample:
    wall: float
    run: float
    """Seconds from the first byte read to the output's being in place; ``wall`` where it tells no events."""
    cpu: float
    peak: int
    """Most bytes of memory of each of its processes, added up; pages of mapped files count."""
    own: int
    """Most bytes of memory without pages of files, of all processes at one time: what they were given by the
    system, and memory that they share, which counts in each that has touched it."""
    projected: int | None = None
    """Bytes above an idle worker that it said beforehand it would use at most; None if it said nothing."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the command to the last event of each kind, and as ``begun`` to a part's first byte."""


def measure(command: Sequence[str], *, environment: Mapping[str, str]) -> Sample:
    with tempfile.TemporaryFile() as complaints:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, stdin=subprocess.DEVNULL, env=environment
        )
        assert process.stdout is not None
        events = _Events(process.stdout)
        ending = _Ending(process.pid)
        watch = Watch(process.pid)
        while not ending.wait(_SAMPLE_SECONDS):
            watch.look()
            if time.monotonic() > began + _MOST_SECONDS:
                process.kill()
        # Popen must not wait for what is reaped already.
        process.returncode = os.waitstatus_to_exitcode(ending.status)
        _linger(watch)
        found = events.finished()
        if process.returncode:
            raise ProgramError(_complaint(command, process.returncode, events.last, complaints))
    wall = ending.time - began
    return Sample(
        wall=wall,
        run=run_seconds(found, wall),
        cpu=max(ending.cpu, watch.cpu),
        peak=watch.peak,
        own=watch.own,
        projected=max(
            (event["projected_peak"] for _, event in found if "projected_peak" in event), default=None
        ),
        steps=_steps(found, began),
    )


def _steps(events: Sequence[tuple[float, Mapping[str, Any]]], began: float) -> dict[str, float]:
    steps = {str(event["event"]): at - began for at, event in events}
    begins = [at - event["seconds"] - began for at, event in events if event["event"] in _PARTS]
    return {**steps, "begun": min(begins)} if begins else steps


def run_seconds(events: Sequence[tuple[float, Mapping[str, Any]]], wall: float) -> float:
    """Seconds from when the first unit or segment was begun to the last publishing; ``wall`` without them.

    What is done before, such as opening the plan in a worker, is start-up. A program that tells of no parts
    has begun its work when it says that it starts.
    """
    begins = [at - event["seconds"] for at, event in events if event["event"] in _PARTS]
    begins = begins or [at for at, event in events if event["event"] == _BEGINS]
    ends = [at for at, event in events if event["event"] == _ENDS]
    return ends[-1] - min(begins) if begins and ends else wall


class _Events:
    def __init__(self, stream: IO[bytes]) -> None:
        self.last = b""
        self._stream = stream
        self._found: list[tuple[float, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finished(self) -> list[tuple[float, dict[str, Any]]]:
        # A process that outlives the program may hold the pipe open: what it says is not waited for.
        self._thread.join(timeout=1)
        return list(self._found)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                at = time.monotonic()
                self.last = line
                if (event := _event(line)) is not None:
                    self._found.append((at, event))


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


class _Ending:
    def __init__(self, pid: int) -> None:
        self.status = 0
        self.time = 0.0
        self.cpu = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._await, args=(pid,), daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def _await(self, pid: int) -> None:
        _, self.status, usage = os.wait4(pid, 0)
        self.time = time.monotonic()
        self.cpu = usage.ru_utime + usage.ru_stime
        self._over.set()


@dataclass(slots=True)
class Watch:
    root: int
    own: int = 0
    _peaks: dict[int, int] = field(default_factory=dict)
    _cpu: dict[int, float] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return sum(self._peaks.values())

    @property
    def cpu(self) -> float:
        return sum(self._cpu.values())

    @property
    def seen(self) -> tuple[int, ...]:
        return tuple(self._peaks)

    def look(self) -> None:
        own = 0
        for pid in tree(self.root):
            status = status_bytes(pid)
            if "VmHWM" in status:
                # The last one counts and not the highest: just after a fork it is the parent's.
                self._peaks[pid] = status["VmHWM"]
                self._cpu[pid] = cpu_seconds(pid)
                own += status.get("RssAnon", 0) + status.get("RssShmem", 0)
        self.own = max(self.own, own)


def tree(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with suppress(FileNotFoundError):  # it has ended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, _text(children).split())
    return found


def status_bytes(pid: int) -> dict[str, int]:
    lines = (line.split() for line in _text(Path(f"/proc/{pid}/status")).splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def cpu_seconds(pid: int) -> float:
    # The name, in parentheses, may hold spaces.
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _linger(watch: Watch) -> None:
    end = time.monotonic() + _LINGER_SECONDS
    while any(status_bytes(pid) for pid in watch.seen) and time.monotonic() < end:
        time.sleep(_SAMPLE_SECONDS)


def _complaint(command: Sequence[str], code: int, last: bytes, stream: IO[bytes]) -> str:
    stream.seek(0)
    said = (stream.read() + last).decode(errors="replace").strip().splitlines()[-8:]
    return "\n".join([f"{' '.join(command)} ended with {code}", *said])


def machine() -> str:
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    name = names[0] if names else "unknown processor"
    return f"{os.cpu_count()} cores of {name}, {memory:.0f} GB of memory, Linux {os.uname().release}"
