"""Control groups with a limit, as a container has them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_group(nbytes: int) -> AbstractContextManager[Path | None]:
    return _group("memory", ("memory.limit_in_bytes", "memory.max"), nbytes)


def process_group(count: int) -> AbstractContextManager[Path | None]:
    return _group("pids", ("pids.max", "pids.max"), count)


@contextmanager
def _group(controller: str, limits: tuple[str, str], most: int) -> Iterator[Path | None]:
    """The file that a process writes its number to, to join; None where this user can make no group."""
    group = _made(controller, limits, most)
    try:
        yield None if group is None else group / "cgroup.procs"
    finally:
        if group is not None:
            _remove(group)


def _made(controller: str, limits: tuple[str, str], most: int) -> Path | None:
    # Of version 1, or of version 2 where the root passes control on.
    for parent, limit in zip((_ROOT / controller, _ROOT), limits, strict=True):
        group = parent / f"raymerge-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(most))
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
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
