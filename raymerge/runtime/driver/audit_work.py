"""The work of an audit: segments of one output, each against the ledger and the sources."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.runtime.workers.pool import Runner
from raymerge.storage.addresses import is_remote
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore
from raymerge.verifier.audit import Auditor, Commission


@dataclass(frozen=True, slots=True)
class AuditWork:
    """Everything that workers need to audit segments, but their numbers."""

    commission: Commission
    """What is audited, and how."""
    output: str
    """The output's place, reachable from every worker."""
    roots: tuple[str, ...]
    """Directory of each source."""
    files: tuple[SourceFile, ...]
    """The files of the sources that are there."""
    slots: int
    """Segments that a worker audits at the same time."""

    @property
    def part(self) -> str:
        """A segment."""
        return "segment"

    @property
    def place(self) -> Path | None:
        """The output's directory; None where it is in no file system."""
        return None if is_remote(self.output) else Path(self.output)

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every segment, the files that it reads."""
        numbers = {(file.source, file.key): number for number, file in enumerate(self.files)}
        return tuple(
            frozenset(numbers[file] for file in files if file in numbers)
            for files in files_read(self.commission.plan)
        )

    def copies(self) -> frozenset[int]:
        """None: an audit is computed on processors alone."""
        return frozenset()

    def lessened(self, number: int, budget: int | None) -> int | None:  # noqa: ARG002 - all parts are alike
        """None: with less memory fewer tensors could be audited, and nobody would have asked for that."""
        return None

    def open(self, device: torch.device, name: str) -> Runner:  # noqa: ARG002 - float64 is for processors
        """What audits segments."""
        sources = [open_store(root) for root in self.roots]
        output = open_store(self.output)
        return _AuditRunner(Auditor(self.commission, sources, output), (*sources, output), name)


class _AuditRunner:
    """Audits segments, and holds the stores that they are read from."""

    def __init__(self, auditor: Auditor, stores: Sequence[ReadStore], name: str) -> None:
        self._auditor = auditor
        self._stores = stores
        self._name = name

    def run(self, number: int, budget: int | None = None) -> Receipt:  # noqa: ARG002 - see ``lessened``
        """Audit one segment; the receipt has what was found."""
        began = time.monotonic()
        findings, read_bytes = self._auditor.audit(number)
        receipt = Receipt(number, read_bytes, 0, round(time.monotonic() - began, 6), self._name, {})
        return replace(receipt, report=findings.to_json())

    def abort(self) -> None:
        """Have the segments in hand fail at their next tensor or sample."""
        self._auditor.abort()

    def close(self) -> None:
        """Close the files."""
        for store in self._stores:
            store.close()
