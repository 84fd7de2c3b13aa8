"""How fast a store gives and takes bytes, found out by moving some."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import ReadStore

_WRITE_NBYTES = 4 << 20


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
    data = aligned_buffer(_WRITE_NBYTES)
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
