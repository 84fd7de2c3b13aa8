"""How an unfinished run begins and how it is thrown away, so that workers of one that is gone do no harm.

A directory begun anew may get the name of one that was thrown away, and a worker that was given up may still
write there what was right for the old one. So each beginning has a random mark; inodes would not do, since
file systems reuse them.
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
    """Put a new mark into a run record, durably: processes with another are refused from then on."""
    with LocalStore(record) as store:
        store.write_atomic(MARK, uuid.uuid4().hex.encode())


def mark_of(record: Path) -> str:
    try:
        return (record / MARK).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def check_begun(record: Path, mark: str) -> None:
    """Raises IncompleteError if the run that began with ``mark`` was thrown away or published.

    A file opened before this call is of that run, whatever happens to its name later.
    """
    if mark_of(record) != mark:
        raise IncompleteError(
            f"{record.parent}: this is no longer the run that the worker writes for; another began there, "
            "or it is published. The worker gives up."
        )


def throw_away(directory: Path, place: Path) -> None:
    """Remove an unfinished run beside ``place``: after a crash at any moment it is whole, or nothing takes it
    up. What cannot be deleted is left to ``remove_thrown_away``. Raises OSError if it could not be renamed,
    and is unchanged.
    """
    away = place.parent / f"{_thrown_away(place)}{uuid.uuid4().hex[:8]}"
    try:
        directory.rename(away)
    except FileNotFoundError:
        return
    sync_directory(place.parent)
    shutil.rmtree(away, ignore_errors=True)


def remove_thrown_away(place: Path) -> None:
    """Delete leftovers of runs that were thrown away beside ``place``."""
    for left in place.parent.glob(glob.escape(_thrown_away(place)) + "*"):
        shutil.rmtree(left, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _thrown_away(place: Path) -> str:
    # Not as unfinished runs are named: it is none any more.
    return f".{place.name}.raymerge.discarded-"


def object_at(path: Path) -> dict[str, Any]:
    """A JSON object of a record; empty where it cannot be read."""
    try:
        return object_in(path.read_bytes())
    except OSError:
        return {}


def object_in(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


_FACTS_SHOWN = 4


def agree(before: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether written conditions are the wanted ones."""
    return before == _plain(wanted)


def check_agreement(
    before: Mapping[str, Any] | None, wanted: Mapping[str, Any], *, where: str, what: str
) -> None:
    """Refuse to mix results made under two conditions, or to throw one away unasked. Raises TargetError that
    says how they differ.

    ``before`` is None where there is nothing; ``where`` is the place and ``what`` the subject of the message.
    Versions of files that are not made yet are not compared.
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
    """A record as written and read again."""
    found: dict[str, Any] = json.loads(json.dumps(dict(record)))
    return found


def _known(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions without the holdings whose version ``wanted`` does not know yet."""
    versions = wanted.get("versions", [])
    unmade = {number for number, each in enumerate(versions) if not all(v for _, v in each["files"])}
    kept = [each for number, each in enumerate(record.get("versions", [])) if number not in unmade]
    known = {**record, "versions": kept}
    if "companions" in wanted and wanted["companions"] is None:
        known["companions"] = None
    return known


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a record, by their place, that distinguish runs."""
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
    """A name for an element of a list: the model or file that it is about, else its number."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return str(position + 1)


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)
