"""Reads what an audit compares, and counts it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raymerge.storage.store import ReadStore
from raymerge.verifier.numbers import Bytes


class Reader:
    """Reads bytes of stores, and counts them."""

    def __init__(self, stores: Sequence[ReadStore]) -> None:
        self._stores = stores
        self.nbytes = 0
        """Bytes read so far."""

    def read(self, store: int, key: str, offset: int, nbytes: int) -> Bytes:
        """Bytes of a file of a store.

        Raises:
            CheckpointError: it cannot be read, or ends before.
        """
        self.nbytes += nbytes
        return np.frombuffer(self._stores[store].read(key, offset, nbytes), np.uint8)
