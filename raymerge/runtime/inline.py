"""Runs segments in this process, without Ray: for small merges, tests and debugging."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.planner.memory import SLOTS
from raymerge.runtime.devices import choose_device, numerics_of
from raymerge.runtime.options import Device
from raymerge.runtime.pool import Stop, Work
from raymerge.storage.open import open_store

_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many segments in flight as any worker."""

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

    def start(self) -> None:
        """Choose the device."""
        self._device = choose_device(self._wanted)

    def run(self, work: Work, segments: Sequence[int], stop: Stop) -> Generator[Receipt, None, None]:
        """Make segments in threads; see ``Pool.run``."""
        with ExitStack() as stack:
            sources = [stack.enter_context(open_store(root)) for root in work.roots]
            staging = stack.enter_context(open_store(str(work.staging)))
            runner = SegmentRunner(
                work.plan, sources, staging, device=self._device, projection=work.projection, name=_NAME
            )
            threads = stack.enter_context(ThreadPoolExecutor(SLOTS))
            stack.callback(runner.abort)
            yield from _feed(runner, threads, list(segments), stop)

    def close(self) -> None:
        """Nothing to give back."""


def _feed(
    runner: SegmentRunner, threads: ThreadPoolExecutor, todo: list[int], stop: Stop
) -> Generator[Receipt, None, None]:
    flight: set[Future[Receipt]] = set()
    while True:
        while todo and len(flight) < SLOTS and not stop.requested:
            flight.add(threads.submit(runner.run, todo.pop(0)))
        if not flight:
            return
        done, flight = wait(flight, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
