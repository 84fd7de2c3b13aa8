"""Calls of one method spread over actors, on an embedded Ray or a running cluster. An actor that ends is
replaced, and what it had in hand is called again once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raymerge.errors import first_line
from raymerge.events import OnEvent, RayEnded, WorkerLost
from raymerge.runtime.workers.pool import TICK_SECONDS
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.worker_group import cause_of, ready_answers

T = TypeVar("T")

_READY_SECONDS = 120.0
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class ActorNeeds:
    count: int
    cpus: int
    """Of each."""
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class LostCall:
    """What became of a call whose actors ended."""

    reason: str


class ActorCalls(Generic[T]):
    def __init__(
        self,
        worker: type[Any],
        argument: object,
        needs: ActorNeeds,
        address: str | None,
        *,
        on_event: OnEvent,
    ) -> None:
        """``worker`` is made of the argument and a name, and has the method ``call`` and ``ready``."""
        self._worker, self._argument, self._needs, self._on_event = worker, argument, needs, on_event
        slots = needs.count * needs.cpus if address is None else None
        self._connection = RayConnection(
            address, num_cpus=slots, on_end=lambda process: on_event(RayEnded(process))
        )
        self._names: dict[Any, str] = {}
        self._spawned = 0

    def start(self) -> None:
        """Raises OptionError if Ray or the actors do not start."""
        self._connection.open()
        self._fill()
        ready = [actor.ready.remote() for actor in self._names]
        ready_answers(self._connection.ray, ready, seconds=_READY_SECONDS)

    def run(self, tasks: Sequence[T]) -> Generator[tuple[int, Any], None, None]:
        """Positions of tasks, each with its result or a ``LostCall``, as they are done. What is in hand when
        it is closed is given up. Raises what a call raises."""
        ray, todo, lost = self._connection.ray, deque(range(len(tasks))), Counter[int]()
        flight: dict[Any, tuple[Any, int]] = {}
        try:
            while todo or flight:
                self._fill()
                busy = {actor for actor, _ in flight.values()}
                for actor in [each for each in self._names if each not in busy][: len(todo)]:
                    number = todo.popleft()
                    flight[actor.call.remote(tasks[number])] = actor, number
                for ref in ray.wait(list(flight), num_returns=1, timeout=TICK_SECONDS)[0]:
                    actor, number = flight.pop(ref)
                    try:
                        result = ray.get(ref)
                    except ray.exceptions.RayTaskError as error:
                        raise cause_of(error) from error
                    except ray.exceptions.RayError as error:
                        lost[number] += 1
                        result = LostCall(first_line(error))
                        self._on_event(WorkerLost(self._names[actor], result.reason, (number,)))
                        self._give_up(actor)
                        if lost[number] < _ATTEMPTS:
                            todo.appendleft(number)
                            continue
                    yield number, result
        finally:
            for actor, _ in flight.values():
                self._give_up(actor)

    def close(self) -> None:
        for actor in tuple(self._names):
            self._give_up(actor)
        self._connection.close()

    def _fill(self) -> None:
        while len(self._names) < self._needs.count:
            name = f"evaluator-{self._spawned}"
            self._spawned += 1
            options = {"num_cpus": self._needs.cpus, "num_gpus": self._needs.gpus, "max_restarts": 0}
            remote = self._connection.ray.remote(self._worker)
            self._names[remote.options(**options).remote(self._argument, name)] = name

    def _give_up(self, actor: Any) -> None:
        self._connection.ray.kill(actor)
        del self._names[actor]
