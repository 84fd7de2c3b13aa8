"""How much memory something takes while it runs."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

from numba.core import runtime
from torch.autograd.profiler import profile


class AllocationMeter:
    """Peaks of what torch's allocator hands out, temporaries inside operators included, and of what numpy,
    compiled loops and Python allocate within the ``with``.

    Both are added up, though they need not be at the same time. What is compiled or imported meanwhile
    counts too: measure what has run before.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        # Not torch.profiler's, which imports torch's compiler with its hundreds of modules.
        self._profile: Any = profile(profile_memory=True, use_kineto=True)
        # Compiled loops get their arrays from the C library as a rule; Python's own allocator is traced.
        native: Any = vars(runtime)["_nrt_python"]
        native.memsys_use_cpython_allocator()

    def __enter__(self) -> AllocationMeter:
        self._profile.__enter__()
        tracemalloc.start()
        self._before, _ = tracemalloc.get_traced_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        _, traced = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self._profile.__exit__(None, None, None)
        events = self._profile.kineto_results.events()
        memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        handed_out = max(itertools.accumulate((e.nbytes() for e in memory), initial=0))
        self.peak_bytes = handed_out + traced - self._before
