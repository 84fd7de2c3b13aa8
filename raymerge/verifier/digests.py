"""Bytes of an output against the digests of the ledger, and against the bytes that they were copied from.

``differing_rows`` is for whoever needs the digests alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.plan import Plan
from raymerge.storage.store import ReadStore
from raymerge.verifier.findings import AGAIN, Findings
from raymerge.verifier.plan_ops import PlanRow, PlanRows

_CHUNK = 1 << 20
_FAR_CHUNK = 16 << 20
"""Bytes of a request where each takes long to begin."""

Bytes_ = Callable[[int, int], bytes]
"""Some bytes that a row should have: from an offset in it on, so many."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the bytes of a row should be."""

    what: str
    """What messages call it."""
    read: Bytes_
    """Gives them."""


def check_bytes(
    row: PlanRow,
    output: ReadStore,
    digests: Mapping[int, str],
    findings: Findings,
    *,
    where: str,
    wanted: Expectation | None,
    chunk: int = _CHUNK,
) -> None:
    """Read every byte of a row and compare it.

    Args:
        row: the row.
        output: the output's files.
        digests: by row, those of the ledger.
        findings: take what is wrong.
        where: what messages call the checkpoint.
        wanted: what the bytes should be, where that is known.
        chunk: bytes that are read at once.
    """
    hasher, place, is_as_wanted = xxhash.xxh3_128(), row.place, True
    name = f"{where}: {row.tensor}"
    try:
        for begin in range(0, place.nbytes, chunk):
            count = min(chunk, place.nbytes - begin)
            found = output.read(place.key, place.offset + begin, count)
            hasher.update(found)
            if wanted is not None and is_as_wanted:
                is_as_wanted = _compare(found, wanted, begin, findings, name)
    except CheckpointError as error:
        for problem in error.problems:
            findings.add(problem)
        return
    findings.digested += place.nbytes
    findings.compared += 0 if wanted is None else place.nbytes
    digest = digests.get(row.made_by)
    if digest is None:
        findings.add(Problem(name, "the ledger has no digest of some of its bytes.", AGAIN))
    elif hasher.hexdigest() != digest:
        span = f"bytes {place.offset} to {place.offset + place.nbytes} of {place.key}"
        what = f"{span} are not those that were written: their digest is not the ledger's."
        findings.add(Problem(name, what, AGAIN))


def differing_rows(plan: Plan, output: ReadStore, digests: Mapping[int, str], where: str) -> Findings:
    """All bytes of an output against the digests of the ledger, one row after the other."""
    findings, rows = Findings(most=20), PlanRows(plan)
    chunk = _FAR_CHUNK if output.is_far else _CHUNK
    for row in _all_rows(plan, rows):
        check_bytes(row, output, digests, findings, where=where, wanted=None, chunk=chunk)
    return findings


def copied_bytes(read: Read, source: ReadStore, name: str) -> Expectation:
    """The bytes that a row was copied from."""
    return Expectation(
        f"what {name} has", lambda begin, count: source.read(read.key, read.offset + begin, count)
    )


def constant_bytes(content: bytes) -> Expectation:
    """The bytes that stand in the plan."""
    return Expectation("what the plan says", lambda begin, count: content[begin : begin + count])


def _compare(found: bytes, wanted: Expectation, begin: int, findings: Findings, name: str) -> bool:
    expected = wanted.read(begin, len(found))
    if found == expected:
        return True
    ours, theirs = (np.frombuffer(each, np.uint8) for each in (found, expected))
    first = (
        int(np.flatnonzero(ours != theirs)[0]) if len(ours) == len(theirs) else min(len(ours), len(theirs))
    )
    what = f"it is a copy, but from its byte {begin + first} on it is not {wanted.what}."
    findings.add(Problem(name, what, AGAIN))
    return False


def _all_rows(plan: Plan, rows: PlanRows) -> Iterator[PlanRow]:
    for segment in range(len(plan["segments"])):
        yield from rows.segment(segment)
