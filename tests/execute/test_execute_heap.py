"""The process's memory: when the allocator is asked for what is free, and what a worker says it grew by."""

from __future__ import annotations

import ctypes

import pytest

from raymerge.execute.heap import HeapWatch


class _Process:
    """A process whose memory is what the test says, of which releasing frees some."""

    def __init__(self, resident: int, *, free: int) -> None:
        self.resident, self.free, self.released = resident, free, 0

    def measure(self) -> int:
        return self.resident

    def release(self) -> None:
        self.released += 1
        self.resident -= self.free


def _watch(process: _Process, limit: int = 100) -> HeapWatch:
    return HeapWatch(limit, measure=process.measure, release=process.release)


def test_free_memory_is_given_back_above_the_limit_only() -> None:
    process = _Process(1000, free=80)
    watch = _watch(process)
    process.resident = 1100
    watch.check()
    assert process.released == 0
    process.resident = 1101
    watch.check()
    assert (process.released, process.resident) == (1, 1021)


def test_what_does_not_go_away_is_not_asked_for_again() -> None:
    process = _Process(1000, free=0)
    watch = _watch(process)
    process.resident = 5000
    for _ in range(3):
        watch.check()
    assert process.released == 1
    process.resident = 5051
    watch.check()
    assert process.released == 2


def test_without_glibc_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    measured = iter([0, 500, 500])
    HeapWatch(100, measure=lambda: next(measured)).check()


def test_the_system_is_asked_by_default() -> None:
    HeapWatch(-1).check()


def test_the_peak_is_the_most_that_was_found_beyond_the_idle_process() -> None:
    process = _Process(1000, free=80)
    watch = _watch(process)
    for resident in (1040, 1250, 1010):
        process.resident = resident
        watch.check()
    assert watch.peak_bytes == 250
