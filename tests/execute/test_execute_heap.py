"""The process's memory: when the allocator is asked for what is free, and what a worker says it grew by."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raymerge.execute.segment import HeapWatch, Resident


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


def test_the_peak_is_the_most_that_was_found_beyond_the_idle_process() -> None:
    process = _Process(1000, free=80)
    watch = HeapWatch(1000, measure=process.measure, resident=lambda: Resident(1500, 1500, 200))
    for resident in (1040, 1250, 1010):
        process.resident = resident
        watch.check()
    assert watch.peak_bytes == 250


@pytest.mark.parametrize(("before", "peak"), [(1500, 700), (2199, 700), (2200, 40), (9000, 40)])
def test_the_system_knows_of_peaks_between_two_looks(before: int, peak: int) -> None:
    """But not where the process had been as large before."""
    process, most = _Process(1000, free=0), [before]
    watch = HeapWatch(1000, measure=process.measure, resident=lambda: Resident(1500, most[0], 200))
    process.resident = 1040
    watch.check()
    most[0] = max(before, 2200)
    assert watch.peak_bytes == peak


def test_what_was_freed_again_before_anybody_looked_is_in_the_peak() -> None:
    """In a process of its own, which was never larger before."""
    code = (
        "from raymerge.execute.segment import HeapWatch\n"
        "watch = HeapWatch(1 << 40)\n"
        "memory = b'x' * (150 << 20)\n"
        "del memory\n"
        "watch.check()\n"
        "assert 140 << 20 < watch.peak_bytes < 170 << 20, watch.peak_bytes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
