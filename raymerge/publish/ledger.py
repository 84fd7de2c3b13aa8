"""The ledger of a run: which segments or units are durable, and at the end what the published files are.
One writer, the driver; one JSON line an entry."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymerge.execute.receipts import Receipt
from raymerge.storage.local.store import LocalStore

NAME = "ledger.jsonl"


class Ledger:
    """Append-only record of receipts beside the growing shards."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """
        Args:
            path: the ledger's file; made with ``conditions`` as first line where it is absent.
            conditions: what must be the same for a run to go on: numerics and the sources' file versions.
        """
        self._path = path
        self._conditions = dict(conditions)
        if not path.exists():
            self.begin({})

    @staticmethod
    def conditions(path: Path) -> Mapping[str, Any] | None:
        """The conditions that a ledger was begun under, or None where there is no readable one."""
        lines = _lines(path)
        found = lines[0].get("conditions") if lines else None
        is_readable = isinstance(found, dict) and isinstance(found.get("versions", []), list)
        return found if is_readable else None

    @staticmethod
    def versions(path: Path) -> list[dict[str, str]]:
        """Of each source, the versions of its files when they were read; none where damaged."""
        return [file_versions(each) for each in (Ledger.conditions(path) or {}).get("versions", [])]

    @staticmethod
    def files(path: Path) -> Mapping[str, Any] | None:
        """The marks of the files that were last published, or None where none were."""
        # From the end, where they are: a merge that reads what was published asks again and again.
        found = (entry.get("files") for entry in map(_entry, reversed(_texts(path))) if entry is not None)
        return next((marks for marks in found if isinstance(marks, dict)), None)

    @staticmethod
    def read(path: Path) -> dict[int, Receipt]:
        """Receipts of a ledger by segment; a line that is not whole, as after a crash, is left out."""
        found = (_receipt(line) for line in _lines(path) if "receipt" in line)
        return {receipt.segment: receipt for receipt in found if receipt is not None}

    def shards(self) -> dict[str, str]:
        """What the shards bear that are objects and complete, by their names."""
        found = [line for line in _lines(self._path) if "shard" in line]
        return {str(line["shard"]): str(line.get("stamp", "")) for line in found}

    def receipts(self) -> dict[int, Receipt]:
        """Receipts by segment; see ``read``."""
        return Ledger.read(self._path)

    def begin(self, receipts: Mapping[int, Receipt]) -> None:
        """Begin anew with these receipts alone; durable, and after a crash the old ledger or the new one."""
        kept = ({"receipt": receipt.to_json()} for receipt in receipts.values())
        text = "".join(map(_line, ({"conditions": self._conditions}, *kept)))
        with LocalStore(self._path.parent) as store:
            store.write_atomic(self._path.name, text.encode())

    def record(self, *receipts: Receipt) -> None:
        """Add receipts and return when they are durable: several cost no more than one."""
        if receipts:
            self._append(*({"receipt": receipt.to_json()} for receipt in receipts))

    def record_shard(self, name: str, stamp: str, receipts: Iterable[Receipt]) -> None:
        """Add that a shard is a complete object, with the receipts of its segments; durable on return.

        Args:
            name: of the shard.
            stamp: what the object bears whose bytes the receipts tell of.
            receipts: of its segments.
        """
        made = ({"receipt": receipt.to_json()} for receipt in receipts)
        self._append({"shard": name, "stamp": stamp}, *made)

    def record_files(self, marks: Mapping[str, Sequence[int]]) -> None:
        """Add what tells the files that are published from any that are written later, by their keys."""
        self._append({"files": marks})

    def _append(self, *entries: Mapping[str, Any]) -> None:
        text = "".join(map(_line, entries))
        if not _ends_whole(self._path):
            text = "\n" + text
        with LocalStore(self._path.parent) as store:
            store.append(self._path.name, text.encode())


def file_versions(entry: Any) -> dict[str, str]:
    """The versions of a source's files, as conditions have them; none where they are damaged."""
    files = entry.get("files") if isinstance(entry, dict) else None
    if not isinstance(files, list) or any(not isinstance(each, list) or len(each) != 2 for each in files):
        return {}
    return {key: version for key, version in files if isinstance(key, str) and isinstance(version, str)}


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True) + "\n"


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The readable lines; one that a crash cut short is not."""
    return [entry for entry in map(_entry, _texts(path)) if entry is not None]


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _entry(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _receipt(line: Mapping[str, Any]) -> Receipt | None:
    try:
        return Receipt.from_json(line["receipt"])
    except (TypeError, ValueError, OverflowError):
        return None
