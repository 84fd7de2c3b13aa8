"""The workers of a pool on Ray: started, compared with each other, given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymerge.errors import OptionError, Problem, RaymergeError, first_line
from raymerge.options import RunOptions
from raymerge.runtime.workers.pool import ATTEMPTS
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.sizing import Layout, Machine, most_lanes

_LOOK_SECONDS = 5.0
"""How often somebody may look around while workers are waited for."""
_REASON_SIZE = 300


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
        except ray.exceptions.GetTimeoutError as error:
            raise not_started(seconds, first_line(error)) from error
        except ray.exceptions.RayActorError as error:
            raise _ended_early(error) from error
    return answers


def _awaited(ray: Any, reference: Any, ends_at: float, look: Callable[[], None] | None) -> Any:
    while look is not None and ends_at - time.monotonic() > _LOOK_SECONDS:
        if ray.wait([reference], num_returns=1, timeout=_LOOK_SECONDS)[0]:
            break
        look()
    return ray.get(reference, timeout=max(0.0, ends_at - time.monotonic()))


def not_started(seconds: float, reason: str) -> OptionError:
    what = f"they did not start within {seconds:.0f} s ({reason})."
    remedy = "Look at 'ray status': the cluster may be full or short of memory; --inline needs none."
    return OptionError(Problem("workers", what, remedy))


def _ended_early(error: Exception) -> OptionError:
    # The last line of a traceback is what was raised; above it Ray tells where, in colours.
    reason = (str(error).strip().splitlines() or [""])[-1].strip()[:_REASON_SIZE].rstrip(".")
    remedy = "Mend what that names, where workers run."
    return OptionError(Problem("workers", f"they ended before they were up ({reason}).", remedy))


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
    idle_seconds: float = 0.0

    def moved(self) -> None:
        self.still_seconds = 0.0


class WorkerGroup:
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

    def capacity(self, machine: Machine) -> int:
        """Workers that fit onto a machine, if it is empty."""
        return machine.capacity(self._layout.threads, with_gpu=self._has_gpu)

    def homes(self, machines: Mapping[str, Machine]) -> frozenset[str]:
        """Nodes that have room for a worker, if they are empty."""
        return frozenset(node for node, machine in machines.items() if self.capacity(machine))

    def equip(self, layout: Layout, *, with_gpu: bool) -> None:
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
        start, or differ from those that are there."""
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
