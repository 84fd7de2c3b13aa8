"""Findings of an audit, by part and in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raymerge.errors import Problem, VerificationError
from raymerge.verifier.structure import Verdict

AGAIN = "Merge again, or take the files from where they are whole."
"""Remedy for changed bytes."""
_LEFT_OPEN = "float32 arithmetic leaves open what it should be: compared within wide bounds alone"


@dataclass(slots=True)
class Findings:
    """Findings in a part of the output; names are those of output tensors."""

    most: int
    recomputed: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    """Tensors with a row of which elements were recomputed but none compared closely."""
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
            else:
                setattr(self, name, mine + theirs if isinstance(mine, int) else mine | theirs)

    @classmethod
    def _kinds(cls) -> list[str]:
        return [each.name for each in fields(cls) if each.name != "most"]

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self._kinds()}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
        return {**plain, "problems": [[each.where, each.what, each.remedy] for each in self.problems]}

    @staticmethod
    def from_json(data: Mapping[str, Any], most: int) -> Findings:
        found = Findings(most)
        for name, value in data.items():
            setattr(found, name, type(getattr(found, name))(value))
        found.problems = [Problem(*each) for each in data["problems"]]
        return found

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
    """Elements undetermined in float32 arithmetic: compared within wide bounds, or not at all."""
    digested: int
    compared: int
    num_problems: int
    """Includes those of the structure."""
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
    """``problems`` are those beside the findings: of structure and sources."""
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
