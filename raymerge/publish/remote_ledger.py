"""The ledger of a run whose output is in an object store: a local file, mirrored piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raymerge.errors import IncompleteError
from raymerge.execute.receipts import Receipt
from raymerge.publish.ledger import NAME, Ledger
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import KEPT

_TRIED = 10


class RemoteLedger(Ledger):
    """A ledger that is durable once its last piece is an object: no object can be appended to.

    Pieces are kept by the mark of the run's beginning, and none is written over another: a process that
    was taken for dead and goes on can neither add to the ledger of another run nor take from it.
    """

    def __init__(
        self,
        path: Path,
        conditions: Mapping[str, Any],
        writer: ObjectWriter,
        record: str,
        mark: str,
        guard: Callable[[], None],
    ) -> None:
        """
        Args:
            path: the local file, with all that was there when the run began.
            conditions: as in ``Ledger``.
            writer: of the output place.
            record: key of the run record.
            mark: of the run's beginning.
            guard: raises where the place is no longer that of this run.
        """
        self._writer = writer
        self._guard = guard
        self._record = record
        self._mark = mark
        self._next = 1 + max((_number(key) for key in self._pieces()), default=0)
        super().__init__(path, conditions)

    @staticmethod
    def fetch(path: Path, writer: ObjectWriter, record: str, mark: str) -> None:
        """Have the local file as the objects say; none where there are no objects."""
        whole = writer.get(f"{record}/{NAME}")
        if whole is None:
            path.unlink(missing_ok=True)
            return
        pieces = [writer.get(key) for key in pieces_of((each.key for each in writer.files()), record, mark)]
        texts = [whole[0], *(each[0] for each in pieces if each is not None)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts))

    def begin(self, receipts: Mapping[int, Receipt]) -> None:
        """Begin anew; who looks meanwhile finds the old receipts, some of them, or these."""
        super().begin(receipts)
        old = self._pieces()
        self._writer.put_only(f"{self._record}/{NAME}", self._path.read_bytes(), self._guard)
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
            key = f"{self._record}/ledger/{self._mark}/{number:08d}.jsonl"
            if self._writer.put_new(key, text) is not None:
                self._next = number + 1
                return
        raise IncompleteError(f"{self._writer.location(key)}: another process writes there. {KEPT}")

    def _pieces(self) -> list[str]:
        return pieces_of((each.key for each in self._writer.files()), self._record, self._mark)


def pieces_of(keys: Iterable[str], record: str, mark: str) -> list[str]:
    """Those of some keys that are pieces of the ledger of one beginning, in order."""
    found = (key for key in keys if key.startswith(f"{record}/ledger/{mark}/") and _number(key) > 0)
    return sorted(found, key=_number)


def _number(key: str) -> int:
    name = key.rpartition("/")[2].removesuffix(".jsonl")
    return int(name) if name.isdecimal() and len(name) < 19 else 0
