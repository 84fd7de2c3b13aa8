"""One piece of work on Ray's workers: what waits, what is in hand, and what follows a worker's loss."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, TypeAlias

from raymerge.errors import IncompleteError, TransientError, first_line, is_memory_error
from raymerge.events import MemoryShort, OnEvent, WorkerLeft, WorkerLost, WorkerProgress
from raymerge.execute.receipts import Receipt, receipt_of
from raymerge.runtime.workers import pool
from raymerge.runtime.workers.placement import Placement
from raymerge.runtime.workers.ray_nodes import Nodes, NodeSurvey
from raymerge.runtime.workers.worker_group import Actor, WorkerGroup, cause_of
from raymerge.units import format_duration

_Entry: TypeAlias = tuple[int, int]


class PartQueue:
    """Finds a worker's next part without a walk over those it cannot do. Parts differ in the nodes that can
    do them, and there are few such groups."""

    def __init__(self, numbers: Iterable[int], *, placement: Placement) -> None:
        self._placement = placement
        self._queues: dict[frozenset[str] | None, deque[_Entry]] = {}
        self._first = self._stop = 0
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[int]:
        return (number for _, number in merge(*self._queues.values()))

    def append(self, number: int) -> None:
        self._queue_of(number).append((self._stop, number))
        self._stop += 1

    def appendleft(self, number: int) -> None:
        self._first -= 1
        self._queue_of(number).appendleft((self._first, number))

    def first(self, node: str | None) -> int | None:
        heads = (entries[0] for entries in self._queues.values() if entries)
        able = (head for head in heads if node is None or self._placement.allows(node, head[1]))
        return min(able, default=(0, None))[1]

    def take(self, number: int) -> None:
        """Remove a part that ``first`` has just named."""
        self._queue_of(number).popleft()

    def place(self, placement: Placement) -> None:
        if placement is self._placement:
            return
        entries = list(merge(*self._queues.values()))
        self._placement, self._queues = placement, {}
        for entry in entries:
            self._queue_of(entry[1]).append(entry)

    def _queue_of(self, number: int) -> deque[_Entry]:
        able = self._placement.able
        return self._queues.setdefault(able[number] if able else None, deque())


_ASK_SECONDS = 5.0
"""How seldom a worker is asked for its heartbeat at most."""
_ANSWERS_A_SECOND = 20
"""Of all workers: a few are asked every second, so that one can watch them."""
_LOOK_SECONDS = 5.0
"""The most that counts between two looks at the workers: a driver that was paused itself blames nobody."""
_IDLE_SECONDS = 15.0
"""How long a worker for which no part is left is kept, in case that one comes back."""


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    surveyed: frozenset[str] | None = None
    """Nodes that were asked what they see; None for a single machine."""
    leaves: bool = False
    """Whether workers without a part left are ended: the last work, on a cluster that shrinks."""
    growth_seconds: float = 0.0
    """How long the cluster may take to add a node."""


DEFAULT_POLICY = DispatchPolicy()


class Dispatcher:
    def __init__(
        self,
        group: WorkerGroup,
        nodes: Nodes,
        work: pool.Work,
        numbers: Sequence[int],
        *,
        placement: Placement,
        patience: float,
        on_event: OnEvent,
        policy: DispatchPolicy = DEFAULT_POLICY,
    ) -> None:
        self._group = group
        self._nodes = nodes
        self._ray = group.ray
        self._work = work
        self._work_ref = self._ray.put(work)
        self._todo = PartQueue(placement.ordered(numbers), placement=placement)
        self._policy = policy
        known = None if policy.surveyed is None else set(policy.surveyed)
        self._survey = NodeSurvey(group.ray, nodes, work, placement, known, on_event)
        self._patience = patience
        self._on_event = on_event
        self._failures = pool.WorkerFailures(work.part, len(group.actors))
        self._transient: Counter[int] = Counter()
        self._failed_starts = 0
        self._looked_at = self._busy_at = time.monotonic()

    def begin(self) -> None:
        """Give every worker the work; one that still takes up an earlier work ends that first."""
        actors, limit = list(self._group.actors), self._group.ready_seconds
        earlier = [actor.opening for actor in actors if actor.opening is not None]
        # Actors are threaded: of two openings at once the older one might end last, and win.
        ready = self._ray.wait(earlier, num_returns=len(earlier), timeout=limit)[0] if earlier else []
        for actor in actors:
            if actor.opening is None or actor.opening in ready:
                actor.opening = actor.handle.open.remote(self._work_ref)
                actor.moved()
            else:
                self._lose(actor, pool.Cause.ENDED, f"it did not take up its work within {limit:.0f} s")

    def goes_on(self, stop: pool.Stop) -> bool:
        """Whether parts are in hand, or wait and may be begun."""
        return any(actor.flight for actor in self._group.actors) or bool(self._todo and not stop.requested)

    def advance(self, stop: pool.Stop) -> Generator[pool.Receipts, None, None]:
        """Wait a moment for receipts, hand out parts in their place, and only then yield them."""
        self._feed(stop)
        self._ask_heartbeats()
        waiting = self._waiting()
        ready, others = self._ray.wait(list(waiting), num_returns=1, timeout=pool.TICK_SECONDS)
        if not waiting:
            # Ray waits for nothing then; without this the driver would only ask itself whether somebody came.
            time.sleep(pool.TICK_SECONDS)
        if ready and others:
            ready += self._ray.wait(others, num_returns=len(others), timeout=0)[0]
        receipts: list[Receipt] = []
        try:
            for ref in ready:
                # Not of a worker that was lost a moment ago: all that it had in hand was taken back.
                answer = self._answer(ref, waiting[ref]) if waiting[ref] in self._group.actors else None
                receipts += [] if answer is None else [receipt_of(answer)]
            self._survey.look()
            self._todo.place(self._survey.placement)
            self._check_progress()
            self._feed(stop)
        finally:
            # What was made is made, also where something else failed.
            yield tuple(receipts)

    def _waiting(self) -> dict[Any, Actor]:
        """Every answer that is to come, and whose it is."""
        waiting: dict[Any, Actor] = {}
        for actor in self._group.actors:
            for ref in (*actor.flight, actor.opening, actor.heartbeat_ref):
                if ref is not None:
                    waiting[ref] = actor
        return waiting

    def _feed(self, stop: pool.Stop) -> None:
        """Hand out parts, one to each worker in turn, so that none gets more while another has fewer."""
        slots = 0 if stop.requested else self._work.slots
        free = [actor for actor in self._group.actors if len(actor.flight) < slots]
        while free:
            free = [actor for actor in free if self._hand_out(actor)]

    def _hand_out(self, actor: Actor) -> bool:
        """Whether the worker got a part, and may get another."""
        number = self._next(actor)
        if number is None:
            return False
        self._todo.take(number)
        if not actor.flight:
            actor.moved()
        budget = self._failures.budget(number)
        arguments = (number,) if budget is None else (number, budget)
        actor.flight[actor.handle.run.remote(*arguments)] = number
        return True

    def _next(self, actor: Actor) -> int | None:
        """A worker's next part; None where it has no slot, or there is none for it."""
        if actor.opening is not None or len(actor.flight) >= self._work.slots:
            return None
        if any(self._failures.is_alone(number) for number in actor.flight.values()):
            return None
        number = None if self._survey.is_asked(actor.node) else self._todo.first(actor.node)
        # Parts that are to be alone are the first to do: whoever is next to have nothing in hand takes them.
        if number is None or (actor.flight and self._failures.is_alone(number)):
            return None
        return number

    def _ask_heartbeats(self) -> None:
        now, usual = time.monotonic(), max(1.0, len(self._group.actors) / _ANSWERS_A_SECOND)
        pause = min(usual, _ASK_SECONDS, self._patience / 4)
        for actor in self._group.actors:
            is_due = now - actor.asked_at >= pause
            if actor.flight and actor.heartbeat_ref is None and is_due:
                actor.heartbeat_ref, actor.asked_at = actor.handle.heartbeat.remote(), now

    def _answer(self, ref: Any, actor: Actor) -> dict[str, Any] | None:
        """A receipt; None for any other answer, and where the worker was lost or the part is tried again."""
        errors = self._ray.exceptions
        try:
            answer: Any = self._ray.get(ref)
        except errors.RayTaskError as error:
            self._failed(ref, actor, error)
            return None
        except errors.OutOfMemoryError as error:
            self._lose(actor, pool.Cause.MEMORY, first_line(error))
            return None
        except errors.ActorUnavailableError as error:
            self._lose(actor, pool.Cause.UNREACHABLE, first_line(error))
            return None
        except errors.RayError as error:
            self._lose(actor, *self._ended(actor, first_line(error)))
            return None
        if ref == actor.heartbeat_ref:
            actor.heartbeat_ref = None
            seconds, parts = answer
            if seconds != actor.heartbeat:
                actor.heartbeat = seconds
                actor.moved()
            self._on_event(WorkerProgress(actor.name, parts))
            return None
        actor.moved()
        if ref == actor.opening:
            self._group.hear(actor, answer, kernels=self._work.part == pool.UNIT)
            actor.opening = None
            self._failed_starts = 0
            self._survey.meet(actor.node)
            return None
        del actor.flight[ref]
        self._failures.progress(actor.node)
        receipt: dict[str, Any] = answer
        return receipt

    def _failed(self, ref: Any, actor: Actor, error: Any) -> None:
        number = actor.flight.pop(ref, None)
        cause = cause_of(error)
        if number is None:
            raise cause from error
        if isinstance(cause, TransientError):
            self._transient[number] += 1
            if self._transient[number] >= pool.ATTEMPTS:
                raise cause from error
            # Last, for then the storage may be well again, and for others to take it.
            self._todo.append(number)
        elif is_memory_error(getattr(error, "cause", None) or error):
            self._lessen(number, actor, first_line(getattr(error, "cause", None) or error))
            self._todo.appendleft(number)
        else:
            raise cause from error

    def _lessen(self, number: int, actor: Actor, reason: str) -> None:
        budget = self._work.lessened(number, self._failures.budget(number))
        self._failures.lessen(number, budget, reason)
        if budget is not None:
            self._on_event(MemoryShort(actor.name, number, budget, reason))

    def _ended(self, actor: Actor, reason: str) -> tuple[pool.Cause, str]:
        if actor.node and not self._nodes.is_alive(actor.node):
            return pool.Cause.NODE, f"its node is gone: {reason}"
        before, now = actor.oom_kills, self._nodes.oom_kills(actor.node) if actor.node else None
        if before is None or now is None or now <= before:
            return pool.Cause.ENDED, reason
        for each in self._group.actors:
            if each.node == actor.node:
                each.oom_kills = now
        return pool.Cause.MEMORY, "the system ended it, because memory ran out"

    def _check_progress(self) -> None:
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, _LOOK_SECONDS), now
        for actor in tuple(self._group.actors):
            actor.still_seconds += passed if actor.flight else 0.0
            if actor.still_seconds >= self._patience:
                waited = format_duration(actor.still_seconds)
                self._lose(actor, pool.Cause.STILL, f"nothing that it had in hand got on for {waited}")
        if self._policy.leaves:
            self._release_idle(passed)
        if not self._todo or any(actor.flight for actor in self._group.actors):
            self._busy_at = now
        elif now - self._busy_at > self._wait_seconds:
            raise IncompleteError(self._nobody())

    @property
    def _wait_seconds(self) -> float:
        """How long the remaining parts may be without a worker."""
        return max(self._group.ready_seconds, self._policy.growth_seconds)

    def _release_idle(self, passed: float) -> None:
        """Give up workers for which no part is left, or may become so: their nodes can go."""
        for actor in tuple(self._group.actors):
            # Of a worker of which nobody knows yet where it will be, all parts may be.
            node = None if self._survey.is_asked(actor.node) else actor.node or None
            has_part = bool(actor.flight) or self._todo.first(node) is not None
            actor.idle_seconds = 0.0 if has_part else actor.idle_seconds + passed
            if actor.idle_seconds >= _IDLE_SECONDS:
                self._group.give_up(actor)
                self._on_event(WorkerLeft(actor.name))

    def _nobody(self) -> str:
        remedy = "What is done is kept: the same command goes on once"
        waited = f"for {self._wait_seconds:.0f} s"
        if any(actor.opening is None for actor in self._group.actors):
            what = f"no worker {waited} was on a node that sees the files of the {len(self._todo)} "
            return f"{what}{self._work.part}s that are left. {remedy} such a node has room."
        return f"no worker has been up {waited}. {remedy} the cluster has room."

    def _lose(self, actor: Actor, cause: pool.Cause, reason: str) -> None:
        self._group.give_up(actor)
        numbers = tuple(actor.flight.values())
        self._failed_starts += actor.opening is not None
        is_replaced = self._failed_starts < pool.ATTEMPTS
        alone = (
            "" if is_replaced else f"; {pool.ATTEMPTS} in a row did not start, so no other takes its place"
        )
        self._on_event(WorkerLost(actor.name, reason + alone, numbers))
        for number in numbers:
            self._todo.appendleft(number)
        self._failures.add(cause, reason, numbers, actor.node)
        for number in numbers if cause is pool.Cause.MEMORY else ():
            self._lessen(number, actor, reason)
        if not is_replaced and not self._group.actors:
            raise IncompleteError(
                f"{pool.ATTEMPTS} workers did not start, the last with: {reason}. What is done is kept: the "
                "same command goes on there."
            )
        if is_replaced:
            self._replace()

    def _replace(self) -> None:
        """Start a worker where one is wanted most; where workers die only if there is no other place."""
        present = {actor.node for actor in self._group.actors}
        homes = self._group.homes(self._nodes.machines())
        placement, off = self._survey.placement, self._failures.shunned
        on = placement.short_of(self._todo, present, homes)
        if not on and not self._policy.growth_seconds:
            # Where a cluster grows a node may join that sees as much as one that is gone.
            on = placement.nodes & homes
        if not (on or homes) - off:
            off = frozenset()
        fresh = self._group.spawn(on=on - off, off=off)
        fresh.opening = fresh.handle.open.remote(self._work_ref)
        self._group.actors.append(fresh)
