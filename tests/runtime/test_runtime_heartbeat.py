"""Whether threads get on, as their processor time tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from raymerge.runtime.workers.worker import Heartbeat


def _during(heartbeat: Heartbeat, work: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    begun = threading.Event()

    def run() -> None:
        with heartbeat.beating():
            begun.set()
            work()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    return thread, begun


def test_a_thread_that_waits_for_ever_has_no_pulse() -> None:
    heartbeat, never = Heartbeat(), threading.Event()
    thread, _ = _during(heartbeat, never.wait)
    deadline = time.monotonic() + 30
    while (before := heartbeat.seconds) != (time.sleep(0.05), heartbeat.seconds)[1]:
        assert time.monotonic() < deadline
    assert heartbeat.seconds == before
    never.set()
    thread.join()
    # What it took stays when it ends.
    assert heartbeat.seconds > before


def test_a_thread_that_waits_again_and_again_has_a_pulse() -> None:
    """As one does that reads from slow storage: each time that it comes back takes some processor time."""
    heartbeat, end = Heartbeat(), threading.Event()

    def read_slowly() -> None:
        while not end.is_set():
            time.sleep(0.01)

    thread, _ = _during(heartbeat, read_slowly)
    seen = heartbeat.seconds
    for _ in range(3):
        deadline = time.monotonic() + 30
        while heartbeat.seconds == seen:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        seen = heartbeat.seconds
    end.set()
    thread.join()


def test_where_the_system_has_no_such_clock_whoever_answers_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    heartbeat, never = Heartbeat(), threading.Event()
    thread, _ = _during(heartbeat, never.wait)
    before = heartbeat.seconds
    time.sleep(0.01)
    assert heartbeat.seconds > before
    never.set()
    thread.join()
