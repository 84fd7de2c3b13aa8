"""Workers and threads: what a machine, a cluster and the user's options make of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import OptionError
from raymerge.options import RunOptions
from raymerge.runtime.workers import sizing
from raymerge.runtime.workers.sizing import (
    MOST_CPU_WORKERS,
    MOST_THREADS,
    Layout,
    embedded_slots,
    layout_of,
    local_layouts,
    most_lanes,
)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (3, 1, 3), (5, 1, 4), (6, 2, 3), (11, 3, 3), (16, 4, 4), (256, MOST_CPU_WORKERS, 4)],
)
def test_a_worker_has_up_to_four_cores_and_few_are_idle(cores: int, workers: int, threads: int) -> None:
    assert layout_of(RunOptions(), (cores,), 0) == Layout(workers, threads)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (RunOptions(workers=5), Layout(5, 3)),
        (RunOptions(workers=100), Layout(100, 1)),
        (RunOptions(threads=2), Layout(MOST_CPU_WORKERS, 2)),
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
        (RunOptions(workers=3, threads=2), Layout(3, 2)),
        (RunOptions(inline=True), Layout(1, 1)),
    ],
)
def test_a_gpu_has_one_worker_with_one_thread(options: RunOptions, layout: Layout) -> None:
    assert layout_of(options, (64, 64), 8) == layout


def test_each_machine_of_a_cluster_counts_by_itself() -> None:
    # The head has no slots, or too few for a worker; no worker lies on two machines.
    assert layout_of(RunOptions(), (0, 64, 64), 0) == Layout(2 * MOST_CPU_WORKERS, 4)
    assert layout_of(RunOptions(), (2, 6, 6), 0) == Layout(4, 3)
    assert layout_of(RunOptions(), (2, 9, 4), 0) == Layout(3, 4)
    assert layout_of(RunOptions(), (2, 2), 0) == Layout(2, 2)
    assert layout_of(RunOptions(workers=2), (1, 1), 0) == Layout(2, 1)
    assert layout_of(RunOptions(workers=3), (5, 5), 0) == Layout(3, 2)
    assert layout_of(RunOptions(), (), 0) == Layout(1, 1)


@settings(deadline=None, max_examples=100)
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
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: [torch.device("cuda")] * 2)
    assert local_layouts(RunOptions()) == (Layout(2, 1), Layout(4, 4))
    assert local_layouts(RunOptions(device="cuda")) == (Layout(2, 1),)
    assert local_layouts(RunOptions(device="cpu")) == (Layout(4, 4),)
    assert most_lanes(RunOptions()) == 6
    assert most_lanes(RunOptions(device="cuda")) == 3
    assert most_lanes(RunOptions(device="cuda", threads=2)) == 4
    monkeypatch.setattr("raymerge.devices.list_gpus", list)
    assert local_layouts(RunOptions()) == (Layout(4, 4),)


def test_a_cluster_is_not_judged_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "cores_here", lambda: 1)
    assert most_lanes(RunOptions(address="far:6379")) == MOST_THREADS + 2
    assert most_lanes(RunOptions(address="far:6379", device="cpu")) == MOST_THREADS + 2
    assert most_lanes(RunOptions(address="far:6379", threads=2)) == 4
    assert most_lanes(RunOptions()) == 3


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        (RunOptions(), 8),
        (RunOptions(device="cuda"), 8),
        (RunOptions(device="cpu"), 4),
        (RunOptions(threads=2), 16),
        (RunOptions(device="cuda", workers=3), 4),
        (RunOptions(device="cpu", workers=100, threads=5), 500),
    ],
)
def test_an_embedded_cluster_has_slots_for_all_gpus(
    options: RunOptions, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs in a container of four cores."""
    monkeypatch.setattr(sizing, "cores_here", lambda: 4)
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: [torch.device("cuda")] * 8)
    assert embedded_slots(options) == slots
    assert all(layout.cores <= slots for layout in local_layouts(options))


def test_no_threads_and_too_many_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--threads: 0 threads compute nothing\. Give 1 or more\."):
        RunOptions(threads=0)
    with pytest.raises(OptionError, match=r"--threads: 257 threads .* at most 256, and more --workers\."):
        RunOptions(threads=257)
    with pytest.raises(OptionError, match=r"--patience: in 0 seconds nobody gets on\. Give more than 0\."):
        RunOptions(patience=0)
    with pytest.raises(OptionError, match=r"(?s)--workers.*--threads"):
        RunOptions(threads=-1, workers=0)
