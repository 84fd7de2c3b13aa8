"""Audits parts of an output: all bytes against the ledger, samples of every tensor against the sources; what
was found, by part and in total."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from raymerge.errors import CheckpointError, IncompleteError, Problem, VerificationError
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import JobPart, Jobs, OpJob
from raymerge.merge_plan.plan import Plan
from raymerge.methods import Expected, LogicalTensor, Reference, Takes, Undecided, find_method, random_key
from raymerge.storage.store import ReadStore
from raymerge.units import format_size
from raymerge.verifier.numbers import Floats, code_gaps, nearest_coded_distance, nearest_distance
from raymerge.verifier.stored import (
    Blocks,
    Coded,
    Reader,
    as_input,
    elements_of,
    logical,
    sources_of,
    stored_offset,
)
from raymerge.verifier.structure import Verdict

AGAIN = "Merge again, or take the files from where they are whole."
_LEFT_OPEN = "float32 arithmetic leaves open what it should be: compared within wide bounds alone"


@dataclass(slots=True)
class Findings:
    """Findings in a part of the output; names are those of output tensors."""

    most: int
    recomputed: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    """Tensors with an op of which elements were recomputed but none compared closely."""
    alike: dict[str, str] = field(default_factory=dict)
    """Tensors copied from another tensor of the output, by name of that."""
    copied: set[str] = field(default_factory=set)
    """Tensors compared byte by byte with a source or the plan."""
    scales: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    judged: int = 0
    near: int = 0
    """Of those, elements so near to a threshold that either side was accepted."""
    open: int = 0
    """Elements undetermined in float32 arithmetic: compared within wide bounds, or not at all."""
    farthest: float = 0.0
    """Of judged elements that are codes, the largest difference from what they should be, in the distance of
    the two codes about that; those near a threshold left out."""
    digested: int = 0
    """Bytes of the output compared with the digests of the ledger."""
    compared: int = 0
    """Of those, bytes compared with a source."""
    num_problems: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        self.num_problems += 1
        if len(self.problems) < self.most:
            self.problems.append(problem)

    def take(self, other: Findings) -> None:
        for name in self._kinds():
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                mine += theirs[: self.most - len(mine)]
            elif isinstance(mine, float):
                setattr(self, name, max(mine, theirs))
            else:
                setattr(self, name, mine + theirs if isinstance(mine, int) else mine | theirs)

    @classmethod
    def _kinds(cls) -> list[str]:
        return [each.name for each in fields(cls) if each.name != "most"]

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._kinds()}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
        return {**plain, "problems": [[each.where, each.what, each.remedy] for each in self.problems]}

    @staticmethod
    def from_json(data: Mapping[str, Any], most: int) -> Findings:
        findings = Findings(most)
        for name, value in data.items():
            setattr(findings, name, type(getattr(findings, name))(value))
        findings.problems = [Problem(*each) for each in data["problems"]]
        return findings

    def settled(self) -> Findings:
        """Findings of all parts together; tensors compared nowhere, and their copies, become skipped."""
        left_open = dict.fromkeys(self.undecided - self.recomputed, _LEFT_OPEN)
        skipped = left_open | self.skipped
        recomputed = set(self.recomputed)
        for name, original in self.alike.items():
            if original in skipped:
                skipped[name] = skipped[original]
            elif original in recomputed:
                recomputed.add(name)
        return replace(self, skipped=skipped, recomputed=recomputed)


@dataclass(frozen=True, slots=True)
class Skipped:
    reason: str
    tensors: int
    example: str


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Counts are those of ``Findings``; ``num_problems`` 0 means that nothing examined is wrong."""

    structure: Verdict
    """Comes first; where tensors are unsound, nothing else was done."""
    sample: float
    """Requested share of the elements of each tensor."""
    seed: int
    tensors: int
    recomputed: int
    copied: int
    scales: int
    skipped: tuple[Skipped, ...]
    judged: int
    near: int
    open: int
    farthest: float
    digested: int
    compared: int
    num_problems: int
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def is_by_bytes_alone(self) -> bool:
        """Whether no tensor was compared with its inputs, so that nothing shows it to be right."""
        return not (self.recomputed or self.copied)

    def require(self) -> AuditVerdict:
        if self.num_problems:
            raise VerificationError(self.problems)
        return self


def skipped_of(findings: Findings) -> tuple[Skipped, ...]:
    """Tensors not audited, by reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(findings.skipped.items()):
        by_reason.setdefault(reason, []).append(name)
    skipped = [Skipped(reason, len(names), names[0]) for reason, names in by_reason.items()]
    return tuple(sorted(skipped, key=lambda each: (-each.tensors, each.reason)))


_TILE = 4096
"""Elements that are sampled together, since bytes are read in runs."""


@dataclass(frozen=True, slots=True)
class Sampling:
    share: float
    """Share of the elements, at least one tile; 1 for all."""
    seed: int

    def runs(self, name: str, span: tuple[int, int], *, unit: int, most: int) -> Iterator[tuple[int, int]]:
        """Runs of whole units, of at most ``most`` elements, in order; ``span`` is (first, stop)."""
        first, stop = span
        tile = max(unit, min(most, _TILE) // unit * unit)
        count = -(-(stop - first) // tile)
        num_chosen = min(count, max(1, round(self.share * count)))
        text = f"{self.seed}/{name}/{first}"
        chance = np.random.default_rng(list(hashlib.blake2b(text.encode(), digest_size=16).digest()))
        chosen = (
            np.arange(count)
            if num_chosen == count
            else np.sort(chance.choice(count, num_chosen, replace=False))
        )
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
    plan: Plan
    name: str
    digests: Mapping[int, str]
    sampling: Sampling
    absent: Mapping[int, str]
    """Unreadable sources by index in the plan, with the reason."""
    budget: int
    most: int

    def examiner(self, sources: Sequence[ReadStore], output: ReadStore | None) -> Auditor:
        assert output is not None
        return Auditor(self, sources, output)


class Auditor:
    def __init__(self, spec: AuditSpec, sources: Sequence[ReadStore], output: ReadStore) -> None:
        self._spec = spec
        self._sources = sources
        self._output = output
        self._jobs = Jobs(spec.plan)
        self._names = [str(each["name"]) for each in spec.plan.manifest["sources"]]
        self._seed = int(spec.plan.manifest["seed"])
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Make segments in progress fail at their next tensor or sample."""
        self._aborted.set()

    def examine(self, segment: int) -> tuple[dict[str, Any], int]:
        findings, read_bytes = self.audit(segment)
        return findings.to_json(), read_bytes

    def audit(self, segment: int) -> tuple[Findings, int]:
        """The findings of a segment, and the bytes read of sources and output. Raises IncompleteError after
        ``abort``."""
        findings, reader = Findings(self._spec.most), Reader(self._sources)
        for op in self._jobs.all_ops(segment):
            self._check_aborted()
            self._audit_op(op, findings, reader)
        return findings, reader.nbytes + findings.digested + findings.compared

    def _audit_op(self, op: OpJob, findings: Findings, reader: Reader) -> None:
        reason = next((self._spec.absent[s] for s in sorted(sources_of(op)) if s in self._spec.absent), None)
        is_copied = op.expression.is_copy or op.expression.is_constant
        expectation = self._bytes_of(op) if is_copied and reason is None else None
        try:
            check_bytes(
                op,
                self._output,
                self._spec.digests,
                findings,
                where=self._spec.name,
                expectation=expectation if op.copy_of < 0 else None,
            )
            if op.expression.is_scales:
                findings.scales.add(op.tensor)
            elif reason is not None:
                findings.skipped[op.tensor] = reason
            elif is_copied:
                findings.copied.add(op.tensor)
            elif op.copy_of >= 0:
                findings.alike[op.tensor] = self._jobs.tensor(op.copy_of)
            elif not op.num_elements:
                findings.recomputed.add(op.tensor)
            else:
                self._recompute(op, findings, reader)
        except CheckpointError as error:
            for problem in error.problems:
                findings.add(problem)

    def _bytes_of(self, op: OpJob) -> Expectation:
        if op.expression.is_constant:
            content = op.expression.content
            return Expectation("what the plan says", lambda begin, count: content[begin : begin + count])
        (read,) = op.inputs
        assert isinstance(read, Read)
        source, name = self._sources[read.source], self._names[read.source]
        return Expectation(
            f"what {name} has", lambda begin, count: source.read(read.key, read.offset + begin, count)
        )

    def _recompute(self, op: OpJob, findings: Findings, reader: Reader) -> None:
        method, has_base = find_method(op.expression.method), op.expression.has_base
        if method is None:
            findings.skipped[op.tensor] = f"{op.expression.method} is no method that is known here"
            return
        output = Reader([self._output])
        for part in op.parts:
            sources = range(len(part.inputs) - has_base) if method.random else ()
            keys = tuple(random_key(self._seed, part.logical, source) for source in sources)
            is_cut = len(op.parts) == 1 and part.view is None
            first = op.first_element if is_cut else 0
            tensor = LogicalTensor(
                [elements_of(each, reader, first=first) for each in part.inputs],
                op.expression.bind(keys=keys, shape=part.shape),
                has_base=has_base,
                takes_deltas=method.takes is Takes.DELTAS and has_base,
                budget=self._spec.budget,
            )
            stored = StoredPart(op, part, output, first, findings, self._spec.name)
            span = (first, first + op.num_elements) if is_cut else (0, prod(part.shape))
            lack = self._sample(stored, tensor, method.reference, span, findings)
            if lack:
                findings.skipped[op.tensor] = lack
        reader.nbytes += output.nbytes

    def _sample(
        self,
        stored: StoredPart,
        tensor: LogicalTensor,
        reference: Reference,
        span: tuple[int, int],
        findings: Findings,
    ) -> str:
        """Compare samples of a part; returns why none could be recomputed, else ""."""
        needed = (tensor.needed if reference.holds_whole(tensor.settings) else 0) + tensor.held + stored.held
        if needed > self._spec.budget:
            return (
                f"it takes {format_size(needed)} in float64 at once, and a worker may use "
                f"{format_size(self._spec.budget)} for that: give more --memory"
            )
        try:
            formula = reference.prepare(tensor)
        except Undecided as undecided:
            return f"what it should be hangs on rounding: {undecided}"
        most, judged = tensor.block_length(whole_rows=reference.by_row), 0
        # Whole blocks, as far as these are no longer than what is sampled together anyway.
        unit = tensor.row_length if reference.by_row else stored.block_width
        unit = unit if reference.by_row or unit <= min(most, _TILE) else 1
        peaks = set[int]()
        for start, stop in self._spec.sampling.runs(stored.name, span, unit=unit, most=most):
            self._check_aborted()
            judged += stored.judge(formula(tensor.block(start, stop)), start, stop)
            if self._spec.sampling.share == 1:
                continue
            # How large a block's scale is says nothing unless its largest element is right.
            beside = {place for place in stored.peaks(start, stop) if not start <= place < stop} - peaks
            for first, last, places in _runs_of(beside, span, unit, min(most, stored.block_width)):
                judged += stored.judge(formula(tensor.block(first, last)), first, last, only=places)
            peaks |= beside
        (findings.recomputed if judged else findings.undecided).add(stored.tensor)
        return ""

    def _check_aborted(self) -> None:
        if self._aborted.is_set():
            raise IncompleteError("stopped in the middle of a segment. The same command begins anew.")


def _runs_of(
    places: Collection[int], span: tuple[int, int], unit: int, reach: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of whole units that hold ``places``; places at most ``reach`` apart share a run.

    Units are counted from the first element of ``span``, (first, stop). Yields the first element of a run,
    its stop, and its places."""
    first, stop = span
    groups: list[list[int]] = []
    for place in sorted(places):
        if not groups or place - groups[-1][0] >= reach:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        begin = first + (group[0] - first) // unit * unit
        end = first + ((group[-1] - first) // unit + 1) * unit
        yield begin, min(end, stop), group


_TOO_OPEN = 2.0**-6
"""An element is judged only if its doubt is below this share of the largest magnitudes of its run."""


@dataclass(frozen=True, slots=True)
class Coding:
    steps: Floats
    zeros: Floats | None
    """Elements that stand for 0; None where 0 has the same code everywhere."""
    is_filled: NDArray[np.bool_]
    """Whether the block's numbers need its scale: it is made for the largest, or kept where every number is
    exactly a code."""

    def at(self, places: NDArray[np.int64]) -> Coding:
        zeros = None if self.zeros is None else self.zeros[places]
        return Coding(self.steps[places], zeros, self.is_filled[places])


class StoredPart:
    """The stored elements of one logical tensor of an op, which are compared with what they should be."""

    def __init__(
        self, op: OpJob, part: JobPart, reader: Reader, first: int, findings: Findings, checkpoint: str
    ) -> None:
        """``first``: index of the op's first element within the logical tensor."""
        self._op, self._part, self._findings, self._checkpoint = op, part, findings, checkpoint
        self.tensor, self.name = op.tensor, f"{op.tensor}/{part.logical}"
        read = as_input(op, part.view)
        self._elements, self._blocks = elements_of(read, reader, first=first), None
        self.held = self._elements.held
        """Bytes of memory beside those of a run."""
        self.block_width = 1
        """Columns that share a scale; 1 for plain numbers."""
        if read.scales is not None:
            codes = Coded(read, read.scales, reader)
            self.held, self.block_width = 3 * self.held, codes.width
            others = (as_input(other, None) for other in op.joined_with)
            joined = [Coded(each, each.scales, reader) for each in others if each.scales is not None]
            self._blocks = Blocks(codes, joined)
            self._offset = stored_offset(read, first)
            self._steps = logical(codes.steps, read, first)
            has_zeros = codes.encoding.format.zero_points is not None
            self._zeros = logical(codes.zeros, read, first) if has_zeros else None
            self._are_filled = logical(self._blocks.are_filled, read, first)

    def peaks(self, start: int, stop: int) -> list[int]:
        """Indices of a largest element of every block that a run touches, if in the op.

        Empty where elements are not in logical order."""
        if self._blocks is None or self._offset is None:
            return []
        peaks = self._blocks.peaks(start + self._offset, stop + self._offset)
        return [place - self._offset for place in peaks]

    def judge(self, expected: Expected, start: int, stop: int, *, only: Sequence[int] | None = None) -> int:
        """Compare a run of stored elements with the expected ones; returns how many could be judged.

        All elements of ``only`` (None: all) that have any bound are compared; narrow bounds count as judged.
        """
        (actual, _), coding = self._elements.read(start, stop), self._coding(start, stop)
        allowed = self._allowed(expected.values, expected.doubt, coding, actual)
        is_right = _agrees(actual, expected.values, allowed)
        is_near = np.zeros(actual.shape, dtype=bool)
        for places, values in expected.others:
            own = None if coding is None else coding.at(places)
            also = self._allowed(values, expected.doubt[places], own, actual[places])
            is_near[places] = True
            is_right[places] |= _agrees(actual[places], values, also)
        is_asked = np.full(actual.shape, only is None)
        if only is not None:
            is_asked[np.asarray(only, dtype=np.int64) - start] = True
        largest = max(float(np.abs(expected.values).max(initial=0.0)), 2.0**-126)
        with np.errstate(invalid="ignore"):
            is_open = ~(expected.doubt <= _TOO_OPEN * largest)
        judged = int((is_asked & ~is_open).sum())
        self._findings.open += int((is_asked & is_open).sum())
        self._findings.judged += judged
        self._findings.near += int((is_near & is_asked & ~is_open).sum())
        self._note_farthest(actual, expected.values, coding, is_asked & ~is_open & ~is_near)
        wrong = np.flatnonzero(~is_right & is_asked & np.isfinite(expected.doubt))
        if len(wrong):
            with np.errstate(invalid="ignore"):
                excess = np.nan_to_num(np.abs(actual - expected.values)[wrong], nan=np.inf)
            worst = int(wrong[int(np.argmax(excess))])
            more = f", and so are {len(wrong) - 1} others near it" if len(wrong) > 1 else ""
            is_near, limit = allowed[worst] >= 0, f"give or take {allowed[worst]:.3g}"
            if not is_near:
                limit = "which is beyond what its scale reaches"
            elif coding is not None and not coding.is_filled[worst]:
                limit += ", as the scale of its block is larger than the block needs"
            fact = f"it is {actual[worst]:.9g}, but recomputed from the sources {expected.values[worst]:.9g}"
            where = f"{self._checkpoint}: {self._position(start + worst)}"
            self._findings.add(Problem(where, f"{fact}, {limit}{more}.", AGAIN))
        return judged

    def _note_farthest(
        self, actual: Floats, values: Floats, coding: Coding | None, which: NDArray[np.bool_]
    ) -> None:
        encode = self._op.expression.encode
        if coding is None or encode is None or not which.any():
            return
        own = coding.at(np.flatnonzero(which))
        with np.errstate(invalid="ignore"):
            gaps = code_gaps(encode.format, values[which], own.steps, own.zeros)
            # Where all codes are one number, as under a scale of 0, nothing is between them.
            shares = np.abs(actual - values)[which][gaps > 0] / gaps[gaps > 0]
        self._findings.farthest = max(self._findings.farthest, float(shares.max(initial=0.0)))

    def _coding(self, start: int, stop: int) -> Coding | None:
        if self._blocks is None:
            return None
        steps, filled = (each.read(start, stop)[0] for each in (self._steps, self._are_filled))
        zeros = None if self._zeros is None else self._zeros.read(start, stop)[0]
        return Coding(steps, zeros, filled > 0)

    def _allowed(self, values: Floats, doubt: Floats, coding: Coding | None, actual: Floats) -> Floats:
        """Largest accepted difference of a stored element from a value: the distance of the nearest storable
        one plus twice the value's doubt. Negative where it cannot be stored."""
        encode = self._op.expression.encode
        if coding is None or encode is None:
            return nearest_distance(self._op.expression.cast, values) + 2 * doubt
        near = nearest_coded_distance(encode.format, values, coding.steps, coding.zeros)
        # Under a scale that its block has no need of, every number is a code times it, or the scale is wrong.
        distance = np.where(coding.is_filled, near, 0.0)
        return np.where(near < 0, -1.0, distance + 2 * doubt + 2.0**-23 * np.abs(actual))

    def _position(self, index: int) -> str:
        place = ", ".join(map(str, np.unravel_index(index, self._part.shape))) if self._part.shape else ""
        logical = self._part.logical
        inside = "" if logical == self.tensor else f" ({logical})"
        return f"{self.tensor}{inside}[{place}]"


def _agrees(actual: Floats, values: Floats, allowed: Floats) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        is_equal = (actual == values) | (np.isnan(actual) & np.isnan(values))
        return np.asarray(is_equal | (np.abs(actual - values) <= allowed))


_CHUNK = 1 << 20
_FAR_CHUNK = 16 << 20
"""Bytes per request on a store of high latency."""


@dataclass(frozen=True, slots=True)
class Expectation:
    what: str
    read: Callable[[int, int], bytes]
    """From an offset within the op, so many."""


def check_bytes(
    op: OpJob,
    output: ReadStore,
    digests: Mapping[int, str],
    findings: Findings,
    *,
    where: str,
    expectation: Expectation | None,
    chunk: int = _CHUNK,
) -> None:
    hasher, (key, offset), is_as_wanted = xxhash.xxh3_128(), op.places[0], True
    name = f"{where}: {op.tensor}"
    try:
        for begin in range(0, op.nbytes, chunk):
            count = min(chunk, op.nbytes - begin)
            actual = output.read(key, offset + begin, count)
            hasher.update(actual)
            if expectation is not None and is_as_wanted:
                is_as_wanted = _compare(actual, expectation, begin, findings, name)
    except CheckpointError as error:
        for problem in error.problems:
            findings.add(problem)
        return
    findings.digested += op.nbytes
    findings.compared += 0 if expectation is None else op.nbytes
    digest = digests.get(op.made_by)
    if digest is None:
        findings.add(Problem(name, "the ledger has no digest of some of its bytes.", AGAIN))
    elif hasher.hexdigest() != digest:
        span = f"bytes {offset} to {offset + op.nbytes} of {key}"
        what = f"{span} are not those that were written: their digest is not the ledger's."
        findings.add(Problem(name, what, AGAIN))


def differing_ops(plan: Plan, output: ReadStore, digests: Mapping[int, str], where: str) -> Findings:
    findings, chunk = Findings(most=20), _FAR_CHUNK if output.is_far else _CHUNK
    jobs = Jobs(plan)
    for op in (op for segment in range(len(jobs)) for op in jobs.all_ops(segment)):
        check_bytes(op, output, digests, findings, where=where, expectation=None, chunk=chunk)
    return findings


def _compare(actual: bytes, expectation: Expectation, begin: int, findings: Findings, name: str) -> bool:
    expected = expectation.read(begin, len(actual))
    if actual == expected:
        return True
    ours, theirs = (np.frombuffer(each, np.uint8) for each in (actual, expected))
    first = min(len(ours), len(theirs))
    if len(ours) == len(theirs):
        first = int(np.flatnonzero(ours != theirs)[0])
    what = f"it is a copy, but from its byte {begin + first} on it is not {expectation.what}."
    findings.add(Problem(name, what, AGAIN))
    return False
