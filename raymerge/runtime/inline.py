"""Does the work in this process, without Ray: for small merges, tests and debugging."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing

import torch

from raymerge.execute.receipts import Receipt
from raymerge.runtime.devices import choose_device, kernels_of, numerics_of
from raymerge.runtime.options import Device
from raymerge.runtime.pool import TICK_SECONDS, Runner, Stop, Work

_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many parts in flight as any worker."""

    def __init__(self, device: Device) -> None:
        self._wanted = device
        self._device = torch.device("cpu")

    @property
    def workers(self) -> tuple[str, ...]:
        """The one worker."""
        return (_NAME,)

    @property
    def device(self) -> str:
        """Kind of device."""
        return self._device.type

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on."""
        return numerics_of(self._device)

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What the bytes of a stage's result may depend on."""
        return {**self.numerics, **kernels_of(self._device)}

    def start(self) -> None:
        """Choose the device."""
        self._device = choose_device(self._wanted)

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipt | None, None, None]:
        """Do the parts in threads; see ``Pool.run``."""
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            stack.callback(runner.abort)
            yield from _feed(runner, threads, list(numbers), work.slots, stop)

    def close(self) -> None:
        """Nothing to give back."""


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
