"""A worker's end of a merge: every thread that makes segments computes alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from raymerge.publish.segment_work import SegmentsRunner
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import RetryPolicy


class _Segments:
    """Notes which threads make segments."""

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
    runner = SegmentsRunner(made_by, projection, (), LocalStore(tmp_path), RetryPolicy())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(runner.run, range(8)))
    assert segments.threads
    assert all(told[thread] == 1 for thread in segments.threads)
    runner.close()
