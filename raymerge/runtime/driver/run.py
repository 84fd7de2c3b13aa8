"""Carries out a plan: stage, run segments, finish the directory, verify, publish."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from raymerge.checkpoints.files import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.device_numerics import (
    NO_GPU_WORKS,
    DeviceChoice,
    choose_device,
    full_float32,
    kernels_of,
    numerics_of,
)
from raymerge.errors import IncompleteError, NonFiniteError, first_line
from raymerge.events import (
    DeviceFailed,
    DuplicatesFound,
    EncodingErrorsFound,
    MemoryShort,
    OnEvent,
    Planned,
    Published,
    SegmentDone,
    Started,
    StorageFailed,
    Verified,
)
from raymerge.execute.receipts import Receipt, row_digests
from raymerge.merge_plan.report import EncodingErrors, FoundDuplicates, encoding_errors, found_duplicates
from raymerge.merge_plan.tables import Plan
from raymerge.options import Device, RunOptions
from raymerge.planner.inputs.sources import Source, holdings, reads_far
from raymerge.publish.attempt import RECORD
from raymerge.publish.finish import check_shards, finish_companions, finish_config, finished_files, parents_of
from raymerge.publish.journal import Journal
from raymerge.publish.lease import Lease
from raymerge.publish.ledger import Ledger
from raymerge.publish.output_place import check_apart
from raymerge.publish.provenance import write_provenance
from raymerge.publish.segment_work import SegmentWork, ShardWork
from raymerge.publish.shards import RemoteShards, Shards
from raymerge.publish.staging import staging_of
from raymerge.publish.stop_request import StopRequest
from raymerge.runtime.driver.interruptions import check_overdue, resumable, stopping
from raymerge.runtime.driver.stage_run import check_results
from raymerge.runtime.driver.versions import (
    check_companions,
    check_unchanged,
    checking_sources,
    companion_condition,
    companion_versions,
    condition_of,
    file_versions,
    source_files,
)
from raymerge.runtime.workers.pool import TICK_SECONDS, Pool, Receipts, Runner, Stop, Work
from raymerge.runtime.workers.sizing import check_free, cores_here, fit_budget, layout_of
from raymerge.runtime.workers.system_limits import is_memory_error
from raymerge.runtime.workers.worker_group import WorkerFailures
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.verifier.structure import Verdict, verify_structure

_STAGES = "stages"
"""Directory within the record for what stages report."""
_ENCODING = f"{RECORD}/encoding_errors.json"
"""What encoding changed in each tensor; the plan's own manifest holds only what is known beforehand."""
_NO_REPORTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RunResult:
    output: Path | str
    digest: str
    verdict: Verdict
    receipts: tuple[Receipt, ...]
    """Those of earlier runs included."""
    seconds: float
    duplicates: FoundDuplicates
    """Known beforehand or not."""
    encoding_errors: EncodingErrors
    """Those of earlier runs included."""


class Run:
    """One run of one plan towards one output directory."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Source],
        output: Path | str,
        options: RunOptions,
        *,
        on_event: OnEvent,
        began: float | None = None,
        reports: Mapping[str, Mapping[str, Any]] = _NO_REPORTS,
        recipes: Sequence[str] = (),
        warn_encoding_error: float | None = None,
        journal: Journal | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        """``on_event`` is called in this thread, and from a signal handler on Ctrl-C; ``began`` is
        ``time.monotonic()`` at the begin of the user's command, None for now; ``reports`` are the records of
        earlier stages by their names; ``recipes`` the texts of earlier merges, for the provenance;
        ``warn_encoding_error`` is the relative error of a tensor that is warned of, None for none;
        ``stop_request`` None for beside the output place.

        Raises PlanError: something stands in the plan's way. OptionError: the memory limit is too small for
        it, or more than is free. TargetError: the output would lie over, in or around a source.
        """
        self._plan = plan.require()
        self._sources = sources
        self._options = options
        self._on_event = on_event
        self._staging = staging_of(output, plan, options)
        self._began = time.monotonic() if began is None else began
        self._recipes = tuple(recipes)
        self._donor = sources[int(self._plan.manifest["donor"])]
        self._companions = companion_versions(self._donor)
        self._reports = {f"{RECORD}/{_STAGES}/{name}.json": each for name, each in reports.items()}
        self._warn_encoding_error = warn_encoding_error
        self._journal = journal
        self.is_stopped = False
        """Whether it was asked to stop, though by then all was made: what comes next is not wanted."""
        self._stop_request = stop_request or StopRequest.beside(self._staging.output)
        beside = self._staging.beside_bytes
        self.projection = fit_budget(plan, options, beside=beside, is_far=reads_far(sources))
        check_free(options)
        check_apart(output, sources)

    @property
    def ledger_path(self) -> Path:
        return self._staging.ledger_path

    def check(self) -> None:
        """Before any worker is started: raises TargetError for the output place."""
        self._staging.check_unheld()
        self._staging.check(replace=self._options.replace)

    def check_conditions(self, pool: Pool) -> None:
        """With a started pool: raises TargetError if an unfinished run may not go on."""
        if not self._options.replace:
            self._staging.check_conditions(self._conditions(pool))

    def announce(self) -> None:
        plan, segments = self._plan, self._plan["segments"]
        self._on_event(
            Planned(
                digest=plan.digest,
                tensors=len(plan["tensors"]),
                output_bytes=sum(plan["shards"].column("nbytes").to_pylist()),
                total_bytes=sum(segments.column("cost").to_pylist()),
                segments=len(segments),
                projected_peak=self.projection.whole_peak,
                notes=tuple(plan.manifest["notes"]),
            )
        )

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the checkpoint is published.

        Raises:
            TargetError: the output place is taken or holds another plan's unfinished run.
            OptionError: workers do not see the sources or the output place.
            NonFiniteError: a source holds NaN or infinity; the staging directory is removed.
            CheckpointError: a source was changed while it was read.
            IncompleteError: stopped by a signal or worn out; the same command goes on from here.
            VerificationError: what was written is not what was planned.
        """
        with resumable(self._staging.output, self._staging.missing_bytes), self._staging.lock() as lease:
            return self._carry_out(pool, lease)

    def _carry_out(self, pool: Pool, lease: Lease) -> RunResult:
        pool.survey(self._segment_work(pool))
        lease.confirm()
        ledger = self._staging.prepare(self._conditions(pool), replace=self._options.replace)
        if self._journal is not None:
            self._journal.open(self._staging.root / RECORD, self._staging.keep_journal)
        with LocalStore(self._staging.root) as store:
            receipts, shared_bytes = self._work(pool, ledger, store, lease)
            duplicates = self._duplicates(receipts, shared_bytes)
            errors = self._encoding_errors(receipts)
            reports = {**self._reports, **({_ENCODING: errors.to_json()} if errors else {})}
            with checking_sources(self._sources):
                wanted = self._finish(
                    store, reports, numerics=pool.numerics, digests=row_digests(receipts.values())
                )
            check_companions(self._donor, self._companions)
            lease.confirm()
            self._staging.sweep(wanted)
        verdict = verify_structure(self._staging.root).require()
        self._on_event(Verified(verdict.tensors, verdict.nbytes))
        lease.confirm()
        self._staging.publish(replace=self._options.replace)
        seconds, output = time.monotonic() - self._began, self._staging.place
        self._on_event(Published(self._staging.name, seconds))
        proved, made = replace(verdict, path=self._staging.name), tuple(receipts.values())
        return RunResult(output, self._plan.digest, proved, made, seconds, duplicates, errors)

    def _conditions(self, pool: Pool) -> dict[str, Any]:
        return {
            "numerics": pool.numerics,
            "versions": file_versions(self._sources),
            "companions": companion_condition(self._donor, self._companions),
            **condition_of(self._sources),
        }

    def _work(
        self, pool: Pool, ledger: Ledger, store: LocalStore, lease: Lease
    ) -> tuple[dict[int, Receipt], int | None]:
        """Receipts of all segments, once every shard has its final name; and the result of ``complete``."""
        shards = self._staging.shards(store)
        receipts = shards.take_up(ledger)
        costs = self._plan["segments"].column("cost").to_pylist()
        done = sum(costs[segment] for segment in receipts)
        started = Started(pool.workers, pool.device, len(receipts), done, pool.threads, pool.device_reason)
        self._on_event(started)
        try:
            with checking_sources(self._sources):
                self._make(pool, shards, ledger, receipts, lease)
        except NonFiniteError:
            lease.confirm()
            self._staging.discard()
            raise
        if len(receipts) < len(costs):
            raise IncompleteError(
                f"stopped with {len(receipts)} of {len(costs)} segments done. They are kept: the same "
                "command goes on from there."
            )
        check_unchanged(self._sources)
        lease.confirm()
        return receipts, shards.complete(self._on_event)

    def _duplicates(self, receipts: Mapping[int, Receipt], shared_bytes: int | None) -> FoundDuplicates:
        found = found_duplicates(self._plan, row_digests(receipts.values()), shared_bytes=shared_bytes)
        if found:
            known = found.planned
            facts = known.tensors, known.nbytes, known.groups, found.shared_bytes, found.unforeseen
            self._on_event(DuplicatesFound(*facts))
        return found

    def _encoding_errors(self, receipts: Mapping[int, Receipt]) -> EncodingErrors:
        sums = {int(row): pair for each in receipts.values() for row, pair in each.encoding_errors.items()}
        found = encoding_errors(self._plan, sums)
        if found:
            self._on_event(EncodingErrorsFound(found.roles, found.above(self._warn_encoding_error)))
        return found

    def _make(
        self,
        pool: Pool,
        shards: Shards | RemoteShards,
        ledger: Ledger,
        receipts: dict[int, Receipt],
        lease: Lease,
    ) -> None:
        """Make segments and add their receipts, until all are in or a stop is requested."""
        work, todo = self._segment_work(pool), shards.parts(receipts)
        costs = self._plan["segments"].column("cost").to_pylist()
        asked = self._stop_request.is_made
        with stopping(self._on_event, asked=asked) as stop, closing(pool.run(work, todo, stop)) as made:
            for parts in made:
                lease.check()
                if parts:
                    # Made again, a result has the same version, and receipts of wrong bytes are believed.
                    check_results(self._sources)
                batch = shards.record(ledger, parts)
                receipts.update((receipt.segment, receipt) for receipt in batch)
                for receipt in batch:
                    self._tell(receipt, costs[receipt.segment])
                check_overdue(stop)
            self.is_stopped = stop.requested

    def _segment_work(self, pool: Pool) -> SegmentWork | ShardWork:
        roots, files = tuple(each.root for each in holdings(self._sources)), source_files(self._sources)
        place, mark = self._staging.root, self._staging.mark
        work = SegmentWork(self._plan, roots, place, self.projection, pool.threads, files, mark)
        return self._staging.work(work)

    def _tell(self, receipt: Receipt, planned_bytes: int) -> None:
        if receipt.note:
            self._on_event(DeviceFailed(receipt.worker, receipt.segment, receipt.note))
        if receipt.retries:
            self._on_event(StorageFailed(receipt.worker, receipt.segment, receipt.retries))
        self._on_event(
            SegmentDone(
                receipt.segment,
                receipt.worker,
                receipt.read_bytes,
                receipt.written_bytes,
                planned_bytes,
                receipt.seconds,
                max(receipt.peak_rss, receipt.peak_device),
            )
        )

    def _finish(
        self,
        store: LocalStore,
        reports: Mapping[str, Mapping[str, Any]],
        *,
        numerics: Mapping[str, str],
        digests: Mapping[int, str],
    ) -> set[str]:
        """Write everything beside the shards, and these reports into the record by their keys; returns the
        keys of all that is to be published, beside what the record begins with. ``digests`` are those of each
        row's bytes.
        """
        donor = self._donor
        check_shards(self._plan, store)
        finished = finished_files(self._plan, donor.checkpoint.companions)
        for key, report in reports.items():
            store.write_atomic(key, (json.dumps(report, indent=2, sort_keys=True) + "\n").encode())
        with open_store(donor.checkpoint.root) as files:
            finish_companions(
                self._plan,
                files,
                store,
                companions=donor.checkpoint.companions,
                parents=parents_of(self._sources),
            )
            written = write_provenance(
                store,
                self._plan,
                self._sources,
                recipes=(*self._recipes, str(self._plan.manifest["recipe_text"])),
                numerics=numerics,
                digests=digests,
                # Config and index come last, and the plan has all that is in them.
                files=finished - {*self._plan["shards"].column("name").to_pylist(), CONFIG_FILE, INDEX_FILE},
                seconds=time.monotonic() - self._began,
                run=self._options.run,
            )
            finish_config(self._plan, files, store, donor_config=donor.checkpoint.config)
        return {*finished, *reports, *written}


_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many parts in flight as any worker."""

    def __init__(
        self, device: Device, threads: int | None = None, *, on_event: OnEvent = lambda _: None
    ) -> None:
        """``on_event`` receives parts that ran out of memory."""
        self._on_event = on_event
        self._options = RunOptions(device=device, threads=threads, inline=True)
        self._device = torch.device("cpu")
        self._device_reason = ""
        self._settings = ExitStack()

    @property
    def workers(self) -> tuple[str, ...]:
        return (_NAME,)

    @property
    def device(self) -> str:
        return self._device.type

    @property
    def threads(self) -> int:
        return layout_of(self._options, (cores_here(),), int(self._device.type == "cuda")).threads

    @property
    def device_reason(self) -> str:
        return self._device_reason

    @property
    def numerics(self) -> dict[str, str]:
        return numerics_of(self._device)

    @property
    def stage_numerics(self) -> dict[str, str]:
        return {**self.numerics, **kernels_of(self._device)}

    def start(self) -> None:
        self._settings.enter_context(full_float32())
        if self._options.device != "auto":
            self._device = choose_device(self._options.device)

    def settle(self, choose: Callable[[], DeviceChoice]) -> None:
        if self._options.device == "auto" and torch.cuda.is_available():
            choice = choose()
            self._device = choose_device("auto" if choice.device == "cuda" else "cpu")
            self._device_reason = (choice if self._device.type == choice.device else NO_GPU_WORKS).reason

    def survey(self, work: Work) -> None:
        """Nothing to ask: this process planned with the files, and writes itself."""

    def conclude(self) -> None:
        """No worker can go."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            group = _PartThreads(work, runner, numbers, stop, self._on_event)
            stack.callback(group.give_up)
            yield from group.receipts(threads)

    def close(self) -> None:
        self._settings.close()


class _PartThreads:
    """Threads that take parts themselves: between two parts nobody waits for the driver, which makes receipts
    durable. At most as many parts as slots are in hand or without a durable receipt: that bounds the loss in
    a crash. Parts that ran out of memory are done again last, one after the other.
    """

    def __init__(
        self, work: Work, runner: Runner, numbers: Sequence[int], stop: Stop, on_event: OnEvent
    ) -> None:
        self._work = work
        self._runner = runner
        self._todo = deque(numbers)
        self._stop = stop
        self._on_event = on_event
        self._room = threading.Semaphore(work.slots)
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._short: list[_Short] = []

    def receipts(self, threads: ThreadPoolExecutor) -> Generator[Receipts, None, None]:
        """Receipts until all threads have ended; raises what one of them failed with."""
        yield from self._until_ended([threads.submit(self._take_parts) for _ in range(self._work.slots)])
        losses = WorkerFailures(self._work.part, 1)
        while self._short and not self._stop.requested:
            short, *self._short = self._short
            budget = self._work.lessened(short.number, losses.budget(short.number))
            losses.lessen(short.number, budget, short.reason)
            if budget is not None:
                self._on_event(MemoryShort(_NAME, short.number, budget, short.reason))
            yield from self._until_ended([threads.submit(self._do, short.number, budget)])

    def give_up(self) -> None:
        """Begin no more parts, and let those in hand fail where they can."""
        self._todo.clear()
        self._room.release(self._work.slots)
        self._runner.abort()

    def _until_ended(self, busy: Sequence[Future[None]]) -> Generator[Receipts, None, None]:
        for thread in busy:
            thread.add_done_callback(self._made.put)
        left = len(busy)
        while left:
            found = self._found()
            receipts = tuple(each for each in found if isinstance(each, Receipt))
            yield receipts
            short = [each for each in found if isinstance(each, _Short)]
            self._short += short
            if receipts or short:
                self._room.release(len(receipts) + len(short))
            ended = [each for each in found if isinstance(each, Future)]
            for thread in ended:
                thread.result()
            left -= len(ended)

    def _take_parts(self) -> None:
        while True:
            self._room.acquire()
            try:
                number = self._todo.popleft()
            except IndexError:
                return
            if self._stop.requested:
                return
            self._do(number, None)

    def _do(self, number: int, budget: int | None) -> None:
        try:
            self._made.put(self._runner.run(number, budget))
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            self._made.put(_Short(number, first_line(error)))

    def _found(self) -> list[_Made]:
        """All receipts since; none after a while."""
        found: list[_Made] = []
        with suppress(Empty):
            found.append(self._made.get(timeout=TICK_SECONDS))
            while True:
                found.append(self._made.get_nowait())
        return found


@dataclass(frozen=True, slots=True)
class _Short:
    number: int
    reason: str


_Made: TypeAlias = Receipt | _Short | Future[None]
