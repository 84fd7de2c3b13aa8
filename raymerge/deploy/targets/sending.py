"""Notes of this machine on the runs that were sent away from it, so that a run's name says enough."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_MOST_NOTES = 500


@dataclass(frozen=True, slots=True)
class RunNote:
    """What is kept of one run. There is no secret in it: a profile has none."""

    run: str
    """Its name."""
    target: str
    """Kind of its target."""
    address: str
    """Address of it; "" for targets without."""
    output: str
    """The output place, as the cluster sees it."""
    profile: str
    """The profile, as YAML."""
    submitted: str
    """When, in UTC."""


class RunNotes:
    """The notes in a directory, one file a run. What cannot be written there is not remembered."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: where they are; made when it is needed.
        """
        self._directory = directory

    def keep(self, note: RunNote) -> None:
        """Write a note down, and forget the oldest beyond some hundreds."""
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = self._directory / f".{secrets.token_hex(4)}"
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(note), file)
            fresh.replace(self._directory / f"{note.run}.json")
            for path in self._newest_first()[_MOST_NOTES:]:
                path.unlink(missing_ok=True)

    def of_run(self, run: str) -> RunNote | None:
        """The note on a run; None where there is none."""
        return _read(self._directory / f"{run}.json")

    def of_output(self, output: str) -> RunNote | None:
        """The newest note on a run that makes this output; None where there is none."""
        with suppress(OSError):
            notes = map(_read, self._newest_first())
            return next((note for note in notes if note is not None and note.output == output), None)
        return None

    def _newest_first(self) -> list[Path]:
        found = list(self._directory.glob("*.json"))
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _read(path: Path) -> RunNote | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        note = RunNote(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return note if all(isinstance(value, str) for value in found.values()) else None
