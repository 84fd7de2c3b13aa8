"""Probes of a store's speed: bounded, honest about what they moved, and gone afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymerge.errors import CheckpointError, OptionError
from raymerge.runtime.devices.probe import measure_read, measure_write
from raymerge.storage.local.buffers import aligned_buffer
from raymerge.storage.local.store import LocalStore

NBYTES = 6 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    (tmp_path / "x").write_bytes(os.urandom(NBYTES))
    with LocalStore(tmp_path) as found:
        yield found


class SlowStore(LocalStore):
    """Takes a hundredth of a second for each request, and notes it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.moved: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def _note(self, offset: int, nbytes: int) -> None:
        time.sleep(0.01)
        self.moved.append((offset, nbytes))
        self.threads.add(threading.get_ident())

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        self._note(offset, nbytes)
        return super().read_extent(key, offset, nbytes, buffer, again=again, like=like)

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._note(offset, len(buffer))
        super().write_extent(key, offset, buffer)


def covered(moved: list[tuple[int, int]]) -> int:
    """Bytes from the begin on that the requests hold once, together."""
    end = 0
    for offset, nbytes in sorted(moved):
        assert offset == end
        end += nbytes
    return end


class TestReading:
    @pytest.mark.parametrize("nbytes", [NBYTES, NBYTES - 12_345, 5])
    def test_reads_every_byte_once_in_several_threads(self, store: LocalStore, nbytes: int) -> None:
        slow = SlowStore(store.root)
        speed = measure_read(slow, "x", nbytes, aligned_buffer(2 << 20), threads=3, seconds=60)
        assert covered(slow.moved) == nbytes
        assert len(slow.threads) <= 3
        assert 0 < speed < nbytes / 0.01

    def test_stops_in_time(self, store: LocalStore) -> None:
        slow = SlowStore(store.root)
        speed = measure_read(slow, "x", NBYTES, aligned_buffer(1 << 17), seconds=0.05)
        assert 0 < covered(slow.moved) < NBYTES
        assert speed > 0

    def test_reads_at_least_once_however_short_the_time(self, store: LocalStore) -> None:
        assert measure_read(store, "x", NBYTES, aligned_buffer(1 << 17), seconds=0) > 0

    def test_a_shorter_file_is_named(self, store: LocalStore) -> None:
        with pytest.raises(CheckpointError, match="x: ends at byte"):
            measure_read(store, "x", NBYTES + 1, aligned_buffer(16 << 20), seconds=60)

    def test_a_buffer_without_room_for_a_block_each(self, store: LocalStore) -> None:
        with pytest.raises(ValueError, match="too few for 2 threads"):
            measure_read(store, "x", NBYTES, aligned_buffer(5 * 4096))


class TestWriting:
    def test_writes_every_byte_once_and_removes_them(self, store: LocalStore) -> None:
        slow = SlowStore(store.root)
        speed = measure_write(slow, "probe/scratch", 10_000_000, seconds=60)
        assert covered(slow.moved) == 10_000_000
        assert 0 < speed < 10_000_000 / 0.01
        assert [info.key for info in store.files()] == ["x"]

    def test_stops_in_time(self, store: LocalStore) -> None:
        slow = SlowStore(store.root)
        measure_write(slow, "scratch", 1 << 30, seconds=0.02)
        assert 0 < covered(slow.moved) < 1 << 30

    def test_is_durable_before_it_says_how_fast(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        monkeypatch.setattr(store, "sync", synced.append)
        measure_write(store, "scratch", 5000)
        assert synced == ["scratch"]

    def test_has_no_name_once_it_is_begun(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that is killed here leaves nothing on the disk."""
        names: list[list[str]] = []
        whole = store.write_extent

        def write(key: str, offset: int, buffer: memoryview) -> None:
            names.append(os.listdir(store.root))
            whole(key, offset, buffer)

        monkeypatch.setattr(store, "write_extent", write)
        assert measure_write(store, "scratch", 10_000_000, threads=1, seconds=60) > 0
        assert [sorted(each) for each in names] == [["scratch", "x"], ["x"], ["x"]]

    def test_reserves_nothing(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the file system cannot, the C library writes a byte to each block: a gigabyte's time."""
        monkeypatch.setattr(os, "posix_fallocate", None)
        assert measure_write(store, "scratch", 1 << 40, seconds=0.01) > 0

    def test_a_failure_leaves_nothing(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OptionError(())

        monkeypatch.setattr(store, "write_extent", full)
        with pytest.raises(OptionError):
            measure_write(store, "scratch", 5000)
        assert [info.key for info in store.files()] == ["x"]
