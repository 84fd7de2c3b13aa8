"""A pool of workers, whatever they run on."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raymerge.execute.receipts import Receipt
from raymerge.planner.memory import Projection
from raymerge.planner.tables import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that workers need of a run, but the segment numbers."""

    plan: Plan
    """The plan."""
    roots: tuple[str, ...]
    """Directory of each source."""
    staging: Path
    """The staging directory, reachable from every worker."""
    projection: Projection
    """Memory that a worker may use."""


class Stop:
    """A request to stop after the segments in hand, made from a signal handler."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether no new segment is to be begun."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for it."""
        self._event.set()


class Pool(Protocol):
    """Workers that make segments."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""

    @property
    def device(self) -> str:
        """Kind of device that they compute on: ``cpu`` or ``cuda``."""

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on: device kind and torch version."""

    def start(self) -> None:
        """Start the workers; returns when they are ready.

        Raises:
            OptionError: the workers asked for cannot be had.
        """

    def run(self, work: Work, segments: Sequence[int], stop: Stop) -> Generator[Receipt, None, None]:
        """Make segments in about the given order and yield receipts as they come.

        Ends early, without error, once ``stop`` is requested and the segments in hand are done. Closing the
        generator gives up the segments in hand.
        """

    def close(self) -> None:
        """Give the workers back."""
