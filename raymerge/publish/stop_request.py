"""A request to stop a run, left beside its output place by whoever sees that place, on whatever machine."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from raymerge.publish.lease import Holder, holder_from, is_same_process, myself

_LOOK_SECONDS = 2.0
_MOST_BYTES = 1 << 16


class Asked(Protocol):
    """Somebody elsewhere who may ask this process to stop."""

    def is_made(self) -> bool:
        """Whether this process is asked to stop; may be called often."""


class StopRequest:
    """A file beside a place. It names the process that is asked: no later run takes it for its own."""

    def __init__(self, place: Path) -> None:
        """
        Args:
            place: the output place; need not exist.
        """
        real = Path(os.path.realpath(place))
        self._path = real.parent / f".{real.name}.raymerge-stop"
        self._looked_at = 0.0

    def make(self, holder: Holder) -> None:
        """Ask a process to stop.

        Args:
            holder: of the place's lease.

        Raises:
            OSError: nothing can be written there.
        """
        fresh = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            fresh.write_text(json.dumps(asdict(holder)))
            fresh.replace(self._path)
        finally:
            fresh.unlink(missing_ok=True)

    def is_made(self) -> bool:
        """Whether this process is asked to stop; looked for every few seconds.

        A request is gone once it was seen, and so is one to a process that has ended.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        # Storage that is away for a moment says nothing, and is asked again.
        with suppress(OSError):
            asked = self._asked()
            if asked is not None:
                self.withdraw()
                return is_same_process(asked, myself(""))
        return False

    def withdraw(self) -> None:
        """Remove it."""
        self._path.unlink(missing_ok=True)

    def _asked(self) -> Holder | None:
        """Who is asked; None where nobody is."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return holder_from(os.pread(descriptor, _MOST_BYTES, 0))
        finally:
            os.close(descriptor)
