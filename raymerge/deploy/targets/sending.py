"""Runs sent to another machine: checks of their paths, and notes to find them again."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from raymerge.deploy.profiles.feasible import steps_faults
from raymerge.deploy.profiles.sections import RunSettings
from raymerge.errors import Problem
from raymerge.recipes import canonical, parse_recipes
from raymerge.recipes.order import places_read
from raymerge.storage.addresses import as_path, is_remote, shown

_USUAL = RunSettings()
_OPTIONS: Mapping[tuple[str | int, ...], str] = {("output",): "-o", ("run", "steps"): "--steps"}
_ABSOLUTE = "Write its absolute path as the cluster sees it, or an address such as s3://bucket/dir."


def recipe_digest(text: str) -> str:
    """Equal for recipes of equal meaning, however they are spelled; raises RecipeError."""
    said = "\n".join(canonical(each) for each in parse_recipes(text))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def sending_problems(
    text: str, name: str, output: str, *, along: Path | None = None, run: RunSettings = _USUAL
) -> tuple[Problem, ...]:
    """All paths that mean nothing on another machine.

    Args:
        along: a directory that is sent with it, and is the current one there.

    Raises:
        RecipeError: the recipe is not valid.
    """
    found, recipes = list(_output_problems(output)), parse_recipes(text, name)
    found += (
        Problem(_OPTIONS[each.path], each.what, each.remedy)
        for each in steps_faults(run, output, len(recipes))
    )
    for where, path in places_read(recipes):
        if _is_of_here(path) and not (along is not None and (along / path).exists()):
            what = f"'{shown(path)}' is a path of this machine, which the cluster does not have."
            found.append(Problem(where, what, _ABSOLUTE))
    return tuple(dict.fromkeys(found))


def _output_problems(output: str) -> Iterator[Problem]:
    if not is_remote(output) and not os.path.isabs(as_path(output)):
        what = f"the output place '{output}' is relative to a directory of this machine."
        yield Problem("-o", what, _ABSOLUTE)


def _is_of_here(path: str) -> bool:
    """Whether a path means something on this machine only: relative, and no Hub name."""
    if is_remote(path) or os.path.isabs(path):
        return False
    return path.startswith((".", "~")) or path.count("/") != 1 or os.path.exists(path)


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
        found = list(self._directory.glob("*.json"))
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _read(path: Path) -> RunNote | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        note = RunNote(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return note if all(isinstance(value, str) for value in found.values()) else None
