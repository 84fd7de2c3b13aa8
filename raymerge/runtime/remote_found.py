"""What lies at a place in an object store, and what of it may be deleted there.

A prefix has no one owner, as a directory has: beside a checkpoint, and below it, may be whatever others keep
in that bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.checkpoints.tokenizer import MORE_TEMPLATES
from raymerge.runtime.journal import JOURNAL
from raymerge.runtime.ledger import NAME
from raymerge.runtime.run_records import entries_of
from raymerge.runtime.staging import RECORD
from raymerge.storage.object_writer import ObjectWriter

MANIFEST = f"{RECORD}/plan/manifest.json"
"""Key of what says whose the place is."""
_MADE = (CONFIG_FILE, INDEX_FILE)
_LEFT = frozenset({f"{RECORD}/stop.json", f"{RECORD}/{JOURNAL}"})
"""What a run may leave that came no further."""
_RECORDED = ("plan", "ledger", "stages")
"""Directories of a record."""


def is_empty(keys: Collection[str]) -> bool:
    """Whether there is nothing but what a run left that came no further."""
    return _LEFT.issuperset(keys)


def is_checkpoint(keys: Collection[str], manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is there, or a run that is on its way to one.

    Args:
        keys: every object at the place.
        manifest: of the plan in its record; empty where there is none.
    """
    return not {*keys}.isdisjoint(_MADE) or "digest" in manifest


def strangers(keys: Collection[str], writer: ObjectWriter) -> list[str]:
    """Objects that are no part of the checkpoint there, so that nobody may delete them with it, sorted.

    A checkpoint is what has no further directory in its key, its record, its chat templates, and what a run
    wrote down that it copies.

    Args:
        keys: every object at the place.
        writer: of the place.
    """
    is_recorded = MANIFEST in keys
    apart = sorted(key for key in keys if "/" in key and not _is_part(key, is_recorded=is_recorded))
    copied = frozenset(_copied(writer)) if apart and is_recorded else frozenset()
    return [key for key in apart if key not in copied]


def _is_part(key: str, *, is_recorded: bool) -> bool:
    directory, *others = key.split("/")
    if directory == MORE_TEMPLATES:
        return len(others) == 1
    is_record = directory == RECORD and (len(others) == 1 or others[0] in _RECORDED)
    return (is_record and is_recorded) or key in _LEFT


def _copied(writer: ObjectWriter) -> Iterator[str]:
    """Keys that the run there copied, or was to copy, beside the weights."""
    found = writer.get(f"{RECORD}/{NAME}")
    first = next(entries_of(b"" if found is None else found[0]), {})
    conditions = first.get("conditions")
    companions = conditions.get("companions") if isinstance(conditions, dict) else None
    for each in companions if isinstance(companions, list) else ():
        if isinstance(each, list) and each and isinstance(each[0], str):
            yield each[0]
