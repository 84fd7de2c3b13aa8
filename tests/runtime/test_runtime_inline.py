"""The pool in this process: threads that take parts by themselves, and a driver that sees to receipts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from raymerge.errors import IncompleteError
from raymerge.execute.receipts import Receipt
from raymerge.runtime.inline import InlinePool
from raymerge.runtime.pool import Runner, Stop

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
    """A part that fails."""

    def open(self, device: torch.device, name: str) -> Runner:
        return self

    def run(self, number: int) -> Receipt:
        self.begun.append(number)
        if number == self.bad:
            raise IncompleteError("it failed.")
        return _receipt(number)

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
