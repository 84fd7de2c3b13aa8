"""Does the work in this process, without Ray: for small merges, tests and debugging."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing

import torch

from raymerge.execute.receipts import Receipt
from raymerge.runtime.device_choice import Choice, GpuError
from raymerge.runtime.device_probe import Sample, measure
from raymerge.runtime.devices import choose_device, kernels_of, numerics_of
from raymerge.runtime.options import Device, RunOptions
from raymerge.runtime.pool import TICK_SECONDS, Measure, Measured, Runner, Stop, Work
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

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipt | None, None, None]:
        """Do the parts in threads; see ``Pool.run``."""
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            stack.callback(runner.abort)
            yield from _feed(runner, threads, list(numbers), work.slots, stop)

    def close(self) -> None:
        """Nothing to give back."""

    def _measured(self, sample: Sample) -> Measured:
        probe = measure(self._device, sample, threads=self._threads(gpus=0))
        return Measured(probe, cpu=Crew(1, 1), gpu=Crew(1, 1))

    def _threads(self, *, gpus: int) -> int:
        return layout_of(self._options, (cores_here(),), gpus).threads


def _feed(
    runner: Runner, threads: ThreadPoolExecutor, todo: list[int], slots: int, stop: Stop
) -> Generator[Receipt | None, None, None]:
    flight: set[Future[Receipt]] = set()
    while True:
        while todo and len(flight) < slots and not stop.requested:
            flight.add(threads.submit(runner.run, todo.pop(0)))
        if not flight:
            return
        done, flight = wait(flight, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            yield None
        for future in done:
            yield future.result()
