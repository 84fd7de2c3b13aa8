"""The workers of a pool on Ray: started, compared with each other, given up, and how they are lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raymerge.errors import IncompleteError, OptionError, Problem, RaymergeError, first_line
from raymerge.options import RunOptions
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.sizing import Layout, Machine, most_lanes
from raymerge.units import format_size

ATTEMPTS = 3
"""Workers that a part may take down, or that may fail to start in a row, before the run gives up."""
_NODE_ATTEMPTS = 3
"""Workers that a node may lose without one receipt between, before no more are started there."""
_LEAST_SPARE, _SPARE = 12, 3
"""Workers that may be lost without one receipt between: so many, or so many for each that there is."""
_KEPT = "What is done is kept: the same command goes on there"
_LOOK_SECONDS = 5.0
"""How often somebody may look around while workers are waited for."""


def ready_answers(
    ray: Any, references: Sequence[Any], *, seconds: float, look: Callable[[], None] | None = None
) -> list[dict[str, Any] | None]:
    """Raises OptionError if workers do not start; or what one of them raised."""
    ends_at = time.monotonic() + seconds
    answers: list[dict[str, Any] | None] = []
    for reference in references:
        try:
            answers.append(_awaited(ray, reference, ends_at, look))
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from error
        except ray.exceptions.ActorUnavailableError:
            answers.append(None)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise not_started(seconds, first_line(error)) from error
    return answers


def _awaited(ray: Any, reference: Any, ends_at: float, look: Callable[[], None] | None) -> Any:
    """An answer; ``look`` is called while waiting."""
    while look is not None and ends_at - time.monotonic() > _LOOK_SECONDS:
        if ray.wait([reference], num_returns=1, timeout=_LOOK_SECONDS)[0]:
            break
        look()
    return ray.get(reference, timeout=max(0.0, ends_at - time.monotonic()))


def not_started(seconds: float, reason: str) -> OptionError:
    what = f"they did not start within {seconds:.0f} s ({reason})."
    remedy = "Look at 'ray status': the cluster may be full or short of memory; --inline needs none."
    return OptionError(Problem("workers", what, remedy))


def cause_of(error: Any) -> Exception:
    """A worker's error, as the driver raises it; an unforeseen one with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RaymergeError | OSError):
        return cause
    return error if isinstance(error, Exception) else RuntimeError(str(error))


_NODE_LABEL = "ray.io/node-id"
"""Every node of Ray has its id under this label."""


@dataclass(slots=True, eq=False)
class Actor:
    """One worker, as the driver knows it."""

    name: str
    handle: Any
    node: str = ""
    """Id; "" until it has answered."""
    oom_kills: int | None = None
    """Of its node when it answered."""
    opening: Any = None
    """Reference to its taking up the work; None once that is done."""
    flight: dict[Any, int] = field(default_factory=dict)
    """Parts in hand by the reference to their receipt."""
    heartbeat_ref: Any = None
    """None where it was not asked for its heartbeat, or has answered."""
    asked_at: float = 0.0
    heartbeat: float | None = None
    still_seconds: float = 0.0
    """How long its parts have shown no progress."""
    idle_seconds: float = 0.0
    """How long there was no part for it."""

    def moved(self) -> None:
        self.still_seconds = 0.0


class WorkerGroup:
    """The workers that there are. They are equal."""

    def __init__(
        self, connection: RayConnection, worker: type[Any], options: RunOptions, *, ready_seconds: float
    ) -> None:
        self.actors: list[Actor] = []
        self.ready_seconds = ready_seconds
        self.numerics: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        self._connection = connection
        self._worker = worker
        self._options = options
        self._spawned = 0
        self._layout = Layout(1, 1)
        self._has_gpu = False

    @property
    def ray(self) -> Any:
        return self._connection.ray

    def room(self, machine: Machine) -> int:
        """Workers that fit onto a machine, if it is empty."""
        return machine.room(self._layout.threads, with_gpu=self._has_gpu)

    def homes(self, machines: Mapping[str, Machine]) -> frozenset[str]:
        """Nodes that have room for a worker, if they are empty."""
        return frozenset(node for node, machine in machines.items() if self.room(machine))

    def equip(self, layout: Layout, *, with_gpu: bool) -> None:
        """Set the resources of workers started from now on."""
        self._layout, self._has_gpu = layout, with_gpu

    def take_on(
        self,
        count: int,
        on: Collection[str] = (),
        *,
        seconds: float | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Start workers, on the nodes ``on`` (one for each; empty for any). Raises OptionError if they do not
        start, or differ from those that are there.
        """
        is_first = not self.actors
        places = [[each] for each in on] or [[] for _ in range(count)]
        for _ in range(ATTEMPTS):
            fresh = [self.spawn(on=place) for place in places]
            self.actors += fresh
            ready = [actor.handle.ready.remote() for actor in fresh]
            answers = ready_answers(self.ray, ready, seconds=seconds or self.ready_seconds, look=look)
            places = [place for place, answer in zip(places, answers, strict=True) if answer is None]
            for actor, answer in zip(fresh, answers, strict=True):
                if answer is None:
                    self.give_up(actor)
                    continue
                if is_first:
                    self.numerics, self.kernels = dict(answer["numerics"]), dict(answer["kernels"])
                    is_first = False
                self.hear(actor, answer)
            if not places:
                return
        raise not_started(self.ready_seconds, "their answers got lost")

    def spawn(self, *, on: Collection[str] = (), off: Collection[str] = ()) -> Actor:
        """A new worker that may not run yet, and is not in ``actors`` so far."""
        name = f"worker-{self._spawned}"
        self._spawned += 1
        options: dict[str, Any] = {
            "num_cpus": self._layout.threads,
            "num_gpus": 1 if self._has_gpu else 0,
            # Ray would fill one machine after the other, though each has storage and memory of its own.
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_task_retries": 0,
            # All lanes, a part that waits for one or for its bytes to be durable, and a call beside them.
            "max_concurrency": most_lanes(self._options) + 2,
        }
        if on:
            options["label_selector"] = {_NODE_LABEL: f"in({','.join(sorted(on))})"}
        elif off:
            options["label_selector"] = {_NODE_LABEL: f"!in({','.join(sorted(off))})"}
        # Who comes later is on a GPU as the others are, and says so where it cannot be.
        device = "cpu" if not self._has_gpu else "cuda" if self.numerics else self._options.device
        handle = self.ray.remote(self._worker).options(**options).remote(name, device)
        return Actor(name, handle)

    def hear(self, actor: Actor, answer: dict[str, Any], *, kernels: bool = False) -> None:
        """Note what a worker says of itself."""
        if answer["numerics"] != self.numerics:
            raise _unequal(
                f"they differ in device or torch version: {self.numerics} and {answer['numerics']}.",
                "Give --device cpu, or use equal machines",
            )
        if kernels and answer["kernels"] != self.kernels:
            raise _unequal(
                "they differ in processor or transformers version, which the work before the merge "
                f"depends on: {self.kernels} and {answer['kernels']}.",
                "Use equal machines, or --inline",
            )
        actor.node, actor.oom_kills = answer["node"], answer["oom_kills"]

    def give_up(self, actor: Actor) -> None:
        """End a worker, or what is left of it, so that it does as little as possible from now on."""
        # Though a call to it failed it may be alive, and would go on.
        self.ray.kill(actor.handle)
        self.actors.remove(actor)

    def dismiss(self) -> None:
        for actor in tuple(self.actors):
            self.give_up(actor)


def _unequal(what: str, remedy: str) -> OptionError:
    return OptionError(Problem("workers", what, f"{remedy}, so that the bytes do not depend on chance."))


class Cause(StrEnum):
    """Why a worker is lost."""

    ENDED = "ended"
    """Its process ended, for unknown reasons."""
    MEMORY = "memory"
    STILL = "still"
    """No progress for too long."""
    UNREACHABLE = "unreachable"
    """A call to it failed; it may be alive, and its parts are not to blame."""
    NODE = "node"
    """Its node is gone; its parts are not to blame."""


class WorkerFailures:
    """Counts failures of workers in one call of ``Pool.run``."""

    def __init__(self, part: str, workers: int) -> None:
        self._part = part
        self._most = max(_LEAST_SPARE, _SPARE * workers)
        self._took_down: Counter[int] = Counter()
        self._budgets: dict[int, int] = {}
        self._short: set[int] = set()
        self._on_nodes: Counter[str] = Counter()
        self._since_receipt = 0

    def is_alone(self, number: int) -> bool:
        """Whether a part is to be in hand alone: to find the culprit, or to have enough memory."""
        return self._took_down[number] > 0 or number in self._short

    def budget(self, number: int) -> int | None:
        """Bytes of memory for a part; None for what the work says."""
        return self._budgets.get(number)

    @property
    def shunned(self) -> frozenset[str]:
        """Nodes on which workers die, one after the other."""
        return frozenset(node for node, count in self._on_nodes.items() if count >= _NODE_ATTEMPTS)

    def progress(self, node: str) -> None:
        self._since_receipt = 0
        del self._on_nodes[node]

    def add(self, cause: Cause, reason: str, numbers: Sequence[int], node: str) -> None:
        """Count a lost worker with the parts that it had in hand; ``node`` is "" if unknown. Raises
        IncompleteError if a part has taken down too many workers, or too many were lost without a receipt.
        """
        self._since_receipt += 1
        if node and cause is not Cause.NODE:
            self._on_nodes[node] += 1
        for number in numbers if cause in (Cause.ENDED, Cause.STILL) else ():
            self._took_down[number] += 1
        worn = next((number for number in numbers if self._took_down[number] >= ATTEMPTS), None)
        if worn is not None:
            raise IncompleteError(
                f"{self._part} {worn} took down {ATTEMPTS} workers, the last with: {reason}. "
                f"{_KEPT}, perhaps with a smaller --memory or fewer --workers."
            )
        if self._since_receipt >= self._most:
            raise IncompleteError(
                f"{self._since_receipt} workers were lost, and nothing was made between, the last with: "
                f"{reason}. {_KEPT}."
            )

    def lessen(self, number: int, budget: int | None, reason: str) -> None:
        """Do a part that ran out of memory alone, with a smaller budget if there is one. Raises
        IncompleteError if there is none, and it was alone already.
        """
        if budget is not None:
            self._budgets[number] = budget
        elif number in self._short:
            raise IncompleteError(no_memory(self._part, number, self._budgets.get(number), reason))
        self._short.add(number)


def no_memory(part: str, number: int, budget: int | None, reason: str) -> str:
    had = "" if budget is None else f" of {format_size(budget)}"
    return (
        f"{part} {number} ran out of memory, alone on a worker and with the least budget{had} that it can be "
        f"made with ({reason}). {_KEPT}, with fewer --workers, or where more memory is free."
    )
