"""Carries out a plan: stage, run segments, finish the directory, verify, publish. And how any run has its
parts done by a pool, through signals, requests to stop and refusals of the system."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TypeAlias

from raymerge import events
from raymerge.checkpoints.source import CONFIG_FILE, Holding
from raymerge.errors import (
    PROCESS_LIMIT,
    DiskSpaceError,
    IncompleteError,
    NonFiniteError,
    Problem,
    RaymergeError,
    TargetError,
    is_process_limit,
)
from raymerge.events import OnEvent
from raymerge.execute.receipts import Receipt, op_digests
from raymerge.execute.stored_scales import check_scales
from raymerge.merge_plan.plan import planned_layout, weight_files
from raymerge.merge_plan.report import EncodingErrors, FoundDuplicates, encoding_errors, found_duplicates
from raymerge.merge_plan.tables import Plan, index_names
from raymerge.options import RunOptions
from raymerge.planner.explain import tensors_by_use
from raymerge.planner.inputs.sources import Source, holdings, reads_far
from raymerge.publish.finish import (
    check_shards,
    finish_companions,
    finish_config,
    finished_files,
    library_versions,
    parents_of,
    provenance,
    write_provenance,
)
from raymerge.publish.lease import Lease, StopRequest
from raymerge.publish.object_shards import RemoteShards, ShardWork
from raymerge.publish.output_place import MANIFEST, check_apart
from raymerge.publish.record import (
    NAME,
    RECORD,
    STAGES,
    Journal,
    Ledger,
    agree_as_known,
    conditions_in,
    receipts_in,
)
from raymerge.publish.run_records import read_object, records_of
from raymerge.publish.shards import SegmentWork, Shards
from raymerge.publish.staging import Staging, is_untouched, staging_of
from raymerge.runtime.driver import versions
from raymerge.runtime.workers.pool import Pool, Receipts, Stop, Work
from raymerge.runtime.workers.sizing import check_free, fit_budget
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.retry import KEPT, OUT_OF_SPACE, disk_space_error
from raymerge.units import format_size
from raymerge.verifier.structure import Verdict, copied_digests, file_digest, verify_structure

GRACE_SECONDS = 1.0
"""How long parts in hand are waited for after SIGTERM: who sends that may give no more than three seconds,
and a pool tells once a second that nothing came."""
STOPPED_AT_ONCE = "stopped at once. What is finished is kept: the same command goes on from there."
_LASTING_NAMES = "EACCES EBUSY EEXIST EISDIR ELOOP ENAMETOOLONG ENOTDIR ENOTEMPTY EPERM EROFS EXDEV"
_LASTING = frozenset(getattr(errno, name) for name in _LASTING_NAMES.split())


Asked: TypeAlias = Callable[[], bool]
"""Whether another process asks this one to stop; true once for each request."""


@contextmanager
def resumable(place: Path, missing: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Tell lasting refusals of the system at ``place`` from passing ones; ``missing`` is the bytes of disk
    wanted there and not reserved yet.

    Raises TargetError: it would refuse the same again. DiskSpaceError: there is no room now. IncompleteError:
    reading or writing failed, and the same command goes on."""
    try:
        yield
    except DiskSpaceError as error:
        is_of_size = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG
        if is_of_size:
            raise
        raise DiskSpaceError(_without_disk_space(str(error), place, missing())) from error
    except RaymergeError:
        raise
    except (OSError, RuntimeError) as error:
        if is_process_limit(error):
            raise IncompleteError(f"{PROCESS_LIMIT} {KEPT}") from error
        if not isinstance(error, OSError):
            raise
        if error.errno == errno.EFBIG:
            raise disk_space_error(str(error.filename or place), 0, error) from error
        if error.errno in OUT_OF_SPACE:
            what = f"{error.filename or place}: the file system refused it: {error.strerror}. {KEPT}"
            raise DiskSpaceError(_without_disk_space(what, place, missing())) from error
        if error.errno in _LASTING:
            what = f"the system refused it: {error.strerror}."
            raise TargetError(
                Problem(str(error.filename or place), what, "Choose another -o, or clear what is there.")
            ) from error
        raise IncompleteError(
            f"reading or writing failed: {error}. What is done is kept: the same command goes on from there."
        ) from error


def _without_disk_space(what: str, place: Path, missing: int) -> str:
    try:
        free = shutil.disk_usage(place.parent).free
    except OSError:
        return what
    more = f"The output takes {format_size(missing)} more, and " if missing else ""
    return f"{what} {more}{format_size(free)} are free beside it."


def do_parts(
    pool: Pool,
    work: Work,
    numbers: Sequence[int],
    take: Callable[[Receipts], None],
    *,
    on_event: OnEvent,
    at_once: str = STOPPED_AT_ONCE,
    asked: Asked = lambda: False,
) -> bool:
    """Have these parts done, and ``take`` called with receipts as they come; returns whether a stop was
    requested, by a signal as ``stopping`` heeds it, or by another process, as ``asked`` says."""
    with stopping(on_event, at_once) as stop, closing(pool.run(work, numbers, stop)) as made:
        for receipts in made:
            take(receipts)
            if not stop.requested and asked():
                stop.request(GRACE_SECONDS)
                on_event(events.Stopping(GRACE_SECONDS, is_asked=True))
            if stop.overdue:
                raise KeyboardInterrupt
        return stop.requested


def planned(plan: Plan, peak: int, notes: Sequence[str] = ()) -> events.Planned:
    """The event that begins a run over a plan's segments; ``peak`` is bytes of memory of a worker."""
    lead = plan.manifest["sources"][int(plan.manifest["donor"])]
    return events.Planned(
        digest=plan.digest,
        tensors=len(plan["tensors"]),
        output_bytes=sum(plan["shards"].column("nbytes").to_pylist()),
        total_bytes=sum(plan["segments"].column("cost").to_pylist()),
        segments=len(plan["segments"]),
        projected_peak=peak,
        notes=tuple(notes),
        made=tensors_by_use(plan),
        lead="" if "made_by" in lead else str(lead["name"]),
        is_loadable=bool(plan.manifest["config"]) and planned_layout(plan) is None,
    )


def report_segment(receipt: Receipt, planned_bytes: int, on_event: OnEvent) -> None:
    if receipt.note:
        on_event(events.DeviceFailed(receipt.worker, receipt.segment, receipt.note))
    if receipt.retries:
        on_event(events.StorageFailed(receipt.worker, receipt.segment, receipt.retries))
    on_event(
        events.SegmentDone(
            receipt.segment,
            receipt.worker,
            receipt.read_bytes,
            receipt.written_bytes,
            planned_bytes,
            receipt.seconds,
            max(receipt.peak_rss, receipt.peak_device),
        )
    )


@contextmanager
def stopping(on_event: OnEvent, at_once: str = STOPPED_AT_ONCE) -> Iterator[Stop]:
    """Ctrl-C: finish the parts in hand. SIGTERM: finish those that end within ``GRACE_SECONDS``. A second
    signal: stop at once; raises IncompleteError with the text ``at_once``."""
    stop = Stop()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.requested:
            on_event(events.Stopping(0.0))
            raise KeyboardInterrupt
        seconds = GRACE_SECONDS if number == signal.SIGTERM else None
        stop.request(seconds)
        on_event(events.Stopping(seconds))

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(at_once) from error
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


_ENCODING = f"{RECORD}/encoding_errors.json"
"""What encoding changed in each tensor; the plan's own manifest holds only what is known beforehand."""
_MANIFEST = MANIFEST.removeprefix(f"{RECORD}/")
_NO_REPORTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RunResult:
    output: Path | str
    digest: str
    verdict: Verdict
    receipts: tuple[Receipt, ...] = field(repr=False)
    """Those of earlier runs included."""
    seconds: float
    duplicates: FoundDuplicates = field(repr=False)
    encoding_errors: EncodingErrors = field(repr=False)
    """Those of earlier runs included."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a run has while it holds its output place."""

    lease: Lease
    ledger: Ledger
    store: LocalStore
    shards: Shards | RemoteShards
    receipts: dict[int, Receipt]
    """Durable ones by segment, those of earlier runs included."""


class Run:
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
        asked: Asked | None = None,
        staging: Staging | None = None,
    ) -> None:
        """``on_event`` is called in this thread, and from a signal handler on Ctrl-C; ``began`` is
        ``time.monotonic()`` at the begin of the user's command, None for now; ``reports`` are the records of
        earlier stages by their names; ``recipes`` the texts of earlier merges, for the provenance;
        ``warn_encoding_error`` is the relative error of a tensor that is warned of, None for none;
        ``asked`` None for a request beside the output place; ``staging`` None for what the place asks for.

        Raises PlanError: something stands in the plan's way. OptionError: the memory limit is too small for
        it, or more than is free. TargetError: the output would lie over, in or around a source."""
        self._plan = plan.require()
        self._sources = sources
        self._held = holdings(sources)
        self._options = options
        self._on_event = on_event
        self._staging = staging or staging_of(output, plan, options)
        self._began = time.monotonic() if began is None else began
        self._recipes = tuple(recipes)
        self._donor = sources[int(self._plan.manifest["donor"])]
        self._companions = versions.companion_versions(self._donor)
        layout = planned_layout(self._plan)
        self._layout = None if layout is None else self._held[layout.source]
        """The checkpoint whose layout the output has."""
        self._layout_files = versions.layout_versions(self._plan, self._layout)
        self._reports = {f"{RECORD}/{STAGES}/{name}.json": each for name, each in reports.items()}
        self._warn_encoding_error = warn_encoding_error
        self._journal = journal
        self.is_stopped = False
        """Whether it was asked to stop, though by then all was made: what comes next is not wanted."""
        self.asked = asked or StopRequest(self._staging.output).is_made
        beside = self._staging.beside_bytes
        self.projection = fit_budget(plan, options, beside=beside, is_far=reads_far(sources))
        check_free(options)
        alone = {each.checkpoint.root for each in sources if each.checkpoint.is_single_file}
        check_apart(output, self._held, alone)

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def held(self) -> Sequence[Holding]:
        """What it reads."""
        return self._held

    @property
    def place(self) -> Path | str:
        return self._staging.place

    @property
    def ledger_path(self) -> Path:
        return self._staging.ledger_path

    def missing_bytes(self) -> int:
        """Bytes of disk beside the output place that are still to be reserved."""
        return self._staging.missing_bytes()

    def check(self) -> None:
        """Before any worker is started: raises TargetError for the output place."""
        self._staging.check_unheld()
        self._staging.check(replace=self._options.replace)

    def check_conditions(self, pool: Pool) -> None:
        """With a started pool: raises TargetError if an unfinished run may not go on."""
        if not self._options.replace:
            self._staging.check_conditions(self._conditions(pool.numerics))

    def is_published(self, pool: Pool | None = None) -> bool:
        """Whether the output place holds, untouched, what this run would make; None for any pool."""
        record = records_of(str(self._staging.place)).published()
        if (
            record is None
            or read_object(record, MANIFEST.removeprefix(f"{RECORD}/")).get("digest") != self._plan.digest
        ):
            return False
        before = conditions_in(record(NAME)) or {}
        numerics = before.get("numerics") if pool is None else pool.numerics
        is_local = isinstance(self._staging.place, Path)
        return agree_as_known(before, self._conditions(numerics)) and (
            not is_local or is_untouched(self._staging.output)
        )

    def published_result(self) -> RunResult:
        """That of an earlier run, of which ``is_published`` is true."""
        place = self._staging.place
        record = records_of(str(place)).published()
        receipts = receipts_in(b"" if record is None else record(NAME))
        duplicates, errors = self._duplicates(receipts, None), self._encoding_errors(receipts)
        verdict, made = verify_structure(place).require(), tuple(receipts.values())
        return RunResult(place, self._plan.digest, verdict, made, 0.0, duplicates, errors)

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the checkpoint is published. Raises TargetError: the output place is
        taken or holds another plan's unfinished run; OptionError: workers do not see the sources or the
        output place; NonFiniteError: a source holds NaN, infinity or scales of codes that are no positive
        numbers; the staging directory is removed;
        CheckpointError: a source was changed while it was read; IncompleteError: stopped by a signal or worn
        out; the same command goes on from here; VerificationError: what was written is not what was planned.
        """
        notes = self._plan.manifest["notes"]
        self._on_event(planned(self._plan, self.projected_peak(pool), notes))
        self.check_scales()
        with self.resumable(), ExitStack() as held:
            lease = self.hold(held)
            pool.survey(self.work(pool))
            begun = self.begin(pool, held, lease)
            self._make(pool, begun)
            return self.conclude(pool, begun)

    def projected_peak(self, pool: Pool) -> int:
        return max(self.projection.whole_peak, self.projection.gpu_peak if pool.device != "cpu" else 0)

    def check_scales(self) -> None:
        with versions.checking_sources(self._held), ExitStack() as opened:
            stores = [opened.enter_context(each.open()) for each in self._held]
            check_scales(self._plan, stores, [each.name for each in self._held])

    def resumable(self) -> AbstractContextManager[None]:
        return resumable(self._staging.output, self._staging.missing_bytes)

    def hold(self, held: ExitStack) -> Lease:
        """Hold the output place against other runs until ``held`` is closed."""
        return held.enter_context(self._staging.lock())

    def begin(self, pool: Pool, held: ExitStack, lease: Lease) -> Begun:
        """Take up what earlier runs of this plan made; files are closed with ``held``."""
        lease.confirm()
        ledger = self._staging.prepare(self._conditions(pool.numerics), replace=self._options.replace)
        if self._journal is not None:
            self._journal.open(self._staging.root / RECORD, self._staging.keep_journal)
        store = held.enter_context(LocalStore(self._staging.root))
        layout = None if self._layout is None else held.enter_context(open_store(self._layout.place))
        shards = self._staging.shards(store, layout)
        return Begun(lease, ledger, store, shards, shards.take_up(ledger))

    def record(self, begun: Begun, parts: Receipts) -> Receipts:
        """Make receipts durable; returns those that are."""
        begun.lease.check()
        if parts:
            # Made again, a result has the same version, and receipts of wrong bytes are believed.
            versions.check_results(self._held)
        batch = begun.shards.record(begun.ledger, parts)
        begun.receipts.update((receipt.segment, receipt) for receipt in batch)
        return batch

    def discard(self, begun: Begun) -> None:
        """Remove what was made of a plan whose results are not finite."""
        begun.lease.confirm()
        self._staging.discard()

    def conclude(self, pool: Pool, begun: Begun) -> RunResult:
        """Finish the checkpoint, verify and publish it; raises IncompleteError where segments are missing."""
        lease, receipts = begun.lease, begun.receipts
        total = len(self._plan["segments"])
        if len(receipts) < total:
            raise IncompleteError(
                f"stopped with {len(receipts)} of {total} segments done. They are kept: the same command "
                "goes on from there."
            )
        versions.check_unchanged(self._held)
        lease.confirm()
        shared_bytes = begun.shards.complete(self._on_event)
        with begun.store as store:
            duplicates = self._duplicates(receipts, shared_bytes)
            errors = self._encoding_errors(receipts)
            self._report_results(duplicates, errors)
            reports = {**self._reports, **({_ENCODING: errors.to_json()} if errors else {})}
            with versions.checking_sources(self._held):
                files = self._finish(
                    store, reports, numerics=pool.numerics, digests=op_digests(receipts.values())
                )
            versions.check_companions(self._donor, self._companions)
            versions.check_layout(self._plan, self._layout, self._layout_files)
            lease.confirm()
            self._staging.sweep(files)
        verdict = verify_structure(self._staging.root).require()
        self._on_event(events.Verified(verdict.tensors, verdict.nbytes))
        lease.confirm()
        self._staging.publish(replace=self._options.replace)
        seconds, output = time.monotonic() - self._began, self._staging.place
        self._on_event(events.Published(self._staging.name, seconds))
        proved, made = replace(verdict, path=self._staging.name), tuple(receipts.values())
        return RunResult(output, self._plan.digest, proved, made, seconds, duplicates, errors)

    def _conditions(self, numerics: Mapping[str, str] | None) -> dict[str, Any]:
        companions, contents = self._companions, self._donor.checkpoint.contents
        return {
            "numerics": numerics,
            "versions": versions.file_versions(self._held),
            "companions": companions and [[key, contents or version] for key, version in companions],
            **({} if self._layout is None else {"layout": self._layout_files}),
            **versions.condition_of(versions.commits_taken(self._sources)),
        }

    def _make(self, pool: Pool, begun: Begun) -> None:
        costs = self._plan["segments"].column("cost").to_pylist()
        done = sum(costs[segment] for segment in begun.receipts)
        started = events.Started(
            pool.workers, pool.device, len(begun.receipts), done, pool.threads, pool.device_reason
        )
        self._on_event(started)

        def take(parts: Receipts) -> None:
            for receipt in self.record(begun, parts):
                report_segment(receipt, costs[receipt.segment], self._on_event)

        todo = begun.shards.parts(begun.receipts)
        work = self.work(pool)
        try:
            with versions.checking_sources(self._held):
                self.is_stopped = do_parts(pool, work, todo, take, on_event=self._on_event, asked=self.asked)
        except NonFiniteError:
            self.discard(begun)
            raise

    def _duplicates(self, receipts: Mapping[int, Receipt], shared_bytes: int | None) -> FoundDuplicates:
        return found_duplicates(self._plan, op_digests(receipts.values()), shared_bytes=shared_bytes)

    def _encoding_errors(self, receipts: Mapping[int, Receipt]) -> EncodingErrors:
        sums = {int(row): pair for each in receipts.values() for row, pair in each.encoding_errors.items()}
        exactness = {int(row): own for each in receipts.values() for row, own in each.exactness.items()}
        return encoding_errors(self._plan, sums, exactness)

    def _report_results(self, duplicates: FoundDuplicates, errors: EncodingErrors) -> None:
        if duplicates:
            known = duplicates.planned
            facts = known.tensors, known.nbytes, known.groups, duplicates.shared_bytes, duplicates.unforeseen
            self._on_event(events.DuplicatesFound(*facts))
        if errors:
            above = errors.above(self._warn_encoding_error)
            self._on_event(events.EncodingErrorsFound(errors.roles, above, errors.proof))

    def work(self, pool: Pool) -> SegmentWork | ShardWork:
        roots, files = tuple(each.place for each in self._held), versions.source_files(self._held)
        place, attempt_id = self._staging.root, self._staging.attempt_id
        segments = SegmentWork(self._plan, roots, place, self.projection, pool.threads, files, attempt_id)
        return self._staging.work(segments)

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
        op's bytes."""
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
            # Config and index come last, and the plan has all that is in them.
            others = finished - {*weight_files(self._plan), CONFIG_FILE, *index_names(self._plan)}
            copied = copied_digests(self._plan, str(self._staging.root))
            record = provenance(
                self._plan,
                self._sources,
                recipes=(*self._recipes, str(self._plan.manifest["recipe_text"])),
                versions=library_versions(),
                numerics=numerics,
                files={key: file_digest(store, key) for key in sorted(others)} | copied,
                digests=digests,
            )
            seconds = time.monotonic() - self._began
            written = write_provenance(store, record, self._sources, seconds=seconds, run=self._options.run)
            finish_config(self._plan, files, store, donor_config=donor.checkpoint.config)
        return {*finished, *reports, *written}
