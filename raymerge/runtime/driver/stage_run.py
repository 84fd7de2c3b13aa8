"""Carries out one stage: units on the workers, a conclusion on the driver, a checked result in its place.

What is done lies in a staging directory beside the result, under the directory of the steps. It is named by
all that the bytes depend on: a worker that was given up writes the same bytes there, or elsewhere. A result
that is there, and that nobody wrote to since, is used again.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import xxhash

from raymerge.errors import CheckpointError, IncompleteError, NonFiniteError, Problem, VerificationError
from raymerge.events import (
    DeviceFailed,
    OnEvent,
    StageKept,
    StageReport,
    StageStarted,
    UnitDone,
    UnitProgress,
)
from raymerge.execute.receipts import Receipt
from raymerge.execute.threads import one_thread
from raymerge.options import RunOptions
from raymerge.planner.inputs.source import RESULT_FILE, Prepared, Source, Stage, holdings
from raymerge.publish.attempt import RECORD, remove_thrown_away, sync_directory, throw_away
from raymerge.publish.conditions import agree, check_agreement
from raymerge.publish.lease import Lease, leased
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.staging import file_marks, is_untouched
from raymerge.publish.stop_request import StopRequest
from raymerge.runtime.driver.interruptions import check_overdue, resumable, stopping
from raymerge.runtime.driver.stage_work import StageWork, UnitWork, digests_of, sources_of_stage, told
from raymerge.runtime.driver.versions import check_unchanged, file_versions, source_files
from raymerge.runtime.workers.pool import Pool
from raymerge.runtime.workers.sizing import fit_units, num_workers
from raymerge.storage.local.store import LocalStore, check_room

_STAGE = "stage.json"


def write_stage_record(place: Path, record: Mapping[str, Any]) -> None:
    """Write down, durably, what is known of the result that is in ``place``, and the marks of its file."""
    with LocalStore(place) as store:
        text = json.dumps(record, indent=2, sort_keys=True) + "\n"
        store.write_atomic(f"{RECORD}/{_STAGE}", text.encode())
    mark_result(place)


def mark_result(place: Path) -> None:
    """Note the marks that the file of a result has now."""
    Ledger(place / RECORD / NAME, {}).record_files({RESULT_FILE: file_marks(place)[RESULT_FILE]})


def stage_record(place: Path) -> dict[str, Any]:
    """What is known of a result: title and digest of its stage, size and digest of its file, the report.

    Empty where there is no finished result.
    """
    try:
        found = json.loads((place / RECORD / _STAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def result_digest(place: Path) -> str | None:
    """xxh3_128 hex of a result's file, as it was published; None where no result was."""
    try:
        return str(stage_record(place)["result"]["digest"])
    except (KeyError, TypeError):
        return None


def is_whole(place: Path) -> bool:
    """Whether a result has the bytes that were published.

    It is read only where its file was written to since, as by a worker that was given up and goes on writing
    the same bytes.
    """
    digest = result_digest(place)
    if digest is None:
        return False
    return is_untouched(place) or digests_of(place, {RESULT_FILE: ()}) == {RESULT_FILE: digest}


def check_results(sources: Sequence[Source]) -> None:
    """Find results of stages and of other merges that are no longer what the sources were opened with.

    Raises:
        CheckpointError: with every such file.
        IncompleteError: one is gone.
    """
    check_unchanged(sources, only_made=True)
    problems = [
        Problem(
            f"{each.name}: {RESULT_FILE}",
            "the file was changed while it was merged.",
            f"Leave {each.root} alone, and give the command again; what may be of it does not count.",
        )
        for each in holdings(sources)
        if isinstance(each, Prepared) and not _is_as_opened(each)
    ]
    if problems:
        raise CheckpointError(problems)


def clear(directory: Path, keep: Collection[str]) -> None:
    """Delete everything in a directory but what has these names."""
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            # What goes on writing there may be as fast.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_as_opened(prepared: Prepared) -> bool:
    place = Path(prepared.root)
    return [file.version for file in prepared.files] == [result_digest(place)] and is_whole(place)


_READERS = 8


class StageRun:
    """One run of one stage towards its result below the directory of the steps."""

    def __init__(
        self,
        stage: Stage,
        root: Path,
        options: RunOptions,
        *,
        work: StageWork,
        on_event: OnEvent,
        position: tuple[int, int] = (1, 1),
        stop_request: StopRequest | None = None,
    ) -> None:
        """
        Args:
            stage: what to do, over sources that are there.
            root: the directory of the steps.
            options: how to run.
            work: how the stage is carried out.
            on_event: receives progress; called in this thread, and from a signal handler on Ctrl-C.
            position: the stage's place among those of the submission, from 1, and how many there are.
            stop_request: where others may ask it to stop; None for beside the result.
        """
        self.work = work
        self._stage = stage
        self._place = root / stage.name
        self._begins = f"{_prefix(stage)}{stage.digest[:16]}"
        self._staging = root / self._begins
        self._options = options
        self._on_event = on_event
        self._position = position
        self._stop_request = stop_request or StopRequest.beside(self._place)
        self._told_bytes = 0

    @property
    def ledger_paths(self) -> tuple[Path, ...]:
        """Where the ledgers of the result, and of what was begun of it, would be."""
        begun = sorted(self._place.parent.glob(f"{glob.escape(self._begins)}*"))
        return tuple(place / RECORD / NAME for place in (self._place, *begun))

    def check(self) -> None:
        """Find what stands in the way before any worker is started.

        Raises:
            PlanError: the stage cannot be carried out; all problems.
            OptionError: the memory limit is too small for it.
        """
        self.work.check()
        self.check_memory()

    def check_conditions(self, pool: Pool) -> None:
        """Find out whether what is there of this stage may be used, changing nothing.

        Raises:
            TargetError: it was made under other conditions, and is not to be replaced.
        """
        wanted = _conditions(self._stage, pool.stage_numerics)
        for path in () if self._options.replace else self.ledger_paths:
            before = Ledger.conditions(path)
            # What was made for another recipe is of no use to anybody.
            if before is not None and before.get("stage") == self._stage.digest:
                check_agreement(before, wanted, where=str(path.parent.parent), what=self._stage.title)

    def check_memory(self) -> None:
        """Find out whether the memory limit is enough; raises OptionError where it is not."""
        self._budget()

    def disk_nbytes(self) -> int:
        """Bytes of disk that are taken at most until the result is in its place."""
        work, options = self.work, self._options
        busy = work.num_units if options.address is not None else num_workers(options)
        return work.staging_nbytes(budget=self._budget(), busy=min(busy, work.num_units))

    def carry_out(self, pool: Pool) -> Mapping[str, Any]:
        """Run with a started pool until the result is in its place; the report about it.

        Raises:
            PlanError: the stage cannot be carried out.
            TargetError: what is there of it was made under other conditions.
            NonFiniteError: the weights or what became of them hold NaN or infinity.
            CheckpointError: a source was changed while it was read.
            IncompleteError: stopped by a signal or worn out; the same command goes on from here.
            VerificationError: the result is not what was planned.
        """
        with resumable(self._place), leased(self._place, self._stage.digest) as lease:
            if is_stage_made(self._place, self._stage, pool.stage_numerics):
                # A crash may have come before it was cleared.
                clear(self._place, (RESULT_FILE, RECORD))
                mark_result(self._place)
                self._on_event(StageKept(self._stage.title, *self._position))
            else:
                self.check_conditions(pool)
                self._carry_out(pool, lease)
        report: dict[str, Any] = stage_record(self._place)["report"]
        self._on_event(StageReport(self._stage.title, report))
        return report

    def _carry_out(self, pool: Pool, lease: Lease) -> None:
        pool.survey(self._unit_work())
        conditions = _conditions(self._stage, pool.stage_numerics)
        self._staging = self._staging_of(conditions)
        lease.confirm()
        ledger = self._prepare(conditions)
        try:
            self._have_units(pool, ledger, self._proved(ledger))
            report = dict(self._concluded())
        except NonFiniteError:
            lease.confirm()
            throw_away(self._staging, self._place)
            raise
        check_unchanged(sources_of_stage(self._stage))
        lease.confirm()
        self._publish(conditions["numerics"], report)

    def _unit_work(self) -> UnitWork:
        """What workers need to know."""
        files = source_files(sources_of_stage(self._stage))
        return UnitWork(self.work, self._staging, self._budget(), files)

    def _budget(self) -> int:
        work, title = self.work, self._stage.title
        return fit_units(self._options, least=work.least_budget(), num_units=work.num_units, title=title)

    def _prepare(self, conditions: Mapping[str, Any]) -> Ledger:
        """The ledger of the staging directory; what was begun under other conditions is gone."""
        path = self._staging / RECORD / NAME
        for other in self._place.parent.glob(glob.escape(_prefix(self._stage)) + "*"):
            if other != self._staging or not agree(Ledger.conditions(path), conditions):
                throw_away(other, self._place)
        remove_thrown_away(self._place)
        if not path.exists():
            check_room(self._staging, self.disk_nbytes(), what=self._stage.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(self._staging, {RECORD, *self._unit_files()})
        for directory in (self._staging, self._staging.parent):
            sync_directory(directory)
        return Ledger(path, conditions)

    def _staging_of(self, conditions: Mapping[str, Any]) -> Path:
        """Where units are done under these conditions, and under no others."""
        digest = xxhash.xxh3_128_hexdigest(json.dumps(conditions, sort_keys=True).encode())
        return self._place.with_name(f"{self._begins}-{digest[:16]}")

    def _unit_files(self) -> set[str]:
        """Names of all that units leave; anything else is of workers that did not end theirs."""
        return {key.split("/")[0] for unit in range(self.work.num_units) for key in self.work.files(unit)}

    def _proved(self, ledger: Ledger) -> dict[int, Receipt]:
        """The receipts of an earlier run whose bytes are still there; the others are out of the ledger.

        A power cut may have taken bytes that a storage had promised to keep.
        """
        before = ledger.receipts()
        files = [self.work.files(unit) for unit in before]
        with ThreadPoolExecutor(_READERS) as threads:
            found = threads.map(lambda each: digests_of(self._staging, each), files)
            pairs = zip(before.values(), found, strict=True)
            kept = {receipt.segment: receipt for receipt, digests in pairs if receipt.digests == digests}
        if len(kept) < len(before):
            ledger.begin(kept)
        return kept

    def _have_units(self, pool: Pool, ledger: Ledger, done: dict[int, Receipt]) -> None:
        """Have every unit done, those that are costly first."""
        costs = self.work.costs()
        todo = sorted((unit for unit in range(len(costs)) if unit not in done), key=lambda u: (-costs[u], u))
        self._on_event(
            StageStarted(
                self._stage.title,
                *self._position,
                units=len(costs),
                total_bytes=sum(costs),
                workers=pool.workers,
                device=pool.device,
                done_units=len(done),
                done_bytes=sum(costs[unit] for unit in done),
            )
        )
        is_stopped = self._work_off(pool, ledger, done, todo)
        # A stop in the last unit is a stop too: whoever asked does not want the merge to begin.
        if is_stopped or len(done) < len(costs):
            raise IncompleteError(
                f"stopped with {len(done)} of {len(costs)} units done of: {self._stage.title}. They are "
                "kept: the same command goes on from there."
            )

    def _work_off(self, pool: Pool, ledger: Ledger, done: dict[int, Receipt], todo: Sequence[int]) -> bool:
        """Have units done and add their receipts; whether a stop was asked for."""
        if not todo:
            return False
        work, costs = self._unit_work(), self.work.costs()
        asked = self._stop_request.is_made
        with stopping(self._on_event, asked=asked) as stop, closing(pool.run(work, todo, stop)) as made:
            for batch in made:
                if batch:
                    # Of what was read while a source was written to, there must be no receipt.
                    check_unchanged(sources_of_stage(self._stage))
                ledger.record(*batch)
                done.update((receipt.segment, receipt) for receipt in batch)
                for receipt in batch:
                    self._tell(receipt, costs[receipt.segment])
                if not batch:
                    self._tell_progress(costs, done)
                check_overdue(stop)
            return stop.requested

    def _tell(self, receipt: Receipt, planned_bytes: int) -> None:
        """Emit what a receipt says."""
        if receipt.note:
            self._on_event(DeviceFailed(receipt.worker, receipt.segment, receipt.note))
        self._on_event(
            UnitDone(
                receipt.segment,
                receipt.worker,
                receipt.read_bytes,
                receipt.written_bytes,
                planned_bytes,
                receipt.seconds,
            )
        )

    def _tell_progress(self, costs: Sequence[int], done: Collection[int]) -> None:
        """Emit how far the stage is, if the units in hand are any further."""
        in_hand = {unit: nbytes for unit, nbytes in told(self._staging).items() if unit not in done}
        nbytes = sum(costs[unit] for unit in done) + sum(min(costs[unit], in_hand[unit]) for unit in in_hand)
        if in_hand and nbytes > self._told_bytes:
            self._told_bytes = nbytes
            self._on_event(UnitProgress(nbytes, sum(costs)))

    def _concluded(self) -> Mapping[str, Any]:
        """The report of the conclusion, whose result was looked at."""
        with one_thread():
            report = self.work.conclude(self._staging)
        with LocalStore(self._staging) as store:
            _check_result(self._stage, store)
            store.sync(RESULT_FILE)
        return report

    def _publish(self, numerics: Mapping[str, str], report: Mapping[str, Any]) -> None:
        """Record the result and rename it into its place; a crash on the way leaves what can be concluded."""
        digests = digests_of(self._staging, {RESULT_FILE: ()})
        record = {
            "title": self._stage.title,
            "digest": self._stage.digest,
            "numerics": numerics,
            "result": {"nbytes": self._stage.layout.nbytes, "digest": digests[RESULT_FILE]},
            "report": report,
        }
        write_stage_record(self._staging, record)
        if self._place.exists():
            shutil.rmtree(self._place)
        self._staging.rename(self._place)
        sync_directory(self._place.parent)
        clear(self._place, (RESULT_FILE, RECORD))


def is_stage_made(place: Path, stage: Stage, numerics: Mapping[str, str] | None = None) -> bool:
    """Whether a directory holds the result of a stage over its sources as they are.

    Args:
        place: the directory.
        stage: over sources that are there.
        numerics: what the bytes may depend on; None for any, and for a look without reading: what was
            written to since counts as lost then.
    """
    before = Ledger.conditions(place / RECORD / NAME) or {}
    if numerics is None:
        wanted = _conditions(stage, before.get("numerics"))
        return agree(before, wanted) and is_untouched(place) and bool(stage_record(place))
    return agree(before, _conditions(stage, numerics)) and is_whole(place)


def _conditions(stage: Stage, numerics: Mapping[str, str] | None) -> dict[str, Any]:
    """What a result, or the units of an unfinished one, must have been made under."""
    return {
        "stage": stage.digest,
        "numerics": None if numerics is None else dict(numerics),
        "versions": file_versions(sources_of_stage(stage)),
    }


def _prefix(stage: Stage) -> str:
    return f".{stage.name}.raymerge-"


def _check_result(stage: Stage, store: LocalStore) -> None:
    """Compare the file with the layout that the merge was planned with.

    Raises:
        VerificationError: it is another file.
    """
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
