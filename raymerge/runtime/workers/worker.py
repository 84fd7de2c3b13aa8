"""The actor: does parts of its work on its device. Threaded, so that one part reads while another computes.

Progress is the processor time of the threads at work: a thread that returns from a read or write has taken
some, however slow the storage; one that waits in vain has not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raymerge.options import Device
from raymerge.runtime.workers.importing import heavy_imports

if TYPE_CHECKING:
    import torch

    from raymerge.events import PartInHand
    from raymerge.runtime.workers.pool import Runner, Work


class Heartbeat:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, float] = {}
        self._ended = 0.0

    @contextmanager
    def beating(self) -> Iterator[None]:
        own = threading.get_ident()
        with self._lock:
            self._threads[own] = _taken(own)
        try:
            yield
        finally:
            # Under the lock: once it has ended, a thread's clock must not be asked for.
            with self._lock:
                self._ended += _taken(own) - self._threads.pop(own)

    @property
    def seconds(self) -> float:
        """Processor time of all threads together; it grows exactly if one of them made progress."""
        with self._lock:
            return self._ended + sum(_taken(each) - begun for each, begun in self._threads.items())


def _taken(thread: int) -> float:
    """Seconds of processor time of a thread; wall time where the system keeps no such clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class MergeWorker:
    """One worker of the Ray pool. Disposable: all that it keeps is in the staging directory."""

    def __init__(self, name: str, device: Device) -> None:
        # What all work needs. Whoever imports this module, such as the driver, need not load it.
        with heavy_imports():
            import torch

            import raymerge.execute.segment
            import raymerge.kernels.jit
            import raymerge.publish.object_shards  # noqa: F401
            from raymerge.device_numerics import set_full_float32
        torch.set_num_threads(1)
        set_full_float32()
        self._name = name
        self._asked_device = device
        self._runner: Runner | None = None
        self._heartbeat = Heartbeat()

    @cached_property
    def _device(self) -> torch.device:
        # Found out once: a GPU that has no memory for a moment later on is still the device.
        from raymerge.device_numerics import choose_device

        return choose_device(self._asked_device)

    def ready(self) -> dict[str, Any]:
        """Its process, node and device, once it can work."""
        import ray

        from raymerge.device_numerics import kernels_of, numerics_of
        from raymerge.runtime.workers.sizing import oom_kills

        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
            "oom_kills": oom_kills(),
            "numerics": numerics_of(self._device),
            "kernels": kernels_of(self._device),
        }

    def open(self, work: Work) -> dict[str, Any]:
        """Take up the work, in place of an earlier one; answers as ``ready``."""
        if self._runner is not None:
            self._runner.close()
        self._runner = work.open(self._device, self._name)
        return self.ready()

    def run(self, number: int, budget: int | None = None) -> dict[str, Any]:
        """Do one part, with at most so many bytes of memory if given; the receipt as JSON values."""
        assert self._runner is not None
        with self._heartbeat.beating():
            return self._runner.run(number, budget).to_json()

    def heartbeat(self) -> tuple[float, tuple[PartInHand, ...]]:
        """A number that grows as long as any part in hand makes progress, and what is done at the moment."""
        return self._heartbeat.seconds, () if self._runner is None else self._runner.in_hand()
