"""Temporary directories of this process, and copies of small files in them."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.open import open_store

_LOCK = "lock"
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OwnDirectory:
    """A temporary directory of this process, marked by a file lock for as long as the process lives.

    Making one removes those beside it whose processes are dead. Use it as a context, or call ``remove``."""

    def __init__(self, shared: str | None = None) -> None:
        """``shared``: the parent directory, created if missing; None for this machine's temporary directory.
        Raises OSError: the parent cannot be written."""
        beside = Path(tempfile.gettempdir() if shared is None else shared)
        beside.mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix=_prefix(), dir=beside))
        self._descriptor = _locked(self._root)
        self.path = self._root / "files"
        self.path.mkdir(0o700)
        _sweep(beside, self._root.stat().st_uid)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        _remove(self._root)
        os.close(self._descriptor)


def _prefix() -> str:
    """Start of this machine's directory names: on a shared filesystem other machines may not see locks.

    Short: paths of Ray's sockets below are limited to 107 bytes."""
    return f"raymerge-{zlib.crc32(socket.gethostname().encode()):08x}-"


def _locked(root: Path) -> int:
    """A descriptor that holds the lock of a directory.

    Without file locks there is none, and nobody else removes the directory. It gets its name only once it is
    locked."""
    fresh = root / f"{_LOCK}.new"
    descriptor = os.open(fresh, _OPENING | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(root / _LOCK)
    return descriptor


def _sweep(beside: Path, user: int) -> None:
    """Remove directories of dead processes of this user and machine; skip what cannot be removed."""
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
    """The lock goes last, so that another process can finish an interrupted removal."""
    shutil.rmtree(root / "files", ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)


_MOST_NBYTES = 1 << 30


@contextmanager
def fetched(place: str, keys: Iterable[str]) -> Iterator[Path]:
    """A directory with some files of a place: the place itself if it is local, else temporary copies.

    Missing keys are left out.

    Raises CheckpointError: the files cannot be read, or are too large."""
    if not is_remote(place):
        yield Path(parse_place(place).text)
        return
    names = frozenset(keys)
    with OwnDirectory() as directory, open_store(place) as store:
        files = [info for info in store.files() if info.key in names]
        nbytes = sum(info.nbytes for info in files)
        if nbytes > _MOST_NBYTES:
            what = (
                f"the {len(files)} files beside its weights have {nbytes} bytes, too many to be copied here."
            )
            raise CheckpointError(Problem(shown(place), what, "Take what is no part of the model out."))
        for info in files:
            path = directory / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(info.key, 0, info.nbytes))
        yield directory
