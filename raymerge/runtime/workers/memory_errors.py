"""What tells from other failures that memory ran out, or that no further thread may be started."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from raymerge.runtime.workers.control_groups import groups_oom_kills

_SAYINGS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What torch says of the memory of a processor: it has no error of its own for that."""

_NO_THREAD = "can't start new thread"
PROCESS_LIMIT = (
    "no further thread or process may be started here: a limit of the user (ulimit -u) or of the container "
    "(pids.max) is reached. Raise it, or end others."
)


def is_memory_error(error: BaseException) -> bool:
    """Whether something was raised because there was no memory to be had."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


def is_process_limit(error: BaseException) -> bool:
    """Whether something was raised because no further thread or process may be started."""
    if isinstance(error, OSError):
        # As fork has it. What is not ready to be read is named; where a pipe of standard output takes nothing
        # for the moment, Python puts a text of its own in the place of the system's.
        is_fork = error.errno == errno.EAGAIN and error.filename is None
        return is_fork and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has ended so far, here, because memory ran out; None where it does not tell.

    Those of this process's control group if it counts them, otherwise those of the machine.
    """
    kills = groups_oom_kills(root)
    if kills is not None:
        return kills
    try:
        lines = (root / "proc/vmstat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    counts = dict(line.split(" ", 1) for line in lines)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None
