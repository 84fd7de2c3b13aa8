"""How an unfinished run begins and how it is thrown away, so that workers of one that is gone do no harm.

A directory that is begun anew may get the name of one that was thrown away, and a worker that was given up
may still write there by name what was right for the old one. So each beginning has a mark of its own, by
chance. Numbers of files would not do: file systems give them out again.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymerge.checkpoints.files import RECORD_DIRECTORY
from raymerge.errors import IncompleteError, Problem, TargetError
from raymerge.storage.local.store import LocalStore

RECORD = RECORD_DIRECTORY
"""Directory of the run record within a checkpoint: plan, ledger, recipe, numerics and choice of device."""


MARK = "begun"
"""File of the run record that tells one beginning from another; it is not published."""


def begin(record: Path) -> None:
    """Have a new mark in a run record, durably: who had another is refused from then on."""
    with LocalStore(record) as store:
        store.write_atomic(MARK, uuid.uuid4().hex.encode())


def mark_of(record: Path) -> str:
    """The mark of a run record; "" where there is none."""
    try:
        return (record / MARK).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def check_begun(record: Path, mark: str) -> None:
    """See that a run is still the one that was begun with ``mark``.

    A file that was opened before this is of that run, whatever happens to its name later.

    Raises:
        IncompleteError: it was thrown away, or published.
    """
    if mark_of(record) != mark:
        raise IncompleteError(
            f"{record.parent}: this is no longer the run that the worker writes for; another began there, "
            "or it is published. The worker gives up."
        )


def throw_away(directory: Path, place: Path) -> None:
    """Remove an unfinished run beside ``place``: after a crash at any moment it is whole or nobody takes it
    up.

    What cannot be deleted is left to ``remove_thrown_away``.

    Raises:
        OSError: it cannot be renamed, and stays as it was.
    """
    away = place.parent / f"{_thrown_away(place)}{uuid.uuid4().hex[:8]}"
    try:
        directory.rename(away)
    except FileNotFoundError:
        return
    sync_directory(place.parent)
    shutil.rmtree(away, ignore_errors=True)


def remove_thrown_away(place: Path) -> None:
    """Delete what a crash left of runs that were thrown away beside ``place``."""
    for left in place.parent.glob(glob.escape(_thrown_away(place)) + "*"):
        shutil.rmtree(left, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _thrown_away(place: Path) -> str:
    # Not as unfinished runs are named: it is none any more.
    return f".{place.name}.raymerge.discarded-"


def object_at(path: Path) -> dict[str, Any]:
    """The JSON object of a file of a record; empty where there is none that can be read."""
    try:
        return object_in(path.read_bytes())
    except OSError:
        return {}


def object_in(text: bytes) -> dict[str, Any]:
    """A text as a JSON object; empty where it is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


_FACTS_SHOWN = 4


def agree(before: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether conditions, as they were written down, are those that are wanted."""
    return before == _plain(wanted)


def check_agreement(
    before: Mapping[str, Any] | None, wanted: Mapping[str, Any], *, where: str, what: str
) -> None:
    """Refuse to mix what was made under two conditions, and to throw it away unasked.

    Versions of files that nobody has made yet are not compared.

    Args:
        before: the conditions of what is there; None where there is nothing.
        wanted: those of this run.
        where: what messages point at.
        what: what is there, as the beginning of a sentence.

    Raises:
        TargetError: they differ; it says in what.
    """
    if before is None:
        return
    old, new = _known(before, wanted), _known(wanted, wanted)
    if not agree(old, new):
        raise TargetError(
            Problem(
                where,
                f"{what} was begun under other conditions: {difference(old, new)}.",
                "Restore them to resume it, or give --replace to start again.",
            )
        )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first few facts in which two records differ, as one phrase."""
    if not old:
        return "its record cannot be read"
    before, after = _facts(old), _facts(_plain(new))
    places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    found = [f"{place} was {_shown(before.get(place))}, is {_shown(after.get(place))}" for place in places]
    shown = found[:_FACTS_SHOWN] + ([f"and {len(found) - _FACTS_SHOWN} more"] if found[_FACTS_SHOWN:] else [])
    return "; ".join(shown) or "its plan was made of the same facts in another way"


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as it is when it was written down and read again."""
    found: dict[str, Any] = json.loads(json.dumps(dict(record)))
    return found


def _known(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions without the holdings of which ``wanted`` does not know a version yet."""
    versions = wanted.get("versions", [])
    unmade = {number for number, each in enumerate(versions) if not all(v for _, v in each["files"])}
    kept = [each for number, each in enumerate(record.get("versions", [])) if number not in unmade]
    known = {**record, "versions": kept}
    if "companions" in wanted and wanted["companions"] is None:
        known["companions"] = None
    return known


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a record by their place, as far as they tell one run from another."""
    found: dict[str, Any] = {}
    for key in ("recipe", "raymerge", "sources", "config", "numerics", "versions", "companions", "commits"):
        found |= _flat(key, record.get(key))
    return found


def _flat(place: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        named = value.items()
    elif isinstance(value, list):
        named = {_label(each, position): each for position, each in enumerate(value)}.items()
    else:
        return {place: value}
    return {at: fact for key, each in named for at, fact in _flat(f"{place} > {key}", each).items()}


def _label(value: Any, position: int) -> str:
    """How to call an element of a list: by the model or file that it is about, else by its number."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return str(position + 1)


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)
