"""Descriptors shared by threads: never closed under a user, never kept beyond the limit."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from raymerge.storage.local.store import OpenFiles


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / f"{number}" for number in range(5)]
    for number, path in enumerate(found):
        path.write_bytes(bytes([number]))
    return [str(path) for path in found]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_same_file_is_opened_once(paths: list[str]) -> None:
    files = OpenFiles(2)
    with files.borrow(paths[0], writable=False) as first, files.borrow(paths[0], writable=False) as again:
        assert first == again
    with files.borrow(paths[0], writable=False) as later:
        assert later == first
    files.close()


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


def test_the_longest_unused_goes_first(paths: list[str]) -> None:
    files = OpenFiles(2)
    descriptors = {}
    for number in (0, 1, 0):
        with files.borrow(paths[number], writable=False) as descriptors[number]:
            pass
    with files.borrow(paths[2], writable=False):
        assert is_open(descriptors[0])
        kept = os.fstat(descriptors[0]).st_ino
        assert kept == Path(paths[0]).stat().st_ino
    files.close()
    assert not is_open(descriptors[0])


def test_files_in_use_are_kept_beyond_the_limit(paths: list[str]) -> None:
    files = OpenFiles(1)
    with ExitStack() as stack:
        borrowed = [stack.enter_context(files.borrow(path, writable=False)) for path in paths]
        assert [os.pread(descriptor, 1, 0)[0] for descriptor in borrowed] == [0, 1, 2, 3, 4]
    with files.borrow(paths[0], writable=False):
        assert sum(map(is_open, borrowed)) == 1
    files.close()


@pytest.mark.parametrize("action", ["forget", "close"])
def test_a_dropped_file_lives_until_its_last_user_ends(paths: list[str], action: str) -> None:
    files = OpenFiles(2)
    with files.borrow(paths[3], writable=False) as descriptor:
        if action == "forget":
            files.forget(paths[3])
        else:
            files.close()
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


def test_nobody_waits_for_a_file_that_another_opens(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, server = OpenFiles(4), SlowServer(monkeypatch, paths[0])
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(read_first, files, paths[0])
        assert server.began.acquire(timeout=10)
        assert [read_first(files, path) for path in paths[1:]] == [1, 2, 3, 4]
        assert not slow.done()
        server.goes_on.release()
        assert slow.result() == 0
    files.close()


def test_of_two_that_open_one_file_the_first_is_kept(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, server = OpenFiles(4), SlowServer(monkeypatch, paths[0])
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(read_first, files, paths[0]) for _ in range(2)]
        for _ in both:
            assert server.began.acquire(timeout=10)
        server.goes_on.release(2)
        assert [each.result() for each in both] == [0, 0]
    assert sorted(map(is_open, server.opened)) == [False, True]
    with files.borrow(paths[0], writable=False) as kept:
        assert kept in server.opened
    files.close()
    assert not any(map(is_open, server.opened))


@pytest.mark.parametrize("action", ["forget", "close"])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_kept(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Who opened it may have the old one or the new; whoever comes later has the new."""
    files, server = OpenFiles(4), SlowServer(monkeypatch, paths[0])
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(read_first, files, paths[0])
        assert server.began.acquire(timeout=10)
        os.replace(paths[1], paths[0])
        if action == "forget":
            files.forget(paths[0])
        else:
            files.close()
        server.goes_on.release(2)
        assert early.result() == 0
    assert not is_open(server.opened[0])
    assert read_first(files, paths[0]) == 1
    files.close()


def test_a_file_that_cannot_be_opened_leaves_nothing_behind(paths: list[str], tmp_path: Path) -> None:
    files = OpenFiles(2)
    missing = str(tmp_path / "missing")
    for _ in range(3):
        with pytest.raises(FileNotFoundError), files.borrow(missing, writable=False):
            pass
    Path(missing).write_bytes(b"!")
    with files.borrow(missing, writable=False) as descriptor:
        assert os.pread(descriptor, 1, 0) == b"!"
    files.close()
