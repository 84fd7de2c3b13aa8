"""Has the units of a piece of work done by a pool, in a staging directory whose ledger says what is done."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from raymerge.checkpoints.source import Holding
from raymerge.deferred import torch
from raymerge.device_numerics import Fallback, torch_threads
from raymerge.errors import IncompleteError, NonFiniteError
from raymerge.events import DeviceFailed, OnEvent, PartInHand, StageStarted, UnitDone, UnitProgress
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import RunOptions
from raymerge.publish.lease import Lease
from raymerge.publish.record import RECORD, Journal, Ledger, check_begun
from raymerge.publish.shards import costliest_first
from raymerge.publish.staging import UnitStaging
from raymerge.runtime.driver.run import STOPPED_AT_ONCE, Asked, do_parts
from raymerge.runtime.driver.versions import check_unchanged, digests_of, source_files
from raymerge.runtime.workers import pool as pool_module
from raymerge.runtime.workers.pool import UNIT, Pool, Receipts, Runner
from raymerge.runtime.workers.sizing import fit_units
from raymerge.storage.store import Range

_PREFIX = "progress-"
_EVERY_SECONDS = 0.5


@contextmanager
def reporting_progress(
    staging: Path, unit: int, aborted: threading.Event, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """What a unit calls now and then with the bytes read so far.

    It writes them at most twice a second, ignores failures to write, and removes them when the unit ends.
    Once ``aborted`` is set, the next call raises ``IncompleteError``."""
    path, written_at = staging / f"{_PREFIX}{unit}", -_EVERY_SECONDS

    def tell(nbytes: int) -> None:
        nonlocal written_at
        if aborted.is_set():
            raise IncompleteError(STOPPED_AT_ONCE)
        now = clock()
        if now - written_at >= _EVERY_SECONDS:
            written_at = now
            # Whoever reads half of it shows it for a moment.
            with suppress(OSError):
                path.write_text(str(nbytes), encoding="ascii")

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


class Units(Protocol):
    """Units of work that know how to be done. Made on the driver; travels to the workers pickled."""

    @property
    def num_units(self) -> int:
        """Independent of the number of workers and their memory."""

    def costs(self) -> tuple[int, ...]: ...

    def least_budget(self) -> int:
        """Bytes of memory that every unit can be done with."""

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Do one unit on a worker and leave its files in ``staging``, durably; returns bytes read and
        written. A worker that was given up may write the same bytes to the same places at the same time.

        ``budget`` is bytes of memory; ``tell`` is called now and then with the bytes read so far, and may
        raise."""

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """What a unit leaves in ``staging``: ranges of files by the key, none for the whole file. Nothing
        else writes to them, so that changes can be detected later."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    work: Units
    staging: Path
    budget: int
    """Bytes of memory of a worker."""
    files: tuple[SourceFile, ...] = ()
    slots: int = 1
    """More than 1 only if units never use more than ``least_budget``."""
    attempt_id: str = ""
    """Of the run that its units must not outlive."""
    part: ClassVar[str] = UNIT

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
        self._costs = work.work.costs()
        self._read_bytes: dict[int, int] = {}
        # The bytes of a result are those of one thread, wherever it is made.
        self._settings = ExitStack()
        self._settings.enter_context(torch_threads(1))

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Do one unit, with the work's budget or a smaller one. Where a GPU fails or lacks memory, the
        processor does it, and the receipt has a note of that. Raises IncompleteError after ``abort``."""
        began, work = time.monotonic(), self._work
        budget = work.budget if budget is None else budget
        # Each thread of a worker that has several has a setting of its own.
        torch.set_num_threads(1)
        with self._telling(number) as tell:
            do = partial(work.work.unit, number, staging=work.staging, budget=budget, tell=tell)
            (read, written), note = self._fallback.run(lambda device, note: (do(device=device), note))
        digests, seconds = digests_of(work.staging, work.work.files(number)), time.monotonic() - began
        return Receipt(number, read, written, round(seconds, 6), self._name, digests, note=note)

    @contextmanager
    def _telling(self, number: int) -> Iterator[Callable[[int], None]]:
        """What the unit calls with the bytes read so far, as long as the run goes on that it is for."""

        def told(nbytes: int) -> None:
            check_begun(self._work.staging.parent / RECORD, self._work.attempt_id)
            self._read_bytes[number] = nbytes
            tell(nbytes)

        self._read_bytes[number] = 0
        with reporting_progress(self._work.staging, number, self._aborted) as tell:
            try:
                yield told
            finally:
                del self._read_bytes[number]

    def in_hand(self) -> tuple[PartInHand, ...]:
        return tuple(
            PartInHand(unit, "computing", "", min(nbytes, self._costs[unit]), self._costs[unit])
            for unit, nbytes in self._read_bytes.copy().items()
        )

    def abort(self) -> None:
        """Let the unit in hand fail at its next progress; its files are not used."""
        self._aborted.set()

    def close(self) -> None:
        self._settings.close()


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


@dataclass(slots=True)
class UnitRun:
    work: Units
    title: str
    held: Sequence[Holding]
    staging: UnitStaging
    options: RunOptions
    on_event: OnEvent
    asked: Asked
    position: tuple[int, int] = (1, 1)
    """Of this work in the submission, from 1, and the number of such works."""
    reported_bytes: int = 0
    reported_at: float = 0.0
    """When it was looked last at what the units in hand have read."""

    def budget(self, useful: int = 0) -> int:
        """Bytes of memory of a worker, where more than ``useful`` would not help; raises OptionError for a
        small limit."""
        least, count = self.work.least_budget(), self.work.num_units
        return fit_units(self.options, least=least, num_units=count, title=self.title, useful=useful)

    @contextmanager
    def made(
        self,
        pool: Pool,
        conditions: Mapping[str, Any],
        lease: Lease,
        *,
        replace: bool,
        slots: int = 1,
        journal: Journal | None = None,
    ) -> Iterator[Path]:
        """Have all units done that the ledger does not prove; the block concludes from the directory that
        they are in. What holds NaN or infinity is discarded.

        ``slots`` is units that a worker may have in hand at once, if its memory holds so many. Raises
        IncompleteError if it was stopped."""
        staging = self.staging
        pool.survey(self._work_in(staging.root, slots))
        lease.confirm()
        ledger = staging.prepare(conditions, replace=replace)
        if journal is not None:
            journal.open(staging.root / RECORD)
        staging.units.mkdir(exist_ok=True)
        # The others are of unfinished workers.
        clear(staging.units, {key for unit in range(self.work.num_units) for key in self.work.files(unit)})
        try:
            self._have_units(pool, self._work_in(staging.units, slots), ledger)
            with torch_threads(1):
                yield staging.units
        except NonFiniteError:
            lease.confirm()
            staging.discard()
            raise
        check_unchanged(self.held)
        lease.confirm()

    def _work_in(self, place: Path, slots: int) -> UnitWork:
        least = self.work.least_budget()
        budget = self.budget(least * slots)
        fitting = max(1, min(slots, budget // max(1, least)))
        return UnitWork(self.work, place, budget, source_files(self.held), fitting, self.staging.attempt_id)

    def _have_units(self, pool: Pool, work: UnitWork, ledger: Ledger) -> None:
        done, costs = self._proved(work.staging, ledger), self.work.costs()
        self.on_event(
            StageStarted(
                self.title,
                *self.position,
                units=len(costs),
                total_bytes=sum(costs),
                workers=pool.workers,
                device=pool.device,
                done_units=len(done),
                done_bytes=sum(costs[unit] for unit in done),
            )
        )
        todo = costliest_first(costs, done)
        is_stopped = bool(todo) and self._work_off(pool, work, ledger, done, todo)
        # A stop in the last unit is a stop too: whoever asked does not want what comes next to begin.
        if is_stopped or len(done) < len(costs):
            raise IncompleteError(
                f"stopped with {len(done)} of {len(costs)} units done of: {self.title}. They are "
                "kept: the same command goes on from there."
            )

    def _proved(self, staging: Path, ledger: Ledger) -> dict[int, Receipt]:
        """Earlier receipts whose bytes survived power cuts; the ledger forgets the others."""
        before = ledger.receipts()
        files = [self.work.files(unit) for unit in before]
        with ThreadPoolExecutor(_READERS) as threads:
            recomputed = threads.map(lambda each: digests_of(staging, each), files)
            pairs = zip(before.values(), recomputed, strict=True)
            valid = {receipt.segment: receipt for receipt, digests in pairs if receipt.digests == digests}
        if len(valid) < len(before):
            ledger.begin(valid)
        return valid

    def _work_off(
        self, pool: Pool, work: UnitWork, ledger: Ledger, done: dict[int, Receipt], todo: Sequence[int]
    ) -> bool:
        costs = self.work.costs()

        def take(batch: Receipts) -> None:
            if batch:
                # Of what was read while a source was written to, there must be no receipt.
                check_unchanged(self.held)
            ledger.record(*batch)
            done.update((receipt.segment, receipt) for receipt in batch)
            for receipt in batch:
                self._report(receipt, costs[receipt.segment])
            if not batch:
                self._report_progress(work.staging, costs, done)

        return do_parts(pool, work, todo, take, on_event=self.on_event, asked=self.asked)

    def _report(self, receipt: Receipt, planned_bytes: int) -> None:
        if receipt.note:
            self.on_event(DeviceFailed(receipt.worker, receipt.segment, receipt.note))
        self.on_event(
            UnitDone(
                receipt.segment,
                receipt.worker,
                receipt.read_bytes,
                receipt.written_bytes,
                planned_bytes,
                receipt.seconds,
            )
        )

    def _report_progress(self, staging: Path, costs: Sequence[int], done: Collection[int]) -> None:
        # Workers that answer wake the driver many times a second.
        if time.monotonic() - self.reported_at < pool_module.TICK_SECONDS:
            return
        self.reported_at = time.monotonic()
        in_hand = {unit: nbytes for unit, nbytes in progress_by_unit(staging).items() if unit not in done}
        nbytes = sum(costs[unit] for unit in done) + sum(min(costs[unit], in_hand[unit]) for unit in in_hand)
        if in_hand and nbytes > self.reported_bytes:
            self.reported_bytes = nbytes
            self.on_event(UnitProgress(nbytes, sum(costs)))
