"""Imports of processes that belong to raymerge: its command, and its workers.

Where the library is imported into a process of others, it leaves the garbage collector to them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_HEAVY = "torch"


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Keep the garbage collector away while modules are loaded, and from them ever after.

    With torch come hundreds of thousands of objects that all stay. To look through them again and again
    while they are made takes as long as making them.
    """
    if _HEAVY in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
