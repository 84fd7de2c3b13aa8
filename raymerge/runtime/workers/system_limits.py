"""Memory, processors and processes that this process may use, and errors of exhausting them.

Control groups limit them: nested groups of containers, batch jobs or services, each with limits of its own.
Linux has two versions; a machine may use both at once, for different resources.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SAYINGS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What torch says of the memory of a processor: it has no error of its own for that."""

_NO_THREAD = "can't start new thread"
PROCESS_LIMIT = (
    "no further thread or process may be started here: a limit of the user (ulimit -u) or of the container "
    "(pids.max) is reached. Raise it, or end others."
)


@dataclass(frozen=True, slots=True)
class _Group:
    directory: Path
    version: int

    def text(self, name: str) -> str:
        return _text(self.directory / name).strip()

    def number(self, name: str) -> int | None:
        """A whole number in a file; None where that is no limit."""
        text = self.text(name)
        return int(text) if text.isdecimal() else None


def memory_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each group with a limit; unused file pages count as free."""
    for group in _groups("memory", root):
        if group.version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        most = group.number(names[0])
        if most is not None:
            stat = dict(line.split() for line in group.text("memory.stat").splitlines())
            yield most - (group.number(names[1]) or 0) + int(stat.get(names[2], 0))


def core_quotas(root: Path) -> Iterator[float]:
    """Cores that each group with a limit may keep busy, as a share of time; need not be whole."""
    for group in _groups("cpu", root):
        if group.version == 1:
            limits = [group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")]
        else:
            limits = group.text("cpu.max").split()
        if len(limits) == 2 and all(each.isdecimal() and int(each) for each in limits):
            yield int(limits[0]) / int(limits[1])


def process_rooms(root: Path) -> Iterator[int]:
    """Processes and threads that each group with a limit may still start."""
    for group in _groups("pids", root):
        most = group.number("pids.max")
        if most is not None:
            yield most - (group.number("pids.current") or 0)


def is_memory_error(error: BaseException) -> bool:
    """Whether an error means that there is no more memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


def is_process_limit(error: BaseException) -> bool:
    """Whether an error means that no more threads or processes may be started."""
    if isinstance(error, OSError):
        # As fork has it. What is not ready to be read is named; where a pipe of standard output takes nothing
        # for the moment, Python puts a text of its own in the place of the system's.
        is_fork = error.errno == errno.EAGAIN and error.filename is None
        return is_fork and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel ended for want of memory, of the group or machine; None if unknown."""
    kills = _groups_oom_kills(root)
    if kills is not None:
        return kills
    try:
        lines = (root / "proc/vmstat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    counts = dict(line.split(" ", 1) for line in lines)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _groups_oom_kills(root: Path) -> int | None:
    """``oom_kills`` of this process's own group; None where it is not counted."""
    for group in _groups("memory", root):
        text = group.text("memory.oom_control" if group.version == 1 else "memory.events")
        counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        if counts.get("oom_kill", "").isdecimal():
            return int(counts["oom_kill"])
    return None


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """This process's group and all above it that may limit a controller's resource."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (mounted / controller, 1) if controllers else (mounted, 2)
        own = top / path.strip("/")
        # Within a container the path may be the host's; what is mounted then is the container's own group.
        for each in (own, *own.parents):
            if each.is_relative_to(top):
                yield _Group(each, version)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
