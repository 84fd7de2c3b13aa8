"""A pool of workers, whatever they run on, and whatever work they do."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Protocol

import torch

from raymerge.execute.receipts import Receipt

TICK_SECONDS = 1.0
"""How long a pool waits before it lets the driver look around."""


UNIT = "unit"
"""A part of a stage's work; of a merge's it is a segment."""


class Runner(Protocol):
    """One worker's end of a piece of work; several threads may run its parts at once."""

    def run(self, number: int) -> Receipt:
        """Do one part and return when what it made is durable."""

    def abort(self) -> None:
        """Have the parts in hand fail soon, where they can."""

    def close(self) -> None:
        """Give back what is held open."""


class Work(Protocol):
    """Everything that workers need of a run, but the numbers of its parts. It travels to them pickled."""

    @property
    def slots(self) -> int:
        """Parts that a worker has in hand at once."""

    @property
    def part(self) -> str:
        """What messages call a part: ``segment`` or ``unit``."""

    def open(self, device: torch.device, name: str) -> Runner:
        """What does the parts on the device of the worker that has this name."""


class Stop:
    """A request to stop after the parts in hand, made from a signal handler."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for it."""
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
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on: device kind and torch version."""

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What the bytes of a stage's result may depend on: that, and what computes layers and products."""

    def start(self) -> None:
        """Start the workers; returns when they are ready.

        Raises:
            OptionError: the workers asked for cannot be had.
        """

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipt | None, None, None]:
        """Do the parts of these numbers in about the given order and yield receipts as they come.

        Yields None when ``TICK_SECONDS`` went by without any, for the driver to look how far the parts are.
        Ends early, without error, once ``stop`` is requested and the parts in hand are done. Closing the
        generator gives up the parts in hand.
        """

    def close(self) -> None:
        """Give the workers back."""
