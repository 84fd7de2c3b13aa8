"""What becomes of workers, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from raymerge.cli.render.screen import counted
from raymerge.events import CarriersChosen, MemoryShort, NodeOfNoUse, RoomAwaited, WorkerLeft, WorkerLost
from raymerge.units import format_duration, format_size

OfWorkers = CarriersChosen | MemoryShort | NodeOfNoUse | RoomAwaited | WorkerLeft | WorkerLost
"""Events that this module has lines for."""


def worker_lines(event: OfWorkers, part: str) -> Iterator[tuple[str, str]]:
    """The lines of an event, each with its style; ``part`` is what a part of the work is called."""
    if isinstance(event, CarriersChosen):
        yield _carriers(event), ""
    elif isinstance(event, WorkerLeft):
        yield f"{event.worker} has nothing more to do and leaves", ""
    elif isinstance(event, NodeOfNoUse):
        yield f"warning: workers on {event.node}, which joined, get no {part}s: {event.lack}", "yellow"
    elif isinstance(event, RoomAwaited):
        most = format_duration(event.seconds)
        yield f"waiting for the cluster to grow, {most} at most: {event.lack}", "yellow"
    elif isinstance(event, WorkerLost):
        yield _lost(event, part), "yellow"
    else:
        yield _short(event, part), "yellow"


def _carriers(event: CarriersChosen) -> str:
    if not event.copies:
        return f"no worker on processors is started beside the GPUs: each {event.part} that is left computes"
    copied = f"{event.copies} of {counted(event.parts, event.part)}"
    return (
        f"{counted(event.workers, 'worker')} on processors beside the GPUs for what is only copied, {copied}"
    )


def _lost(event: WorkerLost, part: str) -> str:
    given = (
        f"{counted(len(event.segments), part)} in hand pass to another"
        if event.segments
        else "it had nothing in hand"
    )
    return f"warning: {event.worker} was lost ({event.reason}); {given}"


def _short(event: MemoryShort, part: str) -> str:
    again = f"it is made again alone, with {format_size(event.budget)}"
    return f"warning: {part} {event.segment} ran out of memory on {event.worker} ({event.reason}); {again}"
