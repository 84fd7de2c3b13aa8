"""Who holds a lease: a process, of somebody, on some machine; and whether it still runs."""

from __future__ import annotations

import getpass
import json
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_MOST_PID = 1 << 31


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a place, as its lease says."""

    run: str
    """Chance; tells two leases of one process apart."""
    what: str
    """Digest of what is made."""
    machine: str
    """Where the number of the process means something: the same system since it was started, and what else
    numbers processes by itself there."""
    host: str
    """Its name: a copy of a running machine has all else of it."""
    pid: int
    """Number of the process."""
    began: str
    """When the process began, as its system counts; "" where that is not known."""
    user: str
    """Whose process it is."""
    since: str
    """When it took the lease, by its own clock; for people."""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


def myself(what: str) -> Holder:
    """This process, as the holder of a lease.

    Args:
        what: digest of what it makes.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    began = _began(os.getpid()) or ""
    run, host = uuid.uuid4().hex[:8], socket.gethostname()
    return Holder(run, what, _machine(), host, os.getpid(), began, user, since)


def holder_from(text: bytes) -> Holder | None:
    """The holder that was written as JSON; None where that cannot be read."""
    try:
        found = json.loads(text)
        holder = Holder(**found)
    except (ValueError, TypeError, RecursionError):
        return None
    is_whole = all(type(value) is (int if name == "pid" else str) for name, value in found.items())
    return holder if is_whole and 0 < holder.pid < _MOST_PID else None


def is_same_process(one: Holder, other: Holder) -> bool:
    """Whether two holders are one process, whatever it holds."""
    return _process(one) == _process(other)


def is_here(holder: Holder) -> bool:
    """Whether the holder's process has its number from this machine."""
    return (holder.machine, holder.host) == (_machine(), socket.gethostname())


def runs_here(holder: Holder) -> bool:
    """Whether a process of this machine runs, and is the one that took the lease."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    began = _began(holder.pid)
    return began is None or (began != "" and began == holder.began) or not holder.began


def _process(holder: Holder) -> tuple[str, str, int, str]:
    return holder.machine, holder.host, holder.pid, holder.began


def _began(pid: int) -> str | None:
    """When a process began, as the system counts; "" for one that has ended, None where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    found = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with suppress(OSError):  # many containers lack the second, other systems than Linux both
            found.append(Path(path).read_text(errors="replace").strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)
