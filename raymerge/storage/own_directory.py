"""A temporary directory that is removed with its process: by it, or by the next run where it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LOCK = "lock"
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OwnDirectory:
    """A directory that is this process's as long as it lives, which a lock of the system says.

    Whoever makes one removes those beside it whose processes were killed. Use it as a context, or call
    ``remove``.
    """

    def __init__(self, shared: str | None = None) -> None:
        """
        Args:
            shared: the directory that it is made in, which is made where it is not there; None for this
                machine's directory for what is temporary.

        Raises:
            OSError: nothing can be written there.
        """
        beside = Path(tempfile.gettempdir() if shared is None else shared)
        beside.mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix=_prefix(), dir=beside))
        self._descriptor = _locked(self._root)
        self.path = self._root / "files"
        """Where its files go; it is empty."""
        self.path.mkdir(0o700)
        _sweep(beside, self._root.stat().st_uid)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        _remove(self._root)
        os.close(self._descriptor)


def _prefix() -> str:
    """What names of this machine's directories begin with: on a shared file system others may not see locks.

    Short, since Ray's sockets below may have paths of no more than 107 bytes.
    """
    return f"raymerge-{zlib.crc32(socket.gethostname().encode()):08x}-"


def _locked(root: Path) -> int:
    """A descriptor that holds the lock of a directory.

    Without locks there is none, and the directory is nobody's to remove; with one it is seen only once it
    is held.
    """
    fresh = root / f"{_LOCK}.new"
    descriptor = os.open(fresh, _OPENING | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(root / _LOCK)
    return descriptor


def _sweep(beside: Path, user: int) -> None:
    """Remove what killed processes of this user and machine left; what cannot be removed stays."""
    for each in beside.glob(f"{_prefix()}*"):
        with suppress(OSError):
            if each.lstat().st_uid != user:
                continue
            descriptor = os.open(each / _LOCK, _OPENING)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(each)
            finally:
                os.close(descriptor)


def _remove(root: Path) -> None:
    """The lock goes last: whoever is killed meanwhile leaves what the next one can remove."""
    shutil.rmtree(root / "files", ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
