"""Carries out one stage: units on the workers, a conclusion on the driver, a checked result in its place.

What is done lies in a staging directory beside the result, under the directory of the steps. A result that
is there, and that nobody wrote to since, is used again.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import xxhash

from raymerge.errors import IncompleteError, NonFiniteError, Problem, VerificationError
from raymerge.execute.receipts import Receipt
from raymerge.execute.threads import one_thread
from raymerge.planner.stages import RESULT_FILE, Stage
from raymerge.runtime.budget import fit_units
from raymerge.runtime.events import OnEvent, StageKept, StageReport, StageStarted, UnitDone
from raymerge.runtime.interruptions import resumable, stopping
from raymerge.runtime.ledger import NAME, Ledger
from raymerge.runtime.locking import locked
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import Pool
from raymerge.runtime.stage_work import StageWork, UnitWork, sources_of_stage
from raymerge.runtime.staging import RECORD, check_room, file_marks, is_untouched, sync_directory
from raymerge.runtime.versions import check_unchanged, file_versions
from raymerge.storage.local import LocalStore

_STAGE = "stage.json"
_CHUNK = 1 << 20


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
    ) -> None:
        """
        Args:
            stage: what to do, over sources that are there.
            root: the directory of the steps.
            options: how to run.
            work: how the stage is carried out.
            on_event: receives progress; called in this thread, and from a signal handler on Ctrl-C.
            position: the stage's place among those of the submission, from 1, and how many there are.
        """
        self.work = work
        self._stage = stage
        self._place = root / stage.name
        self._staging = root / f"{_prefix(stage)}{stage.digest[:16]}"
        self._options = options
        self._on_event = on_event
        self._position = position

    def check(self) -> None:
        """Find what stands in the way before any worker is started.

        Raises:
            PlanError: the stage cannot be carried out; all problems.
            OptionError: the memory limit is too small for it.
        """
        self.work.check()
        self._budget()

    def carry_out(self, pool: Pool) -> Mapping[str, Any]:
        """Run with a started pool until the result is in its place; the report about it.

        Raises:
            PlanError: the stage cannot be carried out.
            NonFiniteError: the weights or what became of them hold NaN or infinity.
            CheckpointError: a source was changed while it was read.
            IncompleteError: stopped by a signal or worn out; the same command goes on from here.
            VerificationError: the result is not what was planned.
        """
        if is_stage_made(self._place, self._stage, pool.numerics):
            self._on_event(StageKept(self._stage.title, *self._position))
        else:
            with resumable(self._place), locked(self._place):
                self._carry_out(pool)
        report: dict[str, Any] = stage_record(self._place)["report"]
        self._on_event(StageReport(self._stage.title, report))
        return report

    def _carry_out(self, pool: Pool) -> None:
        conditions = _conditions(self._stage, pool.numerics)
        ledger = self._prepare(conditions)
        before = ledger.receipts()
        try:
            self._have_units(pool, ledger, dict(before))
            report = dict(self._concluded(ledger, is_resumed=bool(before)))
        except NonFiniteError:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise
        check_unchanged(sources_of_stage(self._stage))
        self._publish(ledger, report)

    def _budget(self) -> int:
        work, title = self.work, self._stage.title
        return fit_units(self._options, least=work.least_budget(), num_units=work.num_units, title=title)

    def _prepare(self, conditions: Mapping[str, Any]) -> Ledger:
        """The ledger of the staging directory; what was begun under other conditions is gone."""
        path = self._staging / RECORD / NAME
        for other in self._place.parent.glob(glob.escape(_prefix(self._stage)) + "*"):
            if other != self._staging or Ledger.conditions(path) != json.loads(json.dumps(conditions)):
                shutil.rmtree(other)
        if not path.exists():
            check_room(self._staging, self._stage.layout.nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self._staging, self._staging.parent):
            sync_directory(directory)
        return Ledger(path, conditions)

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
        work, costs = UnitWork(self.work, self._staging, self._budget()), self.work.costs()
        with stopping(self._on_event) as stop, closing(pool.run(work, todo, stop)) as made:
            for receipt in made:
                ledger.record(receipt)
                done[receipt.segment] = receipt
                self._on_event(
                    UnitDone(
                        receipt.segment,
                        receipt.worker,
                        receipt.read_bytes,
                        receipt.written_bytes,
                        costs[receipt.segment],
                        receipt.seconds,
                    )
                )
            return stop.requested

    def _concluded(self, ledger: Ledger, *, is_resumed: bool) -> Mapping[str, Any]:
        """The report of the conclusion, whose result was looked at.

        Receipts of an earlier run may speak of files that a power cut took. Where nothing can be concluded,
        they are believed no longer, and the next attempt does all units again.
        """
        try:
            with one_thread():
                report = self.work.conclude(self._staging)
            with LocalStore(self._staging) as store:
                _check_result(self._stage, store)
                store.sync(RESULT_FILE)
        except Exception:
            if is_resumed:
                ledger.begin({})
            raise
        return report

    def _publish(self, ledger: Ledger, report: Mapping[str, Any]) -> None:
        """Record the result and rename it into its place; a crash on the way leaves what can be concluded."""
        with LocalStore(self._staging) as store:
            record = {
                "title": self._stage.title,
                "digest": self._stage.digest,
                "result": {"nbytes": self._stage.layout.nbytes, "digest": _digest(store)},
                "report": report,
            }
            text = json.dumps(record, indent=2, sort_keys=True) + "\n"
            store.write_atomic(f"{RECORD}/{_STAGE}", text.encode())
        ledger.record_files({RESULT_FILE: file_marks(self._staging)[RESULT_FILE]})
        if self._place.exists():
            shutil.rmtree(self._place)
        self._staging.rename(self._place)
        sync_directory(self._place.parent)
        _sweep(self._place)


def is_stage_made(place: Path, stage: Stage, numerics: Mapping[str, str] | None = None) -> bool:
    """Whether a directory holds, untouched, the result of a stage over its sources as they are.

    Args:
        place: the directory.
        stage: over sources that are there.
        numerics: what the bytes may depend on; None for any.
    """
    before = dict(Ledger.conditions(place / RECORD / NAME) or {})
    wanted = _conditions(stage, before.get("numerics") if numerics is None else numerics)
    return before == json.loads(json.dumps(wanted)) and is_untouched(place) and bool(stage_record(place))


def stage_record(place: Path) -> dict[str, Any]:
    """What is known of a result: title and digest of its stage, size and digest of its file, the report.

    Empty where there is no finished result.
    """
    try:
        found = json.loads((place / RECORD / _STAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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


def _digest(store: LocalStore) -> str:
    """xxh3_128 hex of the whole result."""
    file = store.info(RESULT_FILE)
    hasher, nbytes = xxhash.xxh3_128(), 0 if file is None else file.nbytes
    for start in range(0, nbytes, _CHUNK):
        hasher.update(store.read(RESULT_FILE, start, min(_CHUNK, nbytes - start)))
    return hasher.hexdigest()


def _sweep(place: Path) -> None:
    """Delete what units left for the conclusion."""
    for path in place.iterdir():
        if path.name in (RESULT_FILE, RECORD):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
