"""The number of threads that torch and its libraries compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, whatever the worker has.

    Libraries of linear algebra cut their sums by the number of threads, and so round in other places. The
    setting is the process's: where several threads compute, each of them has set it to 1 before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
