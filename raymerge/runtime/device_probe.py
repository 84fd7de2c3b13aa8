"""Measures what decides between processors and a GPU: storage, copies, arithmetic. About a second in all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from raymerge.errors import RaymergeError
from raymerge.execute.threads import one_thread
from raymerge.methods import BLOCK
from raymerge.runtime.device_choice import Probe
from raymerge.storage.buffers import aligned_buffer
from raymerge.storage.local import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.speed import measure_read, measure_write

_COPY_NBYTES = 64 << 20
_STORAGE_NBYTES = 1 << 30
_BUFFER_NBYTES = 16 << 20
_TILE = 1 << 22
_SOURCES = 3
_ROUNDS = 3
_SECONDS = 0.1
_FAST = 1e12
"""Bytes a second where storage cannot be measured: it is not what limits the run then."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Where storage is measured."""

    root: str
    """Directory of a source."""
    key: str
    """A large file of it."""
    nbytes: int
    """Its size."""
    target: str
    """A directory on the file system of the output."""


def measure(device: torch.device, sample: Sample, *, threads: int) -> Probe:
    """Measure on this machine.

    Args:
        device: the GPU.
        sample: where storage is measured.
        threads: of this worker, that would compute on processors.
    """
    to_device, from_device = _copy_speeds(device)
    return Probe(
        read=_read_speed(sample),
        write=_write_speed(sample.target),
        to_device=to_device,
        from_device=from_device,
        cpu=_cpu_speed(threads),
        gpu=_gpu_speed(device),
        name=torch.cuda.get_device_name(device),
    )


def _read_speed(sample: Sample) -> float:
    nbytes = min(sample.nbytes, _STORAGE_NBYTES)
    try:
        with open_store(sample.root) as store:
            return measure_read(store, sample.key, nbytes=nbytes, buffer=aligned_buffer(_BUFFER_NBYTES))
    except RaymergeError:
        # What is wrong with the file is told by the run, with what it was read for.
        return _FAST


def _write_speed(target: str) -> float:
    key = f".raymerge-probe-{uuid.uuid4().hex[:12]}"
    try:
        with LocalStore(Path(target)) as store:
            return measure_write(store, key, nbytes=_STORAGE_NBYTES)
    except (RaymergeError, OSError):
        return _FAST


def _copy_speeds(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the GPU and back, from and to memory that is pinned."""
    host = torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
    to_device = _device_seconds(lambda: there.copy_(host, non_blocking=True))
    from_device = _device_seconds(lambda: host.copy_(there, non_blocking=True))
    return _COPY_NBYTES / to_device, _COPY_NBYTES / from_device


def _gpu_speed(device: torch.device) -> float:
    sources = torch.zeros(_SOURCES, _TILE, dtype=torch.bfloat16, device=device)
    return sources.nbytes / _device_seconds(lambda: _combine(sources))


def _device_seconds(step: Callable[[], object]) -> float:
    """Seconds that a step takes on the GPU; the first, which also prepares it, is not counted."""
    step()
    torch.cuda.synchronize()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    for _ in range(_ROUNDS):
        step()
    ended.record()
    torch.cuda.synchronize()
    return max(float(begun.elapsed_time(ended)) / 1000 / _ROUNDS, 1e-9)


def _cpu_speed(threads: int) -> float:
    """Bytes of sources a second that so many threads combine, each in pieces that stay in its cache."""

    def work(deadline: float) -> int:
        sources, done = torch.zeros(_SOURCES, BLOCK, dtype=torch.bfloat16), 0
        while not done or time.perf_counter() < deadline:
            _combine(sources)
            done += sources.nbytes
        return done

    with one_thread(), ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(work, [begin + _SECONDS] * threads))
        return done / (time.perf_counter() - begin)


def _combine(sources: torch.Tensor) -> torch.Tensor:
    """A linear combination as merges compute it: widened, weighted, added, rounded once."""
    total = sources[0].float().mul_(0.5)
    for source in sources[1:]:
        total.add_(source.float(), alpha=0.25)
    return total.bfloat16()
