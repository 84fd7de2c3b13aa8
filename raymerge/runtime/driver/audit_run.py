"""Audits a checkpoint with a pool: its structure, its bytes, and recomputed samples."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any

from raymerge.errors import IncompleteError, OptionError, Problem, UserError
from raymerge.events import OnEvent
from raymerge.execute.receipts import op_digests
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import load_plan
from raymerge.options import RunOptions
from raymerge.publish.finish import record_at
from raymerge.publish.output_place import kept_directories
from raymerge.publish.record import NAME, RECORD, Ledger
from raymerge.runtime.driver.examine import ExamineWork, Located, examined, locate_sources, slots_and_budget
from raymerge.runtime.workers.pool import Pool
from raymerge.runtime.workers.sizing import check_free
from raymerge.storage.addresses import is_remote, shown
from raymerge.verifier.audit import AuditSpec, AuditVerdict, Findings, Sampling, skipped_of
from raymerge.verifier.structure import RECORD_PLAN, changed_copies, verify_structure

_ONLY_MERGED = "Only what raymerge merged can be audited; 'raymerge verify' alone looks at its structure."


@dataclass(frozen=True, slots=True)
class AuditOptions:
    sample: float = 0.01
    """Share of each tensor's elements that is recomputed, at least one run of them; 1 for all."""
    seed: int | None = None
    """None for a new one, which the verdict names."""
    sources: Mapping[str, str] | None = None
    """Directories of sources that moved, by their names in the recipe."""
    most: int = 20
    """Problems told in words; all are counted."""
    steps: str | None = None
    """The directory named for intermediate results when it was merged; None for beside the checkpoint."""

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            what = f"{self.sample:g} is no share of the elements."
            raise OptionError(Problem("--sample", what, "Give more than 0, and at most 1 for all of them."))
        if (self.seed is not None and self.seed < 0) or self.most < 1:
            what = f"seed {self.seed} and {self.most} problems to show cannot be had."
            raise OptionError(Problem("--seed, --show", what, "Give a seed of 0 or more, and 1 or more."))


class Audit:
    def __init__(
        self, output: Path | str, audit_options: AuditOptions, options: RunOptions, *, on_event: OnEvent
    ) -> None:
        """Raises OptionError without the promised memory, CheckpointError if the place cannot be read."""
        self._began = time.monotonic()
        self._name, self._place = shown(str(output)), str(output)
        self._wanted, self._options, self._on_event = audit_options, options, on_event
        self._seed = randbits(32) if audit_options.seed is None else audit_options.seed
        check_free(options)
        self._structure = verify_structure(output)
        held = ExitStack()
        weakref.finalize(self, held.close)
        self._output = held.enter_context(record_at(self._place))
        self._problems = list(self._structure.problems)
        # A companion that was edited says nothing of the tensors.
        self._plan = self._saved_plan() if self._structure.are_tensors_sound else None

    @property
    def num_parts(self) -> int:
        """Segments to audit; 0 for nothing to do."""
        return 0 if self._plan is None else len(self._plan["segments"])

    def carry_out(self, pool: Pool) -> AuditVerdict:
        """Raises OptionError if workers lack the sources or the output, IncompleteError if stopped."""
        if self._plan is None:
            return self._verdict(Findings(self._wanted.most))
        steps = kept_directories(self._place, self._wanted.steps)
        located = locate_sources(self._plan, self._output, self._wanted.sources or {}, steps)
        self._problems += located.problems
        self._problems += changed_copies(self._plan, self._place)
        work = self._work(self._plan, located, pool)
        pool.survey(work)
        findings = self._audited(self._plan, work, pool)
        return self._verdict(findings)

    def _verdict(self, findings: Findings) -> AuditVerdict:
        findings = findings.settled()
        return AuditVerdict(
            structure=self._structure,
            sample=self._wanted.sample,
            seed=self._seed,
            tensors=self._structure.tensors,
            recomputed=len(findings.recomputed - findings.skipped.keys()),
            copied=len(findings.copied - findings.recomputed - findings.skipped.keys()),
            scales=len(findings.scales),
            skipped=skipped_of(findings),
            judged=findings.judged,
            near=findings.near,
            open=findings.open,
            farthest=findings.farthest,
            digested=findings.digested,
            compared=findings.compared,
            num_problems=len(self._problems) + findings.num_problems,
            problems=(*self._problems, *findings.problems)[: findings.most],
            seconds=time.monotonic() - self._began,
        )

    def _saved_plan(self) -> Plan | None:
        """The plan that made the checkpoint; None, with a problem, where there is none."""
        record = self._output / RECORD_PLAN
        if not record.is_dir():
            what = "it keeps no plan, so nobody knows what it was made of."
            self._problems.append(Problem(self._name, what, _ONLY_MERGED))
            return None
        try:
            return load_plan(record)
        except UserError as error:
            self._problems += error.problems
            return None

    def _work(self, plan: Plan, located: Located, pool: Pool) -> ExamineWork:
        receipts = Ledger.read(self._output / RECORD / NAME)
        digests = op_digests(receipts.values())
        slots, budget = slots_and_budget(self._options, pool)
        spec = AuditSpec(
            plan=plan,
            name=self._name,
            digests=digests,
            sampling=Sampling(self._wanted.sample, self._seed),
            absent=located.absent,
            budget=budget,
            most=self._wanted.most,
        )
        place = self._place if is_remote(self._place) else str(self._output)
        return ExamineWork(spec, place, tuple(located.roots), tuple(located.files), slots)

    def _audited(self, plan: Plan, work: ExamineWork, pool: Pool) -> Findings:
        def findings_of(report: Mapping[str, Any]) -> Findings:
            return Findings.from_json(report, self._wanted.most)

        peak = work.slots * work.spec.budget
        by_segment = examined(plan, work, pool, findings_of, on_event=self._on_event, peak=peak)
        findings = Findings(self._wanted.most)
        for each in by_segment.values():
            findings.take(each)
        if len(by_segment) < len(plan["segments"]):
            raise IncompleteError(
                f"stopped with {len(by_segment)} of {len(plan['segments'])} segments audited and "
                f"{findings.num_problems} problems found in them. The same command begins anew."
            )
        return findings
