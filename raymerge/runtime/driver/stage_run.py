"""Carries out one stage: units on the workers, a conclusion on the driver, a checked result in its place.

A result that nobody wrote to since is used again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.source import WeightFile
from raymerge.errors import CheckpointError, Problem, VerificationError
from raymerge.events import OnEvent, StageKept, StageReport
from raymerge.merge_plan.plan import make_plan
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import (
    RESULT_FILE,
    STAGE_RECORD,
    CalibrationSpec,
    GateSpec,
    Prepared,
    RegMeanSpec,
    RepairSpec,
    Source,
    Stage,
    TransplantSpec,
    holdings,
)
from raymerge.publish.lease import Lease, StopRequest
from raymerge.publish.record import NAME, RECORD, Ledger, agree, check_agreement
from raymerge.publish.staging import ResultStaging, file_states, is_untouched
from raymerge.runtime.driver.run import Asked, resumable
from raymerge.runtime.driver.unit_run import UnitRun, Units
from raymerge.runtime.driver.versions import digests_of, file_versions, is_whole, result_digest, stage_record
from raymerge.runtime.workers.pool import Pool
from raymerge.runtime.workers.sizing import num_workers
from raymerge.storage.local.store import LocalStore


class StageWork(Units, Protocol):
    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Most bytes of disk in the staging directory, the result included. What does not fit into
        ``budget``, bytes of memory of a worker, may go to disk; at most ``busy`` units are in hand at once.
        """

    def check(self) -> None:
        """From headers, configs and tokenizers alone; raises PlanError with every problem."""

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """On the driver, last: write the result in ``staging``; returns the report, as JSON values."""


def work_of(stage: Stage) -> StageWork:
    if isinstance(stage.spec, GateSpec):
        from raymerge.stages.router.work import gate_work

        return gate_work(stage)
    if isinstance(stage.spec, TransplantSpec):
        from raymerge.stages.transplant import transplant_work

        return transplant_work(stage)
    if isinstance(stage.spec, RepairSpec):
        from raymerge.stages.calibration.router_repair import RepairWork

        return RepairWork(stage, stage.spec)
    if isinstance(stage.spec, CalibrationSpec):
        from raymerge.stages.calibration.work import CalibrationWork

        return CalibrationWork(stage, stage.spec)
    if isinstance(stage.spec, RegMeanSpec):
        from raymerge.stages.calibration.regmean import regmean_work

        return regmean_work(stage, stage.spec)
    from raymerge.stages.alignment import align_work

    return align_work(stage)


class StageRun:
    def __init__(
        self,
        stage: Stage,
        root: Path,
        options: RunOptions,
        *,
        work: StageWork,
        on_event: OnEvent,
        position: tuple[int, int] = (1, 1),
        asked: Asked | None = None,
    ) -> None:
        """``root`` is the directory of the steps; ``position`` the stage's place in the submission, from 1,
        and their number; ``asked`` None for a request beside the result."""
        self.work = work
        self._stage = stage
        self._place = root / stage.directory
        self._options = options
        self._on_event = on_event
        self._position = position
        plan = make_plan({"stage": stage.digest, "recipe_text": ""}, {}, ())
        self._staging = ResultStaging(self._place, plan, self.disk_nbytes, stage.title)
        self._units = UnitRun(
            work,
            stage.title,
            holdings(stage.spec.sources),
            self._staging,
            options,
            on_event=on_event,
            position=position,
            asked=asked or StopRequest(self._place).is_made,
        )

    @property
    def ledger_paths(self) -> tuple[Path, ...]:
        """Where the ledgers of the result and of an unfinished run of it would be."""
        return self._place / RECORD / NAME, self._staging.ledger_path

    def check(self) -> None:
        """Before any worker is started: raises PlanError, or OptionError for a small memory limit."""
        self.work.check()
        self.budget()

    def check_conditions(self, pool: Pool) -> None:
        """Raises TargetError for a result of other conditions that is not to be replaced; changes nothing."""
        current = _conditions(self._stage, pool.stage_numerics)
        for path in () if self._options.replace else self.ledger_paths:
            before = Ledger.conditions(path)
            # What was made for another recipe is of no use to anybody.
            if before is not None and before.get("stage") == self._stage.digest:
                check_agreement(before, current, where=str(path.parent.parent), what=self._stage.title)

    def disk_nbytes(self) -> int:
        """Most bytes of disk until the result is in its place."""
        work, options = self.work, self._options
        busy = work.num_units if options.address is not None else num_workers(options)
        return work.staging_nbytes(budget=self.budget(), busy=min(busy, work.num_units))

    def carry_out(self, pool: Pool) -> Mapping[str, Any]:
        """Run with a started pool until the result is in its place; returns the report. Raises what
        ``Run.carry_out`` raises, and PlanError where the stage cannot be carried out."""
        with resumable(self._place), self._staging.lock() as lease:
            if is_stage_made(self._place, self._stage, pool.stage_numerics):
                mark = {RESULT_FILE: file_states(self._place)[RESULT_FILE]}
                Ledger(self._place / RECORD / NAME, {}).record_files(mark)
                self._on_event(StageKept(self._stage.title, *self._position))
            else:
                self.check_conditions(pool)
                self._carry_out(pool, lease)
        report: dict[str, Any] = stage_record(self._place)["report"]
        self._on_event(StageReport(self._stage.title, report))
        return report

    def _carry_out(self, pool: Pool, lease: Lease) -> None:
        conditions = _conditions(self._stage, pool.stage_numerics)
        _check_given(self._stage)
        with self._units.made(pool, conditions, lease, replace=True) as units:
            report = dict(self.work.conclude(units))
            _check_given(self._stage)
            with LocalStore(units) as store:
                _check_result(self._stage, store)
                store.sync(RESULT_FILE)
        self._publish(units, conditions["numerics"], report)

    def budget(self) -> int:
        """Bytes of memory of a worker; raises OptionError for a small limit."""
        return self._units.budget()

    def _publish(self, units: Path, numerics: Mapping[str, str], report: Mapping[str, Any]) -> None:
        digests = digests_of(units, {RESULT_FILE: ()})
        record = {
            "title": self._stage.title,
            "digest": self._stage.digest,
            "numerics": numerics,
            "result": {"nbytes": self._stage.layout.nbytes, "digest": digests[RESULT_FILE]},
            "report": report,
        }
        with LocalStore(self._staging.root) as store:
            store.write_atomic(STAGE_RECORD, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode())
            store.rename(f"{units.name}/{RESULT_FILE}", RESULT_FILE)
            store.sync_directory()
        self._staging.sweep({RESULT_FILE, STAGE_RECORD})
        self._staging.publish(replace=True)


def is_stage_made(place: Path, stage: Stage, numerics: Mapping[str, str] | None = None) -> bool:
    """Whether a directory holds the result of a stage over its sources as they are.

    ``numerics`` is what the bytes may depend on; None for any, and for a look without reading: a result that
    was written to counts as lost then."""
    before = Ledger.conditions(place / RECORD / NAME) or {}
    if numerics is None:
        current = _conditions(stage, before.get("numerics"))
        return agree(before, current) and is_untouched(place) and bool(stage_record(place))
    return agree(before, _conditions(stage, numerics)) and is_whole(place)


def _conditions(stage: Stage, numerics: Mapping[str, str] | None) -> dict[str, Any]:
    """What a result, or the units of an unfinished one, must have been made under."""
    return {
        "stage": stage.digest,
        "numerics": None if numerics is None else dict(numerics),
        "versions": file_versions(holdings(stage.spec.sources)),
    }


def _check_given(stage: Stage) -> None:
    """Raises CheckpointError: statistics that were made before are not what was made."""
    given = stage.spec.statistics if isinstance(stage.spec, RegMeanSpec) else ()
    problems = [
        Problem(
            str(Path(each.made_at) / RESULT_FILE),
            "its bytes are not those that 'raymerge calibrate' left: it is damaged, or something changed it.",
            "Make the statistics again.",
        )
        for each in given
        if each.made_at
        and not (result_digest(Path(each.made_at)) == each.digest and is_whole(Path(each.made_at)))
    ]
    if problems:
        raise CheckpointError(problems)


def _check_result(stage: Stage, store: LocalStore) -> None:
    header, file = stage.layout.header, store.info(RESULT_FILE)
    if file is None or file.nbytes != stage.layout.nbytes:
        size = "absent" if file is None else f"{file.nbytes} bytes long"
        what = f"its result is {size}, and was planned with {stage.layout.nbytes} bytes."
    elif store.read(RESULT_FILE, 0, len(header)) != header:
        what = "its result has another header than was planned."
    else:
        return
    remedy = "Give the command again; if that does not help, this is a bug in raymerge: please report it."
    raise VerificationError(Problem(f"{stage.place}: {stage.title}", what, remedy))


def awaits_results(stage: Stage) -> bool:
    return any(source.checkpoint.unwritten is not None for source in stage.spec.sources)


def over_results(stage: Stage, sources: Sequence[Source]) -> Stage:
    by_reference = {source.reference: source for source in sources}

    def opened(planned: Source) -> Source:
        if planned.checkpoint.unwritten is None:
            return planned
        return replace(planned, checkpoint=by_reference[planned.reference].checkpoint)

    return replace(stage, spec=stage.spec.over(opened))


def with_stage_results(sources: Sequence[Source], root: Path) -> tuple[Source, ...]:
    """The sources with results below ``root``; raises CheckpointError if one is absent or not as planned."""
    return tuple(
        replace(
            source, prepared=tuple(_opened(each, root / each.stage.directory) for each in source.prepared)
        )
        if source.prepared
        else source
        for source in sources
    )


def _opened(prepared: Prepared, place: Path) -> Prepared:
    """A result, with its file's digest for a version."""
    files, digest = [], result_digest(place)
    with LocalStore(place) as store:
        for planned in prepared.files:
            info = store.info(planned.key)
            header = None if info is None else read_header(store, info.key, info.nbytes, info.version)
            if header is None or digest is None:
                state = "absent"
            elif (header.nbytes, header.digest) != (planned.nbytes, planned.header_digest):
                state = "no longer what was prepared; something else changed it"
            else:
                files.append(WeightFile(header.key, header.nbytes, header.digest, digest))
                continue
            what = f"the result of '{prepared.name}' is {state}."
            raise CheckpointError(Problem(str(place / planned.key), what, "Give the command again."))
    return replace(prepared, root=str(place), files=tuple(files))
