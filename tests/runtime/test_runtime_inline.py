"""The pool in this process: threads that take parts by themselves, and a driver that sees to receipts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from raymerge.errors import IncompleteError
from raymerge.events import Event, MemoryShort, PartInHand, WorkerProgress
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile
from raymerge.publish.shards import SegmentsRunner
from raymerge.runtime.workers.pool import InlinePool, Runner, Stop
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import RetryPolicy

SLOTS = 2
MOST = SLOTS
"""Parts that may be in hand or done, and not seen to."""


def _receipt(number: int) -> Receipt:
    return Receipt(number, 0, 0, 0.0, "inline", {})


@dataclass
class _Parts:
    """Work whose parts are noted; it is its own runner."""

    part = "part"
    slots: int = SLOTS
    begun: list[int] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    bad: int = -1
    large: int = 0
    """Bytes of memory that part 1 needs; usually it has 800."""
    files: tuple[SourceFile, ...] = ()
    place: Path = Path("place")

    def open(self, device: torch.device, name: str) -> Runner:
        return self

    def run(self, number: int, budget: int | None = None) -> Receipt:
        self.begun.append(number)
        if number == self.bad:
            raise IncompleteError("it failed.")
        if number == 1 and (budget or 800) > self.large > 0:
            raise MemoryError("no room")
        return _receipt(number)

    def reads(self) -> tuple[frozenset[int], ...]:
        return ()

    def lessened(self, number: int, budget: int | None) -> int | None:
        had = budget or 800
        return had // 2 if had > 100 else None

    def in_hand(self) -> tuple[PartInHand, ...]:
        return (PartInHand(0, "reading", "a.weight", 1, 2),)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        """Nothing is held."""


def _until(reached: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_parts_go_on_while_the_driver_sees_to_receipts_but_not_for_ever() -> None:
    work = _Parts()
    made = InlinePool("cpu").run(work, range(100), Stop())
    first = next(made)
    # What was yielded is not seen to before the next is asked for.
    _until(lambda: len(work.begun) == MOST)
    time.sleep(0.05)
    assert len(work.begun) == MOST
    second = next(made)
    assert len(first) + len(second) >= MOST
    rest = [receipt for batch in made for receipt in batch]
    assert sorted(each.segment for each in (*first, *second, *rest)) == list(range(100))


def test_a_stop_begins_nothing_more_and_loses_nothing() -> None:
    work, stop = _Parts(), Stop()
    made = InlinePool("cpu").run(work, range(100), stop)
    found = list(next(made))
    _until(lambda: len(work.begun) == MOST)
    stop.request()
    found += [receipt for batch in made for receipt in batch]
    assert sorted(each.segment for each in found) == sorted(work.begun) == list(range(MOST))
    assert work.aborted.is_set()


def test_what_was_made_before_a_failure_is_told_first() -> None:
    work = _Parts(bad=1, slots=1)
    made = InlinePool("cpu").run(work, range(100), Stop())
    _until(lambda: next(made) == (_receipt(0),))
    with pytest.raises(IncompleteError, match="it failed"):
        list(made)
    assert work.begun == [0, 1]


def test_a_run_that_is_given_up_begins_nothing_more() -> None:
    work = _Parts()
    made = InlinePool("cpu").run(work, range(100), Stop())
    next(made)
    _until(lambda: len(work.begun) == MOST)
    made.close()
    assert work.aborted.is_set()
    assert len(work.begun) == MOST


def test_what_is_in_hand_is_told_while_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.runtime.workers.pool.TICK_SECONDS", 0.01)
    told, is_told = list[Event](), threading.Event()

    class Slow(_Parts):
        def run(self, number: int, budget: int | None = None) -> Receipt:
            assert is_told.wait(30)
            return super().run(number, budget)

    def take(event: Event) -> None:
        told.append(event)
        is_told.set()

    assert sum(len(batch) for batch in InlinePool("cpu", on_event=take).run(Slow(), range(3), Stop())) == 3
    assert told[0] == WorkerProgress("inline", (PartInHand(0, "reading", "a.weight", 1, 2),))


def test_a_part_that_runs_out_of_memory_is_made_in_the_end_with_less() -> None:
    work, events = _Parts(large=200), list[Event]()
    made = InlinePool("cpu", on_event=events.append).run(work, range(6), Stop())
    assert sorted(each.segment for batch in made for each in batch) == list(range(6))
    assert work.begun[-2:] == [1, 1]
    assert events == [MemoryShort("inline", 1, 400, "no room"), MemoryShort("inline", 1, 200, "no room")]


def test_a_part_that_no_memory_suffices_for_is_named_after_the_others_are_made() -> None:
    work = _Parts(large=1)
    made = InlinePool("cpu").run(work, range(6), Stop())
    found: list[Receipt] = []
    with pytest.raises(IncompleteError, match=r"part 1 ran out of memory, alone .* of 100 B .*\(no room\)"):
        found.extend(each for batch in made for each in batch)
    assert sorted(each.segment for each in found) == [0, 2, 3, 4, 5]


class _Segments:
    def __init__(self) -> None:
        self.threads: set[int] = set()

    def run(self, number: int) -> Any:
        self.threads.add(threading.get_ident())
        return number


def test_every_thread_is_told_to_compute_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decompositions round by is a setting of each thread, which new threads do not inherit."""
    told: dict[int, int] = {}
    monkeypatch.setattr(torch, "set_num_threads", lambda count: told.update({threading.get_ident(): count}))
    segments = _Segments()
    made_by: Any = lambda _: segments  # noqa: E731
    projection: Any = None
    runner = SegmentsRunner(made_by, projection, (), [LocalStore(tmp_path)], RetryPolicy())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(runner.run, range(8)))
    assert segments.threads
    assert all(told[thread] == 1 for thread in segments.threads)
    runner.close()
