"""How much memory something takes while it runs."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

from numba.core import runtime
from torch.profiler import ProfilerActivity, profile


class MemoryMeter:
    """Peak of what torch's allocator hands out within the ``with``, temporaries inside operators included."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> MemoryMeter:
        self._profile.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        self.peak_bytes = max(itertools.accumulate((e.nbytes() for e in memory), initial=0))


class AllocationMeter(MemoryMeter):
    """The same, and of what numpy, compiled loops and Python allocate.

    Both peaks are added up, though they need not be at the same time. What is compiled or imported meanwhile
    counts too: measure what has run before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = 0
        # Compiled loops get their arrays from the C library as a rule; Python's own allocator is traced.
        native: Any = vars(runtime)["_nrt_python"]
        native.memsys_use_cpython_allocator()

    def __enter__(self) -> AllocationMeter:
        super().__enter__()
        tracemalloc.start()
        self._before, _ = tracemalloc.get_traced_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        _, traced = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        super().__exit__(*exc)
        self.peak_bytes += traced - self._before
