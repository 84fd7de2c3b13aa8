"""A pool of workers, whatever they run on, and whatever work they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from raymerge.device_numerics import DeviceChoice
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile

TICK_SECONDS = 1.0
"""How long a pool waits before it lets the driver look around."""

Receipts: TypeAlias = tuple[Receipt, ...]
"""Those that came while the driver saw to the ones before."""

UNIT = "unit"
"""A part of a stage's work; of a merge's it is a segment."""


class Runner(Protocol):
    """One worker's end of a piece of work; several threads may run its parts at once."""

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Do one part and return when what it made is durable.

        Args:
            budget: bytes of memory that it may use, which ``Work.lessened`` gave; None for what the work
                says. One with a budget is in hand alone.
        """

    def abort(self) -> None:
        """Have the parts in hand fail soon, where they can."""

    def close(self) -> None:
        """Give back what is held open."""


class Work(Protocol):
    """Everything that workers need of a run, but the numbers of its parts. It travels to them pickled."""

    @property
    def slots(self) -> int:
        """Parts that a worker is given at once; its runner takes them up as it has room for them."""

    @property
    def part(self) -> str:
        """What messages call a part: ``segment`` or ``unit``."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Files that the parts read, which a worker must see."""

    @property
    def place(self) -> Path | None:
        """The directory that parts are written to, which a worker must see. It need not be there yet. None
        where that is no directory."""

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every part, which of ``files`` it reads, by their positions."""

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Bytes of memory to try a part with that has run out of it; the result has the same bytes.

        Returns:
            Half of what it had, or what it needs if that is more; None if it had no more than it needs.
        """

    def open(self, device: torch.device, name: str) -> Runner:
        """What does the parts on the device of the worker that has this name."""


class Stop:
    """A request to stop after the parts in hand, made from a signal handler or from elsewhere."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.look = look
        self._event = threading.Event()
        self._until: float | None = None

    @property
    def requested(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._event.is_set()

    @property
    def overdue(self) -> bool:
        """Whether the parts in hand are not waited for any longer."""
        return self._until is not None and time.monotonic() >= self._until

    def request(self, seconds: float | None = None) -> None:
        """Ask for it; parts in hand have so many seconds, None for as long as it takes."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._event.set()


class Pool(Protocol):
    """Workers that do the parts of one piece of work after the other."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""

    @property
    def device(self) -> str:
        """Kind of device that they compute on: ``cpu`` or ``cuda``."""

    @property
    def device_reason(self) -> str:
        """Why they compute on it, where there was a choice; otherwise ""."""

    @property
    def threads(self) -> int:
        """Threads of each worker that compute at once."""

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on: device kind and torch version."""

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What the bytes of a stage's result may depend on: that, and what computes layers and products."""

    def start(self) -> None:
        """Start the workers, or make ready for ``settle``; returns when they are ready.

        Raises:
            OptionError: the workers asked for cannot be had.
        """

    def settle(self, choose: Callable[[], DeviceChoice]) -> None:
        """Start the workers where that was left open, because there are GPUs that need not be used.

        All compute on the chosen kind of device; on processors where GPUs are chosen and do not work.

        Args:
            choose: called only if there is a choice, since it may look at what an earlier run left.

        Raises:
            OptionError: the workers asked for cannot be had.
        """

    def survey(self, work: Work) -> None:
        """Find out, before anything is written, whether the workers see the files that the work reads and
        the place that it is written to.

        Raises:
            OptionError: some of it cannot be done; all reasons.
        """

    def conclude(self) -> None:
        """Say that the next piece of work is the last one: who finds nothing to do in it may go."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Do the parts of these numbers in about the given order and yield receipts as they come.

        All that are there are yielded together, so that they can be made durable together; meanwhile workers
        go on. Yields none when ``TICK_SECONDS`` went by without any, for the driver to look how far the
        parts are.
        Ends early, without error, once ``stop`` is requested and the parts in hand are done. Closing the
        generator gives up the parts in hand.
        """

    def close(self) -> None: ...
