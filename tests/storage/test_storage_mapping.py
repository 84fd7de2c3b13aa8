"""Cached pages of files in the place of a buffer's own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymerge.storage.local import mapping
from raymerge.storage.local import store as local_store
from raymerge.storage.local.buffers import ALIGNMENT, address_of, aligned_buffer, buffer_nbytes
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.local.store import LocalStore

NBYTES = 300_007
DATA = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()
PLACES = 3
BUFFER_NBYTES = buffer_nbytes(NBYTES)


class Owner:
    """What a buffer lives as long as."""

    has: tuple[Owner, memoryview]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    """A file in the cache, on a file system that is taken for one that maps fast."""
    monkeypatch.setattr(local_store, "MAP_LEAST", 1)
    monkeypatch.setattr(PageMaps, "_maps_fast", lambda *_: True)
    (tmp_path / "x").write_bytes(DATA)
    with LocalStore(tmp_path) as local:
        yield local


def watched(maps: PageMaps, owner: Owner, nbytes: int = PLACES * BUFFER_NBYTES) -> memoryview:
    buffer = aligned_buffer(nbytes)
    maps.watch(buffer, owner)
    return buffer


@contextmanager
def opened(store: LocalStore) -> Iterator[int]:
    file = os.open(store.location("x"), os.O_RDONLY)
    yield file
    os.close(file)


@st.composite
def reads(draw: st.DrawFn) -> tuple[int, bool, int, int]:
    """Where in the buffer, whether it may be mapped, and which bytes."""
    offset = draw(st.integers(0, NBYTES - 1))
    nbytes = draw(st.integers(1, NBYTES - offset))
    place = draw(st.integers(0, (PLACES * BUFFER_NBYTES - buffer_nbytes(nbytes)) // ALIGNMENT)) * ALIGNMENT
    return place, draw(st.booleans()), offset, nbytes


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(reads(), min_size=2, max_size=8))
def test_whatever_was_in_a_buffer_a_range_is_what_the_file_has(
    store: LocalStore, steps: list[tuple[int, bool, int, int]]
) -> None:
    """And what was mapped or read beside it before stays what it was."""
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    there: list[tuple[int, int, int]] = []
    for place, is_mapped, offset, nbytes in steps:
        region = buffer[place : place + buffer_nbytes(nbytes)]
        if is_mapped:
            begin = store.map_extent("x", offset, nbytes, region, maps)
        else:
            maps.release(region)
            begin = store.read_extent("x", offset, nbytes, region)
        assert begin == offset % ALIGNMENT
        end = place + len(region)
        there = [each for each in there if each[0] >= end or each[0] + buffer_nbytes(each[2]) <= place]
        there.append((place, offset, nbytes))
        for first, start, count in there:
            at = first + start % ALIGNMENT
            assert bytes(buffer[at : at + count]) == DATA[start : start + count]
    assert maps.lost_pages == 0


def test_what_is_mapped_takes_no_memory_and_what_is_written_there_stays_there(store: LocalStore) -> None:
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
    assert pages_of(buffer)["Anonymous"] == ["0", "kB"]
    buffer[:5] = b"other"
    assert bytes(buffer[:6]) == b"other" + DATA[5:6]
    assert store.read("x", 0, NBYTES) == DATA


def pages_of(buffer: memoryview) -> dict[str, list[str]]:
    """What the system says of the mapping that a buffer begins with."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{address_of(buffer):x}-"))
    last = next(n for n in range(first, len(lines)) if lines[n].startswith("VmFlags"))
    pairs = (line.partition(":") for line in lines[first + 1 : last + 1])
    return {name: values.split() for name, _, values in pairs}


def test_what_is_not_cached_or_not_watched_is_better_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    assert store.map_extent("x", 0, NBYTES, aligned_buffer(BUFFER_NBYTES), maps) is None
    monkeypatch.setattr(local_store, "MAP_LEAST", NBYTES + 1)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) is None
    monkeypatch.setattr(local_store, "MAP_LEAST", 1)
    monkeypatch.setattr("raymerge.storage.local.store.Residency.is_cached", lambda *_: False)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) is None
    monkeypatch.undo()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="s390x"))
    monkeypatch.setattr(PageMaps, "_maps_fast", lambda *_: True)
    with opened(store) as file:
        assert not maps.map(file, 0, NBYTES, watched(maps, Owner()))


def test_only_where_the_file_system_maps_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    for kind, is_mapped in (("nfs4", False), ("ext4", True), ("tmpfs", True), ("xfs", True)):
        monkeypatch.setattr(mapping, "mount_of", lambda _, kind=kind: (kind, ()))
        maps, owner = PageMaps(), Owner()
        buffer = watched(maps, owner)
        with LocalStore(tmp_path) as store:
            begin = store.map_extent("x", 0, NBYTES, buffer, maps)
        assert (begin is not None) is is_mapped


def test_pages_that_a_file_loses_become_zeros_and_count(store: LocalStore) -> None:
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
    os.truncate(store.location("x"), ALIGNMENT)
    assert bytes(buffer[: 2 * ALIGNMENT]) == DATA[:ALIGNMENT] + bytes(ALIGNMENT)
    assert np.frombuffer(buffer, np.uint8)[2 * ALIGNMENT : NBYTES].max() == 0
    assert maps.lost_pages == -(-NBYTES // ALIGNMENT) - 1


def test_pages_that_are_gone_before_are_left_to_reading(store: LocalStore) -> None:
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    os.truncate(store.location("x"), ALIGNMENT)
    with opened(store) as file:
        assert not maps.map(file, 0, NBYTES, buffer)
    buffer[:] = b"\1" * len(buffer)
    assert maps.lost_pages == 0


def test_a_file_that_ends_within_its_last_page_is_left_to_reading(store: LocalStore) -> None:
    """No signal would come for the zeros there."""
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner)
    os.truncate(store.location("x"), NBYTES - 1)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) is None
    assert store.map_extent("x", 0, NBYTES - 1, buffer, maps) == 0


def test_memory_of_its_own_is_as_it_was_before(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of huge pages, where the system has them."""
    maps, owner = PageMaps(), Owner()
    buffer = watched(maps, owner, 4 << 20)
    flags = pages_of(buffer)["VmFlags"]
    for _ in range(2):
        assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
        assert maps.mapped_bytes == -(-NBYTES // ALIGNMENT) * ALIGNMENT
        maps.release(buffer)
        assert (pages_of(buffer)["VmFlags"], maps.mapped_bytes) == (flags, 0)
    assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
    monkeypatch.setattr(mapping, "_map_anonymous", lambda *_: False)
    with pytest.raises(MemoryError, match="no memory"):
        maps.release(buffer)


def test_ranges_of_one_buffer_may_be_read_by_threads(store: LocalStore) -> None:
    """As those of servers are, where a file was mapped over all of them before."""
    maps, owner, interval = PageMaps(), Owner(), sys.getswitchinterval()
    buffer = watched(maps, owner)
    ranges = [buffer[first : first + ALIGNMENT] for first in range(0, NBYTES, ALIGNMENT)]
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(maps.release, ranges))
            assert maps.mapped_bytes == 0
    finally:
        sys.setswitchinterval(interval)


def test_buffers_may_go_whenever_the_collector_runs(store: LocalStore) -> None:
    maps, owner = PageMaps(), Owner()
    buffer, thresholds = watched(maps, owner), gc.get_threshold()
    try:
        for later in range(60):
            gc.set_threshold(0)
            for _ in range(20):
                garbage = Owner()
                garbage.has = garbage, watched(maps, garbage, ALIGNMENT)
                assert store.map_extent("x", 0, ALIGNMENT, garbage.has[1], maps) == 0
            del garbage
            gc.set_threshold(gc.get_count()[0] + later)
            assert store.map_extent("x", 0, NBYTES, buffer, maps) == 0
            maps.release(buffer)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert maps.mapped_bytes == 0


FAULTS = """
import faulthandler, gc, mmap, os, sys
from pathlib import Path
from raymerge.storage.local.buffers import aligned_buffer
from raymerge.storage.local.mapping import PageMaps
class Owner: pass
path = Path(sys.argv[1]); path.write_bytes(bytes(1 << 20))
file = os.open(path, os.O_RDWR)
PageMaps._maps_fast = lambda *_: True
def mapped():
    maps, owner, buffer = PageMaps(), Owner(), aligned_buffer(2 << 20)
    maps.watch(buffer, owner)
    assert maps.map(file, 0, 1 << 20, buffer)
    return maps, buffer, owner
all_maps = [mapped(), mapped()]
first, other = all_maps[0][1], mmap.mmap(file, 1 << 20)
exec(sys.argv[2])
os.truncate(path, 0)
for maps, buffer, _ in all_maps:
    assert (buffer[8192], maps.lost_pages) == (0, 1)
print("zeros", flush=True)
print(eval(sys.argv[3])[8192])
"""


@pytest.mark.parametrize(
    ("before", "touched"),
    [
        ("pass", "other"),
        ("del all_maps[0]", "other"),
        ("del all_maps[1]", "other"),
        ("all_maps.clear(); gc.collect()", "first"),
        ("faulthandler.enable(); all_maps.append(mapped())", "other"),
    ],
)
def test_lost_pages_of_others_end_the_process_and_those_of_buffers_never(
    before: str, touched: str, tmp_path: Path
) -> None:
    """Whichever buffer goes first, and whoever asked the system for something else meanwhile."""
    arguments = [sys.executable, "-c", FAULTS, tmp_path / "f", before, touched]
    done = subprocess.run(arguments, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"zeros\n"), done.stderr
    assert (b"Bus error" in done.stderr) is ("faulthandler" in before)
