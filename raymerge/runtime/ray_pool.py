"""A pool of Ray actors, owned by the driver: it feeds them, and replaces those that die."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raymerge.errors import IncompleteError, OptionError, Problem
from raymerge.execute.receipts import Receipt
from raymerge.runtime.device_choice import Choice, GpuError
from raymerge.runtime.device_probe import Sample
from raymerge.runtime.devices import first_line
from raymerge.runtime.events import OnEvent, WorkerLost
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import TICK_SECONDS, UNIT, Measure, Measured, Receipts, Stop, Work
from raymerge.runtime.ray_answers import cause_of, probed, ready_answers
from raymerge.runtime.ray_environment import RayConnection
from raymerge.runtime.sizing import (
    Crew,
    Layout,
    Machine,
    embedded_slots,
    layout_of,
    most_lanes,
    no_gpu,
    no_room,
)
from raymerge.runtime.worker import MergeWorker

_READY_SECONDS = 120.0
"""How long a worker may take to start, or to take up work."""
_ATTEMPTS = 3
"""Workers that a part may take down, or that may fail to start in a row, before the run gives up."""


@dataclass(slots=True, eq=False)
class _Actor:
    name: str
    handle: Any
    opening: Any = None
    """Reference to its taking up the work; None once that is done."""
    flight: dict[Any, int] = field(default_factory=dict)
    """Parts in hand by the reference to their receipt."""


class RayPool:
    """Workers on an embedded Ray, or on a running cluster."""

    def __init__(
        self,
        options: RunOptions,
        on_event: OnEvent,
        *,
        worker: type[Any] = MergeWorker,
        parts: int | None = None,
    ) -> None:
        """
        Args:
            options: how many workers, on what, and where.
            on_event: told of lost workers.
            worker: class of the actors.
            parts: of the work; no more workers are started. None while nobody knows how many there will be.
        """
        if parts is not None and options.workers is not None:
            options = replace(options, workers=max(1, min(options.workers, parts)))
        self._options = options
        self._on_event = on_event
        self._worker = worker
        self._parts = parts
        self._actors: list[_Actor] = []
        self._spawned = 0
        self._numerics: dict[str, str] = {}
        self._kernels: dict[str, str] = {}
        self._gpus = 0
        self._layout = Layout(1, 1)
        self._choice: Choice | None = None
        self._gpu_failure = ""
        slots = embedded_slots(options) if options.address is None else None
        self._connection = RayConnection(options.address, num_cpus=slots)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(actor.name for actor in self._actors)

    @property
    def device(self) -> str:
        """Kind of device."""
        return self._numerics.get("device", "cpu")

    @property
    def threads(self) -> int:
        """Threads of each worker that compute at once."""
        return self._layout.threads

    @property
    def choice(self) -> Choice | None:
        """How the device was chosen."""
        return self._choice

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on."""
        return self._numerics

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What the bytes of a stage's result may depend on."""
        return {**self._numerics, **self._kernels}

    def start(self) -> None:
        """Connect and start the workers; see ``Pool.start``."""
        self._connection.open()
        self._gpus = self._usable_gpus()
        lack = self._lack(self._gpus)
        if self._is_open and lack is not None:
            # More workers are wanted than there are GPUs for, and nobody has insisted on GPUs.
            self._choice, self._gpus = Choice("cpu", lack.what.rstrip(".")), 0
        self._layout = self._fitting(self._gpus)
        if self._is_open:
            self._try_gpu()
        else:
            self._take_on(self._layout.workers)

    def settle(self, choose: Callable[[Measure], Choice]) -> None:
        """Choose between GPUs and processors; see ``Pool.settle``."""
        if not self._is_open:
            return
        try:
            self._choice = choose(self._measured)
        except GpuError as error:
            self._choice = error.choice()
        if self._choice.device == "cpu":
            self._dismiss()
            self._gpus = 0
            self._layout = self._fitting(0)
        self._take_on(self._layout.workers - len(self._actors))

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Keep every worker busy with a bounded number of parts; see ``Pool.run``."""
        shift = _Shift(self, self._connection.ray, work, deque(numbers))
        shift.begin()
        while shift.goes_on(stop):
            yield from shift.advance(stop)

    def close(self) -> None:
        """End the workers, and the cluster if it is ours."""
        self._dismiss()
        self._connection.close()

    @property
    def _is_open(self) -> bool:
        """Whether there are GPUs that need not be used."""
        return self._gpus > 0 and self._options.device == "auto" and self._choice is None

    def _machines(self) -> list[Machine]:
        """The machines of the cluster."""
        alive = [node["Resources"] for node in self._connection.ray.nodes() if node["Alive"]]
        return [Machine(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in alive]

    def _usable_gpus(self) -> int:
        """GPUs that workers can have, with CPU slots for their threads beside them."""
        machines, threads = self._machines(), self._options.threads or 1
        gpus = sum(machine.room(threads, with_gpu=True) for machine in machines)
        if self._options.device == "cuda" and not gpus:
            raise OptionError(no_gpu(machines))
        return 0 if self._options.device == "cpu" else gpus

    def _wanted(self, gpus: int) -> Layout:
        """The layout for the machines of the cluster, of as many workers as have something to do."""
        layout = layout_of(self._options, [machine.cores for machine in self._machines()], gpus)
        if self._parts is None:
            return layout
        return replace(layout, workers=min(layout.workers, max(1, self._parts)))

    def _lack(self, gpus: int) -> Problem | None:
        """What the cluster lacks for that layout."""
        return no_room(self._options, self._wanted(gpus), self._machines(), with_gpu=gpus > 0)

    def _fitting(self, gpus: int) -> Layout:
        """That layout, if the cluster has room for it."""
        lack = self._lack(gpus)
        if lack is not None:
            raise OptionError(lack)
        return self._wanted(gpus)

    def _try_gpu(self) -> None:
        """Start a worker on a GPU: where processors may turn out to do as well, one is enough to find out."""
        try:
            self._take_on(1)
        except OptionError as error:
            # Others may have the GPUs, or they are broken. Nobody has insisted on them yet.
            self._gpu_failure = f"its worker does not start ({error.problems[0].what.rstrip('.')})"
            self._dismiss()

    def _measured(self, sample: Sample) -> Measured:
        """What one worker measures, for the workers that there would be."""
        if not self._gpu_failure and self.device != "cuda":
            self._gpu_failure = "its worker sees none"
        if self._gpu_failure:
            raise GpuError(self._gpu_failure)
        cpu = self._fitting(0)
        answer = self._actors[0].handle.probe.remote(sample, cpu.threads)
        probe = probed(self._connection.ray, answer)
        return Measured(probe, self._crew(cpu, with_gpu=False), self._crew(self._layout, with_gpu=True))

    def _crew(self, layout: Layout, *, with_gpu: bool) -> Crew:
        """Workers are spread, so that they are on as many machines as they can be."""
        rooms = [machine.room(layout.threads, with_gpu=with_gpu) for machine in self._machines()]
        return Crew(layout.workers, min(layout.workers, sum(room > 0 for room in rooms)))

    def _take_on(self, count: int) -> None:
        """Start workers, and see that they are equal to those that are there."""
        fresh = [self._spawn() for _ in range(count)]
        is_first = not self._actors
        self._actors += fresh
        ready = [actor.handle.ready.remote() for actor in fresh]
        answers = ready_answers(self._connection.ray, ready, seconds=_READY_SECONDS)
        if is_first:
            self._numerics, self._kernels = dict(answers[0]["numerics"]), dict(answers[0]["kernels"])
        for answer in answers:
            self._check_numerics(answer)

    def _dismiss(self) -> None:
        for actor in self._actors:
            self._connection.ray.kill(actor.handle)
        self._actors = []

    def _spawn(self) -> _Actor:
        name = f"worker-{self._spawned}"
        self._spawned += 1
        options = {
            "num_cpus": self._layout.threads,
            "num_gpus": 1 if self._gpus else 0,
            # Ray would fill one machine after the other, though each has storage and memory of its own.
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_task_retries": 0,
            # All lanes, a part that waits for one or for its bytes to be durable, and a call beside them.
            "max_concurrency": most_lanes(self._options) + 2,
        }
        device = self._options.device if self._gpus else "cpu"
        return _Actor(name, self._connection.ray.remote(self._worker).options(**options).remote(name, device))

    def _check_numerics(self, answer: dict[str, Any]) -> None:
        if answer["numerics"] != self._numerics:
            raise OptionError(
                Problem(
                    "workers",
                    f"they differ in device or torch version: {self._numerics} and {answer['numerics']}.",
                    "Give --device cpu, or use equal machines, so that the bytes do not depend on chance.",
                )
            )

    def _check_kernels(self, answer: dict[str, Any]) -> None:
        if answer["kernels"] != self._kernels:
            raise OptionError(
                Problem(
                    "workers",
                    "they differ in processor or transformers version, which the work before the merge "
                    f"depends on: {self._kernels} and {answer['kernels']}.",
                    "Use equal machines, or --inline, so that the bytes do not depend on chance.",
                )
            )


class _Shift:
    """One call of ``RayPool.run``: what is to be done, and who has what in hand."""

    def __init__(self, pool: RayPool, ray: Any, work: Work, todo: deque[int]) -> None:
        self._pool = pool
        self._ray = ray
        self._part, self._slots = work.part, work.slots
        self._work = ray.put(work)
        self._todo = todo
        self._took_down: Counter[int] = Counter()
        self._failed_starts = 0
        self._progress = time.monotonic()

    def begin(self) -> None:
        """Give every worker the work; one that still takes up that of an earlier call ends that first."""
        actors = list(self._pool._actors)
        earlier = [actor.opening for actor in actors if actor.opening is not None]
        # Actors are threaded: of two openings at once the older one might end last, and win.
        ready = (
            self._ray.wait(earlier, num_returns=len(earlier), timeout=_READY_SECONDS)[0] if earlier else []
        )
        for actor in actors:
            if actor.opening is None or actor.opening in ready:
                actor.opening = actor.handle.open.remote(self._work)
            else:
                self._lose(actor, f"it did not take up its work within {_READY_SECONDS:.0f} s")

    def goes_on(self, stop: Stop) -> bool:
        """Whether parts are in hand, or wait and may be begun."""
        return any(actor.flight for actor in self._pool._actors) or bool(self._todo and not stop.requested)

    def advance(self, stop: Stop) -> Generator[Receipts, None, None]:
        """Wait a moment for receipts, hand out parts in their place, and only then yield them."""
        self._feed(stop)
        actors = self._pool._actors
        waiting = {
            ref: actor for actor in actors for ref in (*actor.flight, actor.opening) if ref is not None
        }
        ready, others = self._ray.wait(list(waiting), num_returns=1, timeout=TICK_SECONDS)
        if ready and others:
            ready += self._ray.wait(others, num_returns=len(others), timeout=0)[0]
        found: list[Receipt] = []
        try:
            for ref in ready:
                # Not of a worker that was lost a moment ago: all that it had in hand was taken back.
                answer = self._answer(ref, waiting[ref]) if waiting[ref] in actors else None
                found += [] if answer is None else [Receipt.from_json(answer)]
            self._check_patience(progressed=bool(ready))
            self._feed(stop)
        finally:
            # What was made is made, also where something else failed.
            yield tuple(found)

    def _feed(self, stop: Stop) -> None:
        for _ in range(self._slots):
            for actor in self._pool._actors:
                if self._todo and not stop.requested and self._may_take(actor, self._todo[0]):
                    number = self._todo.popleft()
                    actor.flight[actor.handle.run.remote(number)] = number

    def _may_take(self, actor: _Actor, number: int) -> bool:
        """Whether there is a place; one that took a worker down runs alone, for the blame to be clear."""
        if actor.opening is not None or len(actor.flight) >= self._slots:
            return False
        suspects = [each for each in (number, *actor.flight.values()) if self._took_down[each]]
        return not (actor.flight and suspects)

    def _answer(self, ref: Any, actor: _Actor) -> dict[str, Any] | None:
        """A receipt; None where a worker took up the work, or was lost."""
        errors = self._ray.exceptions
        try:
            answer: dict[str, Any] = self._ray.get(ref)
        except errors.RayTaskError as error:
            raise cause_of(error) from None
        except errors.RayError as error:
            self._lose(actor, first_line(error))
            return None
        if ref == actor.opening:
            self._pool._check_numerics(answer)
            if self._part == UNIT:
                self._pool._check_kernels(answer)
            actor.opening = None
            self._failed_starts = 0
            return None
        del actor.flight[ref]
        return answer

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Take back what a lost worker had in hand, and start another in its place."""
        self._ray.kill(actor.handle)
        self._pool._actors.remove(actor)
        numbers = tuple(actor.flight.values())
        self._failed_starts += actor.opening is not None
        is_replaced = self._failed_starts < _ATTEMPTS
        alone = "" if is_replaced else f"; {_ATTEMPTS} in a row did not start, so no other takes its place"
        self._pool._on_event(WorkerLost(actor.name, reason + alone, numbers))
        for number in numbers:
            self._took_down[number] += 1
            self._todo.appendleft(number)
        self._check_attempts(numbers, reason)
        if is_replaced:
            fresh = self._pool._spawn()
            fresh.opening = fresh.handle.open.remote(self._work)
            self._pool._actors.append(fresh)

    def _check_attempts(self, numbers: Sequence[int], reason: str) -> None:
        worn = next((number for number in numbers if self._took_down[number] >= _ATTEMPTS), None)
        if worn is not None:
            raise IncompleteError(
                f"{self._part} {worn} took down {_ATTEMPTS} workers, the last with: {reason}. What is done "
                "is kept: the same command goes on there, perhaps with a smaller --memory or fewer --workers."
            )
        if self._failed_starts >= _ATTEMPTS and not self._pool._actors:
            raise IncompleteError(
                f"{_ATTEMPTS} workers did not start, the last with: {reason}. What is done is kept: the same "
                "command goes on there."
            )

    def _check_patience(self, *, progressed: bool) -> None:
        """Without any worker that is up, wait only so long for a new one."""
        if progressed or any(actor.opening is None for actor in self._pool._actors):
            self._progress = time.monotonic()
        elif time.monotonic() - self._progress > _READY_SECONDS:
            raise IncompleteError(
                f"no worker has been up for {_READY_SECONDS:.0f} s. What is done is kept: the same command "
                "goes on once the cluster has room."
            )
