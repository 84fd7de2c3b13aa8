"""Storage that fails for a moment: tried again a bounded number of times, ever longer apart."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raymerge.errors import RoomError, TransientError, UnreadableError
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import TRANSIENT, RetryPolicy

DATA = bytes(range(200))


class Watch:
    """Notes how long is waited, and waits not at all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def patience(watch: Watch) -> RetryPolicy:
    return RetryPolicy(sleep=watch, chance=lambda: 1.0)


@pytest.fixture
def store(tmp_path: Path, patience: RetryPolicy) -> LocalStore:
    (tmp_path / "x").write_bytes(DATA)
    return LocalStore(tmp_path, patience=patience)


def failing(function: Callable[..., Any], times: int, number: int = errno.EIO) -> Callable[..., Any]:
    """The function, which fails so many times before it does its work."""
    left = times

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("number", sorted(TRANSIENT), ids=lambda number: errno.errorcode[number])
def test_a_read_that_fails_for_a_moment_is_tried_again(
    number: int, store: LocalStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 3, number))
    assert store.read("x", 10, 50) == DATA[10:60]
    assert watch.seconds == pytest.approx([0.1, 0.2, 0.4])


def test_a_write_that_fails_for_a_moment_is_tried_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 2))
    store.write_at("x", 7, b"new")
    assert store.read("x", 0, 12) == DATA[:7] + b"new" + DATA[10:12]


def test_what_is_appended_is_there_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the attempt that failed had written a part."""
    whole, calls = os.pwrite, 0

    def partly(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "")
        return whole(descriptor, data[:2] if calls == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", partly)
    store.append("x", b"line")
    assert (store.root / "x").read_bytes() == DATA + b"line"


def test_a_file_is_opened_anew_for_each_attempt(store: LocalStore, tmp_path: Path) -> None:
    """A file server that came back does not know the descriptors of before: ESTALE."""
    store.read("x", 0, 1)
    first = os.stat(tmp_path / "x").st_ino
    (tmp_path / "y").write_bytes(DATA[::-1])
    whole = os.preadv

    def stale(descriptor: int, *rest: Any) -> int:
        if os.fstat(descriptor).st_ino == first:
            os.replace(tmp_path / "y", tmp_path / "x")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        assert store.read("x", 0, 4) == DATA[::-1][:4]


def test_after_the_last_attempt_file_byte_and_cause_are_named(
    store: LocalStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1000))
    said = r"x: reading at byte 4 failed 8 times, .* Input/output error \(EIO\)\. .* same command goes on"
    with pytest.raises(TransientError, match=said) as caught:
        store.read("x", 4, 2)
    assert caught.value.exit_code == 3
    assert watch.seconds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4])


def test_waits_differ_by_chance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watch = Watch()
    (tmp_path / "x").write_bytes(DATA)
    store = LocalStore(tmp_path, patience=RetryPolicy(sleep=watch, chance=lambda: 0.0))
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 2))
    store.read("x", 0, 1)
    assert watch.seconds == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EROFS, errno.EISDIR])
def test_what_lasts_is_not_tried_again(
    number: int, store: LocalStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1, number))
    with pytest.raises(UnreadableError, match="x: cannot be read at byte 0"):
        store.read("x", 0, 1)
    assert watch.seconds == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lack_of_room_is_not_tried_again(
    number: int, store: LocalStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 1, number))
    with pytest.raises(RoomError):
        store.write_at("x", 0, b"1")
    assert watch.seconds == []


def test_bytes_that_were_not_made_durable_count_as_lost(
    store: LocalStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets them and says that all is well when it is asked again."""
    store.create("y", 5)
    monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, 1))
    with pytest.raises(TransientError, match=r"x: not made durable: Input/output error \(EIO\)"):
        store.sync("x")
    with pytest.raises(TransientError, match="x: bytes of it were lost"):
        store.sync("x")
    store.sync("y")
    assert watch.seconds == []


def test_a_file_that_cannot_be_looked_at_for_a_moment_is_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "stat", failing(os.stat, 2))
    found = store.info("x")
    assert found is not None
    assert found.nbytes == len(DATA)


def test_what_was_tried_again_is_told_once(
    store: LocalStore, patience: RetryPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 2, errno.ETIMEDOUT))
    store.read("x", 0, 1)
    assert patience.take_faults() == {"x: Connection timed out (ETIMEDOUT)": 2}
    assert patience.take_faults() == {}


@pytest.mark.usefixtures("store")
def test_a_wait_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = RetryPolicy()
    patience.end()
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1000))
    with pytest.raises(TransientError, match="failed once"):
        LocalStore(tmp_path, patience=patience).read("x", 0, 1)
