"""A pool of Ray actors, owned by the driver: it feeds them, and replaces those that die."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymerge.errors import IncompleteError, OptionError, Problem, RaymergeError
from raymerge.execute.receipts import Receipt
from raymerge.planner.memory import SLOTS
from raymerge.runtime.events import OnEvent, WorkerLost
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import Stop, Work
from raymerge.runtime.ray_environment import RayConnection
from raymerge.runtime.worker import MergeWorker

_READY_SECONDS = 120.0
_TICK_SECONDS = 1.0
_ATTEMPTS = 3
"""Workers that a segment may take down with it before the run gives up."""
_MOST_CPU_WORKERS = 8


@dataclass(slots=True, eq=False)
class _Actor:
    name: str
    handle: Any
    flight: dict[Any, int] = field(default_factory=dict)


class RayPool:
    """Workers on an embedded Ray, or on a running cluster."""

    def __init__(self, options: RunOptions, on_event: OnEvent) -> None:
        self._options = options
        self._on_event = on_event
        self._actors: list[_Actor] = []
        self._spawned = 0
        self._numerics: dict[str, str] = {}
        self._wanted = 0
        self._use_gpu = False
        workers = options.workers or 0
        self._connection = RayConnection(
            options.address, num_cpus=max(workers, os.cpu_count() or 1) if options.address is None else None
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(actor.name for actor in self._actors)

    @property
    def device(self) -> str:
        """Kind of device."""
        return self._numerics.get("device", "cpu")

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on."""
        return self._numerics

    def start(self) -> None:
        """Connect and start the workers; see ``Pool.start``."""
        self._connection.open()
        self._count()
        self._actors = [self._spawn() for _ in range(self._wanted)]
        answers = self._ready(self._actors)
        kinds = {tuple(sorted(answer["numerics"].items())) for answer in answers}
        if len(kinds) > 1:
            raise OptionError(
                Problem(
                    "workers", f"the workers differ in device or torch version: {sorted(kinds)}.",
                    "Give --device cpu, or use equal machines, so that the bytes do not depend on chance.",
                )
            )
        self._numerics = dict(answers[0]["numerics"])

    def run(self, work: Work, segments: Sequence[int], stop: Stop) -> Iterator[Receipt]:
        """Keep every worker busy with a bounded number of segments; see ``Pool.run``."""
        ray = self._connection.ray
        shared = ray.put(work)
        ray.get([actor.handle.open.remote(shared) for actor in self._actors])
        todo = deque(segments)
        attempts: dict[int, int] = {}
        while True:
            self._feed(todo, stop)
            flight = {ref: actor for actor in self._actors for ref in actor.flight}
            if not flight:
                return
            ready, _ = ray.wait(list(flight), num_returns=1, timeout=_TICK_SECONDS)
            for ref in ready:
                actor = flight[ref]
                if ref not in actor.flight:
                    continue
                receipt = self._collect(ref, actor, lambda a, e: self._lost(a, e, todo, attempts, shared))
                if receipt is not None:
                    yield receipt

    def close(self) -> None:
        """End the workers, and the cluster if it is ours."""
        for actor in self._actors:
            self._connection.ray.kill(actor.handle)
        self._actors = []
        self._connection.close()

    def _count(self) -> None:
        resources = self._connection.ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        self._use_gpu = gpus > 0 and self._options.device != "cpu"
        if self._options.device == "cuda" and not gpus:
            raise OptionError(
                Problem("--device", "cuda was asked for, but the cluster has no GPU.", "Use --device auto or cpu.")
            )
        room = gpus if self._use_gpu else cpus
        usual = gpus if self._use_gpu else min(cpus, _MOST_CPU_WORKERS)
        self._wanted = self._options.workers or max(1, usual)
        if self._wanted > room:
            kind = "GPUs" if self._use_gpu else "CPU slots"
            raise OptionError(
                Problem(
                    "--workers", f"{self._wanted} workers were asked for, but the cluster has {room} {kind}.",
                    f"Give at most {room}, or add machines.",
                )
            )

    def _spawn(self) -> _Actor:
        ray = self._connection.ray
        name = f"worker-{self._spawned}"
        self._spawned += 1
        options = {
            "num_cpus": 1,
            "num_gpus": 1 if self._use_gpu else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": SLOTS + 1,
        }
        device = self._options.device if self._use_gpu else "cpu"
        return _Actor(name, ray.remote(MergeWorker).options(**options).remote(name, device))

    def _ready(self, actors: Sequence[_Actor]) -> list[dict[str, Any]]:
        ray = self._connection.ray
        try:
            answers: list[dict[str, Any]] = ray.get(
                [actor.handle.ready.remote() for actor in actors], timeout=_READY_SECONDS
            )
        except ray.exceptions.GetTimeoutError as error:
            raise OptionError(
                Problem(
                    "workers", f"they did not start within {_READY_SECONDS:.0f} s.",
                    "Look at 'ray status': the cluster may be full or without the resources asked for.",
                )
            ) from error
        return answers

    def _feed(self, todo: deque[int], stop: Stop) -> None:
        for _ in range(SLOTS):
            for actor in self._actors:
                if todo and len(actor.flight) < SLOTS and not stop.requested:
                    segment = todo.popleft()
                    actor.flight[actor.handle.run.remote(segment)] = segment

    def _collect(
        self, ref: Any, actor: _Actor, lost: Callable[[_Actor, Exception], None]
    ) -> Receipt | None:
        ray = self._connection.ray
        errors = ray.exceptions
        try:
            answer = ray.get(ref)
        except errors.RayTaskError as error:
            raise _cause(error) from None
        except (
            errors.RayActorError, errors.OutOfMemoryError, errors.NodeDiedError, errors.WorkerCrashedError,
            errors.ObjectLostError,
        ) as error:
            lost(actor, error)
            return None
        del actor.flight[ref]
        return Receipt.from_json(answer)

    def _lost(
        self, actor: _Actor, error: Exception, todo: deque[int], attempts: dict[int, int], shared: Any
    ) -> None:
        ray = self._connection.ray
        segments = tuple(actor.flight.values())
        ray.kill(actor.handle)
        self._actors.remove(actor)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._on_event(WorkerLost(actor.name, reason, segments))
        for segment in segments:
            attempts[segment] = attempts.get(segment, 0) + 1
            todo.appendleft(segment)
        worn = [segment for segment in segments if attempts[segment] >= _ATTEMPTS]
        if worn:
            raise IncompleteError(
                f"segment {worn[0]} took down {_ATTEMPTS} workers, the last with: {reason}. What is done is kept: "
                "the same command goes on there, perhaps with a smaller --memory or fewer --workers."
            )
        fresh = self._spawn()
        self._ready([fresh])
        ray.get(fresh.handle.open.remote(shared))
        self._actors.append(fresh)


def _cause(error: Any) -> Exception:
    """What a worker raised, as the driver raises it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RaymergeError):
        return cause
    if isinstance(cause, OSError):
        return IncompleteError(
            f"a worker could not read or write: {cause}. What is done is kept: the same command goes on there."
        )
    return error if isinstance(error, Exception) else RuntimeError(str(error))
