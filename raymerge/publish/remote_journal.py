"""The journal of a run whose output is in an object store, mirrored for whoever asks meanwhile how it goes.

It is no ground for anything, so nothing waits for it and nothing ends by it: it has a thread and a connection
of its own, and what the store refuses is tried again a few seconds later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raymerge.storage.objects.writer import ObjectWriter

_PAUSE_SECONDS = 5.0


class JournalMirror:
    """Keeps an object as a local file is."""

    def __init__(self, writer: ObjectWriter, journal: Path, key: str, is_ours: Callable[[], bool]) -> None:
        """
        Args:
            writer: of the output place; the mirror's own, without patience.
            journal: the local file; need not exist.
            key: of the object.
            is_ours: whether the place is still that of this run; asked just before each time.
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
        """Have it written every few seconds until the block ends."""
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
        """Write it now, if the store lets it and there is anything new; raises nothing."""
        with suppress(Exception), self.lock:
            if self._journal.stat().st_size != self._nbytes and self._is_ours():
                text = self._journal.read_bytes()
                self._writer.put(self._key, text)
                self._nbytes = len(text)
