"""The ledger of a run, written by the driver: durable segments or units, and marks of published files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymerge.errors import IncompleteError
from raymerge.execute.receipts import Receipt
from raymerge.publish.attempt import RECORD
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import KEPT

NAME = "ledger.jsonl"


class Ledger:
    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Makes the file with ``conditions`` (numerics, versions of the sources' files) if it is absent."""
        self._path = path
        self._conditions = dict(conditions)
        if not path.exists():
            self.begin({})

    @staticmethod
    def conditions(path: Path) -> Mapping[str, Any] | None:
        lines = _lines(path)
        conditions = lines[0].get("conditions") if lines else None
        is_readable = isinstance(conditions, dict) and isinstance(conditions.get("versions", []), list)
        return conditions if is_readable else None

    @staticmethod
    def versions(path: Path) -> list[dict[str, str]]:
        """Versions of each source's files when they were read; empty where the ledger is damaged."""
        return [file_versions(each) for each in (Ledger.conditions(path) or {}).get("versions", [])]

    @staticmethod
    def files(path: Path) -> Mapping[str, Any] | None:
        # From the end, where they are: a merge that reads what was published asks again and again.
        entries = (entry.get("files") for entry in map(_entry, reversed(_texts(path))) if entry is not None)
        return next((marks for marks in entries if isinstance(marks, dict)), None)

    @staticmethod
    def read(path: Path) -> dict[int, Receipt]:
        """Receipts by segment, without incomplete lines, which a crash leaves."""
        receipts = (_receipt(line) for line in _lines(path) if "receipt" in line)
        return {receipt.segment: receipt for receipt in receipts if receipt is not None}

    def shards(self) -> dict[str, str]:
        """The stamps of complete objects by shard."""
        return {
            str(line["shard"]): str(line.get("stamp", "")) for line in _lines(self._path) if "shard" in line
        }

    def receipts(self) -> dict[int, Receipt]:
        return Ledger.read(self._path)

    def begin(self, receipts: Mapping[int, Receipt]) -> None:
        """Replace the ledger by these receipts, atomically and durably."""
        entries = ({"receipt": receipt.to_json()} for receipt in receipts.values())
        text = "".join(map(_line, ({"conditions": self._conditions}, *entries)))
        with LocalStore(self._path.parent) as store:
            store.write_atomic(self._path.name, text.encode())

    def record(self, *receipts: Receipt) -> None:
        """Add receipts durably: several cost no more than one."""
        if receipts:
            self._append(*({"receipt": receipt.to_json()} for receipt in receipts))

    def record_shard(self, name: str, stamp: str, receipts: Iterable[Receipt]) -> None:
        """Add durably that a shard is a complete object with this stamp, and the receipts of its segments."""
        entries = ({"receipt": receipt.to_json()} for receipt in receipts)
        self._append({"shard": name, "stamp": stamp}, *entries)

    def record_files(self, marks: Mapping[str, Sequence[int]]) -> None:
        """Add the marks of the published files by their keys; they tell later changes."""
        self._append({"files": marks})

    def _append(self, *entries: Mapping[str, Any]) -> None:
        text = "".join(map(_line, entries))
        if not _ends_whole(self._path):
            text = "\n" + text
        with LocalStore(self._path.parent) as store:
            store.append(self._path.name, text.encode())


def file_versions(entry: Any) -> dict[str, str]:
    """Versions of a source's files in the conditions; empty where these are damaged."""
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
    """The readable lines, without one that a crash cut short."""
    return [entry for entry in map(_entry, _texts(path)) if entry is not None]


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _entry(text: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _receipt(line: Mapping[str, Any]) -> Receipt | None:
    try:
        return Receipt.from_json(line["receipt"])
    except (TypeError, ValueError, OverflowError):
        return None


_TRIED = 10


class RemoteLedger(Ledger):
    """A ledger in pieces, each an object, since objects cannot be appended to.

    Pieces have the mark of the run's beginning in their keys, and none replaces another: a process that was
    thought dead and goes on cannot change the ledger of another run.
    """

    def __init__(
        self,
        path: Path,
        conditions: Mapping[str, Any],
        writer: ObjectWriter,
        mark: str,
        guard: Callable[[], None],
    ) -> None:
        """``path`` is a local file with all that was there when the run began; ``guard`` raises where the
        place is no longer that of this run.
        """
        self._writer = writer
        self._guard = guard
        self._mark = mark
        self._next = 1 + max((_number(key) for key in self._pieces()), default=0)
        super().__init__(path, conditions)

    @staticmethod
    def fetch(path: Path, writer: ObjectWriter, mark: str) -> None:
        """Write the local file from the objects; no file where there are no objects."""
        whole = writer.get(f"{RECORD}/{NAME}")
        if whole is None:
            path.unlink(missing_ok=True)
            return
        pieces = [writer.get(key) for key in pieces_of((each.key for each in writer.files()), mark)]
        texts = [whole[0], *(each[0] for each in pieces if each is not None)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts))

    def begin(self, receipts: Mapping[int, Receipt]) -> None:
        """Begin anew; a reader meanwhile finds the old receipts, some of them, or these."""
        super().begin(receipts)
        old = self._pieces()
        self._writer.put_only(f"{RECORD}/{NAME}", self._path.read_bytes(), self._guard)
        self._writer.delete(old)

    def _append(self, *entries: Mapping[str, Any]) -> None:
        before = self._path.stat().st_size
        super()._append(*entries)
        with self._path.open("rb") as file:
            file.seek(before)
            text = file.read()
        # A piece that is there is of a process that was taken for dead, and as true as ours, or is ours, if
        # an answer was lost.
        for number in range(self._next, self._next + _TRIED):
            key = f"{RECORD}/ledger/{self._mark}/{number:08d}.jsonl"
            if self._writer.put_new(key, text) is not None:
                self._next = number + 1
                return
        raise IncompleteError(f"{self._writer.location(key)}: another process writes there. {KEPT}")

    def _pieces(self) -> list[str]:
        return pieces_of((each.key for each in self._writer.files()), self._mark)


def pieces_of(keys: Iterable[str], mark: str) -> list[str]:
    """The pieces of the ledger of one beginning among ``keys``, in order."""
    pieces = (key for key in keys if key.startswith(f"{RECORD}/ledger/{mark}/") and _number(key) > 0)
    return sorted(pieces, key=_number)


def _number(key: str) -> int:
    name = key.rpartition("/")[2].removesuffix(".jsonl")
    return int(name) if name.isdecimal() and len(name) < 19 else 0
