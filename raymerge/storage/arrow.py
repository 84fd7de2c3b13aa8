"""Read-only places that pyarrow reads: HDFS, and some filesystems of fsspec."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from raymerge.errors import CheckpointError, OptionError, Problem, first_line
from raymerge.storage.addresses import HDFS_SCHEMES, parse_place, shown
from raymerge.storage.remote import RemoteStore
from raymerge.storage.retry import RetryPolicy, changed, ends_before, reading
from raymerge.storage.store import NO_FILES, FileInfo, as_bytes, is_listed

_PIECE_NBYTES = 4 << 20
_NUMBERS = {FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR, PermissionError: errno.EACCES}
"""Errors that another attempt does not change."""

_Result = TypeVar("_Result")


class ArrowStore(RemoteStore):
    """Files below a place of a pyarrow filesystem. Thread-safe.

    These filesystems have no versions: time and size are compared when a file is opened, and again by
    ``check_expected``."""

    def __init__(
        self,
        place: str,
        *,
        retry_policy: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        """Raises OptionError: no installed package reads such addresses."""
        super().__init__(place.rstrip("/"), retry_policy, expected)
        self._open: dict[str, Any] = {}
        self._system, self._base = _file_system(place)

    def close(self) -> None:
        with self._lock:
            # Those in use are closed by the collector when their last reader is done.
            self._open.clear()

    def files(self) -> tuple[FileInfo, ...]:
        from pyarrow.fs import FileSelector

        def listed() -> list[FileInfo]:
            selector = FileSelector(self._base, recursive=True)
            return list(self._found(self._system.get_file_info(selector)))

        with reading(self._top, 0):
            return tuple(sorted(self._tried(listed, self._top, "listing"), key=lambda info: info.key))

    def info(self, key: str) -> FileInfo | None:
        path, location = self._path(key), self.location(key)
        with reading(location, 0):
            status = self._tried(lambda: self._system.get_file_info(path), location, "looking")
        return _info(key, status) if status.is_file else None

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        view, location = as_bytes(buffer), self.location(key)
        for start in range(0, len(view), _PIECE_NBYTES):
            self._fill(key, location, offset + start, view[start : start + _PIECE_NBYTES])

    def check_expected(self) -> None:
        with self._lock:
            read = tuple(self._open)
        for key in read:
            info = self.info(key)
            # What is gone was read whole all the same; whoever wants more of it will say so.
            if info is not None:
                self._compare(key, info)

    def _fill(self, key: str, location: str, offset: int, view: memoryview) -> None:
        def read() -> int:
            data = memoryview(self._opened(key).read_at(len(view), offset))
            view[: len(data)] = data
            return len(data)

        with reading(location, offset):
            done = self._tried(read, location, "reading", offset, key=key)
        if done < len(view):
            info = self.info(key)
            nbytes = offset + done if info is None else info.nbytes
            raise CheckpointError(ends_before(location, offset, length=len(view), nbytes=nbytes))

    def _opened(self, key: str) -> Any:
        with self._lock:
            file = self._open.get(key)
        if file is not None:
            return file
        path = self._path(key)
        if key in self._expected:
            status = self._system.get_file_info(path)
            if status.is_file:
                self._compare(key, _info(key, status))
        file = self._system.open_input_file(path)
        with self._lock:
            return self._open.setdefault(key, file)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._open.pop(key, None)

    def _compare(self, key: str, info: FileInfo) -> None:
        expected = self._expected.get(key)
        if expected is not None and info != expected:
            raise CheckpointError(changed(self.location(key)))

    def _found(self, infos: list[Any]) -> Iterator[FileInfo]:
        for each in infos:
            key = os.path.relpath(each.path, self._base)
            if each.is_file and is_listed(key):
                yield _info(key, each)

    def _path(self, key: str) -> str:
        self.location(key)
        return f"{self._base}/{key}"

    def _tried(
        self,
        attempt: Callable[[], _Result],
        location: str,
        doing: str,
        offset: int = 0,
        *,
        key: str | None = None,
    ) -> _Result:
        def asked() -> _Result:
            try:
                return attempt()
            except OSError as error:
                raise _numbered(error) from error

        forget = None if key is None else partial(self._forget, key)
        return self._retry_policy.have(asked, path=location, doing=doing, offset=offset, again=forget)


def _info(key: str, status: Any) -> FileInfo:
    return FileInfo(key, int(status.size), f"{status.mtime_ns}-{status.size}")


def _numbered(error: OSError) -> OSError:
    """The error with an errno: libraries raise some without, mostly of connections."""
    if error.errno is not None:
        return error
    for kind, number in _NUMBERS.items():
        if isinstance(error, kind):
            return OSError(number, os.strerror(number))
    return OSError(errno.EIO, str(error)[:200])


def _file_system(place: str) -> tuple[Any, str]:
    from pyarrow import fs

    address = parse_place(place)
    try:
        if address.scheme in HDFS_SCHEMES:
            system, path = fs.FileSystem.from_uri(place)
            return system, path.rstrip("/")
        import fsspec

        file_system, path = fsspec.core.url_to_fs(place)
    except (ImportError, OSError, ValueError) as error:
        what = f"what reads {address.scheme}:// addresses does not work here: {first_line(error)[:200]}."
        raise OptionError(Problem(shown(place), what, "Install what it names, on every machine.")) from error
    return fs.PyFileSystem(fs.FSSpecHandler(file_system)), path.rstrip("/")
