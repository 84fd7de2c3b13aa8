"""A directory of one process below one that many share, for files that nobody wants after its end."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from glob import escape
from pathlib import Path

SHARDS = "raymerge-shard-"
"""What the names of directories begin with that have a shard until it is uploaded."""
_LOCK = "lock"
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OwnDirectory:
    """A directory that is this process's as long as it lives, which a lock of the system says."""

    def __init__(self, shared: str, prefix: str = SHARDS, *, names_host: bool = True) -> None:
        """
        Args:
            shared: the directory that it is made in; it is made where it is not there.
            prefix: what its name begins with.
            names_host: whether its name has that of this machine in it, as it must have where others see it.

        Raises:
            OSError: nothing can be written there.
        """
        Path(shared).mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=_of_here(prefix) if names_host else prefix, dir=shared))
        """Where it is."""
        fresh = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(fresh, _OPENING | os.O_CREAT | os.O_EXCL, 0o600)
        # Without locks it is nobody's to remove; with one it is seen only once it is held.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep(shared: Path, prefix: str = SHARDS, *, names_host: bool = True) -> None:
    """Remove what killed processes of this machine left; what cannot be removed stays, and so does what one
    left that was killed before it had its lock.

    Args:
        shared: the directory that theirs are in.
        prefix: what their names begin with.
        names_host: whether their names have that of this machine in them.
    """
    for each in shared.glob(f"{escape(_of_here(prefix) if names_host else prefix)}*"):
        with suppress(OSError):
            descriptor = os.open(each / _LOCK, _OPENING)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(descriptor)


def _of_here(prefix: str) -> str:
    """What names of this machine's directories begin with: locks may not be seen by others."""
    return f"{prefix}{socket.gethostname()}@"
