"""What a worker reports of a finished segment: a few hundred bytes, never tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raymerge.checkpoints.quantisation.block_codec import Exactness
from raymerge.errors import RaymergeError

UNFINISHED = ".part"
"""Ending of a shard's name until all of its segments are in."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a segment's bytes are durable, with the digest of each op."""

    segment: int
    read_bytes: int
    written_bytes: int
    seconds: float
    worker: str
    digests: Mapping[str, str]
    peak_rss: int = 0
    """Most bytes that the worker had grown by since it was idle, when this segment was made."""
    peak_device: int = 0
    note: str = ""
    """What went otherwise than planned; empty as a rule."""
    encoding_errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sum of squared errors and of squared true values, by op number, of ops that were encoded as codes."""
    exactness: Mapping[str, Exactness] = field(default_factory=dict)
    """By op number, of ops that were converted to codes."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """What storage failed with for a moment, and how often it was asked again, since the worker told last."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What an audit of the segment found, as JSON values; empty where it was made."""

    def to_json(self) -> dict[str, Any]:
        # Not by asdict, which copies every digest: there are a hundred thousand receipts.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def is_by_ops(self) -> bool:
        """Whether its digests are those of ops: of a unit, they are those of files."""
        return all(map(_is_op, self.digests))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Receipt:
        """Inverse of ``to_json``. Raises TypeError or ValueError: it is no receipt."""
        receipt = Receipt(**data)
        if any(type(getattr(receipt, name)) not in kinds for name, kinds in _KINDS.items()):
            raise TypeError("a field is of another kind")
        # JSON has no tuples, and a receipt that was read is to equal the one that was written.
        sums = {op: (float(error), float(value)) for op, (error, value) in receipt.encoding_errors.items()}
        exactness = {
            op: Exactness(int(n), int(lost), float(most)) for op, (n, lost, most) in receipt.exactness.items()
        }
        if not all(map(_is_op, (*sums, *exactness))):
            raise ValueError("an op has no number")
        return replace(receipt, encoding_errors=sums, exactness=exactness)


@dataclass(frozen=True, slots=True)
class JointReceipt(Receipt):
    """Of a segment of several plans that are carried out together; its own numbers are those of all."""

    by_output: Mapping[int, Receipt] = field(default_factory=dict)
    """Each plan's own receipt, by the plan's number."""
    failures: Mapping[int, RaymergeError] = field(default_factory=dict)
    """What some of the plans failed with."""


def receipt_of(answer: Mapping[str, Any]) -> Receipt:
    """What ``to_json`` of a worker's receipt was made of. Raises as ``Receipt.from_json``."""
    return JointReceipt(**answer) if "by_output" in answer else Receipt.from_json(answer)


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("segment", "read_bytes", "written_bytes", "peak_rss", "peak_device"), (int,)),
    **dict.fromkeys(("worker", "note"), (str,)),
    **dict.fromkeys(("digests", "encoding_errors", "exactness", "report"), (dict,)),
    "seconds": (int, float),
}
# Exactly these: true is an int to Python, but no number of bytes.
_MOST_DIGITS = 19


def op_digests(receipts: Iterable[Receipt]) -> dict[int, str]:
    """The digests of all ops; a receipt that is of no ops has none."""
    return {int(op): digest for each in receipts if each.is_by_ops for op, digest in each.digests.items()}


def _is_op(name: str) -> bool:
    return name.isdecimal() and len(name) < _MOST_DIGITS
