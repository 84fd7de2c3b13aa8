"""Holds an output place against a second driver on the same machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from raymerge.errors import Problem, TargetError


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold ``place``, beside which the lock file is as long as it is held.

    Raises:
        TargetError: another process holds it.
    """
    path = place.parent / f".{place.name}.raymerge.lock"
    with _lock_file(path, place):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _lock_file(path: Path, place: Path) -> Iterator[None]:
    """The lock file, held; one that its holder removed while we waited for it is no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a", encoding="utf-8") as file:
            _hold(file, place)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return


def _hold(file: TextIO, place: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TargetError(
            Problem(
                str(place),
                "another raymerge process is making this very checkpoint now.",
                "Wait for it, or stop it first.",
            )
        ) from error
    except OSError:
        # A file system without locks. Two drivers of one plan write the same bytes to the same places.
        return
