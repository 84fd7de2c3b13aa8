"""Requests to stop a run whose output is in an object store: an object in the record of its place."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from raymerge.publish.attempt import RECORD
from raymerge.publish.lease import Holder, holder_from, is_same_process, myself
from raymerge.storage.objects.writer import ObjectWriter

STOP = f"{RECORD}/stop.json"
"""Key of a request."""
_LOOK_SECONDS = 5.0
_REQUEST_SECONDS = 5.0


class RemoteStopRequest:
    """A request to stop. It names the process that is asked: no later run takes it for its own."""

    def __init__(self, place: str) -> None:
        """
        Args:
            place: the output place, with its options.
        """
        self._writer = ObjectWriter(place, seconds=_REQUEST_SECONDS)
        self._looked_at = time.monotonic()
        self._look: threading.Thread | None = None
        self._is_seen = False

    def is_made(self) -> bool:
        """Whether this process is asked to stop, as far as that was seen by now; true once.

        It is looked for every few seconds, in a thread of its own: whoever asks must not wait for the store.
        """
        now = time.monotonic()
        is_looking = self._look is not None and self._look.is_alive()
        if not is_looking and now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._look = threading.Thread(target=self._see, name="stop request", daemon=True)
            self._look.start()
        is_seen, self._is_seen = self._is_seen, False
        return is_seen

    def _see(self) -> None:
        # A store that is away for a moment says nothing, and is asked again.
        with suppress(Exception):
            asked = _asked(self._writer)
            if asked is not None:
                self._is_seen = is_same_process(asked, myself(""))
                # Gone once it was seen, and so is one to a process that has ended.
                self._writer.delete([STOP])


def ask_to_stop(writer: ObjectWriter, holder: Holder) -> None:
    """Leave a request.

    Args:
        writer: of the output place.
        holder: of the place's lease.

    Raises:
        TransientError: the store failed for a while.
        TargetError: it refuses it.
    """
    writer.put(STOP, json.dumps(asdict(holder)).encode())


def withdraw(writer: ObjectWriter) -> None:
    """Remove a request to this process, which ends; raises nothing."""
    with suppress(Exception):
        asked = _asked(writer)
        if asked is not None and is_same_process(asked, myself("")):
            writer.delete([STOP])


def _asked(writer: ObjectWriter) -> Holder | None:
    """Who is asked; None where nobody is, or nobody knows whom."""
    found = writer.get(STOP)
    return None if found is None else holder_from(found[0])
