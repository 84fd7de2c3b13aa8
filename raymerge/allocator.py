"""Gives memory that is free back to the system."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Have the C library return what it holds on to, where it can do that (glibc).

    What large tensors leave is often too small for the next, and without a word the process grows by several
    of them though only one lives.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
