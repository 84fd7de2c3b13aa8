"""Several outputs of one submission: those whose tensors lie alike are made of one read of their sources.

Each is a run of its own, with the staging directory, ledger, record and digest of its separate submission.
The driver begins them together, has each segment made for all that lack it, records it in the ledger of each,
and publishes each by itself. What goes wrong with one of them ends that one alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from raymerge import events
from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    NonFiniteError,
    Problem,
    RaymergeError,
    UserError,
    shortlist,
)
from raymerge.events import Event, OnEvent
from raymerge.execute.receipts import JointReceipt, Receipt
from raymerge.merge_plan.joint import joint_costs, joint_groups
from raymerge.merge_plan.memory import Projection
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.planner.merges import PlannedMerge
from raymerge.publish.lease import Lease, stop_request_at
from raymerge.publish.object_shards import ShardWork, joint_work
from raymerge.publish.output_place import sweep_steps
from raymerge.publish.record import Journal
from raymerge.publish.run_records import NO_FAILURE, SweepRecord
from raymerge.publish.shards import JointWork
from raymerge.runtime.driver import versions
from raymerge.runtime.driver.chained_merges import (
    Disk,
    MergeJob,
    check_disk,
    device_for,
    drop_steps,
    has_steps,
    holding_steps,
    noting,
    raise_any,
)
from raymerge.runtime.driver.run import Begun, Run, RunResult, do_parts, planned, report_segment
from raymerge.runtime.workers.pool import Pool, Receipts
from raymerge.storage.addresses import is_remote, shown


@dataclass(frozen=True, slots=True)
class OutputMerges:
    """One output of a sweep."""

    name: str
    place: Path | str
    merges: tuple[PlannedMerge, ...]
    """Of its plain recipe, in order of dependency; the last is the output."""


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Outputs that are made of one read."""

    numbers: tuple[int, ...]
    why_apart: str = ""
    """Of one output that is made as if it were submitted alone, why; "" if nothing but memory is between it
    and others."""


def read_groups(outputs: Sequence[OutputMerges], projections: Sequence[Projection]) -> tuple[ReadGroup, ...]:
    """Which outputs are made together, in the order in which they are made. ``projections`` are those of each
    one made alone."""
    joined: dict[tuple[str, ...], list[int]] = {}
    for number, output in enumerate(outputs):
        # Results before them of one name have one place.
        joined.setdefault(tuple(each.plan.digest for each in output.merges[:-1]), []).append(number)
    in_order = any(is_remote(str(each.place)) for each in outputs)
    groups: list[ReadGroup] = []
    for candidates in joined.values():
        plans = [outputs[number].merges[-1].plan for number in candidates]
        for positions in joint_groups(plans, in_order=in_order):
            numbers = tuple(candidates[position] for position in positions)
            most = _neediest([projections[number] for number in numbers]).most_outputs
            why = "its tensors lie otherwise" if len(numbers) == 1 < len(outputs) else ""
            groups += (ReadGroup(numbers[at : at + most], why) for at in range(0, len(numbers), most))
    return tuple(groups)


def _neediest(projections: Sequence[Projection]) -> Projection:
    """The projection of plans that are made together: of each number the one that takes most."""
    most = min(projections, key=lambda each: (each.lanes, -each.least_budget))
    return replace(
        most,
        shared=max(each.shared for each in projections),
        least_lane=max(each.least_lane for each in projections),
        gpu_peak=max(each.gpu_peak for each in projections),
    )


@dataclass(slots=True)
class _Member:
    """One output while it is made."""

    name: str
    job: MergeJob
    journal: Journal
    held: ExitStack = field(default_factory=ExitStack)
    begun: Begun | None = None
    error: RaymergeError | None = None
    result: RunResult | None = None

    @property
    def run(self) -> Run:
        return self.job.run


class JointRun:
    """The outputs of one ``ReadGroup``, carried out together."""

    def __init__(self, members: Sequence[_Member], on_event: OnEvent) -> None:
        self._members = members
        self._on_event = on_event
        self._plans = [member.run.plan for member in members]
        every = (own for member in members for own in member.run.held)
        self._sources = tuple({(own.root, own.files): own for own in every}.values())
        self.is_stopped = False
        """Whether it was asked to stop; all may be made nevertheless."""

    def emit(self, event: Event) -> None:
        """What happens to workers: passed on once, and written to the journal of each output, which otherwise
        has the output's own events."""
        for member in self._members:
            member.journal(event)
        self._on_event(event)

    def carry_out(self, pool: Pool) -> None:
        """Give each member its result or its error; raises, as ``do_parts`` does, what ends all of them."""
        with ExitStack() as held:
            for member in self._members:
                held.push(member.held)
                member.held.enter_context(member.journal)
            self._announce(pool)
            self._begin(pool)
            if begun := [member for member in self._members if member.begun is not None]:
                self._make(pool, begun)
            for member in self._members:
                self._conclude(pool, member)

    def without_changed(self, error: CheckpointError) -> list[_Member]:
        """Give this error to those of which a source was changed; returns the others."""
        left: list[_Member] = []
        for member in self._members:
            if member.result is not None or member.error is not None:
                continue
            try:
                versions.check_unchanged(member.run.held)
            except RaymergeError:
                self._fail(member, error)
            else:
                member.begun = None
                left.append(member)
        return left

    def _announce(self, pool: Pool) -> None:
        alone = (member.run.projected_peak(pool) for member in self._members)
        peak = max(self._projection(self._members).whole_peak, *alone)
        each = [planned(plan, peak, plan.manifest["notes"]) for plan in self._plans]
        made: Counter[str] = Counter()
        for own in each:
            made.update(own.made)
        sums = replace(
            each[0],
            digest="",
            tensors=sum(own.tensors for own in each),
            output_bytes=sum(own.output_bytes for own in each),
            total_bytes=sum(joint_costs(self._plans)),
            notes=tuple(dict.fromkeys(note for own in each for note in own.notes)),
            made=dict(made),
        )
        for member, own in zip(self._members, each, strict=True):
            # What is read for all stands in the receipts of the first.
            is_first = member is self._members[0]
            member.journal(own if is_first else replace(own, total_bytes=own.output_bytes))
        self._on_event(sums)

    def _begin(self, pool: Pool) -> None:
        leases: list[tuple[_Member, Lease]] = []
        checked: list[tuple[object, ...]] = []
        for member in self._members:
            with self._failing(member):
                if (read := _scales_read(member.run)) not in checked:
                    member.run.check_scales()
                    checked.append(read)
                leases.append((member, member.run.hold(member.held)))
        if leases:
            pool.survey(self._work(pool, [member for member, _ in leases]))
        for member, lease in leases:
            with self._failing(member):
                member.begun = member.run.begin(pool, member.held, lease)

    def _work(self, pool: Pool, members: Sequence[_Member]) -> JointWork | ShardWork:
        """The work of these outputs, each for the parts that it lacks once it is begun."""
        todo: dict[int, list[int]] = {}
        for number, begun in enumerate(each.begun for each in members):
            for part in () if begun is None else begun.shards.parts(begun.receipts):
                todo.setdefault(part, []).append(number)
        lacking = {part: tuple(numbers) for part, numbers in todo.items()}
        return joint_work([each.run.work(pool) for each in members], lacking, self._projection(members))

    @staticmethod
    def _projection(members: Sequence[_Member]) -> Projection:
        return _neediest([member.run.projection for member in members]).together(len(members))

    def _make(self, pool: Pool, members: Sequence[_Member]) -> None:
        """Make what these outputs lack, and record it in the ledger of each."""
        work = self._work(pool, members)
        every, todo = joint_costs(self._plans), work.todo or {}
        own = {segment: numbers for part, numbers in todo.items() for segment in work.segments_of(part)}
        costs = _costs([member.run.plan for member in members], own)
        by_part = {part: sum(costs[segment] for segment in work.segments_of(part)) for part in todo}
        parts = sorted(by_part, key=lambda part: (-by_part[part], part))
        done, done_bytes = len(every) - len(costs), sum(every) - sum(costs.values())
        how = pool.threads, pool.device_reason
        self._on_event(events.Started(pool.workers, pool.device, done, done_bytes, *how))
        for member in members:
            before = [] if member.begun is None else [*member.begun.receipts.values()]
            nbytes = sum(map(_moved_bytes, before))
            member.journal(events.Started(pool.workers, pool.device, len(before), nbytes, *how))

        def take(receipts: Receipts) -> None:
            made = [each for each in receipts if isinstance(each, JointReceipt)]
            for number, member in enumerate(members):
                self._record(member, [own for each in made if (own := each.by_output.get(number))])
            for receipt in made:
                for number, error in receipt.failures.items():
                    self._fail(members[number], error)
                for segment in work.receipts_of(receipt):
                    report_segment(segment, costs[segment.segment], self._on_event)
            if all(member.error is not None for member in members):
                raise _NoneLeftError

        with suppress(_NoneLeftError), versions.checking_sources(self._sources):
            self.is_stopped = do_parts(pool, work, parts, take, on_event=self.emit, asked=self._is_asked)

    def _is_asked(self) -> bool:
        return self._members[0].run.asked()

    def _record(self, member: _Member, receipts: Sequence[Receipt]) -> None:
        if member.error is None and member.begun is not None:
            with self._failing(member):
                for receipt in member.run.record(member.begun, tuple(receipts)):
                    report_segment(receipt, _moved_bytes(receipt), member.journal)

    def _conclude(self, pool: Pool, member: _Member) -> None:
        """Publish an output, or leave its place if it has failed."""
        if member.error is None and member.begun is not None:
            with self._failing(member):
                member.result = member.run.conclude(pool, member.begun)
        error = member.error
        if isinstance(error, NonFiniteError) and member.begun is not None:
            # Only now: as long as parts are made, a worker may write there.
            with suppress(RaymergeError, OSError):
                member.run.discard(member.begun)
        member.held.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def _failing(self, member: _Member) -> Iterator[None]:
        """What goes wrong with one output ends that one."""
        try:
            with member.run.resumable():
                yield
        except RaymergeError as error:
            self._fail(member, error)

    def _fail(self, member: _Member, error: RaymergeError) -> None:
        if member.error is None:
            member.error = error
            if not self.is_stopped:
                self._on_event(events.OutputFailed(member.name, error.exit_code, str(error)))


def _moved_bytes(receipt: Receipt) -> int:
    return receipt.read_bytes + receipt.written_bytes


def _scales_read(run: Run) -> tuple[object, ...]:
    """What the check of a plan's scales depends on."""
    return run.plan["inputs"], run.plan["scales"], run.plan.manifest["sources"]


class _NoneLeftError(Exception):
    """All outputs that were made together have failed."""


def _costs(plans: Sequence[Plan], todo: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """Bytes that each segment reads and writes for the plans that lack it."""
    by_plans = {each: joint_costs([plans[number] for number in each]) for each in set(todo.values())}
    return {segment: by_plans[each][segment] for segment, each in todo.items()}


_OF_STEPS = events.StepStarted | events.StepKept | events.StageKept | events.StageReport


class SweepJob:
    """One submission of several outputs."""

    def __init__(
        self,
        outputs: Sequence[OutputMerges],
        place: Path | str,
        options: RunOptions,
        *,
        on_event: OnEvent,
        began: float | None = None,
    ) -> None:
        """``place`` is the directory of all outputs' places; ``began`` is ``time.monotonic()`` at the begin
        of the user's command, None for now.

        Raises what ``Run`` raises, with the problems of all outputs."""
        self._outputs = outputs
        self._place = place
        self._options = options
        self._emit = self._on_event = self._noting_failures(on_event)
        self._record = SweepRecord(str(place))
        self._failures = dict.fromkeys((each.name for each in outputs), NO_FAILURE)
        self._began = time.monotonic() if began is None else began
        self._root = sweep_steps(place, options.steps)
        self._merges = [merge for each in outputs for merge in each.merges]
        self._has_steps = any(has_steps(output.merges) for output in outputs)
        self._before: list[Event] = []
        """What was shown of results between, which several outputs take."""
        requests = [stop_request_at(each.place, options) for each in outputs]
        self._asked = lambda: any(each.is_made() for each in requests)
        errors: list[UserError] = []
        self._members: list[_Member] = []
        for output in outputs:
            with noting(errors):
                self._members.append(self._member(output))
        raise_any(errors)

    @property
    def most_segments(self) -> int | None:
        """More workers would be idle; None if that is unknown yet."""
        counts = [member.job.most_segments for member in self._members]
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None

    def emit(self, event: Event) -> None:
        """What the pool tells: to the user, and to the journals of the outputs that are made now."""
        self._emit(event)

    def check(self) -> None:
        """Before any worker is started: raises TargetError for the places of outputs that are not made yet,
        OptionError without room for them."""
        errors: list[UserError] = []
        missing = [member for member in self._members if not member.run.is_published()]
        for member in missing:
            with noting(errors):
                member.job.check()
        raise_any(errors)
        counted: set[Path] = set()
        disks = [member.job.disk(counted) for member in missing]
        if disks:
            # What one output needs stays until all are published.
            before = accumulate((each.results for each in disks), initial=0)
            steps = max(stored + each.steps for stored, each in zip(before, disks, strict=False))
            results, output = (sum(getattr(each, name) for each in disks) for name in ("results", "output"))
            whole = Disk(steps, results, output)
            is_chosen, what = self._options.steps is not None, "all outputs together"
            check_disk(whole, self._root, missing[0].run.place, is_chosen=is_chosen, what=what)

    def carry_out(self, pool: Pool) -> dict[str, RunResult]:
        """Run with a started pool until all outputs are published; returns their results by name.

        Outputs that are there already, untouched, are left as they are. What one fails with does not keep the
        others from being made. Raises at the end what the missing ones failed with: IncompleteError if the
        same command would go on with some of them, a UserError otherwise."""
        ledgers = (path for member in self._members for path in member.job.ledgers())
        pool.settle(lambda: device_for(self._merges, ledgers))
        for member in self._members:
            if member.run.is_published(pool):
                member.result = member.run.published_result()
                self._on_event(events.OutputKept(member.name))
        missing = [number for number, member in enumerate(self._members) if member.result is None]
        if missing:
            self._record.write(self._failures)
        with ExitStack() as held:
            if self._has_steps and missing:
                held.enter_context(holding_steps(self._root, self._merges))
            self._make(missing, pool)
            if self._has_steps and all(member.result is not None for member in self._members):
                drop_steps(self._root, self._options)
        if any(member.result is None for member in self._members):
            raise _joined(self._members)
        self._record.remove()
        seconds, names = time.monotonic() - self._began, tuple(member.name for member in self._members)
        self._on_event(events.OutputsPublished(shown(str(self._place)), names, seconds))
        return {each.name: each.result for each in self._members if each.result is not None}

    def _make(self, missing: Sequence[int], pool: Pool) -> None:
        projections = [self._members[number].run.projection for number in missing]
        groups = read_groups([self._outputs[number] for number in missing], projections)
        for position, group in enumerate(groups, start=1):
            members = [self._members[missing[number]] for number in group.numbers]
            names = tuple(member.name for member in members)
            self._on_event(events.OutputsStarted(names, position, len(groups)))
            with ExitStack() as held:
                is_stopped = self._make_group(members, pool, held, is_last=position == len(groups))
            self._emit = self._on_event
            # What one cannot go on with now, such as a full disk, the next would meet as well.
            if is_stopped or any(each.error and not isinstance(each.error, UserError) for each in members):
                return

    def _make_group(self, members: Sequence[_Member], pool: Pool, held: ExitStack, *, is_last: bool) -> bool:
        """Whether it was asked to stop."""
        if self._has_steps:
            members = self._ready(members, pool, held)
        if len(members) > 1:
            return self._make_jointly(members, pool, is_last=is_last)
        return bool(members) and self._make_alone(members[0], pool, is_last=is_last)

    def _ready(self, members: Sequence[_Member], pool: Pool, held: ExitStack) -> Sequence[_Member]:
        """Have made, once for all that use them, the results that these outputs are made of; returns those
        outputs that have theirs. What a merge that all use fails with is the error of all."""
        self._before.clear()
        for member in members:
            self._emit = self._emitter(member.journal)
            with self._failing(member):
                member.job.check()
                held.enter_context(member.job.holding())
                member.job.check_conditions(pool)
        if left := [member for member in members if member.error is None]:
            self._emit = self._emitter(left[0].journal)
            with self._failing(*left):
                left[0].job.make_before(pool)
        for member in left:
            self._emit = self._emitter(member.journal)
            if member.error is None:
                with self._failing(member):
                    member.job.take_results(pool)
        return [member for member in left if member.error is None]

    def _make_jointly(self, members: Sequence[_Member], pool: Pool, *, is_last: bool) -> bool:
        """What a source of some of them is refused for costs the others a new begin, which takes up what is
        made."""
        run = JointRun(members, self._on_event)
        self._emit = run.emit
        if is_last:
            pool.conclude()
        try:
            run.carry_out(pool)
        except CheckpointError as error:
            left = run.without_changed(error)
            if not 0 < len(left) < len(members):
                raise
            return self._make_jointly(left, pool, is_last=is_last)
        return run.is_stopped

    def _make_alone(self, member: _Member, pool: Pool, *, is_last: bool) -> bool:
        self._emit = self._emitter(member.journal)
        with self._failing(member), member.journal:
            member.result = member.job.make_last(pool, is_last=is_last)
        return member.job.is_stopped

    @contextmanager
    def _failing(self, *members: _Member) -> Iterator[None]:
        """What goes wrong ends these outputs."""
        try:
            yield
        except RaymergeError as error:
            for member in members:
                member.error = error
                self._on_event(events.OutputFailed(member.name, error.exit_code, str(error)))

    def _member(self, output: OutputMerges) -> _Member:
        journal = Journal(lambda _: None)
        job = MergeJob(
            output.merges,
            output.place,
            self._options,
            on_event=self._emitter(journal),
            began=self._began,
            journal=journal,
            root=self._root,
            asked=self._asked,
        )
        return _Member(output.name, job, journal)

    def _noting_failures(self, on_event: OnEvent) -> OnEvent:
        def emit(event: Event) -> None:
            if isinstance(event, events.OutputFailed):
                self._failures[event.name] = {"exit_code": event.exit_code, "message": event.message}
                self._record.write(self._failures)
            on_event(event)

        return emit

    def _emitter(self, journal: Journal) -> OnEvent:
        def emit(event: Event) -> None:
            journal(event)
            if isinstance(event, _OF_STEPS):
                if event in self._before:
                    return
                self._before.append(event)
            self._on_event(event)

        return emit


def _joined(members: Sequence[_Member]) -> RaymergeError:
    """The one error that says what became of the outputs that are not published."""
    missing = [member for member in members if member.result is None]
    errors = [member.error for member in missing]
    problems: dict[Problem, list[str]] = {}
    for member in missing:
        for problem in member.error.problems if isinstance(member.error, UserError) else ():
            problems.setdefault(problem, []).append(member.name)
    if all(isinstance(error, UserError) for error in errors):
        kinds = {type(error) for error in errors if isinstance(error, UserError)}
        kind = kinds.pop() if len(kinds) == 1 else UserError
        return kind(
            replace(each, where=f"{shortlist(names)}: {each.where}") for each, names in problems.items()
        )
    messages: dict[str, list[str]] = {}
    for member in missing:
        message = "not begun." if member.error is None else str(member.error)
        messages.setdefault(message, []).append(member.name)
    lines = [f"{shortlist(names)}: {message}" for message, names in messages.items()]
    count = f"{len(members) - len(missing)} of {len(members)} outputs are published."
    return IncompleteError("\n".join([f"{count} The same command goes on with the others.", *lines]))
