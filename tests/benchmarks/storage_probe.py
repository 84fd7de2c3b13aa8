"""What storage and cores give to lanes: some threads read while others write, as in a merge."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.cache import warm

from raymerge.merge_plan.memory import LOAD_MOST, lanes_of
from raymerge.runtime.workers.sizing import cores_here
from raymerge.storage.local.buffers import aligned_buffer, buffer_nbytes
from raymerge.storage.local.store import LocalStore

READ_NBYTES = 2 << 20
WRITE_NBYTES = 4 << 20
SYNC_BLOCKS = 2
"""Blocks after which a writer waits until they are durable, as at the end of a segment."""
_WRITERS = 2
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Gives:
    read: float
    write: float
    per_core: float
    cores: int


@dataclass(frozen=True, slots=True)
class _Moved:
    nbytes: int
    seconds: float
    used: float


def measure_machine(file: Path, place: Path) -> Gives:
    nbytes, cores, done = file.stat().st_size, cores_here(), threading.Event()
    # Caches hold the memory of one lane, and hardly that of all that a worker has.
    lanes = -(-lanes_of(cores) // cores)
    with (
        LocalStore(file.parent) as source,
        LocalStore(place) as target,
        ThreadPoolExecutor(cores + _WRITERS) as pool,
    ):
        try:
            target.create(_PROBE, nbytes)
            os.sync()
            warm([file])
            readers = [pool.submit(_read, source, file.name, nbytes, done, lanes) for _ in range(cores)]
            writers = [pool.submit(_write, target, nbytes, number) for number in range(_WRITERS)]
            written = [each.result() for each in writers]
        finally:
            done.set()
            target.remove(_PROBE)
        read = [each.result() for each in readers]
    # Of the bytes of a merge more are read than written.
    moving = (3 * _per_byte(read) + _per_byte(written)) / 4
    return Gives(
        read=sum(each.nbytes / each.seconds for each in read),
        write=nbytes / max(each.seconds for each in written),
        per_core=1 / moving,
        cores=cores,
    )


def _per_byte(moved: list[_Moved]) -> float:
    return sum(each.used for each in moved) / sum(each.nbytes for each in moved)


def _read(source: LocalStore, name: str, nbytes: int, done: threading.Event, lanes: int) -> _Moved:
    room = buffer_nbytes(READ_NBYTES)
    buffer = aligned_buffer(lanes * LOAD_MOST // READ_NBYTES * room)
    places = cycle(range(0, len(buffer), room))
    moved, began, used = 0, time.perf_counter(), time.thread_time()
    while not moved or not done.is_set():
        place = next(places)
        offset, length = _piece(moved, nbytes, READ_NBYTES)
        source.read_extent(name, offset, length, buffer[place : place + room])
        moved += length
    return _Moved(moved, time.perf_counter() - began, time.thread_time() - used)


def _piece(moved: int, nbytes: int, most: int) -> tuple[int, int]:
    offset = moved % nbytes
    return offset, min(most, nbytes - offset)


def _write(target: LocalStore, nbytes: int, number: int) -> _Moved:
    buffer = aligned_buffer(WRITE_NBYTES)
    buffer[:] = os.urandom(WRITE_NBYTES)
    moved, began, used = 0, time.perf_counter(), time.thread_time()
    for count, (offset, length) in enumerate(_blocks(nbytes, number)):
        target.write_extent(_PROBE, offset, buffer[:length])
        moved += length
        if count % SYNC_BLOCKS == SYNC_BLOCKS - 1:
            target.sync(_PROBE)
    target.sync(_PROBE)
    return _Moved(moved, time.perf_counter() - began, time.thread_time() - used)


def _blocks(nbytes: int, number: int) -> Iterator[tuple[int, int]]:
    for offset in range(number * WRITE_NBYTES, nbytes, _WRITERS * WRITE_NBYTES):
        yield offset, min(WRITE_NBYTES, nbytes - offset)
