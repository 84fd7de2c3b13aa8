"""A pool of workers, whatever they run on and do."""

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
        """Do one part; what it made is durable on return. ``budget`` is bytes of memory from
        ``Work.lessened``, for a part that is in hand alone; None for what the work says.
        """

    def abort(self) -> None:
        """Let the parts in hand fail soon, where they can."""

    def close(self) -> None: ...


class Work(Protocol):
    """Everything that workers need of a run, but the numbers of its parts. It travels pickled."""

    @property
    def slots(self) -> int:
        """Parts that a worker is given at once; its runner starts them as it has room."""

    @property
    def part(self) -> str:
        """Its name in messages: ``segment`` or ``unit``."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Files that the parts read, which a worker must see."""

    @property
    def place(self) -> Path | None:
        """The directory that parts are written to, and workers must see; None for an object store."""

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every part, the positions in ``files`` of what it reads."""

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Bytes of memory to retry a part with that ran out of it, with the same result: half of what it had,
        or its least need if that is more; None if it had no more than that.
        """

    def open(self, device: torch.device, name: str) -> Runner:
        """What does the parts, on the device of the worker of this name."""


class Stop:
    """A request to stop after the parts in hand, from a signal handler or elsewhere."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.look = look
        self._event = threading.Event()
        self._until: float | None = None

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def overdue(self) -> bool:
        """Whether the parts in hand are no longer waited for."""
        return self._until is not None and time.monotonic() >= self._until

    def request(self, seconds: float | None = None) -> None:
        """Parts in hand have so many seconds; None for no limit."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._event.set()


class Pool(Protocol):
    """Workers that do the parts of one piece of work after the other."""

    @property
    def workers(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> str:
        """Kind: ``cpu`` or ``cuda``."""

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
        """What a stage's bytes may depend on: ``numerics``, and what computes layers and products."""

    def start(self) -> None:
        """Start the workers, or prepare for ``settle``; raises OptionError if they cannot be had."""

    def settle(self, choose: Callable[[], DeviceChoice]) -> None:
        """Start the workers where that was left open, because GPUs need not be used. All compute on the
        chosen kind of device; on processors where GPUs are chosen and do not work.

        ``choose`` is called only if there is a choice, since it may read what an earlier run left. Raises
        OptionError if the workers asked for cannot be had.
        """

    def survey(self, work: Work) -> None:
        """Before the first write: raises OptionError if workers lack the work's files or its place."""

    def conclude(self) -> None:
        """The next piece of work is the last: workers without a part in it may go."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Do these parts in about the given order and yield receipts as they come.

        All available ones are yielded together, to be made durable together; meanwhile workers go on. Yields
        none after ``TICK_SECONDS`` without any, so that the driver can look at progress. Ends early, without
        error, once ``stop`` is requested and the parts in hand are done. Closing the generator gives up the
        parts in hand.
        """

    def close(self) -> None: ...
