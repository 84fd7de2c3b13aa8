"""Runs on another machine: checks before they are sent, notes to find them again, patience with servers."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from raymerge.deploy.profiles.profile import steps_faults
from raymerge.deploy.profiles.sections import RunSettings
from raymerge.errors import IncompleteError, OptionError, Problem
from raymerge.recipes.load import canonical, parse_recipes
from raymerge.recipes.order import places_read
from raymerge.storage.addresses import as_path, is_remote, shown

_USUAL = RunSettings()
_OPTIONS: Mapping[tuple[str | int, ...], str] = {("output",): "-o", ("run", "steps"): "--steps"}
_ABSOLUTE = "Write its absolute path as the cluster sees it, or an address such as s3://bucket/dir."


def recipe_digest(text: str) -> str:
    """Equal for recipes of equal meaning, however they are spelled; raises RecipeError."""
    meaning = "\n".join(canonical(each) for each in parse_recipes(text))
    return hashlib.sha256(meaning.encode()).hexdigest()[:16]


def sending_problems(
    text: str, name: str, output: str, *, along: Path | None = None, run: RunSettings = _USUAL
) -> tuple[Problem, ...]:
    """All paths that mean nothing on another machine. ``along``: a directory that is sent with it, and is the
    current one there. Raises RecipeError: the recipe is not valid."""
    problems, recipes = [], parse_recipes(text, name)
    if not is_remote(output) and not os.path.isabs(as_path(output)):
        what = f"the output place '{output}' is relative to a directory of this machine."
        problems.append(Problem("-o", what, _ABSOLUTE))
    for fault in steps_faults(run, output, len(recipes)):
        problems.append(Problem(_OPTIONS[fault.path], fault.what, fault.remedy))
    for where, path in places_read(recipes):
        is_absolute = is_remote(path) or os.path.isabs(path)
        is_hub_name = path.count("/") == 1 and not path.startswith((".", "~")) and not os.path.exists(path)
        # Only what is relative may be here: what is absolute is a path of the cluster.
        if not (is_absolute or is_hub_name or (along is not None and (along / path).exists())):
            what = f"'{shown(path)}' is a path of this machine, which the cluster does not have."
            problems.append(Problem(where, what, _ABSOLUTE))
    return tuple(dict.fromkeys(problems))


def other_recipe(run: str, output: str) -> OptionError:
    """The refusal of a run whose output another run makes of another recipe."""
    remedy = f"Wait for it, stop it with 'raymerge stop {run}', or choose another -o."
    return OptionError(Problem(output, f"the run {run} makes it now, of another recipe.", remedy))


_MOST_NOTES = 500


@dataclass(frozen=True, slots=True)
class RunNote:
    """A record of one run, without secrets, as a profile has none."""

    run: str
    target: str
    address: str
    """"" for targets without."""
    output: str
    """As the cluster sees it."""
    profile: str
    submitted: str
    """In UTC."""


class RunNotes:
    """Notes in a directory, one file a run; write errors are ignored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, note: RunNote) -> None:
        """Keep a note; the oldest beyond some hundreds are deleted."""
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
        return _read(self._directory / f"{run}.json")

    def of_output(self, output: str) -> RunNote | None:
        with suppress(OSError):
            notes = map(_read, self._newest_first())
            return next((note for note in notes if note is not None and note.output == output), None)
        return None

    def _newest_first(self) -> list[Path]:
        notes = self._directory.glob("*.json")
        return sorted(notes, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _read(path: Path) -> RunNote | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        note = RunNote(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return note if all(isinstance(value, str) for value in fields.values()) else None


class AwayError(OptionError):
    """A server does not answer; it may later."""


Seen = TypeVar("Seen")

_PAUSE_FACTOR = 10
"""Looks are this many times as far apart as one takes: each sends the whole log."""


def look_patiently(
    look: Callable[[], Seen],
    run: str,
    passing: tuple[type[OptionError], ...],
    *,
    pause: float,
    away_seconds: float,
) -> tuple[Seen, float]:
    """What is seen of a run, and the seconds to wait before the next look. ``passing``: errors after which to
    look again. ``pause``: least seconds between two looks. ``away_seconds``: how long such errors are
    tolerated. Raises IncompleteError: they went on for longer; the run may go on."""
    ends_at = time.monotonic() + away_seconds
    while True:
        began = time.monotonic()
        try:
            return look(), max(pause, _PAUSE_FACTOR * (time.monotonic() - began))
        except passing as error:
            if time.monotonic() > ends_at:
                how = f"'raymerge status {run}' tells, once the server answers."
                raise IncompleteError(f"{error} The run may go on: {how}") from error
            time.sleep(pause)
