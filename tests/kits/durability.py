"""What a power cut would leave: data and names since they were last synced, as system calls show it.

The oracle knows nothing of the package. The data of a file are durable when nothing was written after its
last sync, its name when the directory had it at its own last sync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_WRITES = ("pwrite", "pwritev", "write", "writev", "ftruncate", "posix_fallocate")
_Inode = tuple[int, int]


class Durability:
    def __init__(self, root: Path, rule: Rule) -> None:
        self._root = root
        self._rule = rule
        self._synced_data: dict[_Inode, tuple[int, int]] = {}
        self._synced_names: dict[_Inode, dict[str, int]] = {}
        self._written: set[_Inode] = set()
        self.checked: set[str] = set()
        self.violations: list[str] = []

    def has_name(self, path: Path) -> bool:
        """Whether a power cut would leave a file or directory its name."""
        names = self._synced_names.get(_inode(os.stat(path.parent)), {})
        return names.get(path.name) == path.stat().st_ino

    def has_data(self, path: Path) -> bool:
        """Whether a power cut would leave a file all that was written to it."""
        inode = _inode(path.stat())
        # The time shows writes that were none of the calls that are replaced.
        return inode not in self._written and self._synced_data.get(inode) == _state(path)

    def lost(self, directory: Path) -> list[str]:
        """Names below a directory of what a power cut would take, whole or in part; sorted."""
        return sorted(
            path.name
            for path in directory.rglob("*")
            if not (self.has_name(path) and (path.is_dir() or self.has_data(path)))
        )

    def check(self, call: str, path: Path) -> None:
        missing = self._rule(self, call, path) if path.is_relative_to(self._root) else None
        if missing is not None:
            self.checked.add(call)
            self.violations += [f"{call} {path.name}: {each}" for each in missing]

    def sync(self, descriptor: int) -> None:
        inode, path = _inode(os.fstat(descriptor)), _path(descriptor)
        if path.is_dir():
            self._synced_names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._written.discard(inode)
            self._synced_data[inode] = _state(path)

    def write(self, descriptor: int) -> None:
        self.check("write", _path(descriptor))
        self._written.add(_inode(os.fstat(descriptor)))


Rule = Callable[[Durability, str, Path], list[str] | None]
"""What is not durable and must be before a call ("write", "rename", "link" or "unlink") on a path.

None where nothing is required.
"""


def record_durability(patch: pytest.MonkeyPatch, root: Path, rule: Rule) -> Durability:
    seen = Durability(root, rule)

    def before(name: str, look: Callable[..., object]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(os, name, call)

    for name in _WRITES:
        before(name, lambda descriptor, *_: seen.write(descriptor))
    before("copy_file_range", lambda _, target, *__: seen.write(target))
    for name in ("fsync", "fdatasync"):
        before(name, seen.sync)
    for name in ("rename", "replace"):
        before(name, lambda source, *_, **__: seen.check("rename", Path(source)))
    before("link", lambda source, *_, **__: seen.check("link", Path(source)))
    for name in ("unlink", "remove"):
        before(name, lambda path, *, dir_fd=None: seen.check("unlink", _below(path, dir_fd)))
    return seen


def _below(path: str | os.PathLike[str], directory: int | None) -> Path:
    return Path(path) if directory is None else _path(directory) / path


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
