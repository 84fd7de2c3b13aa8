"""A model on the Hub as a store: of its files only the bytes that are asked for are fetched."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Mapping

from raymerge.errors import CheckpointError
from raymerge.storage.hub.addresses import HubPlace
from raymerge.storage.hub.store import HubFiles
from raymerge.storage.local.transfers import as_bytes
from raymerge.storage.pieces import Pieces
from raymerge.storage.refusals import ends_before, reading
from raymerge.storage.remote import FarStore
from raymerge.storage.retry import Patience
from raymerge.storage.store import NO_FILES, FileInfo


class HubStore(FarStore):
    """The files of a commit on the Hub. Thread-safe; pickles as its place and what it expects.

    A commit never changes, so that what it holds is asked once.
    """

    def __init__(
        self,
        place: HubPlace,
        *,
        patience: Patience | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        """
        Args:
            place: of a commit.
            patience: how often to try again; None for the usual.
            expected: files as they must be when they are read; others may be as they like.

        Raises:
            ValueError: the place is of a branch or a tag.
        """
        if place.commit is None:
            raise ValueError(f"{place} is no commit: what it holds may change")
        self.root = str(place)
        self._place = place
        self._expected = dict(expected)
        self._patience = patience or Patience()
        self._files = HubFiles(place)
        self._pieces = Pieces()
        self._lock = threading.Lock()
        self._listed: dict[str, FileInfo] | None = None

    def __getstate__(self) -> tuple[HubPlace, dict[str, FileInfo]]:
        return self._place, self._expected

    def __setstate__(self, state: tuple[HubPlace, dict[str, FileInfo]]) -> None:
        self.__init__(state[0], expected=state[1])  # type: ignore[misc]

    def close(self) -> None:
        """End the threads; the store may be used again afterwards."""
        self._pieces.close()

    def _named(self, path: str) -> str:
        return self.root if path == "." else self._files.where(path)

    def files(self) -> tuple[FileInfo, ...]:
        """Every file, sorted by key; what lies in hidden directories is left out.

        Raises:
            CheckpointError: the Hub does not tell.
            TransientError: it failed for longer than is waited.
        """
        return tuple(self._listing().values())

    def info(self, key: str) -> FileInfo | None:
        """One file; None where there is none. Raises as ``files`` does."""
        self.location(key)
        return self._listing().get(key)

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        """Several files; None for those that are not there. Raises as ``files`` does."""
        return {key: self.info(key) for key in keys}

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``, of long ranges several pieces at once.

        Raises:
            UnreadableError: the Hub does not give the file.
            CheckpointError: it ends before the buffer is full, or is not the one expected.
            TransientError: the Hub failed for longer than is waited.
        """
        view = as_bytes(buffer)
        if not len(view):
            return
        info = self._wanted(key)
        if offset + len(view) > info.nbytes:
            place = self.location(key)
            raise CheckpointError(ends_before(place, offset, wanted=len(view), nbytes=info.nbytes))
        self._pieces.fetch(lambda begin, piece: self._fetch(info, begin, piece), offset, view)

    def check_expected(self) -> None:
        """A commit stays what it is: there is nothing to look at."""

    def _listing(self) -> Mapping[str, FileInfo]:
        with self._lock:
            if self._listed is None:
                found = self._patience.have(
                    self._files.listing, path=self.root, doing="listing", again=lambda _: None
                )
                self._listed = {info.key: info for info in found}
            return self._listed

    def _wanted(self, key: str) -> FileInfo:
        """A file that is to be read: as it is expected, else as it is listed.

        Raises:
            UnreadableError: there is none.
        """
        where, info = self.location(key), self._expected.get(key) or self._listing().get(key)
        if info is None:
            with reading(where, 0):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        return info

    def _fetch(self, info: FileInfo, offset: int, view: memoryview) -> None:
        """Fill a view; an attempt goes on where the one before broke off."""
        done = 0

        def go_on() -> None:
            nonlocal done
            for chunk in self._files.chunks(info, offset + done, len(view) - done):
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done < len(view):
                raise OSError(errno.ECONNRESET, "the connection ended in the middle of an answer")

        self._patience.have(
            go_on,
            path=self.location(info.key),
            doing="reading",
            offset=offset,
            again=lambda _: self._files.forget(info.key),
        )
