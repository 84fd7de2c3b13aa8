"""Work whose parts take no time, and workers that load neither torch nor pyarrow: so that a small machine has
room for many of them, and what is measured is the driver. Nothing heavy is imported here."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOTS = 4
"""Segments that a worker has in hand: three lanes of one thread, and one that waits for a lane."""
OPS = 8
"""Digests in a receipt: in a merge of DeepSeek-V3 a segment of 512 MiB has 8 to 30 ops."""


@dataclass(frozen=True, slots=True)
class EmptyWork:
    """Parts that take ``seconds`` each; on the worker of the name ``straggler`` twenty times as long."""

    seconds: float
    straggler: str
    slots: int = SLOTS
    part: str = "segment"
    files: tuple[Any, ...] = ()
    place: Path | None = None

    def reads(self) -> tuple[frozenset[int], ...]:
        return ()

    def lessened(self, number: int, budget: int | None) -> int | None:
        return None


class EmptyWorker:
    """Answers as ``raymerge.runtime.workers.worker.MergeWorker`` does."""

    def __init__(self, name: str, device: str) -> None:
        del device
        self._name = name
        self._seconds = 0.0
        self._done = 0
        self._lock = threading.Lock()

    def ready(self) -> dict[str, Any]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {
            "pid": os.getpid(),
            "node": node,
            "oom_kills": None,
            "numerics": {"device": "cpu"},
            "kernels": {},
        }

    def open(self, work: EmptyWork) -> dict[str, Any]:
        self._seconds = work.seconds * (20 if self._name == work.straggler else 1)
        return self.ready()

    def run(self, number: int, budget: int | None = None) -> dict[str, Any]:
        del budget
        time.sleep(self._seconds)
        with self._lock:
            self._done += 1
        first = number * OPS
        return {
            "segment": number,
            "read_bytes": 345 << 20,
            "written_bytes": 172 << 20,
            "seconds": self._seconds,
            "worker": self._name,
            "digests": {
                str(op): f"{op * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128):032x}"
                for op in range(first, first + OPS)
            },
            "peak_rss": 200 << 20,
            "peak_device": 0,
            "note": "",
            "encoding_errors": {str(op): (1.25e-3, 7.5e2) for op in range(first, first + OPS, 2)},
            "retries": {},
            "report": {},
        }

    def heartbeat(self) -> tuple[float, tuple[Any, ...]]:
        from raymerge.events import PartInHand

        return float(self._done), (PartInHand(0, "computing", "model.layers.0", 1, 2),) * 3
