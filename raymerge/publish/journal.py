"""The journal of a run: its events as JSON lines in its record, for whoever asks how it goes or went.

Nothing depends on it: the ledger alone says what is done, so what cannot be written is left out. For an
output in an object store it has a thread and a connection of its own: nothing waits for it, and refused
writes are tried again seconds later.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from raymerge.errors import RaymergeError
from raymerge.events import Event, OnEvent, SegmentDone, UnitDone, UnitProgress
from raymerge.storage.objects.writer import ObjectWriter


def entries_of(text: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines."""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry


JOURNAL = "events.jsonl"
"""Its key within the record."""
ENDED = "ended"
"""Name of the line that is written where a run ends without its output."""
_BEGIN_ANEW_BYTES = 1 << 20
_FULL_BYTES = 2 << 20
"""From here on it takes no more lines about single parts, of which there may be a hundred thousand."""
_MOST_BYTES = 3 << 20
_MOST_KEPT = 1000
_MOST_MESSAGE = 2000
_STOPPED = 3


class Journal:
    """Passes events on, and writes them once there is a record."""

    def __init__(self, on_event: OnEvent) -> None:
        """``on_event`` receives every event after it was written."""
        self._on_event = on_event
        self._kept: list[bytes] = []
        self._descriptor: int | None = None
        self._nbytes = 0
        self._kept_elsewhere: Callable[[], None] | None = None

    def __call__(self, event: Event) -> None:
        """Also called from signal handlers."""
        if self._nbytes < _FULL_BYTES or not isinstance(event, SegmentDone | UnitDone | UnitProgress):
            self._add(event.to_json())
        self._on_event(event)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the error that ended the run, if any, and close the file."""
        if error is not None:
            self._add(_ended(error))
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        if self._kept_elsewhere is not None:
            self._kept_elsewhere()

    def open(self, record: Path, kept_elsewhere: Callable[[], None] | None = None) -> None:
        """Write to this record's journal from now on, beginning with earlier events. ``kept_elsewhere`` is
        called once nothing more is written, and raises nothing.
        """
        self._kept_elsewhere = kept_elsewhere
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):
            path = record / JOURNAL
            if path.is_file() and path.stat().st_size > _BEGIN_ANEW_BYTES:
                path.unlink()
            descriptor = os.open(path, flags, 0o666)
            self._nbytes = os.fstat(descriptor).st_size
            self._descriptor, kept, self._kept = descriptor, self._kept, []
            self._write(b"".join(kept))

    def _add(self, entry: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = (json.dumps({"time": now, **entry}) + "\n").encode()
        if self._descriptor is None:
            self._kept = [*self._kept, line][-_MOST_KEPT:]
        else:
            self._write(line)

    def _write(self, lines: bytes) -> None:
        """One system call: an event from a signal handler may interrupt another."""
        if self._descriptor is not None and self._nbytes < _MOST_BYTES:
            self._nbytes += len(lines)
            with suppress(OSError):
                os.write(self._descriptor, lines)


def _ended(error: BaseException) -> dict[str, Any]:
    is_ours = isinstance(error, RaymergeError)
    code = error.exit_code if isinstance(error, RaymergeError) else _STOPPED
    if not is_ours and isinstance(error, Exception):
        code = 1
    said = str(error) if is_ours else type(error).__name__
    return {"event": ENDED, "exit_code": code, "message": said[:_MOST_MESSAGE]}


_PAUSE_SECONDS = 5.0


class JournalMirror:
    def __init__(self, writer: ObjectWriter, journal: Path, key: str, is_ours: Callable[[], bool]) -> None:
        """``writer`` is the mirror's own, without patience; ``journal`` need not exist; ``is_ours`` says,
        before each write, whether the place is still that of this run.
        """
        self._writer = writer
        self._journal = journal
        self._key = key
        self._is_ours = is_ours
        self._nbytes = 0
        self.lock = threading.Lock()
        """Nothing is written while somebody has it."""

    @contextmanager
    def mirroring(self) -> Iterator[None]:
        """Write it every few seconds until the block ends."""
        ended = threading.Event()

        def go_on() -> None:
            while not ended.wait(_PAUSE_SECONDS):
                self.mirror()

        threading.Thread(target=go_on, name="journal", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def mirror(self) -> None:
        """Write what is new, if the store lets it; raises nothing."""
        with suppress(Exception), self.lock:
            if self._journal.stat().st_size != self._nbytes and self._is_ours():
                text = self._journal.read_bytes()
                self._writer.put(self._key, text)
                self._nbytes = len(text)
