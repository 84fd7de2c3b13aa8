"""The local store: whole files, ranges, what is appended, buffers, and what stays in memory."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raymerge.errors import CheckpointError, DiskSpaceError
from raymerge.storage.local.buffers import ALIGNMENT, BufferPool, address_of, aligned_buffer, round_up
from raymerge.storage.local.store import LocalStore, OpenFiles

OUTSIDE = ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "x\0y"]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def put(store: LocalStore, key: str, data: bytes) -> Path:
    path = store.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class TestFiles:
    def test_lists_every_level_sorted_by_key_with_sizes_but_no_hidden_directories(
        self, store: LocalStore
    ) -> None:
        sizes = {"b.txt": 3, "a/c.txt": 0, "a.txt": 5, "a/b/c.txt": 7, ".gitattributes": 1}
        for key, size in {**sizes, ".git/config": 1, ".cache/huggingface/x": 1, "a/.ipynb/x": 1}.items():
            put(store, key, b"x" * size)
        assert [(info.key, info.nbytes) for info in store.files()] == sorted(sizes.items())

    def test_a_link_to_a_file_counts_as_the_file(self, store: LocalStore, tmp_path: Path) -> None:
        blob = tmp_path / "blobs" / "abc"
        blob.parent.mkdir()
        blob.write_bytes(b"12345")
        os.utime(blob, ns=(1, 987_654_321))
        put(store, "other", b"")
        (store.root / "model.safetensors").symlink_to(blob)
        info = store.files()[0]
        assert (info.key, info.nbytes, info.version) == ("model.safetensors", 5, "987654321")

    def test_enters_no_linked_directory_and_leaves_out_what_is_no_file(
        self, store: LocalStore, tmp_path: Path
    ) -> None:
        put(store, "a/x", b"")
        for link, target in (("a/again", "."), ("b", "a"), ("nowhere", "gone"), ("itself", "itself")):
            (store.root / link).symlink_to(store.root / target)
        os.mkfifo(store.root / "pipe")
        assert [info.key for info in store.files()] == ["a/x"]
        (tmp_path / "link").symlink_to(store.root)
        assert LocalStore(tmp_path / "link").files() == store.files()

    def test_a_root_that_is_none_is_named(self, store: LocalStore) -> None:
        with pytest.raises(CheckpointError, match=r"root: there is no such directory\. Check the path"):
            store.files()
        put(store, "x", b"")
        with pytest.raises(CheckpointError, match="root/x: cannot be listed: Not a directory"):
            LocalStore(store.root / "x").files()


class TestKeys:
    @pytest.mark.parametrize("key", OUTSIDE)
    def test_none_leaves_the_root(self, store: LocalStore, key: str) -> None:
        for action in (
            lambda: store.location(key),
            lambda: store.read(key, 0, 0),
            lambda: store.create(key, 1),
            lambda: store.write_at(key, 0, b"x"),
            lambda: store.write_extent(key, 0, memoryview(b"x")),
            lambda: store.read_extent(key, 0, 0, memoryview(bytearray(8192))),
            lambda: store.rename("a", key),
            lambda: store.rename(key, "a"),
            lambda: store.remove(key),
            lambda: store.sync(key),
            lambda: store.sync_directory(key),
            lambda: store.write_atomic(key, b"x"),
        ):
            with pytest.raises(ValueError, match="is not a key"):
                action()


class TestReading:
    def test_goes_on_after_short_reads(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        data = bytes(range(100))
        put(store, "x", data)
        whole = os.preadv

        def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return whole(descriptor, [buffers[0][:7]], offset)

        monkeypatch.setattr(os, "preadv", stingy)
        assert store.read("x", 3, 90) == data[3:93]
        assert store.read("x", 100, 0) == b""

    @pytest.mark.parametrize(("offset", "ends"), [(0, 10), (5, 10), (10, 10), (50, 10)])
    def test_an_early_end_names_file_and_bytes(self, store: LocalStore, offset: int, ends: int) -> None:
        put(store, "x", b"0123456789")
        message = rf"root/x: ends at byte {ends}, but bytes {offset} to {offset + 11} were wanted"
        with pytest.raises(CheckpointError, match=message):
            store.read("x", offset, 11)

    def test_a_missing_file_is_named(self, store: LocalStore) -> None:
        with pytest.raises(CheckpointError, match=r"root/x: cannot be read at byte 3: No such file"):
            store.read("x", 3, 1)

    def test_many_threads_read_more_files_than_stay_open(self, store: LocalStore) -> None:
        count = 150
        for number in range(count):
            put(store, f"{number}", number.to_bytes(4, "little") * 64)

        def check(turn: int) -> bool:
            number = turn * 37 % count
            return store.read(f"{number}", 8, 4) == number.to_bytes(4, "little")

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(1500)))
        assert 0 < open_below(store.root) <= 64
        store.close()
        assert open_below(store.root) == 0

    def test_pickles_as_its_root_alone(self, store: LocalStore) -> None:
        put(store, "x", b"1")
        store.read("x", 0, 1)
        copy = pickle.loads(pickle.dumps(store))
        assert copy.root == store.root
        assert copy.read("x", 0, 1) == b"1"
        assert len(pickle.dumps(store)) < 300 + len(str(store.root))


class TestWriting:
    @pytest.mark.parametrize("nbytes", [0, 3, 8, 20])
    def test_creating_again_keeps_the_bytes_and_gives_the_size(self, store: LocalStore, nbytes: int) -> None:
        store.create("x", 8)
        store.write_at("x", 0, b"12345678")
        store.create("x", nbytes)
        assert (store.root / "x").read_bytes() == b"12345678"[:nbytes].ljust(nbytes, b"\0")

    def test_memory_of_any_element_type_is_written_and_read(self, store: LocalStore) -> None:
        numbers = np.arange(6, dtype=np.int64).reshape(2, 3)
        store.create("x", 52)
        store.write_at("x", 4, numbers.data)
        store.write_at("x", 4, np.zeros((0, 3)).data)
        found = np.zeros((3, 2), dtype=np.int64)
        store.read_into("x", 4, found.data)
        assert np.array_equal(found.ravel(), numbers.ravel())

    def test_goes_on_after_short_writes(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.create("x", 100)
        whole = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:7], offset))
        store.write_at("x", 10, bytes(range(90)))
        assert store.read("x", 10, 90) == bytes(range(90))


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        monkeypatch.setattr(os, "pwrite", refuse)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))

    @pytest.mark.usefixtures("full")
    def test_creating_says_how_many_bytes_are_missing(self, store: LocalStore) -> None:
        with pytest.raises(DiskSpaceError) as caught:
            store.create("x", 1_040_960)
        message = str(caught.value)
        assert message.startswith(str(store.root / "x"))
        assert "1000000 bytes (1.00 MB) are missing" in message
        assert "40960 free" in message
        assert caught.value.exit_code == 3

    def test_growing_counts_only_what_is_new(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.create("x", 600)

        def refuse(*_: object) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DiskSpaceError, match="cannot take 400 more bytes"):
            store.create("x", 1000)
        assert (store.root / "x").stat().st_size == 600

    @pytest.mark.usefixtures("full")
    def test_an_atomic_write_cleans_up(self, store: LocalStore) -> None:
        with pytest.raises(DiskSpaceError):
            store.write_atomic("x", b"0123456789")
        assert store.files() == ()

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
    def test_without_reservation_the_size_is_still_right(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def unsupported(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        store.create("x", 5000)
        assert (store.root / "x").stat().st_size == 5000

    def test_without_the_calls_of_linux(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.delattr(os, "fdatasync")
        store.create("x", 5000)
        store.sync("x")
        assert (store.root / "x").stat().st_size == 5000

    @pytest.mark.parametrize("can", [True, False])
    def test_on_macos_the_disk_s_own_memory_is_emptied_too(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, can: bool
    ) -> None:
        """And where a file system there cannot do that, it is asked for as much as it can."""
        asked: list[object] = []

        def full_sync(descriptor: int, request: int) -> int:
            asked.append((os.fstat(descriptor).st_size, request))
            if not can:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            return 0

        store.create("x", 5000)
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", full_sync)
        monkeypatch.delattr(os, "fdatasync")
        monkeypatch.setattr(os, "fsync", lambda _: asked.append("fsync"))
        store.sync("x")
        assert asked == ([(5000, 51)] if can else [(5000, 51), "fsync"])


class TestNames:
    def test_rename_replaces_and_is_seen_by_readers(self, store: LocalStore) -> None:
        put(store, "new", b"old")
        assert store.read("new", 0, 3) == b"old"
        store.create("part", 3)
        store.write_at("part", 0, b"yes")
        store.rename("part", "new")
        assert store.read("new", 0, 3) == b"yes"
        with pytest.raises(CheckpointError):
            store.read("part", 0, 1)

    def test_remove_is_final_and_may_be_repeated(self, store: LocalStore) -> None:
        put(store, "x", b"1")
        store.read("x", 0, 1)
        store.remove("x")
        store.remove("x")
        with pytest.raises(CheckpointError, match="No such file"):
            store.read("x", 0, 1)


class TestWriteAtomic:
    @pytest.mark.parametrize("key", ["x", "a/b/x"])
    @pytest.mark.parametrize("data", [b"", b"12345"])
    def test_writes_and_replaces(self, store: LocalStore, key: str, data: bytes) -> None:
        for content in (b"the one before", data):
            store.write_atomic(key, content)
        assert (store.root / key).read_bytes() == data
        assert [info.key for info in store.files()] == [key]

    def test_gives_the_usual_rights(self, store: LocalStore) -> None:
        put(store, "plain", b"")
        store.write_atomic("x", b"")
        assert (store.root / "x").stat().st_mode == (store.root / "plain").stat().st_mode

    def test_a_reader_sees_the_old_or_the_new(self, store: LocalStore) -> None:
        contents = [bytes([number]) * 5000 for number in range(40)]
        store.write_atomic("x", contents[0])
        done = threading.Event()
        seen: set[bytes] = set()

        def watch() -> None:
            while not done.is_set():
                seen.add((store.root / "x").read_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for content in contents:
            store.write_atomic("x", content)
        done.set()
        watcher.join()
        assert seen <= set(contents)

    def test_a_failure_keeps_the_old(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.write_atomic("x", b"old")

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "replace", broken)
        with pytest.raises(OSError, match="Input/output error"):
            store.write_atomic("x", b"new")
        assert [info.key for info in store.files()] == ["x"]
        assert store.read("x", 0, 3) == b"old"


def open_below(root: Path) -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith(str(root))
        except OSError:
            continue
    return count


def test_what_is_added_comes_last_and_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
    (tmp_path / "ledger").write_bytes(b"one\n")
    with LocalStore(tmp_path) as store:
        for number, line in enumerate((b"two\n", b"", b"three\n")):
            store.append("ledger", line)
            assert len(synced) == number + 1
    assert (tmp_path / "ledger").read_bytes() == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_a_full_file_system_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it says so only when what was written is to be durable."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "ledger"
    path.write_bytes(b"one\n")
    with LocalStore(tmp_path) as store:
        monkeypatch.setattr(os, name, full)
        with pytest.raises(DiskSpaceError, match=rf"{path}.*cannot take .* free") as caught:
            store.append("ledger", b"two\n")
    assert "Free space there" in str(caught.value)


MIB = 1 << 20


class TestAlignedBuffer:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB])
    def test_begins_on_a_page_and_has_whole_blocks_of_zeros(self, nbytes: int) -> None:
        buffer = aligned_buffer(nbytes)
        assert address_of(buffer) % ALIGNMENT == 0
        assert len(buffer) == max(ALIGNMENT, round_up(nbytes))
        assert buffer.format == "B"
        assert not any(buffer)

    def test_large_ones_begin_on_a_huge_page(self) -> None:
        assert address_of(aligned_buffer(2 * MIB)) % (2 * MIB) == 0


class TestBufferPool:
    def test_never_gives_one_to_two_nor_more_than_there_are(self) -> None:
        pool = BufferPool(3, ALIGNMENT)
        lock, held, most = threading.Lock(), set[int](), [0]

        def use(_: int) -> None:
            with pool.borrow() as buffer:
                with lock:
                    assert address_of(buffer) not in held
                    held.add(address_of(buffer))
                    most.append(len(held))
                time.sleep(0.001)
                with lock:
                    held.remove(address_of(buffer))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(60)))
        assert max(most) == 3

    def test_gets_it_back_from_one_who_fails(self) -> None:
        pool = BufferPool(1, ALIGNMENT)
        for _ in range(3):
            with pytest.raises(RuntimeError), pool.borrow():
                raise RuntimeError


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / f"{number}" for number in range(5)]
    for number, path in enumerate(found):
        path.write_bytes(bytes([number]))
    return [*map(str, found)]


@pytest.fixture
def files() -> Iterator[OpenFiles]:
    with closing(OpenFiles(2)) as found:
        yield found


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_same_file_is_opened_once(files: OpenFiles, paths: list[str]) -> None:
    with files.borrow(paths[0], writable=False) as first, files.borrow(paths[0], writable=False) as again:
        assert first == again
    with files.borrow(paths[0], writable=False) as later:
        assert later == first


def test_direct_descriptors_are_apart_and_forgotten_with_the_others(paths: list[str]) -> None:
    files = OpenFiles(8)
    kinds = [(writable, direct) for writable in (False, True) for direct in (False, True)]
    opened = []
    for writable, direct in kinds:
        try:
            with files.borrow(paths[0], writable=writable, direct=direct) as descriptor:
                assert bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) == direct
                opened.append(descriptor)
        except OSError:
            pytest.skip("this file system has no direct I/O")
    assert len(set(opened)) == 4
    files.forget(paths[0])
    assert not any(map(is_open, opened))


def test_files_in_use_are_kept_beyond_the_limit(paths: list[str]) -> None:
    files = OpenFiles(1)
    with ExitStack() as stack:
        borrowed = [stack.enter_context(files.borrow(path, writable=False)) for path in paths]
        assert [os.pread(descriptor, 1, 0)[0] for descriptor in borrowed] == [0, 1, 2, 3, 4]
    with files.borrow(paths[0], writable=False):
        assert sum(map(is_open, borrowed)) == 1
    files.close()


@pytest.mark.parametrize("drop", [lambda files, path: files.forget(path), lambda files, _: files.close()])
def test_a_dropped_file_lives_until_its_last_user_ends(
    files: OpenFiles, paths: list[str], drop: Callable[[OpenFiles, str], None]
) -> None:
    with files.borrow(paths[3], writable=False) as descriptor:
        drop(files, paths[3])
        assert os.pread(descriptor, 1, 0) == b"\x03"
    assert not is_open(descriptor)


class SlowServer:
    """Opening a file waits there until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
        self.began, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)
        self.opened: list[int] = []
        whole = os.open

        def opening(path: str, flags: int) -> int:
            descriptor = whole(path, flags)
            if path == slow:
                self.opened.append(descriptor)
                self.began.release()
                assert self.goes_on.acquire(timeout=10)
            return descriptor

        monkeypatch.setattr(os, "open", opening)


def read_first(files: OpenFiles, path: str) -> int:
    with files.borrow(path, writable=False) as descriptor:
        return os.pread(descriptor, 1, 0)[0]


@pytest.mark.parametrize("drop", [lambda files, path: files.forget(path), lambda files, _: files.close()])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_kept(
    files: OpenFiles,
    paths: list[str],
    monkeypatch: pytest.MonkeyPatch,
    drop: Callable[[OpenFiles, str], None],
) -> None:
    """Who opened it may have the old one or the new; whoever comes later has the new."""
    server = SlowServer(monkeypatch, paths[0])
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(read_first, files, paths[0])
        assert server.began.acquire(timeout=10)
        os.replace(paths[1], paths[0])
        drop(files, paths[0])
        server.goes_on.release(2)
        assert early.result() == 0
    assert not is_open(server.opened[0])
    assert read_first(files, paths[0]) == 1
