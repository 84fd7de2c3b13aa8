"""What runs towards one output place left of themselves, and who makes it now; read without any server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.publish.attempt import MARK, RECORD
from raymerge.publish.journal import JOURNAL, entries_of
from raymerge.publish.lease import DEAD_SECONDS, Holder, LeaseView, hold_of, is_here, runs_here
from raymerge.publish.ledger import NAME
from raymerge.publish.output_contents import MANIFEST
from raymerge.publish.remote_lease import look
from raymerge.publish.remote_staging import LEASE, STEPS_LEASE, pieces_of
from raymerge.publish.steps_place import steps_beside
from raymerge.publish.stop_request import StopRequest
from raymerge.storage.addresses import is_object_place, parse_place, shown
from raymerge.storage.objects.writer import ObjectWriter

STORY = "run.json"
Record: TypeAlias = Callable[[str], bytes]
"""Reads a file of a record as far as it is written by now; empty where there is none that can be read."""
_POLL_SECONDS = 1.0
_MOST_BYTES = 256 << 20
"""Of a file of a record that is read as a whole."""


class RunRecords(Protocol):
    """The records of one output place, wherever it is."""

    @property
    def place(self) -> str:
        """The output place, for messages."""

    def hold(self) -> LeaseView | None:
        """Who holds the place; None for nobody."""

    def begun(self) -> Record | None:
        """The record of the unfinished run, or of the one that goes on now; None where there is none."""

    def published(self) -> Record | None:
        """The record of the checkpoint in its place; None where there is none."""

    def has_steps(self) -> bool:
        """Whether something that was made on the way is beside the place."""

    def ask_to_stop(self, holder: Holder) -> None:
        """Leave a request for a process to stop; raises OSError where nothing can be left there."""


class LocalRecords:
    """Those of a directory that this machine sees."""

    def __init__(self, place: str) -> None:
        """
        Args:
            place: the output place; need not exist.
        """
        self._path = Path(os.path.realpath(parse_place(place).text))
        self._shown = place

    @property
    def place(self) -> str:
        """The output place, as it was named."""
        return self._shown

    def hold(self) -> LeaseView | None:
        """Who holds the place, or what is made before it."""
        holds = [each for each in map(hold_of, (self._path, steps_beside(self._path))) if each is not None]
        return next((each for each in holds if each.is_alive), holds[0] if holds else None)

    def begun(self) -> Record | None:
        """The record that was written to last, of those beside the place."""
        pattern = f".{self._path.name}.raymerge-"
        ledgers = [
            each / RECORD / NAME
            for each in self._path.parent.glob(".*")
            if each.name.startswith(pattern) and (each / RECORD / NAME).is_file()
        ]
        newest = max(ledgers, key=lambda each: each.stat().st_mtime, default=None)
        return None if newest is None else _reader(newest.parent)

    def published(self) -> Record | None:
        """That of the directory, if raymerge made it."""
        record = self._path / RECORD
        return _reader(record) if (record / STORY).is_file() else None

    def has_steps(self) -> bool:
        """Whether the directory for results between is there."""
        return steps_beside(self._path).is_dir()

    def ask_to_stop(self, holder: Holder) -> None:
        """Leave a file beside the place."""
        StopRequest.beside(self._path).make(holder)


def records_of(place: str) -> RunRecords:
    """The records of an output place.

    Raises:
        OptionError: it is an address of a store that cannot be spoken to from here.
        CheckpointError: there are no credentials for it.
    """
    if not is_object_place(place):
        return LocalRecords(place)

    return RemoteRecords(place)


def journal_lines(
    records: RunRecords, *, follow: bool, pause: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """The lines of the newest journal, without line ends.

    Args:
        records: of the place.
        follow: whether to wait for more for as long as somebody holds the place.
        pause: waits between two looks.
    """
    told, is_held = 0, True
    while True:
        # Looked at first, so that what was written just before the end is not missed.
        is_held = follow and is_made(records)
        text = _journal(records)
        if len(text) < told:
            told = 0
        whole = text.rfind(b"\n") + 1
        yield from text[told:whole].decode(errors="replace").splitlines()
        told = max(told, whole)
        if not is_held:
            return
        pause(_POLL_SECONDS)


def seconds_taken(records: RunRecords, run: str) -> float | None:
    """How long a run of this name took that made the checkpoint in its place; None where another made it."""
    record = records.published()
    story = {} if record is None else read_object(record, STORY)
    return float(story.get("seconds", 0)) if story.get("run") == run else None


def is_made(records: RunRecords) -> bool:
    """Whether somebody makes it now."""
    hold = records.hold()
    return hold is not None and hold.is_alive


def events_of(record: Record) -> Iterator[dict[str, Any]]:
    """The events of a journal, in order, each with its ``time``; what is no event is left out."""
    return entries_of(record(JOURNAL))


def read_object(record: Record, key: str) -> dict[str, Any]:
    """A file of a record that holds a JSON object; empty where there is none that can be read."""
    return next(entries_of(record(key).replace(b"\n", b" ")), {})


def is_older(begun: Record, published: Record | None) -> bool:
    """Whether an unfinished run was left behind before the checkpoint in its place was finished."""
    if published is None:
        return False
    finished = read_object(published, STORY).get("finished")
    last = [str(event.get("time", "")) for event in events_of(begun)][-1:]
    return bool(last) and isinstance(finished, str) and last[0] < finished


def _reader(directory: Path) -> Record:
    def read(key: str) -> bytes:
        try:
            with open(directory / key, "rb", opener=_without_links) as file:
                return file.read(_MOST_BYTES)
        except OSError:
            # It may be renamed or begun anew at this moment.
            return b""

    return read


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _journal(records: RunRecords) -> bytes:
    begun, published = records.begun(), records.published()
    record = published if begun is None or is_older(begun, published) else begun
    return b"" if record is None else record(JOURNAL)


_WATCH_SECONDS = 0.5


class RemoteRecords:
    """Those of a place in an object store."""

    def __init__(self, place: str, *, dead_seconds: float = DEAD_SECONDS) -> None:
        """
        Args:
            place: the output place, with its options.
            dead_seconds: how long a holder on another machine may show nothing until it is taken for dead.

        Raises:
            OptionError: what speaks to such stores is not installed.
            CheckpointError: there are no credentials.
        """
        self._writer = ObjectWriter(place)
        self._place = shown(place)
        self._dead_seconds = dead_seconds

    @property
    def place(self) -> str:
        """The output place, without its options."""
        return self._place

    def hold(self) -> LeaseView | None:
        """Who holds the place, or what is made before it; on another machine a holder is waited for until it
        shows that it lives."""
        is_told = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            found = threads.map(lambda lease: self._hold_of(lease, is_told), (LEASE, STEPS_LEASE))
            holds = [each for each in found if each is not None]
        return next((each for each in holds if each.is_alive), holds[0] if holds else None)

    def begun(self) -> Record | None:
        """The record of the unfinished run."""
        keys = self._keys()
        # The manifest comes first; the mark and the ledger may not be there yet.
        is_begun = f"{RECORD}/{MARK}" in keys or (MANIFEST in keys and not _is_whole(keys))
        return self._read if is_begun else None

    def published(self) -> Record | None:
        """That of the checkpoint, if raymerge made it and it is whole."""
        keys = self._keys()
        is_whole = _is_whole(keys) and f"{RECORD}/{STORY}" in keys and f"{RECORD}/{MARK}" not in keys
        return self._read if is_whole else None

    def has_steps(self) -> bool:
        """No: they are in a directory that the store knows nothing of."""
        return False

    def ask_to_stop(self, holder: Holder) -> None:
        """Leave an object in the record."""
        StopRequest.in_store(self._writer).make(holder)

    def _hold_of(self, lease: str, is_told: threading.Event) -> LeaseView | None:
        """Who holds one of the leases; ``is_told`` once either is known to be of one that lives."""
        found = self._watched(lease, is_told)
        if found is not None and found.is_alive:
            is_told.set()
        return found

    def _watched(self, lease: str, is_told: threading.Event) -> LeaseView | None:
        first = look(self._writer, lease)
        if first is None:
            return None
        if first.holder is not None and is_here(first.holder):
            return LeaseView(first.holder, 0.0, runs_here(first.holder))
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self._dead_seconds:
            found = look(self._writer, lease)
            if found is None or found.version != first.version:
                return None if found is None else LeaseView(found.holder, 0.0, True)
            if is_told.wait(_WATCH_SECONDS):
                return None
        return LeaseView(first.holder, waited, False)

    def _read(self, key: str) -> bytes:
        found = self._writer.get(f"{RECORD}/{key}")
        text = b"" if found is None else found[0]
        if key != NAME:
            return text
        begun = self._writer.get(f"{RECORD}/{MARK}")
        mark = "" if begun is None else begun[0].decode("ascii", "replace")
        pieces = [self._writer.get(each) for each in pieces_of(self._keys(), RECORD, mark)]
        return b"\n".join((text, *(each[0] for each in pieces if each is not None)))

    def _keys(self) -> frozenset[str]:
        return frozenset(each.key for each in self._writer.files())


def _is_whole(keys: frozenset[str]) -> bool:
    return bool(keys & {INDEX_FILE, CONFIG_FILE})
