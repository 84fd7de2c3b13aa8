"""A request to stop a run, left at its output place from any machine that sees it."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from raymerge.options import RunOptions
from raymerge.publish.attempt import RECORD
from raymerge.publish.lease import Holder, holder_from, is_same_process, myself
from raymerge.storage.addresses import is_object_place, with_options
from raymerge.storage.objects.writer import ObjectWriter

STOP = f"{RECORD}/stop.json"
"""Key of a request in an object store."""
_LOOK_SECONDS = 2.0
_LOOK_SECONDS_IN_STORE = 5.0
_REQUEST_SECONDS = 5.0
_MOST_BYTES = 1 << 16


class _RequestFile:
    is_far = False

    def __init__(self, place: Path) -> None:
        real = Path(os.path.realpath(place))
        self._path = real.parent / f".{real.name}.raymerge-stop"
        self.look_seconds = _LOOK_SECONDS

    def read(self) -> bytes | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return os.pread(descriptor, _MOST_BYTES, 0)
        finally:
            os.close(descriptor)

    def write(self, text: bytes) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(text)
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class _RequestObject:
    is_far = True

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self.look_seconds = _LOOK_SECONDS_IN_STORE

    def read(self) -> bytes | None:
        there = self._writer.get(STOP)
        return None if there is None else there[0]

    def write(self, text: bytes) -> None:
        self._writer.put(STOP, text)

    def remove(self) -> None:
        self._writer.delete([STOP])


class StopRequest:
    """A request to stop. It names the process that is asked, so that no later run heeds it."""

    def __init__(self, file: _RequestFile | _RequestObject) -> None:
        self._file = file
        # A store is first asked after a while, as most runs in one end with no request.
        self._looked_at = time.monotonic() if file.is_far else -file.look_seconds
        self._look: threading.Thread | None = None
        self._is_seen = False

    @staticmethod
    def beside(place: Path) -> StopRequest:
        return StopRequest(_RequestFile(place))

    @staticmethod
    def in_store(place: str | ObjectWriter) -> StopRequest:
        """``place`` is an address with options, or its writer."""
        writer = ObjectWriter(place, seconds=_REQUEST_SECONDS) if isinstance(place, str) else place
        return StopRequest(_RequestObject(writer))

    def make(self, holder: Holder) -> None:
        """Ask the holder of the place's lease to stop.

        Raises OSError where nothing can be written, TransientError for a passing failure of the store,
        TargetError where it refuses.
        """
        self._file.write(json.dumps(asdict(holder)).encode())

    def is_made(self) -> bool:
        """Whether this process is asked to stop, as last seen; true once.

        It looks every few seconds; in a store from a thread, so that the caller never waits.
        """
        is_looking = self._look is not None and self._look.is_alive()
        if not is_looking and time.monotonic() - self._looked_at >= self._file.look_seconds:
            self._looked_at = time.monotonic()
            if self._file.is_far:
                self._look = threading.Thread(target=self._see, name="stop request", daemon=True)
                self._look.start()
            else:
                self._see()
        is_seen, self._is_seen = self._is_seen, False
        return is_seen

    def withdraw(self) -> None:
        """Remove a request to this process, which is ending; raises nothing."""
        with suppress(Exception):
            asked = self._asked()
            if asked is not None and is_same_process(asked, myself("")):
                self._file.remove()

    def _see(self) -> None:
        # Storage that is away for a moment says nothing, and is asked again.
        with suppress(Exception):
            asked = self._asked()
            if asked is not None:
                self._is_seen = is_same_process(asked, myself(""))
                # Gone once it was seen, and so is one to a process that has ended.
                self._file.remove()

    def _asked(self) -> Holder | None:
        """The process that is asked; None for none, or an unreadable request."""
        text = self._file.read()
        return None if text is None else holder_from(text)


def stop_request_at(output: Path | str, options: RunOptions) -> StopRequest:
    """Raises OptionError without the client of the place's store, CheckpointError without credentials."""
    if not is_object_place(str(output)):
        return StopRequest.beside(Path(output))
    return StopRequest.in_store(with_options(str(output), options.storage))
