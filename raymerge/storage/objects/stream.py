"""One object on its way into an object store: an upload in parts, complete or aborted, or one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    Problem,
    TargetError,
    TransientError,
    UnreadableError,
)
from raymerge.storage.addresses import parse_place
from raymerge.storage.local.transfers import as_bytes
from raymerge.storage.objects.client import chain_of
from raymerge.storage.objects.faults import asking, lacks_credentials, told
from raymerge.storage.retry import KEPT
from raymerge.storage.store import Buffer

SMALLEST_PART = 8 << 20
"""Bytes of a part, where the object has not so many that they would be too many parts."""
STREAM_PARTS = 2
"""Parts of one stream that are on their way at the same time."""
LARGEST_OBJECT = 5 << 40
"""Bytes of the largest object that stores take."""
_MOST_PARTS = 9000
"""Stores take ten thousand."""
_AT_ONCE = 1 << 20
"""Bytes that are copied at a time."""


def part_bytes(nbytes: int) -> int:
    """Bytes of each part of an object but the last."""
    return max(SMALLEST_PART, -(-nbytes // _MOST_PARTS))


def stream_bytes(nbytes: int) -> int:
    """Bytes of memory that a stream takes at most, besides what comes early."""
    if nbytes <= part_bytes(nbytes):
        # Ours, and the client's of the one request.
        return 2 * nbytes + 2 * _AT_ONCE
    # Those on their way, one that is filled, and one that goes from hand to hand.
    return min(nbytes, (STREAM_PARTS + 2) * part_bytes(nbytes)) + 2 * _AT_ONCE


class ObjectStream(ABC):
    """Takes the bytes of an object in about their order, each once. For one thread.

    Bytes that come early are kept until those before them are there. Used as a context it is aborted by
    whatever leaves the block before ``finish``: then the store has what it had before.
    """

    def __init__(self, location: str, nbytes: int) -> None:
        self._location = location
        self._nbytes = nbytes
        self._early: dict[int, bytes] = {}
        self._is_open = True
        self.done_bytes = 0
        """Bytes that the store was given, from the begin on."""
        self.early_bytes = 0
        """Bytes that are kept, since some before them lack."""

    def __enter__(self) -> ObjectStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, offset: int, buffer: Buffer) -> None:
        """Take bytes from an offset on; the buffer is free afterwards.

        Raises:
            TransientError: the store refused them for a while.
            TargetError: it refuses them for good.
            ValueError: they were there already, or lie behind the end.
        """
        view = as_bytes(buffer)
        if offset < self.done_bytes or offset + len(view) > self._nbytes or offset in self._early:
            raise ValueError(f"{self._location}: bytes from {offset} on are not awaited")
        if offset > self.done_bytes:
            self._early[offset] = bytes(view)
            self.early_bytes += len(view)
            return
        self._send(view)
        while (kept := self._early.pop(self.done_bytes, None)) is not None:
            self.early_bytes -= len(kept)
            self._send(memoryview(kept))

    def finish(self) -> None:
        """Have the object there; returns when it is.

        Raises:
            TransientError: as ``write`` does; and TargetError.
            IncompleteError: bytes lack, or the guard of the stream refuses it.
        """
        if self.done_bytes != self._nbytes:
            raise IncompleteError(
                f"{self._location}: {self.done_bytes} of {self._nbytes} bytes came; it is not there. {KEPT}"
            )
        self._complete()
        self._is_open = False

    def abort(self) -> None:
        """Have the store forget what it was given, unless it is finished."""
        if not self._is_open:
            return
        self._is_open = False
        self._early.clear()
        self._drop()

    @abstractmethod
    def _send(self, view: memoryview) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    @abstractmethod
    def _drop(self) -> None: ...


class OneRequest(ObjectStream):
    """An object of one part, kept until it is whole."""

    def __init__(self, put: Callable[[bytearray], None], location: str, nbytes: int) -> None:
        super().__init__(location, nbytes)
        self._put = put
        self._data = bytearray(nbytes)

    def _send(self, view: memoryview) -> None:
        self._data[self.done_bytes : self.done_bytes + len(view)] = view
        self.done_bytes += len(view)

    def _complete(self) -> None:
        self._put(self._data)

    def _drop(self) -> None:
        self._data = bytearray()


class Upload(ObjectStream):
    """An object in parts that go out as they come."""

    def __init__(
        self, writer: Any, place: str, location: str, nbytes: int, guard: Callable[[], None]
    ) -> None:
        super().__init__(location, nbytes)
        self._writer = writer
        self._place = place
        self._guard = guard

    def _complete(self) -> None:
        self._guard()
        self._asked(self._writer.close)

    def _drop(self) -> None:
        from obstore.exceptions import BaseError

        try:
            # The client aborts where it hears of an error, and only there. It breaks off the parts on their
            # way, and aborts again where that fails for a moment, as an abort that meets parts may.
            self._writer.__exit__(IncompleteError, IncompleteError(), None)
        except (BaseError, OSError):
            # What cannot be aborted now is when the next run begins, or by a rule of the store.
            return

    def _send(self, view: memoryview) -> None:
        for start in range(0, len(view), _AT_ONCE):
            # The client keeps what it is given until it is sent; the caller's memory is used again before.
            piece = bytes(view[start : start + _AT_ONCE])
            self._asked(partial(self._writer.write, piece))
        self.done_bytes += len(view)

    def _asked(self, action: Callable[[], object]) -> None:
        # Outermost, since what is refused for good is an OSError too.
        with refusing(self._place, self._location):
            try:
                with asking(self._place, self._location):
                    action()
            except OSError as error:
                is_gone = isinstance(error, FileNotFoundError)
                fault = "the store no longer knows of the upload" if is_gone else error.strerror or error
                said = f"{self._location}: writing at byte {self.done_bytes} failed: {fault}. {KEPT}"
                raise TransientError(said) from error


@contextmanager
def refusing(place: str, location: str) -> Iterator[None]:
    """Says of what may not be done at an output place that it is one.

    Raises:
        TargetError: the credentials do not do, or there is no such bucket.
    """
    try:
        yield
    except UnreadableError as error:
        address = parse_place(place)
        cause = error.__cause__
        if isinstance(cause, Exception) and lacks_credentials(cause):
            raise TargetError(error.problems) from error
        said = told(cause) if isinstance(cause, Exception) else ""
        if said.removeprefix("status ")[:3] not in ("", "401", "403"):
            remedy = "Check the place and the options in storage:."
            raise TargetError(Problem(location, f"the store refuses it: {said}.", remedy)) from error
        what = f"the store refuses it to the credentials of this machine: {said or 'there are none'}."
        chain = chain_of(address.scheme)
        remedy = f"Looked for were {chain}. They must be allowed to list, read, write and delete."
        raise TargetError(Problem(location, what, remedy)) from error
    except CheckpointError as error:
        raise TargetError(error.problems) from error
