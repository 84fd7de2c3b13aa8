"""What a worker reports of a finished segment: a few hundred bytes, never tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a segment's bytes are durable, with the digest of each row."""

    segment: int
    """Number of the segment."""
    read_bytes: int
    """Bytes read from sources."""
    written_bytes: int
    """Bytes written to shards."""
    seconds: float
    """Wall time of the segment."""
    worker: str
    """Name of the worker."""
    digests: Mapping[str, str]
    """xxh3_128 hex of each row's bytes, by row number."""
    peak_rss: int = 0
    """Most bytes that the worker had grown by since it was idle, when this segment was made."""
    peak_device: int = 0
    """Most bytes of a GPU's memory that torch had handed out by then."""
    note: str = ""
    """What went otherwise than planned; empty as a rule."""
    encoding_errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sum of squared errors and of squared true values, by row number, of rows that were encoded as codes."""

    def to_json(self) -> dict[str, Any]:
        """JSON form, a line of the ledger."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Receipt:
        """Inverse of ``to_json``."""
        # JSON has no tuples, and a receipt that was read is to equal the one that was written.
        found = Receipt(**data)
        sums = {row: (error, value) for row, (error, value) in found.encoding_errors.items()}
        return replace(found, encoding_errors=sums)
