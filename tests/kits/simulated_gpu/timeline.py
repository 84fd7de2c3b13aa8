"""Streams and events: what is queued, and the order that it is carried out in."""

from __future__ import annotations

import random
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import torch

DEVICE = torch.device("cuda", 0)
_SPEEDS = (0.0, 0.0, 0.1, 0.5, 0.9)
"""How likely a stream goes on whenever anything is queued. Some never do before somebody waits for them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    run: Callable[[], object]
    waits: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the work of a stream: behind so many pieces of it."""

    stream: Stream
    number: int

    @property
    def is_reached(self) -> bool:
        return self.stream.done >= self.number


class Timeline:
    """All streams of a GPU."""

    def __init__(self, seed: int, on_wait: Callable[[], None]) -> None:
        self.on_wait = on_wait
        """Called before the host waits for anything."""
        self.lock = threading.RLock()
        """Held by whoever queues or carries out work."""
        self.streams: list[Stream] = []
        self._random = random.Random(seed)
        self._local = threading.local()
        self.is_running = False
        """Whether a piece of work is being carried out."""
        self.stream_type = type("Stream", (Stream,), {"timeline": self})
        self.event_type = type("Event", (Event,), {"timeline": self})
        self.default: Stream = self.stream_type()

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._local, "stream", None) or self.default

    @current.setter
    def current(self, stream: Stream | None) -> None:
        self._local.stream = stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def speed(self) -> float:
        return self._random.choice(_SPEEDS)

    def reclaim(self, run: Callable[[], object], marks: Sequence[Mark]) -> None:
        """Carry something out as soon as several streams have come so far, on none of them."""
        with self.lock:
            ahead = next((mark for mark in marks if not mark.is_reached), None)
            if ahead is None:
                run()
            else:
                insort(ahead.stream.watchers, (ahead.number, _Work(run, marks)), key=itemgetter(0))

    def advance(self) -> None:
        """Let every stream go on for a while, or not."""
        if self.is_running:
            # Garbage was collected meanwhile, and frees memory.
            return
        for stream in self.streams:
            while stream.can_go_on and self._random.random() < stream.speed:
                stream.run_next()

    def synchronize(self, *_: object) -> None:
        self.on_wait()
        with self.lock:
            for stream in self.streams:
                stream.run_to(stream.queued)


class Stream:
    timeline: ClassVar[Timeline]

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = DEVICE
        self.queued = self.done = 0
        self._queue: deque[_Work] = deque()
        self.watchers: list[tuple[int, _Work]] = []
        """What is to be carried out when the stream, and perhaps others, have come so far."""
        with self.timeline.lock:
            self.speed = self.timeline.speed()
            self.timeline.streams.append(self)

    @property
    def mark(self) -> Mark:
        """Behind all that is queued now."""
        return Mark(self, self.queued)

    def queue(self, run: Callable[[], object], waits: Sequence[Mark] = ()) -> Mark:
        with self.timeline.lock:
            self.queued += 1
            self._queue.append(_Work(run, waits))
            mark = self.mark
            self.timeline.advance()
            return mark

    @property
    def can_go_on(self) -> bool:
        return bool(self._queue) and all(mark.is_reached for mark in self._queue[0].waits)

    def run_next(self) -> None:
        work = self._queue.popleft()
        self.timeline.is_running = True
        try:
            work.run()
        finally:
            self.timeline.is_running = False
            self.done += 1
        while self.watchers and self.watchers[0][0] <= self.done:
            _, watcher = self.watchers.pop(0)
            self.timeline.reclaim(watcher.run, watcher.waits)

    def run_to(self, number: int) -> None:
        """Carry out all up to a mark, and what other streams must do before."""
        with self.timeline.lock:
            while self.done < number:
                for mark in self._queue[0].waits:
                    mark.stream.run_to(mark.number)
                self.run_next()

    def synchronize(self) -> None:
        self.timeline.on_wait()
        self.run_to(self.queued)

    def query(self) -> bool:
        return self.done >= self.queued

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue(_nothing, (event.mark,))

    def wait_stream(self, stream: Stream) -> None:
        self.queue(_nothing, (stream.mark,))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.timeline.event_type()
        event.record(self)
        return event


class Event:
    timeline: ClassVar[Timeline]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.mark: Mark | None = None
        """The latest that was recorded."""

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or self.timeline.current).mark

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.timeline.current).wait_event(self)

    def synchronize(self) -> None:
        self.timeline.on_wait()
        if self.mark is not None:
            self.mark.stream.run_to(self.mark.number)

    def query(self) -> bool:
        return self.mark is None or self.mark.is_reached


def _nothing() -> None:
    """Work that only waits."""
