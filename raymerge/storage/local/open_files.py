"""A bounded set of open file descriptors that threads share without closing one under another."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product


@dataclass(slots=True)
class _Handle:
    descriptor: int
    users: int = 0
    retired: bool = False


class OpenFiles:
    """Keeps the most recently used descriptors open, at most ``limit`` of them while idle.

    A checkpoint has hundreds of files and thousands of reads of each: opening per read costs more than
    reading on network file systems, and keeping all open meets the limit of the process.
    """

    def __init__(
        self,
        limit: int,
        opened: Callable[[str, int], None] | None = None,
        opened_to_write: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            opened: given the path and the descriptor of a file that was opened to be read; may raise.
            opened_to_write: called after a file was opened to be written to; may raise.
        """
        self._limit = limit
        self._opened = opened
        self._opened_to_write = opened_to_write
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple[str, bool, bool], _Handle] = OrderedDict()
        self._drops = 0

    @contextmanager
    def borrow(self, path: str, *, writable: bool, direct: bool = False) -> Iterator[int]:
        """A descriptor of ``path`` that stays open until the block ends; ``direct`` goes past the page cache.

        Raises:
            OSError: the file cannot be opened like that.
        """
        handle = self._acquire(path, writable, direct)
        try:
            yield handle.descriptor
        finally:
            self._release(handle)

    def forget(self, path: str) -> None:
        """Drop the descriptors of ``path``, which was renamed, replaced or removed."""
        with self._lock:
            self._drops += 1
            for writable, direct in product((False, True), repeat=2):
                handle = self._handles.pop((path, writable, direct), None)
                if handle is not None:
                    _retire(handle)

    def close(self) -> None:
        """Drop every descriptor; those in use are closed by their last user."""
        with self._lock:
            self._drops += 1
            for handle in self._handles.values():
                _retire(handle)
            self._handles.clear()

    def _acquire(self, path: str, writable: bool, direct: bool) -> _Handle:
        key = path, writable, direct
        with self._lock:
            handle, drops = self._taken(key), self._drops
        if handle is not None:
            return handle
        flags = (os.O_RDWR | os.O_NOFOLLOW if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        # Without the lock: a file server may take its time, for which nobody else is to wait.
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            if writable and self._opened_to_write is not None:
                self._opened_to_write()
            elif not writable and self._opened is not None:
                self._opened(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            handle = self._taken(key)
            if handle is None:
                return self._added(key, descriptor, is_kept=drops == self._drops)
        # Another thread was faster.
        os.close(descriptor)
        return handle

    def _taken(self, key: tuple[str, bool, bool]) -> _Handle | None:
        handle = self._handles.get(key)
        if handle is not None:
            self._handles.move_to_end(key)
            handle.users += 1
            self._evict()
        return handle

    def _added(self, key: tuple[str, bool, bool], descriptor: int, *, is_kept: bool) -> _Handle:
        """A handle with its first user; not kept where the path may meanwhile lead to another file."""
        handle = _Handle(descriptor, users=1, retired=not is_kept)
        if is_kept:
            self._handles[key] = handle
            self._evict()
        return handle

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.retired and not handle.users:
                os.close(handle.descriptor)

    def _evict(self) -> None:
        excess = len(self._handles) - self._limit
        idle = [key for key, handle in self._handles.items() if not handle.users] if excess > 0 else []
        for key in idle[:excess]:
            _retire(self._handles.pop(key))


def _retire(handle: _Handle) -> None:
    handle.retired = True
    if not handle.users:
        os.close(handle.descriptor)
