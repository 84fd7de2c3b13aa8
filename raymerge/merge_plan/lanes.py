"""How many segments a worker has in hand at once."""

from __future__ import annotations

_BESIDE = 2
"""Segments beside those that are computed: one is read, one is written."""


def lanes_of(threads: int) -> int:
    """The lanes of a worker: while some compute, others read and write.

    Args:
        threads: that compute at once.
    """
    return threads + _BESIDE
