"""Does the work in this process, without Ray: for small merges, tests and debugging."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from queue import Empty, SimpleQueue

import torch

from raymerge.execute.receipts import Receipt
from raymerge.runtime.device_choice import Choice, GpuError
from raymerge.runtime.device_probe import Sample, measure
from raymerge.runtime.devices import choose_device, kernels_of, numerics_of
from raymerge.runtime.options import Device, RunOptions
from raymerge.runtime.pool import TICK_SECONDS, Measure, Measured, Receipts, Runner, Stop, Work
from raymerge.runtime.sizing import Crew, cores_here, layout_of

_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many parts in flight as any worker."""

    def __init__(self, device: Device, threads: int | None = None) -> None:
        """
        Args:
            device: where arithmetic runs.
            threads: that compute at once; None for as many as suit the device.
        """
        self._options = RunOptions(device=device, threads=threads, inline=True)
        self._device = torch.device("cpu")
        self._choice: Choice | None = None

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
        self._device = choose_device(self._options.device)

    def settle(self, choose: Callable[[Measure], Choice]) -> None:
        """Choose between the GPU and the processors; see ``Pool.settle``."""
        if self._options.device == "auto" and self._device.type == "cuda":
            try:
                self._choice = choose(self._measured)
            except GpuError as error:
                self._choice = error.choice()
            self._device = torch.device(self._choice.device)

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Do the parts in threads; see ``Pool.run``."""
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            crew = _Crew(runner, numbers, stop, slots=work.slots)
            stack.callback(crew.give_up)
            yield from crew.receipts(threads)

    def close(self) -> None:
        """Nothing to give back."""

    def _measured(self, sample: Sample) -> Measured:
        probe = measure(self._device, sample, threads=self._threads(gpus=0))
        return Measured(probe, cpu=Crew(1, 1), gpu=Crew(1, 1))

    def _threads(self, *, gpus: int) -> int:
        return layout_of(self._options, (cores_here(),), gpus).threads


class _Crew:
    """Threads that take parts by themselves: between two parts nobody waits for the driver, which makes
    receipts durable. No more parts than slots are in hand or have no durable receipt: that is what a crash
    costs."""

    def __init__(self, runner: Runner, numbers: Sequence[int], stop: Stop, *, slots: int) -> None:
        self._runner = runner
        self._todo = deque(numbers)
        self._stop = stop
        self._slots = slots
        self._room = threading.Semaphore(slots)
        self._made: SimpleQueue[Receipt | Future[None]] = SimpleQueue()

    def receipts(self, threads: ThreadPoolExecutor) -> Generator[Receipts, None, None]:
        """What threads make until all of them have ended; raises what one of them failed with."""
        for _ in range(self._slots):
            threads.submit(self._work).add_done_callback(self._made.put)
        busy = self._slots
        while busy:
            found = self._found()
            receipts = tuple(each for each in found if isinstance(each, Receipt))
            yield receipts
            if receipts:
                self._room.release(len(receipts))
            ended = [each for each in found if isinstance(each, Future)]
            for thread in ended:
                thread.result()
            busy -= len(ended)

    def give_up(self) -> None:
        """Begin no more parts, and have those in hand fail where they can."""
        self._todo.clear()
        self._room.release(self._slots)
        self._runner.abort()

    def _work(self) -> None:
        """Do parts until none is left or a stop is asked for."""
        while True:
            self._room.acquire()
            try:
                number = self._todo.popleft()
            except IndexError:
                return
            if self._stop.requested:
                return
            self._made.put(self._runner.run(number))

    def _found(self) -> list[Receipt | Future[None]]:
        """All that has come since; nothing where that takes long."""
        found: list[Receipt | Future[None]] = []
        with suppress(Empty):
            found.append(self._made.get(timeout=TICK_SECONDS))
            while True:
                found.append(self._made.get_nowait())
        return found
