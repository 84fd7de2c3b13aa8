"""A control group with a memory limit, as a container has one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(nbytes: int) -> Iterator[Path | None]:
    """The file that a process writes its number to in order to join; None where this user can make no group.

    Args:
        nbytes: what the processes in it may use together.
    """
    group = _made(nbytes)
    try:
        yield None if group is None else group / "cgroup.procs"
    finally:
        if group is not None:
            _remove(group)


def _made(nbytes: int) -> Path | None:
    # Of version 1, or of version 2 where the root passes control of memory on.
    for parent, limit in ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")):
        group = parent / f"raymerge-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(nbytes))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        with suppress(OSError):
            # Otherwise what has no room goes to disk, where there is swap.
            (group / "memory.swap.max").write_text("0")
        return group
    return None


def _remove(group: Path) -> None:
    """Remove a group once its last process is gone."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
