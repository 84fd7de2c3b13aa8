"""Carries out one stage: units on the workers, a conclusion on the driver, a checked result in its place.

Its staging directory beside the result is named by all that the bytes depend on: a worker that was given up
writes the same bytes there, or elsewhere. A result that nobody wrote to since is used again.
"""

from __future__ import annotations

import glob
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.source import WeightFile
from raymerge.device_numerics import Fallback, one_thread
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
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Prepared, Source, Stage
from raymerge.publish.lease import Lease, LeaseFile, StopRequest, leased
from raymerge.publish.record import (
    NAME,
    RECORD,
    Ledger,
    agree,
    check_agreement,
    remove_thrown_away,
    sync_directory,
    throw_away,
)
from raymerge.publish.staging import file_marks, is_untouched
from raymerge.runtime.driver.run import STOPPED_AT_ONCE, costliest_first, do_parts, resumable
from raymerge.runtime.driver.versions import (
    STAGE_RECORD,
    check_unchanged,
    digests_of,
    file_versions,
    is_whole,
    result_digest,
    source_files,
    stage_record,
)
from raymerge.runtime.workers.pool import UNIT, Pool, Receipts, Runner
from raymerge.runtime.workers.sizing import fit_units, num_workers
from raymerge.storage.local.store import LocalStore, check_room
from raymerge.storage.store import Range

_PREFIX = "progress-"
_EVERY_SECONDS = 0.5


@contextmanager
def reporting_progress(
    staging: Path, unit: int, aborted: threading.Event, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """What a unit calls now and then with the bytes read so far.

    It writes them at most twice a second, ignores failures to write, and removes them when the unit ends.
    Once ``aborted`` is set, the next call raises ``IncompleteError``.
    """
    path, written_at = staging / f"{_PREFIX}{unit}", -_EVERY_SECONDS

    def tell(nbytes: int) -> None:
        nonlocal written_at
        if aborted.is_set():
            raise IncompleteError(STOPPED_AT_ONCE)
        now = clock()
        if now - written_at >= _EVERY_SECONDS:
            written_at = now
            with suppress(OSError):
                _write(path, nbytes)

    try:
        yield tell
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def progress_by_unit(staging: Path) -> dict[int, int]:
    """Bytes read so far, by the unit in hand."""
    progress: dict[int, int] = {}
    for path in staging.glob(f"{_PREFIX}*"):
        # A unit may end while its number is read.
        with suppress(OSError, ValueError):
            progress[int(path.name.removeprefix(_PREFIX))] = int(path.read_text(encoding="ascii"))
    return progress


def _write(path: Path, nbytes: int) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    part.write_text(str(nbytes), encoding="ascii")
    part.replace(path)


class StageWork(Protocol):
    """How a stage is carried out. Made on the driver; travels to the workers pickled."""

    @property
    def num_units(self) -> int:
        """Independent of the number of workers and their memory."""

    def costs(self) -> tuple[int, ...]: ...

    def least_budget(self) -> int:
        """Bytes of memory that every unit can be done with."""

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Most bytes of disk in the staging directory, the result included. What does not fit into
        ``budget``, bytes of memory of a worker, may go to disk; at most ``busy`` units are in hand at once.
        """

    def check(self) -> None:
        """From headers, configs and tokenizers alone; raises PlanError with every problem."""

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Do one unit on a worker and leave its files in ``staging``, durably; returns bytes read and
        written. A worker that was given up may write the same bytes to the same places at the same time.

        ``budget`` is bytes of memory; ``tell`` is called now and then with the bytes read so far, and may
        raise.
        """

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """What a unit leaves in ``staging``: ranges of files by the key, none for the whole file. Nothing
        else writes to them, so that changes can be detected later.
        """

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """On the driver, last: write the result in ``staging``; returns the report, as JSON values."""


def work_of(stage: Stage) -> StageWork:
    if isinstance(stage.spec, GateSpec):
        from raymerge.stages.router import gate_work

        return gate_work(stage)
    from raymerge.stages.alignment import align_work

    return align_work(stage)


def sources_of_stage(stage: Stage) -> tuple[Source, ...]:
    spec = stage.spec
    return (spec.base,) if isinstance(spec, GateSpec) else (spec.reference, spec.other)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Everything that workers need to do units of a stage, but their numbers."""

    work: StageWork
    staging: Path
    budget: int
    """Bytes of memory of a worker."""
    files: tuple[SourceFile, ...] = ()

    @property
    def slots(self) -> int:
        """1: a unit may use the whole budget."""
        return 1

    @property
    def part(self) -> str:
        return UNIT

    @property
    def place(self) -> Path:
        return self.staging

    def reads(self) -> tuple[frozenset[int], ...]:
        """All files: which of them a unit reads is not known beforehand."""
        return (frozenset(range(len(self.files))),) * self.work.num_units

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of what the unit had; all units need the same."""
        del number
        had, least = self.budget if budget is None else budget, self.work.least_budget()
        return max(least, had // 2) if had > least else None

    def open(self, device: torch.device, name: str) -> Runner:
        return UnitRunner(self, device, name)


class UnitRunner:
    def __init__(self, work: UnitWork, device: torch.device, name: str) -> None:
        self._work = work
        self._fallback = Fallback(device)
        self._name = name
        self._aborted = threading.Event()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Do one unit, with the work's budget or a smaller one. Where a GPU fails or lacks memory, the
        processor does it, and the receipt has a note of that. Raises IncompleteError after ``abort``.
        """
        began, work = time.monotonic(), self._work
        budget = work.budget if budget is None else budget
        # The bytes of a result are those of one thread, wherever it is made.
        with one_thread(), reporting_progress(work.staging, number, self._aborted) as tell:
            do = partial(work.work.unit, number, staging=work.staging, budget=budget, tell=tell)
            (read, written), note = self._fallback.run(lambda device, note: (do(device=device), note))
        digests, seconds = digests_of(work.staging, work.work.files(number)), time.monotonic() - began
        return Receipt(number, read, written, round(seconds, 6), self._name, digests, note=note)

    def abort(self) -> None:
        """Let the unit in hand fail at its next progress; its files are not used."""
        self._aborted.set()

    def close(self) -> None: ...


def mark_result(place: Path) -> None:
    Ledger(place / RECORD / NAME, {}).record_files({RESULT_FILE: file_marks(place)[RESULT_FILE]})


def clear(directory: Path, keep: Collection[str]) -> None:
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            # What goes on writing there may be as fast.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


_READERS = 8


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
        stop_request: StopRequest | None = None,
    ) -> None:
        """``root`` is the directory of the steps; ``position`` the stage's place in the submission, from 1,
        and their number; ``stop_request`` None for beside the result.
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
        self._reported_bytes = 0

    @property
    def ledger_paths(self) -> tuple[Path, ...]:
        """Where the ledgers of the result and of an unfinished run of it would be."""
        begun = sorted(self._place.parent.glob(f"{glob.escape(self._begins)}*"))
        return tuple(place / RECORD / NAME for place in (self._place, *begun))

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
        ``Run.carry_out`` raises, and PlanError where the stage cannot be carried out.
        """
        with resumable(self._place), leased(LeaseFile(self._place), self._stage.digest) as lease:
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
        files = source_files(sources_of_stage(self._stage))
        return UnitWork(self.work, self._staging, self.budget(), files)

    def budget(self) -> int:
        """Bytes of memory of a worker; raises OptionError for a small limit."""
        work, title = self.work, self._stage.title
        return fit_units(self._options, least=work.least_budget(), num_units=work.num_units, title=title)

    def _prepare(self, conditions: Mapping[str, Any]) -> Ledger:
        """The ledger of the staging directory, without what began under other conditions."""
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
        digest = xxhash.xxh3_128_hexdigest(json.dumps(conditions, sort_keys=True).encode())
        return self._place.with_name(f"{self._begins}-{digest[:16]}")

    def _unit_files(self) -> set[str]:
        """Names of all that units leave; other files are of unfinished workers."""
        return {key.split("/")[0] for unit in range(self.work.num_units) for key in self.work.files(unit)}

    def _proved(self, ledger: Ledger) -> dict[int, Receipt]:
        """Earlier receipts whose bytes survived power cuts; the ledger forgets the others."""
        before = ledger.receipts()
        files = [self.work.files(unit) for unit in before]
        with ThreadPoolExecutor(_READERS) as threads:
            recomputed = threads.map(lambda each: digests_of(self._staging, each), files)
            pairs = zip(before.values(), recomputed, strict=True)
            valid = {receipt.segment: receipt for receipt, digests in pairs if receipt.digests == digests}
        if len(valid) < len(before):
            ledger.begin(valid)
        return valid

    def _have_units(self, pool: Pool, ledger: Ledger, done: dict[int, Receipt]) -> None:
        costs = self.work.costs()
        todo = costliest_first(costs, done)
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
        if not todo:
            return False
        costs = self.work.costs()

        def take(batch: Receipts) -> None:
            if batch:
                # Of what was read while a source was written to, there must be no receipt.
                check_unchanged(sources_of_stage(self._stage))
            ledger.record(*batch)
            done.update((receipt.segment, receipt) for receipt in batch)
            for receipt in batch:
                self._report(receipt, costs[receipt.segment])
            if not batch:
                self._report_progress(costs, done)

        asked = self._stop_request.is_made
        return do_parts(pool, self._unit_work(), todo, take, on_event=self._on_event, asked=asked)

    def _report(self, receipt: Receipt, planned_bytes: int) -> None:
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

    def _report_progress(self, costs: Sequence[int], done: Collection[int]) -> None:
        in_hand = {
            unit: nbytes for unit, nbytes in progress_by_unit(self._staging).items() if unit not in done
        }
        nbytes = sum(costs[unit] for unit in done) + sum(min(costs[unit], in_hand[unit]) for unit in in_hand)
        if in_hand and nbytes > self._reported_bytes:
            self._reported_bytes = nbytes
            self._on_event(UnitProgress(nbytes, sum(costs)))

    def _concluded(self) -> Mapping[str, Any]:
        with one_thread():
            report = self.work.conclude(self._staging)
        with LocalStore(self._staging) as store:
            _check_result(self._stage, store)
            store.sync(RESULT_FILE)
        return report

    def _publish(self, numerics: Mapping[str, str], report: Mapping[str, Any]) -> None:
        """Record the result and rename it into its place; after a crash between, it can be concluded."""
        digests = digests_of(self._staging, {RESULT_FILE: ()})
        record = {
            "title": self._stage.title,
            "digest": self._stage.digest,
            "numerics": numerics,
            "result": {"nbytes": self._stage.layout.nbytes, "digest": digests[RESULT_FILE]},
            "report": report,
        }
        with LocalStore(self._staging) as store:
            store.write_atomic(STAGE_RECORD, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode())
        mark_result(self._staging)
        if self._place.exists():
            shutil.rmtree(self._place)
        self._staging.rename(self._place)
        sync_directory(self._place.parent)
        clear(self._place, (RESULT_FILE, RECORD))


def is_stage_made(place: Path, stage: Stage, numerics: Mapping[str, str] | None = None) -> bool:
    """Whether a directory holds the result of a stage over its sources as they are.

    ``numerics`` is what the bytes may depend on; None for any, and for a look without reading: a result that
    was written to counts as lost then.
    """
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
        "versions": file_versions(sources_of_stage(stage)),
    }


def _prefix(stage: Stage) -> str:
    return f".{stage.name}.raymerge-"


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
    return any(source.checkpoint.unwritten is not None for source in sources_of_stage(stage))


def over_results(stage: Stage, sources: Sequence[Source]) -> Stage:
    by_reference = {source.reference: source for source in sources}

    def opened(planned: Source) -> Source:
        if planned.checkpoint.unwritten is None:
            return planned
        return replace(planned, checkpoint=by_reference[planned.reference].checkpoint)

    spec = stage.spec
    if isinstance(spec, GateSpec):
        return replace(stage, spec=replace(spec, base=opened(spec.base)))
    return replace(stage, spec=replace(spec, reference=opened(spec.reference), other=opened(spec.other)))


def with_stage_results(sources: Sequence[Source], root: Path) -> tuple[Source, ...]:
    """The sources with results below ``root``; raises CheckpointError if one is absent or not as planned."""
    return tuple(
        replace(source, prepared=tuple(_opened(each, root / each.stage.name) for each in source.prepared))
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
