"""The records of an output place in an object store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.publish.attempt import MARK
from raymerge.publish.lease import DEAD_SECONDS, Holder, LeaseView, is_here, runs_here
from raymerge.publish.ledger import NAME
from raymerge.publish.output_contents import MANIFEST
from raymerge.publish.remote_lease import look
from raymerge.publish.remote_staging import LEASE, STEPS_LEASE, pieces_of
from raymerge.publish.remote_stop import ask_to_stop
from raymerge.publish.run_records import RECORD, STORY, Record
from raymerge.storage.addresses import shown
from raymerge.storage.objects.writer import ObjectWriter

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
        ask_to_stop(self._writer, holder)

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
