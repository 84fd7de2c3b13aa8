"""Carries out a plan: stage, run segments, finish the directory, verify, publish."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from raymerge.assemble.finish import check_shards, finish_companions, finish_config, parents_of
from raymerge.errors import IncompleteError, NonFiniteError, OptionError, Problem
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import UNFINISHED
from raymerge.planner.memory import SMALLEST_BUDGET, Projection, project
from raymerge.planner.sources import Source
from raymerge.planner.tables import Plan
from raymerge.runtime.events import OnEvent, Planned, Published, SegmentDone, ShardDone, Started, Verified
from raymerge.runtime.ledger import Ledger
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import Pool, Stop, Work
from raymerge.runtime.staging import Staging
from raymerge.storage.local import LocalStore
from raymerge.storage.open import open_store
from raymerge.units import format_size
from raymerge.verifier.structure import Verdict, verify_structure

_USUAL_BUDGET = 2 << 30


@dataclass(frozen=True, slots=True)
class RunResult:
    """A published checkpoint."""

    output: Path
    """Where it is."""
    digest: str
    """Digest of its plan."""
    verdict: Verdict
    """The structure verdict."""
    receipts: tuple[Receipt, ...]
    """Receipts of all segments, those of earlier runs included."""
    seconds: float
    """Wall time of this run."""


def fit_budget(plan: Plan, options: RunOptions) -> Projection:
    """The memory projection of a plan under the options' budget.

    Raises:
        OptionError: the plan needs more than the budget allows; the message names the tensor and the least budget.
    """
    projection = project(plan, options.memory or _usual_budget(options))
    if projection.budget < projection.least_budget:
        raise OptionError(
            Problem(
                "--memory",
                f"{format_size(projection.budget)} a worker are too little for {projection.least_tensor} "
                f"with {plan.manifest['method']}.",
                f"The smallest budget that works is {projection.least_budget} bytes "
                f"({format_size(projection.least_budget)}).",
            )
        )
    return projection


def _usual_budget(options: RunOptions) -> int:
    """Half of the free memory, shared out, and no more than helps."""
    workers = options.workers or (1 if options.inline else psutil.cpu_count() or 1)
    share = int(psutil.virtual_memory().available / 2 / workers)
    return max(SMALLEST_BUDGET, min(_USUAL_BUDGET, share))


class Run:
    """One run of one plan towards one output directory."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Source],
        output: Path,
        options: RunOptions,
        *,
        on_event: OnEvent,
    ) -> None:
        self._plan = plan.require()
        self._sources = sources
        self._options = options
        self._on_event = on_event
        self._staging = Staging(output.absolute(), plan)
        self._started = time.monotonic()
        self.projection = fit_budget(plan, options)

    def check(self) -> None:
        """Find what is wrong with the output place before any worker is started.

        Raises:
            TargetError: it is taken, or holds another plan's unfinished run.
        """
        self._staging.check(replace=self._options.replace)

    def announce(self) -> None:
        """Emit ``Planned``."""
        segments = self._plan["segments"]
        self._on_event(
            Planned(
                digest=self._plan.digest,
                tensors=len(self._plan["tensors"]),
                output_bytes=sum(self._plan["shards"].column("nbytes").to_pylist()),
                total_bytes=sum(segments.column("cost").to_pylist()),
                segments=len(segments),
                projected_peak=self.projection.peak,
            )
        )

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the checkpoint is published.

        Raises:
            TargetError: the output place is taken or holds another plan's unfinished run.
            NonFiniteError: a source holds NaN or infinity; the staging directory is removed.
            IncompleteError: stopped by a signal or worn out; the same command goes on from here.
            VerificationError: what was written is not what was planned.
        """
        conditions = {
            "numerics": pool.numerics,
            "versions": [
                {"name": s.name, "files": [[f.key, f.version] for f in s.checkpoint.files]}
                for s in self._sources
            ],
        }
        ledger = self._staging.prepare(conditions, replace=self._options.replace)
        with self._staging.lock(), LocalStore(self._staging.root) as store:
            receipts = self._work(pool, ledger, store)
            self._finish(store)
        verdict = verify_structure(self._staging.root).require()
        self._on_event(Verified(verdict.tensors, verdict.nbytes))
        self._staging.publish(replace=self._options.replace)
        seconds = time.monotonic() - self._started
        self._on_event(Published(str(self._staging.output), seconds))
        return RunResult(
            self._staging.output, self._plan.digest, verdict, tuple(receipts.values()), seconds
        )

    def _work(self, pool: Pool, ledger: Ledger, store: LocalStore) -> dict[int, Receipt]:
        receipts = ledger.receipts()
        costs = self._plan["segments"].column("cost").to_pylist()
        todo = sorted((s for s in range(len(costs)) if s not in receipts), key=lambda s: (-costs[s], s))
        self._on_event(Started(pool.workers, pool.device, len(receipts), sum(costs[s] for s in receipts)))
        progress = _Shards(self._plan, store, self._on_event)
        progress.create()
        work = Work(
            self._plan,
            tuple(source.checkpoint.root for source in self._sources),
            self._staging.root,
            self.projection.budget,
        )
        try:
            with _stopping() as stop:
                for receipt in pool.run(work, todo, stop):
                    ledger.record(receipt)
                    receipts[receipt.segment] = receipt
                    self._on_event(
                        SegmentDone(
                            receipt.segment, receipt.worker, receipt.read_bytes, receipt.written_bytes,
                            receipt.seconds,
                        )
                    )
        except NonFiniteError:
            self._staging.discard()
            raise
        if len(receipts) < len(costs):
            raise IncompleteError(
                f"stopped with {len(receipts)} of {len(costs)} segments done. They are kept: the same command goes "
                "on from there."
            )
        progress.complete()
        return receipts

    def _finish(self, store: LocalStore) -> None:
        donor = self._sources[int(self._plan.manifest["donor"])]
        check_shards(self._plan, store)
        with open_store(donor.checkpoint.root) as files:
            finish_companions(
                self._plan, files, store,
                companions=donor.checkpoint.companions, parents=parents_of(self._sources),
            )
            finish_config(self._plan, files, store, donor_config=donor.checkpoint.config)


class _Shards:
    """The shard files of a run: made with their headers first, named for good when all segments are in."""

    def __init__(self, plan: Plan, store: LocalStore, on_event: OnEvent) -> None:
        self._shards = plan["shards"].to_pylist()
        self._store = store
        self._on_event = on_event

    def create(self) -> None:
        """Reserve every file that is not there and write its header."""
        present = {file.key for file in self._store.files()}
        for shard in self._shards:
            key = shard["name"] + UNFINISHED
            if shard["name"] in present:
                continue
            self._store.create(key, shard["nbytes"])
            self._store.write_at(key, 0, shard["header"])

    def complete(self) -> None:
        """Give every shard its final name."""
        present = {file.key for file in self._store.files()}
        for shard in self._shards:
            if shard["name"] not in present:
                self._store.sync(shard["name"] + UNFINISHED)
                self._store.rename(shard["name"] + UNFINISHED, shard["name"])
            self._on_event(ShardDone(shard["name"], shard["nbytes"]))
        self._store.sync_directory()


@contextmanager
def _stopping() -> Iterator[Stop]:
    """First Ctrl-C or SIGTERM: finish the segments in hand. Second: stop at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.request()

    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(
            "stopped at once. Finished segments are kept: the same command goes on from there."
        ) from error
    finally:
        for number, old in zip(wanted, before, strict=True):
            signal.signal(number, old)

