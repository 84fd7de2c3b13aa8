"""Audits a checkpoint with the workers of a pool: its structure, then its bytes, and samples recomputed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits

from raymerge.errors import IncompleteError, OptionError, Problem, UserError
from raymerge.events import OnEvent, Planned, SegmentDone, Started
from raymerge.execute.receipts import row_digests
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import load_plan
from raymerge.options import RunOptions
from raymerge.publish.attempt import RECORD
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.record import record_at
from raymerge.publish.steps_place import steps_directory
from raymerge.runtime.driver.audit_sources import Located, locate_sources
from raymerge.runtime.driver.audit_work import AuditWork
from raymerge.runtime.driver.interruptions import check_overdue, stopping
from raymerge.runtime.workers.budget import check_free, free_memory, usual_budget
from raymerge.runtime.workers.pool import Pool
from raymerge.storage.addresses import is_remote, shown
from raymerge.units import format_size
from raymerge.verifier.audit import Commission, Sampling
from raymerge.verifier.findings import AuditVerdict, Findings, audit_verdict
from raymerge.verifier.structure import RECORD_PLAN, verify_structure

LEAST_ROOM = 16 << 20
"""Bytes of memory that a segment in hand takes at least."""
_FIXED = 8 << 20
# Bytes of it for counts of magnitudes, and for what is read to be compared byte by byte.
_ONLY_MERGED = "Only what raymerge merged can be audited; 'raymerge verify' alone looks at its structure."

_STOPPED = "stopped at once. The same command begins anew."


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What of a checkpoint is audited."""

    sample: float = 0.01
    """Share of each tensor's elements that is recomputed, one run of them at least; 1 for all."""
    seed: int | None = None
    """Chooses which; None for others each time. The verdict has the one that was taken."""
    sources: Mapping[str, str] | None = None
    """Directories of sources, by their names in the recipe, that are no longer where they were."""
    most: int = 20
    """Problems that are told in words; all are counted."""
    steps: str | None = None
    """The directory that was named for results between when it was merged; None for beside the checkpoint."""

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            what = f"{self.sample:g} is no share of the elements."
            raise OptionError(Problem("--sample", what, "Give more than 0, and at most 1 for all of them."))
        if (self.seed is not None and self.seed < 0) or self.most < 1:
            what = f"seed {self.seed} and {self.most} problems to show cannot be had."
            raise OptionError(Problem("--seed, --show", what, "Give a seed of 0 or more, and 1 or more."))


class Audit:
    """An audit of one checkpoint, prepared."""

    def __init__(
        self, output: Path | str, wanted: AuditOptions, options: RunOptions, *, on_event: OnEvent
    ) -> None:
        """
        Args:
            output: the checkpoint: a directory, or another place with its options.
            wanted: what of it.
            options: how to run.
            on_event: receives progress.

        Raises:
            OptionError: the memory that workers were promised is not there.
            CheckpointError: the place cannot be read.
        """
        self._began = time.monotonic()
        self._name, self._place = shown(str(output)), str(output)
        self._wanted, self._options, self._on_event = wanted, options, on_event
        self._seed = randbits(32) if wanted.seed is None else wanted.seed
        check_free(options)
        self._structure = verify_structure(output)
        self._output = self._recorded()
        self._problems = list(self._structure.problems)
        # A companion that was edited says nothing of the tensors.
        self._plan = self._saved_plan() if self._structure.are_tensors_sound else None

    @property
    def num_parts(self) -> int:
        """Segments to audit; 0 where there is nothing to be done."""
        return 0 if self._plan is None else len(self._plan["segments"])

    def carry_out(self, pool: Pool) -> AuditVerdict:
        """Audit with a started pool.

        Raises:
            OptionError: workers do not see the sources or the output.
            IncompleteError: it was stopped.
        """
        if self._plan is None:
            return self.verdict(Findings(self._wanted.most))
        steps = steps_directory(self._place, self._wanted.steps)
        located = locate_sources(self._plan, self._output, self._wanted.sources or {}, steps)
        self._problems += located.problems
        work = self._work(self._plan, located, pool)
        pool.survey(work)
        findings = self._audited(self._plan, work, pool)
        return self.verdict(findings)

    def verdict(self, findings: Findings) -> AuditVerdict:
        """The verdict, with what is wrong beside the findings."""
        return audit_verdict(
            self._structure,
            findings,
            sample=self._wanted.sample,
            seed=self._seed,
            tensors=self._structure.tensors,
            problems=self._problems,
            seconds=time.monotonic() - self._began,
        )

    def _recorded(self) -> Path:
        """A directory with the checkpoint's record: itself, or a copy of what there is elsewhere."""
        held = ExitStack()
        weakref.finalize(self, held.close)
        return held.enter_context(record_at(self._place))

    def _saved_plan(self) -> Plan | None:
        """The plan that the checkpoint was made by; None, with a problem, where there is none."""
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

    def _work(self, plan: Plan, located: Located, pool: Pool) -> AuditWork:
        receipts = Ledger.read(self._output / RECORD / NAME)
        digests = row_digests(receipts.values())
        budget = self._options.memory or usual_budget(self._options, free_memory())
        if budget < LEAST_ROOM:
            what = f"a worker may use {format_size(budget)}, and an audit takes {format_size(LEAST_ROOM)}."
            raise OptionError(Problem("--memory", what, f"Give {format_size(LEAST_ROOM)} or more."))
        slots = max(1, min(pool.threads, budget // LEAST_ROOM))
        commission = Commission(
            plan=plan,
            name=self._name,
            digests=digests,
            sampling=Sampling(self._wanted.sample, self._seed),
            absent=located.absent,
            room=max(1, budget // slots - _FIXED),
            most=self._wanted.most,
        )
        place = self._place if is_remote(self._place) else str(self._output)
        return AuditWork(commission, place, tuple(located.roots), tuple(located.files), slots)

    def _audited(self, plan: Plan, work: AuditWork, pool: Pool) -> Findings:
        costs = plan["segments"].column("cost").to_pylist()
        self._announce(plan, costs, work, pool)
        order = sorted(range(len(costs)), key=lambda segment: (-costs[segment], segment))
        by_segment: dict[int, Findings] = {}
        with stopping(self._on_event, _STOPPED) as stop, closing(pool.run(work, order, stop)) as made:
            for batch in made:
                for receipt in batch:
                    by_segment[receipt.segment] = Findings.from_json(receipt.report, self._wanted.most)
                    self._on_event(
                        SegmentDone(
                            receipt.segment,
                            receipt.worker,
                            receipt.read_bytes,
                            0,
                            costs[receipt.segment],
                            receipt.seconds,
                        )
                    )
                check_overdue(stop)
        findings = Findings(self._wanted.most)
        # In the order of the files, whoever was first.
        for segment in sorted(by_segment):
            findings.take(by_segment[segment])
        if len(by_segment) < len(costs):
            raise IncompleteError(
                f"stopped with {len(by_segment)} of {len(costs)} segments audited and "
                f"{findings.num_problems} problems found in them. The same command begins anew."
            )
        return findings

    def _announce(self, plan: Plan, costs: list[int], work: AuditWork, pool: Pool) -> None:
        self._on_event(
            Planned(
                digest=plan.digest,
                tensors=len(plan["tensors"]),
                output_bytes=sum(plan["shards"].column("nbytes").to_pylist()),
                total_bytes=sum(costs),
                segments=len(costs),
                projected_peak=work.commission.room * work.slots,
            )
        )
        self._on_event(Started(pool.workers, pool.device, 0, 0, pool.threads))
