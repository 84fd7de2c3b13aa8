"""Measures what decides between processors and a GPU: storage, copies, arithmetic. About a second in all."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from raymerge.device_numerics import check_full_float32
from raymerge.errors import OptionError, RaymergeError
from raymerge.execute.threads import one_thread
from raymerge.methods import Settings, Stored, Tile
from raymerge.methods.linear import LinearKernel
from raymerge.runtime.devices.choice import GpuError, Probe
from raymerge.runtime.devices.devices import first_line
from raymerge.storage.addresses import is_remote
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore

_STORE_WRITE_NBYTES = 4 << 20


def measure_read(
    store: ReadStore,
    key: str,
    nbytes: int,
    buffer: memoryview,
    *,
    threads: int = 2,
    seconds: float = 0.2,
) -> float:
    """Bytes per second that several threads read together from the begin of a file, cached or not as it is.

    Args:
        store: where the file is.
        key: the file; it has at least ``nbytes`` bytes.
        nbytes: the most to read.
        buffer: page-aligned memory to read into; each thread reads as much at once as its share holds.
        threads: how many read at once.
        seconds: no read begins later than this.

    Raises:
        CheckpointError: the file cannot be read, or is shorter.
        ValueError: the buffer has no room for a block for each thread.
    """
    share = buffer.nbytes // threads // ALIGNMENT * ALIGNMENT
    load = share - room_for(0)
    if load < ALIGNMENT:
        raise ValueError(f"{buffer.nbytes} bytes of buffer are too few for {threads} threads to read into")

    def move(thread: int, offset: int, length: int) -> None:
        store.read_extent(key, offset, length, buffer[thread * share : (thread + 1) * share])

    begin = time.perf_counter()
    done = _move_all(move, nbytes, piece=load, threads=threads, seconds=seconds)
    return done / (time.perf_counter() - begin)


def measure_write(
    store: LocalStore, key: str, nbytes: int, *, threads: int = 2, seconds: float = 0.2
) -> float:
    """Bytes per second that several threads write to a new file, until they would survive a power cut.

    No room is reserved for it: some file systems do that by writing it all. Once its first bytes are written
    it has no name any more, so that nothing stays of it however this process ends.

    Args:
        store: where to write; it keeps what it has opened.
        key: a file that is not there; it is made and removed.
        nbytes: the most to write.
        threads: how many write at once.
        seconds: no write begins later than this.

    Raises:
        RoomError: the file system has no room for it.
    """
    # Not zeros, which some storage does not keep; the same for all threads, since nobody changes it.
    data = aligned_buffer(_STORE_WRITE_NBYTES)
    data[:] = os.urandom(ALIGNMENT) * (len(data) // ALIGNMENT)
    first = min(len(data), nbytes)
    try:
        store.create(key, 0)
        begin = time.perf_counter()
        store.write_extent(key, 0, data[:first])
        os.unlink(store.location(key))
        done = first + _move_all(
            lambda _, offset, length: store.write_extent(key, first + offset, data[:length]),
            nbytes - first,
            piece=len(data),
            threads=threads,
            seconds=seconds,
        )
        store.sync(key)
        return done / (time.perf_counter() - begin)
    finally:
        store.remove(key)


def _move_all(
    move: Callable[[int, int, int], None], nbytes: int, *, piece: int, threads: int, seconds: float
) -> int:
    """Move pieces of ``nbytes`` bytes, each given as thread, offset and length; bytes moved in the time."""
    offsets = iter(range(0, nbytes, piece))
    lock = threading.Lock()
    deadline = time.perf_counter() + seconds

    def work(thread: int) -> int:
        done = 0
        while not done or time.perf_counter() < deadline:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                break
            length = min(piece, nbytes - offset)
            move(thread, offset, length)
            done += length
        return done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


_COPY_NBYTES = 64 << 20
_READ_NBYTES = 1 << 30
_WRITE_NBYTES = 256 << 20
_BUFFER_NBYTES = 16 << 20
_CPU_TILE = 1 << 20
_GPU_TILE = 1 << 22
_SOURCES = 3
_KERNEL = LinearKernel()
_SETTINGS = Settings({"normalize": True}, tuple({"weight": weight} for weight in (0.5, 0.25, 0.25)))
_ROUNDS = 3
_SECONDS = 0.1


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

    Raises:
        GpuError: the GPU is broken or busy, or does not compute float32 in full.
    """
    try:
        check_full_float32(device)
        to_device, from_device = _copy_speeds(device)
        gpu, name = _gpu_speed(device), torch.cuda.get_device_name(device)
    except RuntimeError as error:
        # What torch raises for whatever goes wrong on a GPU is one, or a kind of it.
        raise GpuError(first_line(error)) from error
    except OptionError as error:
        raise GpuError(error.problems[0].what.rstrip(".")) from error
    return Probe(
        read=_read_speed(sample),
        write=_write_speed(sample.target),
        to_device=to_device,
        from_device=from_device,
        cpu=_cpu_speed(threads),
        gpu=gpu,
        name=name,
    )


def _read_speed(sample: Sample) -> float | None:
    if is_remote(sample.root):
        # Bytes from afar are paid for, and come no slower or faster for the device.
        return None
    nbytes = min(sample.nbytes, _READ_NBYTES)
    try:
        with open_store(sample.root) as store:
            return measure_read(store, sample.key, nbytes=nbytes, buffer=aligned_buffer(_BUFFER_NBYTES))
    except RaymergeError:
        # What is wrong with the file is told by the run, with what it was read for.
        return None


def _write_speed(target: str) -> float | None:
    key = f".raymerge-probe-{uuid.uuid4().hex[:12]}"
    try:
        with LocalStore(Path(target)) as store:
            return measure_write(store, key, nbytes=_WRITE_NBYTES)
    except (RaymergeError, OSError):
        return None


def _copy_speeds(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the GPU and back, from and to memory that is pinned."""
    host = torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
    to_device = _device_seconds(lambda: there.copy_(host, non_blocking=True))
    from_device = _device_seconds(lambda: host.copy_(there, non_blocking=True))
    return _COPY_NBYTES / to_device, _COPY_NBYTES / from_device


def _gpu_speed(device: torch.device) -> float:
    sources = torch.zeros(_SOURCES, _GPU_TILE, dtype=torch.bfloat16, device=device)
    return sources.nbytes / _device_seconds(lambda: _combined(sources))


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
    """Bytes of sources a second that so many threads combine, each as the lanes of a worker do."""
    tiles = [_stored_tile(_CPU_TILE) for _ in range(threads)]

    def work(tile: Stored, deadline: float) -> int:
        out, done = np.empty(tile.count, np.uint16), 0
        while not done or time.perf_counter() < deadline:
            _combine_stored(tile, out)
            done += tile.words.nbytes
        return done

    # Loops are compiled, or loaded, when they are first called.
    _combine_stored(tiles[0], np.empty(_CPU_TILE, np.uint16))
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(work, tiles, [begin + _SECONDS] * threads))
        return done / (time.perf_counter() - begin)


def _stored_tile(count: int) -> Stored:
    places = np.arange(_SOURCES) * count
    return Stored(np.zeros(_SOURCES * count, np.uint16), places, count, 0)


def _combine_stored(tile: Stored, out: NDArray[np.uint16]) -> None:
    """A linear merge on processors, as lanes compute it: in one call for a tile, as it is stored."""
    _KERNEL.apply_stored(tile, _SETTINGS, None, out)


def _combined(sources: torch.Tensor) -> torch.Tensor:
    """The same on a GPU: widened, combined, rounded; bfloat16 ``[sources, n]`` to ``[n]``."""
    return _KERNEL.apply(Tile(None, sources.float(), 0), _SETTINGS, None).bfloat16()
