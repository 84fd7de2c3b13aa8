"""Does the work in this process, without Ray: for small merges, tests and debugging."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch

from raymerge.device_numerics import full_float32
from raymerge.events import MemoryShort, OnEvent
from raymerge.execute.receipts import Receipt
from raymerge.options import Device, RunOptions
from raymerge.runtime.devices.choice import Choice, GpuError
from raymerge.runtime.devices.devices import choose_device, first_line, kernels_of, numerics_of
from raymerge.runtime.devices.probe import Sample, measure
from raymerge.runtime.workers.failures import Losses
from raymerge.runtime.workers.memory_errors import is_memory_error
from raymerge.runtime.workers.pool import TICK_SECONDS, Measure, Measured, Receipts, Runner, Stop, Work
from raymerge.runtime.workers.sizing import Crew, cores_here, layout_of

_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many parts in flight as any worker."""

    def __init__(
        self, device: Device, threads: int | None = None, *, on_event: OnEvent = lambda _: None
    ) -> None:
        """
        Args:
            device: where arithmetic runs.
            threads: that compute at once; None for as many as suit the device.
            on_event: told of parts that memory did not suffice for.
        """
        self._on_event = on_event
        self._options = RunOptions(device=device, threads=threads, inline=True)
        self._device = torch.device("cpu")
        self._choice: Choice | None = None
        self._settings = ExitStack()

    @property
    def workers(self) -> tuple[str, ...]:
        """The one worker."""
        return (_NAME,)

    @property
    def device(self) -> str:
        """Kind of device."""
        return self._device.type

    @property
    def threads(self) -> int:
        """Threads that compute at once."""
        return self._threads(gpus=int(self._device.type == "cuda"))

    @property
    def choice(self) -> Choice | None:
        """How the device was chosen."""
        return self._choice

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on."""
        return numerics_of(self._device)

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What the bytes of a stage's result may depend on."""
        return {**self.numerics, **kernels_of(self._device)}

    def start(self) -> None:
        """Find the device."""
        self._settings.enter_context(full_float32())
        self._device = choose_device(self._options.device)

    def settle(self, choose: Callable[[Measure], Choice]) -> None:
        """Choose between the GPU and the processors; see ``Pool.settle``."""
        if self._options.device == "auto" and self._device.type == "cuda":
            try:
                self._choice = choose(self._measured)
            except GpuError as error:
                self._choice = error.choice()
            self._device = torch.device(self._choice.device)

    def survey(self, work: Work) -> None:
        """Nothing to find out: this process has planned with the files, and writes itself."""

    def conclude(self) -> None:
        """Nobody can go."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Do the parts in threads; see ``Pool.run``."""
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            crew = _Crew(work, runner, numbers, stop, self._on_event)
            stack.callback(crew.give_up)
            yield from crew.receipts(threads)

    def close(self) -> None:
        """Give back the settings of torch."""
        self._settings.close()

    def _measured(self, sample: Sample) -> Measured:
        probe = measure(self._device, sample, threads=self._threads(gpus=0))
        return Measured(probe, cpu=Crew(1, 1), gpu=Crew(1, 1))

    def _threads(self, *, gpus: int) -> int:
        return layout_of(self._options, (cores_here(),), gpus).threads


class _Crew:
    """Threads that take parts by themselves: between two parts nobody waits for the driver, which makes
    receipts durable. No more parts than slots are in hand or have no durable receipt: that is what a crash
    costs. Parts that memory did not suffice for are done again in the end, one after the other."""

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
        """What threads make until all of them have ended; raises what one of them failed with."""
        yield from self._until_ended([threads.submit(self._take_parts) for _ in range(self._work.slots)])
        losses = Losses(self._work.part, 1)
        while self._short and not self._stop.requested:
            short, *self._short = self._short
            budget = self._work.lessened(short.number, losses.budget(short.number))
            losses.lessen(short.number, budget, short.reason)
            if budget is not None:
                self._on_event(MemoryShort(_NAME, short.number, budget, short.reason))
            yield from self._until_ended([threads.submit(self._do, short.number, budget)])

    def give_up(self) -> None:
        """Begin no more parts, and have those in hand fail where they can."""
        self._todo.clear()
        self._room.release(self._work.slots)
        self._runner.abort()

    def _until_ended(self, busy: Sequence[Future[None]]) -> Generator[Receipts, None, None]:
        """What comes until these have ended."""
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
        """Do parts until none is left or a stop is asked for."""
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
        """All that has come since; nothing where that takes long."""
        found: list[_Made] = []
        with suppress(Empty):
            found.append(self._made.get(timeout=TICK_SECONDS))
            while True:
                found.append(self._made.get_nowait())
        return found


@dataclass(frozen=True, slots=True)
class _Short:
    """A part that memory did not suffice for."""

    number: int
    reason: str


_Made: TypeAlias = Receipt | _Short | Future[None]
