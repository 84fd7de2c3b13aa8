"""Audits parts of an output: every byte against the ledger, samples of every tensor against the sources."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from raymerge.errors import CheckpointError, IncompleteError
from raymerge.merge_plan.expressions import Part
from raymerge.merge_plan.plan import Plan
from raymerge.methods import LogicalTensor, Reference, Settings, Takes, Undecided, find_method, random_key
from raymerge.storage.store import ReadStore
from raymerge.units import format_size
from raymerge.verifier.comparing import Written, judge
from raymerge.verifier.digests import Expectation, check_bytes, constant_bytes, copied_bytes
from raymerge.verifier.findings import Findings
from raymerge.verifier.plan_ops import PlanRow, PlanRows
from raymerge.verifier.stored import Reader, elements_of

_TILE = 4096
"""Elements that are sampled together, as bytes are read in runs."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which elements of a tensor are recomputed."""

    share: float
    """Of the elements, at least one tile; 1 for all of them."""
    seed: int
    """Chooses them."""

    def runs(self, name: str, span: tuple[int, int], *, unit: int, most: int) -> Iterator[tuple[int, int]]:
        """Runs of elements, in order.

        Args:
            name: of the tensor; chooses as well.
            span: first element and stop.
            unit: elements that are taken together.
            most: elements of a run.
        """
        first, stop = span
        tile = max(unit, min(most, _TILE) // unit * unit)
        count = -(-(stop - first) // tile)
        wanted = min(count, max(1, round(self.share * count)))
        text = f"{self.seed}/{name}/{first}"
        chance = np.random.default_rng(list(hashlib.blake2b(text.encode(), digest_size=16).digest()))
        chosen = np.arange(count) if wanted == count else np.sort(chance.choice(count, wanted, replace=False))
        begin = end = -1
        for number in chosen.tolist():
            start = first + number * tile
            if start == end and end + tile - begin <= most:
                end = start + tile
                continue
            if begin >= 0:
                yield begin, min(end, stop)
            begin, end = start, start + tile
        if begin >= 0:
            yield begin, min(end, stop)


@dataclass(frozen=True, slots=True)
class AuditSpec:
    """What is to be audited, and how; the same for all workers."""

    plan: Plan
    """The plan that the output was made by."""
    name: str
    """What messages call the output."""
    digests: Mapping[int, str]
    """Digests of rows, from the ledger."""
    sampling: Sampling
    """Which elements are recomputed."""
    absent: Mapping[int, str]
    """Sources, by their index in the plan, that cannot be read, and why."""
    room: int
    """Bytes of memory that a part may take."""
    most: int
    """Problems that are told in words."""


class Auditor:
    """Audits the segments of one output."""

    def __init__(self, spec: AuditSpec, sources: Sequence[ReadStore], output: ReadStore) -> None:
        """
        Args:
            spec: what is wanted.
            sources: in the plan's order; of an absent one any store.
            output: the output's files.
        """
        self._wanted = spec
        self._sources = sources
        self._output = output
        self._rows = PlanRows(spec.plan)
        self._names = [str(each["name"]) for each in spec.plan.manifest["sources"]]
        self._seed = int(spec.plan.manifest["seed"])
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Have the segments in hand fail at their next tensor or sample."""
        self._aborted.set()

    def audit(self, segment: int) -> tuple[Findings, int]:
        """What is found in a segment, and the bytes read of sources and output.

        Raises:
            IncompleteError: ``abort`` was called.
        """
        findings, reader = Findings(self._wanted.most), Reader(self._sources)
        for row in self._rows.segment(segment):
            self._check_aborted()
            self._row(row, findings, reader)
        return findings, reader.nbytes + findings.digested + findings.compared

    def _row(self, row: PlanRow, findings: Findings, reader: Reader) -> None:
        reason = next((self._wanted.absent[s] for s in sorted(row.sources) if s in self._wanted.absent), None)
        is_copied = row.expression.is_copy or row.expression.is_constant
        wanted = self._bytes_of(row) if is_copied and reason is None else None
        try:
            check_bytes(
                row,
                self._output,
                self._wanted.digests,
                findings,
                where=self._wanted.name,
                wanted=wanted if row.is_made else None,
            )
            if row.expression.is_scales:
                findings.scales.add(row.tensor)
            elif reason is not None:
                findings.skipped[row.tensor] = reason
            elif is_copied:
                findings.copied.add(row.tensor)
            elif not row.is_made:
                findings.alike[row.tensor] = row.made_for
            elif not row.num_elements:
                findings.recomputed.add(row.tensor)
            else:
                self._recompute(row, findings, reader)
        except CheckpointError as error:
            for problem in error.problems:
                findings.add(problem)

    def _bytes_of(self, row: PlanRow) -> Expectation:
        if row.expression.is_constant:
            return constant_bytes(row.expression.content)
        (read,) = row.reads
        return copied_bytes(read, self._sources[read.source], self._names[read.source])

    def _recompute(self, row: PlanRow, findings: Findings, reader: Reader) -> None:
        output = Reader([self._output])
        for number, part in enumerate(row.parts):
            settings = self._settings(row, number, part)
            reads = row.reads_of(number)
            method = find_method(row.expression.method)
            if method is None:
                findings.skipped[row.tensor] = f"{row.expression.method} is no method that is known here"
                return
            is_cut = len(row.parts) == 1 and part.view is None
            first = row.first_element if is_cut else 0
            tensor = LogicalTensor(
                [elements_of(read, reader, first=first if read.assembly is None else 0) for read in reads],
                settings,
                has_base=row.expression.has_base,
                takes_deltas=_takes_deltas(row),
                room=self._wanted.room,
            )
            written = Written(row, part, output, first=first)
            span = (first, first + row.num_elements) if is_cut else (0, prod(part.shape))
            self._sample(row, part, tensor, method.reference, written, span, findings)
        reader.nbytes += output.nbytes

    def _sample(
        self,
        row: PlanRow,
        part: Part,
        tensor: LogicalTensor,
        reference: Reference,
        written: Written,
        span: tuple[int, int],
        findings: Findings,
    ) -> None:
        """Recompute samples of one logical tensor and compare them."""
        needed = (tensor.needed if reference.holds_whole(tensor.settings) else 0) + tensor.held + written.held
        if needed > self._wanted.room:
            findings.skipped[row.tensor] = (
                f"it takes {format_size(needed)} in float64 at once, and a worker may use "
                f"{format_size(self._wanted.room)} for that: give more --memory"
            )
            return
        try:
            formula = reference.prepare(tensor)
        except Undecided as undecided:
            findings.skipped[row.tensor] = f"what it should be hangs on rounding: {undecided}"
            return
        most, judged = tensor.block_length(whole_rows=reference.by_row), 0
        # Whole blocks, as far as these are no longer than what is sampled together anyreference.
        unit = tensor.row_length if reference.by_row else written.block_width
        unit = unit if reference.by_row or unit <= min(most, _TILE) else 1
        runs = self._wanted.sampling.runs(f"{row.tensor}/{part.logical}", span, unit=unit, most=most)
        peaks, name = set[int](), self._wanted.name
        for start, stop in runs:
            self._check_aborted()
            judged += judge(formula(tensor.block(start, stop)), written, (start, stop), findings, name)
            if self._wanted.sampling.share == 1:
                continue
            # How large a block's scale is says nothing unless its largest element is right.
            beside = {place for place in written.peaks(start, stop) if not start <= place < stop} - peaks
            reach = min(most, written.block_width)
            for first, last, places in _runs_of(beside, span, unit, reach):
                expected = formula(tensor.block(first, last))
                judged += judge(expected, written, (first, last), findings, name, only=places)
            peaks |= beside
        (findings.recomputed if judged else findings.undecided).add(row.tensor)

    def _check_aborted(self) -> None:
        if self._aborted.is_set():
            raise IncompleteError("stopped in the middle of a segment. The same command begins anew.")

    def _settings(self, row: PlanRow, number: int, part: Part) -> Settings:
        method = find_method(row.expression.method)
        count = len(row.reads_of(number)) - row.expression.has_base
        is_random = method is not None and method.random
        keys = tuple(random_key(self._seed, part.logical, source) for source in range(count))
        return row.expression.bind(keys=keys if is_random else (), shape=part.shape)


def _runs_of(
    places: Collection[int], span: tuple[int, int], unit: int, reach: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of whole units in which some elements are, those that are near each other together.

    Args:
        places: indices of the elements.
        span: first element of all and stop.
        unit: elements that are taken together, from the first on.
        reach: elements that lie no farther apart are taken together too.

    Yields:
        The first element of a run, its stop, and which of the elements are there.
    """
    first, stop = span
    groups: list[list[int]] = []
    for place in sorted(places):
        if not groups or place - groups[-1][0] >= reach:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        begin, end = (
            first + (group[0] - first) // unit * unit,
            first + ((group[-1] - first) // unit + 1) * unit,
        )
        yield begin, min(end, stop), group


def _takes_deltas(row: PlanRow) -> bool:
    method = find_method(row.expression.method)
    return method is not None and method.takes is Takes.DELTAS and row.expression.has_base
