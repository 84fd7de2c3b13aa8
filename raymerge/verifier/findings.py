"""What an audit finds: part by part, and altogether."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raymerge.errors import Problem, VerificationError
from raymerge.verifier.structure import Verdict

AGAIN = "Merge again, or take the files from where they are whole."
"""The remedy for bytes that are not what they were."""
_LEFT_OPEN = "float32 arithmetic leaves open what it should be: compared within wide bounds alone"


@dataclass(slots=True)
class Findings:
    """What was found in a part of the output. Names are those of output tensors."""

    most: int
    recomputed: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    """Tensors of which elements were recomputed, of some row none that could be compared closely."""
    alike: dict[str, str] = field(default_factory=dict)
    """Tensors whose bytes were copied from those of another tensor of the output, by which that is."""
    copied: set[str] = field(default_factory=set)
    """Tensors that were compared with a source, or with the plan, byte by byte."""
    scales: set[str] = field(default_factory=set)
    """Tensors of scales, which are audited with their codes."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Tensors that could not be audited, whole or in part, and why."""
    judged: int = 0
    """Elements that were recomputed and compared."""
    near: int = 0
    """Elements of those so near to a threshold that either side of it was taken."""
    open: int = 0
    """Elements that float32 arithmetic leaves open, so that they were compared within wide bounds, or where
    there are none, not at all."""
    digested: int = 0
    """Bytes of the output that were read and compared with the digests of the ledger."""
    compared: int = 0
    """Bytes of them that were compared with those of a source."""
    num_problems: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        self.num_problems += 1
        if len(self.problems) < self.most:
            self.problems.append(problem)

    def take(self, other: Findings) -> None:
        """Add what was found in another part."""
        for name in self._kinds():
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                mine += theirs[: self.most - len(mine)]
            else:
                setattr(self, name, mine + theirs if isinstance(mine, int) else mine | theirs)

    @classmethod
    def _kinds(cls) -> list[str]:
        """Names of all that is found: sets and maps of tensors, counts, and problems in words."""
        return [each.name for each in fields(cls) if each.name != "most"]

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        found = {name: getattr(self, name) for name in self._kinds()}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
        return {**plain, "problems": [[each.where, each.what, each.remedy] for each in self.problems]}

    @staticmethod
    def from_json(data: Mapping[str, Any], most: int) -> Findings:
        """Inverse of ``to_json``."""
        found = Findings(most)
        for name, value in data.items():
            setattr(found, name, type(getattr(found, name))(value))
        found.problems = [Problem(*each) for each in data["problems"]]
        return found

    def settled(self) -> Findings:
        """These findings of all parts together: what was compared nowhere is not audited, nor is what was
        copied from that."""
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
    """What an audit found; ``num_problems`` 0 means that nothing is wrong with what was looked at.

    Counts are those of ``Findings``.
    """

    structure: Verdict
    """The verdict on the structure, which comes first; where tensors are not sound, nothing else was done."""
    sample: float
    """Share of the elements of each tensor that was asked for."""
    seed: int
    tensors: int
    recomputed: int
    """Those recomputed from the sources, whole or in part."""
    copied: int
    """Those compared with a source byte by byte, whole or in part, and not recomputed."""
    scales: int
    """Those that are scales, which were looked at with their codes."""
    skipped: tuple[Skipped, ...]
    """Those that were not audited, whole or in part, with the reasons."""
    judged: int
    near: int
    open: int
    """Elements that float32 arithmetic leaves open, so that they were compared within wide bounds, or where
    there are none, not at all."""
    digested: int
    """Bytes of the output that were read and compared with the digests of the ledger."""
    compared: int
    num_problems: int
    """How much is wrong, those of the structure included."""
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def is_by_bytes_alone(self) -> bool:
        """Whether no tensor was compared with what it was made of, so that nothing says that it is right."""
        return not (self.recomputed or self.copied)

    def require(self) -> AuditVerdict:
        if self.num_problems:
            raise VerificationError(self.problems)
        return self


def skipped_of(findings: Findings) -> tuple[Skipped, ...]:
    """Tensors that were not audited, by reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(findings.skipped.items()):
        by_reason.setdefault(reason, []).append(name)
    found = [Skipped(reason, len(names), names[0]) for reason, names in by_reason.items()]
    return tuple(sorted(found, key=lambda each: (-each.tensors, each.reason)))


def audit_verdict(
    structure: Verdict,
    findings: Findings,
    *,
    sample: float,
    seed: int,
    tensors: int,
    problems: Sequence[Problem],
    seconds: float,
) -> AuditVerdict:
    """The verdict on all parts.

    Args:
        problems: what is wrong beside the findings: with the structure, with sources.
    """
    findings = findings.settled()
    return AuditVerdict(
        structure=structure,
        sample=sample,
        seed=seed,
        tensors=tensors,
        recomputed=len(findings.recomputed - findings.skipped.keys()),
        copied=len(findings.copied - findings.recomputed - findings.skipped.keys()),
        scales=len(findings.scales),
        skipped=skipped_of(findings),
        judged=findings.judged,
        near=findings.near,
        open=findings.open,
        digested=findings.digested,
        compared=findings.compared,
        num_problems=len(problems) + findings.num_problems,
        problems=(*problems, *findings.problems)[: findings.most],
        seconds=seconds,
    )
