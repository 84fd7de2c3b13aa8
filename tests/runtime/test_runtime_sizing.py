"""Workers and threads: what a machine, a cluster and the user's options make of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import OptionError
from raymerge.runtime import sizing
from raymerge.runtime.options import RunOptions
from raymerge.runtime.sizing import (
    MOST_CPU_WORKERS,
    MOST_THREADS,
    Layout,
    cores_here,
    layout_of,
    local_layouts,
    most_lanes,
)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (3, 1, 3),
        (4, 1, 4),
        (6, 1, 4),
        (8, 2, 4),
        (16, 4, 4),
        (256, MOST_CPU_WORKERS, 4),
    ],
)
def test_a_worker_has_up_to_four_cores(cores: int, workers: int, threads: int) -> None:
    assert layout_of(RunOptions(), (cores,), 0) == Layout(workers, threads)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (RunOptions(workers=2), Layout(2, 4)),
        (RunOptions(workers=5), Layout(5, 3)),
        (RunOptions(workers=16), Layout(16, 1)),
        (RunOptions(workers=100), Layout(100, 1)),
        (RunOptions(threads=2), Layout(MOST_CPU_WORKERS, 2)),
        (RunOptions(threads=16), Layout(1, 16)),
        (RunOptions(threads=32), Layout(1, 32)),
        (RunOptions(workers=3, threads=7), Layout(3, 7)),
        (RunOptions(inline=True), Layout(1, 4)),
        (RunOptions(inline=True, threads=9), Layout(1, 9)),
    ],
)
def test_what_the_user_says_on_16_cores(options: RunOptions, layout: Layout) -> None:
    assert layout_of(options, (16,), 0) == layout


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (RunOptions(), Layout(8, 1)),
        (RunOptions(threads=2), Layout(8, 2)),
        (RunOptions(workers=3), Layout(3, 1)),
        (RunOptions(inline=True), Layout(1, 1)),
    ],
)
def test_a_gpu_has_one_worker_with_one_thread(options: RunOptions, layout: Layout) -> None:
    assert layout_of(options, (64, 64), 8) == layout


def test_each_machine_of_a_cluster_counts_by_itself() -> None:
    # The head has no slots, or too few for a worker; no worker lies on two machines.
    assert layout_of(RunOptions(), (0, 64, 64), 0) == Layout(2 * MOST_CPU_WORKERS, 4)
    assert layout_of(RunOptions(), (2, 6, 6), 0) == Layout(2, 4)
    assert layout_of(RunOptions(), (2, 2), 0) == Layout(2, 2)
    assert layout_of(RunOptions(workers=2), (1, 1), 0) == Layout(2, 1)
    assert layout_of(RunOptions(workers=3), (5, 5), 0) == Layout(3, 2)
    assert layout_of(RunOptions(), (), 0) == Layout(1, 1)


@settings(deadline=None, max_examples=200)
@given(
    machines=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    workers=st.none() | st.integers(1, 40),
    inline=st.booleans(),
)
def test_no_more_cores_are_promised_than_there_are(
    machines: list[int], workers: int | None, inline: bool
) -> None:
    options = RunOptions(workers=None if inline else workers, inline=inline)
    found = layout_of(options, machines, 0)
    assert 1 <= found.threads <= MOST_THREADS
    assert found.workers == (1 if inline else workers or found.workers)
    room = sum(cores // found.threads for cores in machines)
    assert found.workers <= room or found.threads == 1
    assert found.cores == found.workers * found.threads


def test_memory_is_shared_out_for_either_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "cores_here", lambda: 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_layouts(RunOptions()) == (Layout(2, 1), Layout(4, 4))
    assert local_layouts(RunOptions(device="cuda")) == (Layout(2, 1),)
    assert local_layouts(RunOptions(device="cpu")) == (Layout(4, 4),)
    assert most_lanes(RunOptions()) == 5
    assert most_lanes(RunOptions(device="cuda")) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert local_layouts(RunOptions()) == (Layout(4, 4),)


def test_a_cluster_is_not_judged_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "cores_here", lambda: 1)
    assert most_lanes(RunOptions(address="far:6379")) == MOST_THREADS + 1
    assert most_lanes(RunOptions(address="far:6379", threads=2)) == 3
    assert most_lanes(RunOptions()) == 2


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
        ("odd\n", 8),
    ],
)
def test_a_quota_counts(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores_here(tmp_path) == 8
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    assert cores_here(tmp_path) == cores


def test_this_machine_has_cores() -> None:
    assert 1 <= cores_here() <= (os.cpu_count() or 1)


def test_no_threads_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--threads: 0 threads compute nothing\. Give 1 or more\."):
        RunOptions(threads=0)
    with pytest.raises(OptionError, match=r"(?s)--workers.*--threads"):
        RunOptions(threads=-1, workers=0)
