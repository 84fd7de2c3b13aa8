"""A place in an object store, read by ranges."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.addresses import parse_place, shown
from raymerge.storage.local.store import as_bytes
from raymerge.storage.objects.client import READ_SECONDS, ObjectClient, asking, file_info, object_client
from raymerge.storage.remote import Pieces, RemoteStore
from raymerge.storage.retry import RetryPolicy, changed, ends_before, reading
from raymerge.storage.store import NO_FILES, FileInfo, is_key

if TYPE_CHECKING:
    from obstore import GetOptions

_CHUNK_NBYTES = 256 << 10
"""Bytes of an answer that a request buffers before they go to the caller's memory."""
_FEW = 2
_MOST_FILES = 100_000

_Result = TypeVar("_Result")


class ObjectStore(RemoteStore):
    """Objects below a place. Thread-safe; pickles as its place and the expected files, without a connection.

    Every read names the expected version, or the first one that this store saw. The server refuses another
    one, so bytes of two versions never mix.
    """

    def __init__(
        self,
        place: str,
        *,
        patience: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        """Args:
            read_seconds: how long the server may be silent before a request fails.

        Raises:
            OptionError: the address is of no object store.
        """
        self._place = parse_place(place)
        self.root = str(self._place)
        self._top = shown(self.root)
        self._patience = patience or RetryPolicy()
        self._expected = dict(expected)
        self._read_seconds = read_seconds
        self._seen: dict[str, FileInfo] = {}
        self._pieces = Pieces()
        self._lock = threading.Lock()
        self._client: ObjectClient | None = None

    def __getstate__(self) -> tuple[str, dict[str, FileInfo]]:
        return self.root, self._expected

    def __setstate__(self, state: tuple[str, dict[str, FileInfo]]) -> None:
        self.__init__(state[0], expected=state[1])  # type: ignore[misc]

    def close(self) -> None:
        self._pieces.close()
        with self._lock:
            self._client = None

    def files(self) -> tuple[FileInfo, ...]:
        """Every object below the place, sorted by key, without those in hidden directories.

        Raises:
            CheckpointError: the listing is refused, or has more objects than any model.
            TransientError: the server failed for too long.
        """
        client = self._connected()
        with reading(self._top, 0):
            found = self._tried(lambda: list(self._listed(client)), self._top, "listing")
        self._seen.update((info.key, info) for info in found)
        return tuple(sorted(found, key=lambda info: info.key))

    def info(self, key: str) -> FileInfo | None:
        import obstore

        client, location = self._connected(), self.location(key)

        def head() -> FileInfo | None:
            try:
                with asking(self._place, location):
                    return file_info(key, obstore.head(client.store, client.path(key)))
            except FileNotFoundError:
                return None

        found = self._tried(head, location, "looking")
        if found is not None:
            self._seen[key] = found
        return found

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        if len(keys) <= _FEW:
            return {key: self.info(key) for key in keys}
        found = {info.key: info for info in self.files()}
        return {key: found.get(key) for key in keys}

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        view = as_bytes(buffer)
        if not len(view):
            return
        wanted, location = self._wanted(key), self.location(key)
        if offset + len(view) > wanted.nbytes:
            raise CheckpointError(ends_before(location, offset, wanted=len(view), nbytes=wanted.nbytes))
        self._pieces.fetch(lambda at, piece: self._fetch(wanted, location, at, piece), offset, view)

    def _connected(self) -> ObjectClient:
        with self._lock:
            if self._client is None:
                self._client = object_client(self._place, read_seconds=self._read_seconds)
            return self._client

    def _wanted(self, key: str) -> FileInfo:
        found = self._expected.get(key) or self._seen.get(key) or self.info(key)
        if found is None:
            location = self.location(key)
            with reading(location, 0):
                raise FileNotFoundError(2, os.strerror(2), location)
        return found

    def _fetch(self, wanted: FileInfo, location: str, offset: int, view: memoryview) -> None:
        """Fill a view; a request that breaks off is continued by another."""
        client, done = self._connected(), 0

        def go_on() -> None:
            nonlocal done
            begin = done
            with asking(self._place, location):
                for chunk in self._chunks(client, wanted, location, (offset + done, offset + len(view))):
                    if len(chunk) > len(view) - done:
                        done = begin  # which of its bytes are those of the range is not known
                        raise OSError(errno.EIO, "an answer with more bytes than were asked for")
                    view[done : done + len(chunk)] = chunk
                    done += len(chunk)

        with reading(location, offset):
            self._tried(go_on, location, "reading", offset)
        if done < len(view):
            raise CheckpointError(ends_before(location, offset, wanted=len(view), nbytes=offset + done))

    def _chunks(
        self, client: ObjectClient, wanted: FileInfo, location: str, span: tuple[int, int]
    ) -> Iterator[memoryview]:
        import obstore

        # A weak one cannot be asked for; it is compared with what the answer says.
        options: GetOptions = {"range": span}
        if not wanted.version.startswith("W/"):
            options["if_match"] = wanted.version
        answer = obstore.get(client.store, client.path(wanted.key), options=options)
        if file_info(wanted.key, answer.meta) != wanted:
            raise CheckpointError(changed(location))
        for chunk in answer.stream(min_chunk_size=_CHUNK_NBYTES):
            yield memoryview(chunk)

    def _listed(self, client: ObjectClient) -> Iterator[FileInfo]:
        with asking(self._place, self._top):
            for number, info in enumerate(client.listed(), 1):
                is_hidden = any(part.startswith(".") for part in info.key.split("/")[:-1])
                if is_key(info.key) and not is_hidden:
                    yield info
                if number > _MOST_FILES:
                    what = f"holds more than {_MOST_FILES} objects, which is no model."
                    raise CheckpointError(Problem(self._top, what, "Name the model's own directory."))

    def _tried(self, attempt: Callable[[], _Result], location: str, doing: str, offset: int = 0) -> _Result:
        return self._patience.have(attempt, path=location, doing=doing, offset=offset)
