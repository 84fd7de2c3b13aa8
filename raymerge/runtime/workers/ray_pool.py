"""A pool of Ray actors, owned by the driver, which feeds them and replaces those that die."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from raymerge.device_numerics import NO_GPU_WORKS, DeviceChoice
from raymerge.errors import OptionError, Problem
from raymerge.events import OnEvent, RayEnded, RoomAwaited
from raymerge.options import USUAL_PATIENCE, RunOptions
from raymerge.runtime.workers.dispatcher import Dispatcher, DispatchPolicy
from raymerge.runtime.workers.placement import Placement, placement_of, stations, survey_problems, unreached
from raymerge.runtime.workers.pool import Receipts, Stop, Work
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.ray_nodes import Demand, Nodes
from raymerge.runtime.workers.sizing import Layout, Machine, embedded_slots, layout_of, no_capacity, no_gpu
from raymerge.runtime.workers.worker import MergeWorker
from raymerge.runtime.workers.worker_group import WorkerGroup

_READY_SECONDS = 120.0
_GROWTH_SECONDS = 1800.0
"""How long the first worker may take on a cluster that has no room yet, and adds machines."""


class RayPool:
    """Workers on an embedded Ray, or on a running cluster."""

    def __init__(
        self,
        options: RunOptions,
        on_event: OnEvent,
        *,
        worker: type[Any] = MergeWorker,
        parts: int | None = None,
        ready_seconds: float = _READY_SECONDS,
    ) -> None:
        """At most ``parts`` workers are started; None while the number of parts is unknown."""
        if parts is not None:
            workers = None if options.workers is None else max(1, min(options.workers, parts))
            options = replace(options, workers=workers)
        self._options = options
        self._on_event = on_event
        self._parts = parts
        self._gpus = 0
        self._layout = Layout(1, 1)
        self._open_gpus = 0
        self.device_reason = ""
        self._placement = Placement()
        self._surveyed: frozenset[str] | None = None
        self._is_last = False
        slots = embedded_slots(options) if options.address is None else None
        self._connection = RayConnection(
            options.address, num_cpus=slots, on_end=lambda process: on_event(RayEnded(process))
        )
        self._nodes = Nodes(self._connection.ray, is_here=options.address is None)
        self.group = WorkerGroup(self._connection, worker, options, ready_seconds=ready_seconds)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(actor.name for actor in self.group.actors)

    @property
    def device(self) -> str:
        return self.group.numerics.get("device", "cpu")

    @property
    def threads(self) -> int:
        return self._layout.threads

    @property
    def numerics(self) -> dict[str, str]:
        return self.group.numerics

    @property
    def stage_numerics(self) -> dict[str, str]:
        return {**self.group.numerics, **self.group.kernels}

    def start(self) -> None:
        self._connection.open()
        gpus = self._usable_gpus()
        if gpus and self._options.device == "auto":
            self._open_gpus = gpus
        else:
            self._equip(gpus)
            self._fill()

    def settle(self, choose: Callable[[], DeviceChoice]) -> None:
        gpus, self._open_gpus = self._open_gpus, 0
        if not gpus:
            return
        choice = choose()
        if choice.device == "cuda":
            choice = self._tried(choice, gpus)
        if choice.device == "cpu":
            self._equip(0)
            self._fill()
        self.device_reason = choice.reason

    def survey(self, work: Work) -> None:
        """Ask every node; where they differ, workers are started where they are of use."""
        self._placement = Placement()
        if self._options.address is None:
            return
        sights, reads = self._nodes.sights(work.files, work.place), work.reads()
        problems = survey_problems(sights, work.files, reads, str(work.place and work.place.parent))
        if problems:
            raise OptionError(problems)
        self._placement, self._surveyed = placement_of(sights, reads), frozenset(sights)
        if not self._options.growing:
            self._check_reach(work)
        present, homes = {actor.node for actor in self.group.actors}, self.group.homes(self._nodes.machines())
        # What none of these homes sees is for nodes that are yet to join.
        if not self._placement.is_served(present, homes):
            self._station()

    def conclude(self) -> None:
        self._is_last = True

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        growing = self._options.growing
        if growing:
            # They join once there is room for them; that they wait is what has the cluster grow.
            missing = self._layout.workers - len(self.group.actors)
            self.group.actors += [self.group.spawn() for _ in range(missing)]
        policy = DispatchPolicy(
            surveyed=self._surveyed,
            leaves=growing and self._is_last,
            growth_seconds=_GROWTH_SECONDS if growing else 0.0,
        )
        dispatcher = Dispatcher(
            self.group,
            self._nodes,
            work,
            numbers,
            placement=self._placement,
            patience=self._options.patience or USUAL_PATIENCE,
            on_event=self._on_event,
            policy=policy,
        )
        dispatcher.begin()
        try:
            while dispatcher.goes_on(stop):
                yield from dispatcher.advance(stop)
        finally:
            # Who still waits for room would have the cluster grow for nothing.
            for actor in tuple(self.group.actors) if growing else ():
                if not actor.node:
                    self.group.give_up(actor)

    def close(self) -> None:
        self.group.dismiss()
        self._connection.close()

    def _fill(self) -> None:
        """Start the missing workers; on a growing cluster those that it has room for, or one."""
        missing = self._layout.workers - len(self.group.actors)
        if self._options.growing:
            capacity = sum(map(self.group.capacity, self._machines()))
            missing = min(missing, max(capacity, 1) - len(self.group.actors))
            if missing > 0 and not capacity:
                self._grow(missing)
                return
        self.group.take_on(missing)

    def _grow(self, missing: int) -> None:
        """Start workers on a cluster without room for one yet; raises if it cannot get any."""
        largest = max(self._machines(), key=lambda each: (each.gpus, each.cores), default=Machine(0))
        needs = f"CPUs: {self._layout.threads}, GPUs: {min(self._gpus, 1)}"
        lack = f"a worker needs {needs}; the largest node has CPUs: {largest.cores}, GPUs: {largest.gpus}"
        self._on_event(RoomAwaited(lack, _GROWTH_SECONDS))
        demand = Demand(self._connection.ray, cpus=self._layout.threads, gpus=min(self._gpus, 1), lack=lack)
        self.group.take_on(missing, seconds=_GROWTH_SECONDS, look=demand.check)

    def _machines(self) -> list[Machine]:
        return list(self._nodes.machines().values())

    def _check_reach(self, work: Work) -> None:
        """Raises unless every part can be done on a node that may have a worker for it."""
        homes, threads = self.group.homes(self._nodes.machines()), self._layout.threads
        stranded = sum(not able.intersection(homes) for able in self._placement.able)
        if stranded:
            raise OptionError(unreached(stranded, work.part, threads=threads, with_gpu=self._gpus > 0))

    def _station(self) -> None:
        """Have a worker on every indispensable node, and the others where they are of use."""
        capacities = {node: self.group.capacity(machine) for node, machine in self._nodes.machines().items()}
        nodes = stations(self._placement, capacities, self._layout.workers)
        asked = self._options.workers
        if len(nodes) > self._layout.workers and asked is not None:
            what = (
                f"the sources are on disks of different nodes, and {len(nodes)} workers at least are needed "
            )
            what += f"to be where they are; {asked} were asked for."
            raise OptionError(Problem("--workers", what, f"Give at least {len(nodes)}."))
        self.group.dismiss()
        self.group.take_on(len(nodes), on=nodes)

    def _usable_gpus(self) -> int:
        """GPUs that have CPU slots for their workers' threads beside them."""
        machines, threads = self._machines(), self._options.threads or 1
        gpus = sum(machine.capacity(threads, with_gpu=True) for machine in machines)
        if self._options.device == "cuda" and not gpus:
            if self._options.growing:
                return self._options.workers or 1
            raise OptionError(no_gpu(machines))
        return 0 if self._options.device == "cpu" else gpus

    def _equip(self, gpus: int) -> None:
        layout = layout_of(self._options, [machine.cores for machine in self._machines()], gpus)
        if self._parts is not None:
            layout = replace(layout, workers=min(layout.workers, max(1, self._parts)))
        lack = no_capacity(self._options, layout, self._machines(), with_gpu=gpus > 0)
        if lack is not None and not self._options.growing:
            raise OptionError(lack)
        self._gpus, self._layout = gpus, layout
        self.group.equip(self._layout, with_gpu=gpus > 0)

    def _tried(self, choice: DeviceChoice, gpus: int) -> DeviceChoice:
        """The choice of GPUs with workers on them, or why there are none: they were not required."""
        try:
            self._equip(gpus)
            self._fill()
        except OptionError as error:
            # There may be fewer GPUs than workers are wanted; others may have them, or they are broken.
            choice = DeviceChoice("cpu", error.problems[0].what.rstrip("."))
        else:
            choice = NO_GPU_WORKS if self.device == "cpu" else choice
        if choice.device == "cpu":
            self.group.dismiss()
        return choice
