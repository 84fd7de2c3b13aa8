"""Copies between stores, and patience with those that fail."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.reflink_mount import reflink_mount

from raymerge.errors import CheckpointError, RoomError, TransientError, UnreadableError
from raymerge.storage.local import copying
from raymerge.storage.local.copying import BLOCK_NBYTES, inner_blocks, mount_of
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import TRANSIENT, RetryPolicy

NBYTES = 40 * BLOCK_NBYTES + 777
DATA = random.Random(5).randbytes(NBYTES)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[LocalStore, LocalStore]]:
    """A source with a file ``a`` and a target with a file ``b`` of zeros."""
    with LocalStore(tmp_path / "source") as source, LocalStore(tmp_path / "target") as target:
        fill(source, target)
        yield source, target


@pytest.fixture(scope="module")
def reflink_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStore, LocalStore]]:
    with (
        reflink_mount(tmp_path_factory.mktemp("xfs")) as place,
        LocalStore(place / "source") as source,
        LocalStore(place / "target") as target,
    ):
        yield source, target


def fill(source: LocalStore, target: LocalStore) -> None:
    for store, key, data in ((source, "a", DATA), (target, "b", bytes(NBYTES))):
        store.create(key, NBYTES)
        store.write_at(key, 0, data)


def copied(stores: tuple[LocalStore, LocalStore], *, source_offset: int, offset: int, nbytes: int) -> int:
    source, target = stores
    return target.copy_range(
        "b", offset, source=source, source_key="a", source_offset=source_offset, nbytes=nbytes
    )


@pytest.fixture
def count_clones(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Lets every attempt to share blocks end with an error number (0: as if done), and counts them."""

    def install(code: int) -> list[int]:
        calls: list[int] = []

        def answer(descriptor: int, request: int, _: bytes) -> int:
            calls.append(request)
            if code:
                raise OSError(code, os.strerror(code))
            return 0

        monkeypatch.setattr(fcntl, "ioctl", answer)
        return calls

    return install


class TestBlocks:
    @given(
        source_offset=st.integers(0, 1 << 45), offset=st.integers(0, 1 << 45), nbytes=st.integers(0, 1 << 40)
    )
    def test_inner_blocks_are_whole_in_both_files(self, source_offset: int, offset: int, nbytes: int) -> None:
        source_offset += (offset - source_offset) % BLOCK_NBYTES * (nbytes % 2)
        lead, inner = inner_blocks(source_offset, offset, nbytes)
        assert lead + inner <= nbytes
        assert inner % BLOCK_NBYTES == 0
        if inner:
            assert (source_offset + lead) % BLOCK_NBYTES == (offset + lead) % BLOCK_NBYTES == 0
            assert lead < BLOCK_NBYTES
            assert nbytes - lead - inner < BLOCK_NBYTES
        elif (source_offset - offset) % BLOCK_NBYTES == 0:
            assert nbytes < 2 * BLOCK_NBYTES


class TestSharing:
    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        source_offset=st.integers(0, NBYTES // 2),
        block=st.integers(0, 20),
        nbytes=st.integers(0, NBYTES // 2),
    )
    def test_any_range_is_copied_whole_or_not_at_all(
        self, reflink_stores: tuple[LocalStore, LocalStore], source_offset: int, block: int, nbytes: int
    ) -> None:
        fill(*reflink_stores)
        offset = block * BLOCK_NBYTES + source_offset % BLOCK_NBYTES
        nbytes = min(nbytes, NBYTES - offset)
        done = copied(reflink_stores, source_offset=source_offset, offset=offset, nbytes=nbytes)
        assert done in (0, nbytes)
        if nbytes >= 2 * BLOCK_NBYTES:
            assert done == nbytes
        new = DATA[source_offset : source_offset + done]
        assert reflink_stores[1].read("b", 0, NBYTES) == bytes(offset) + new + bytes(NBYTES - offset - done)

    def test_takes_no_room_and_keeps_its_bytes(self, reflink_stores: tuple[LocalStore, LocalStore]) -> None:
        source, target = reflink_stores
        data = os.urandom(20 << 20)
        source.create("a", len(data))
        source.write_extent("a", 0, memoryview(data))
        target.create("b", len(data))
        os.sync()
        free = os.statvfs(target.root).f_bfree
        assert copied(reflink_stores, source_offset=0, offset=0, nbytes=len(data)) == len(data)
        target.sync("b")
        os.sync()
        assert os.statvfs(target.root).f_bfree - free > 0.9 * len(data) / BLOCK_NBYTES
        source.write_extent("a", 0, memoryview(bytes(len(data))))
        assert target.read("b", 0, len(data)) == data

    def test_a_source_that_ends_early_is_left_to_an_ordinary_copy(
        self, reflink_stores: tuple[LocalStore, LocalStore]
    ) -> None:
        fill(*reflink_stores)
        reflink_stores[0].create("a", 10 * BLOCK_NBYTES)
        assert copied(reflink_stores, source_offset=0, offset=0, nbytes=20 * BLOCK_NBYTES) == 0


class TestRefusals:
    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.ENOSYS])
    def test_a_pair_of_devices_that_cannot_is_asked_once(
        self, stores: tuple[LocalStore, LocalStore], count_clones: Callable[[int], list[int]], code: int
    ) -> None:
        calls = count_clones(code)
        for _ in range(3):
            assert copied(stores, source_offset=0, offset=0, nbytes=NBYTES) == 0
        assert len(calls) == 1

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSPC, errno.EPERM])
    def test_a_range_that_cannot_says_nothing_of_others(
        self, stores: tuple[LocalStore, LocalStore], count_clones: Callable[[int], list[int]], code: int
    ) -> None:
        calls = count_clones(code)
        for _ in range(3):
            assert copied(stores, source_offset=0, offset=0, nbytes=NBYTES) == 0
        assert len(calls) == 3

    @pytest.mark.usefixtures("stores")
    def test_a_missing_source_is_named(self, stores: tuple[LocalStore, LocalStore]) -> None:
        stores[0].remove("a")
        with pytest.raises(CheckpointError, match="a: cannot be read at byte 0: No such file"):
            copied(stores, source_offset=0, offset=0, nbytes=NBYTES)


class TestServers:
    @pytest.fixture
    def on_server(
        self,
        stores: tuple[LocalStore, LocalStore],
        monkeypatch: pytest.MonkeyPatch,
        count_clones: Callable[[int], list[int]],
    ) -> tuple[LocalStore, LocalStore]:
        """The stores as on a file server that shares no blocks, but copies."""
        count_clones(errno.EOPNOTSUPP)
        monkeypatch.setattr(copying, "mount_of", lambda _: ("nfs4", ("rw", "vers=4.2", "hard")))
        return stores

    @pytest.mark.parametrize("lead", [0, 5])
    @pytest.mark.parametrize("most", [NBYTES, 3 * BLOCK_NBYTES])
    def test_the_server_copies_in_as_many_steps_as_it_takes(
        self, on_server: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch, lead: int, most: int
    ) -> None:
        whole = os.copy_file_range
        monkeypatch.setattr(
            os, "copy_file_range", lambda src, dst, n, at, to: whole(src, dst, min(n, most), at, to)
        )
        for _ in range(2):
            length = NBYTES - lead
            assert copied(on_server, source_offset=lead, offset=lead, nbytes=length) == length
            assert on_server[1].read("b", lead, length) == DATA[lead:]

    @pytest.mark.parametrize("answer", [0, errno.EIO])
    def test_a_server_that_stops_leaves_it_to_an_ordinary_copy(
        self, on_server: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch, answer: int
    ) -> None:
        def stop(*_: object) -> int:
            if answer:
                raise OSError(answer, os.strerror(answer))
            return 0

        monkeypatch.setattr(os, "copy_file_range", stop)
        assert copied(on_server, source_offset=0, offset=0, nbytes=NBYTES) == 0

    @pytest.mark.parametrize(
        "mount",
        [
            ("ext4", ("rw", "vers=4.2")),
            ("nfs", ("rw", "vers=3")),
            ("nfs4", ("rw", "vers=4.0")),
            ("nfs4", ("rw", "vers=4.1", "minorversion=1")),
            ("nfs4", ()),
            ("ceph", ("rw", "acl")),
            ("", ()),
        ],
    )
    def test_elsewhere_the_kernel_is_not_asked_to_copy(
        self,
        stores: tuple[LocalStore, LocalStore],
        monkeypatch: pytest.MonkeyPatch,
        count_clones: Callable[[int], list[int]],
        mount: tuple[str, tuple[str, ...]],
    ) -> None:
        """Of NFS before 4.2, and of Ceph unless mounted for it, it would do so through this machine."""
        count_clones(errno.EOPNOTSUPP)
        monkeypatch.setattr(copying, "mount_of", lambda _: mount)
        monkeypatch.setattr(os, "copy_file_range", None)
        assert copied(stores, source_offset=0, offset=0, nbytes=NBYTES) == 0

    @pytest.mark.parametrize("mount", [("cifs", ("rw", "vers=3.1.1")), ("ceph", ("rw", "copyfrom"))])
    def test_other_servers_are_asked(
        self,
        on_server: tuple[LocalStore, LocalStore],
        monkeypatch: pytest.MonkeyPatch,
        mount: tuple[str, tuple[str, ...]],
    ) -> None:
        monkeypatch.setattr(copying, "mount_of", lambda _: mount)
        assert copied(on_server, source_offset=0, offset=0, nbytes=NBYTES) == NBYTES


class TestMounts:
    MOUNTS = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/root rw,discard\n"
        "36 22 0:33 / /mnt/some\\040place rw shared:5 master:7 - nfs4 server:/x rw,vers=4.2\n"
    )

    @pytest.mark.parametrize(
        ("device", "found"),
        [
            (os.makedev(254, 0), ("ext4", ("rw", "discard"))),
            (os.makedev(0, 33), ("nfs4", ("rw", "vers=4.2"))),
            (os.makedev(9, 9), ("", ())),
        ],
    )
    def test_kind_and_options_are_found_by_device(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: int, found: tuple[str, tuple[str, ...]]
    ) -> None:
        table = tmp_path / "mountinfo"
        table.write_text(self.MOUNTS)
        monkeypatch.setattr(copying, "_MOUNTS", table)
        assert mount_of(device) == found


PATIENT_DATA = bytes(range(200))


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
    (tmp_path / "x").write_bytes(PATIENT_DATA)
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
    assert store.read("x", 10, 50) == PATIENT_DATA[10:60]
    assert watch.seconds == pytest.approx([0.1, 0.2, 0.4])


def test_a_write_that_fails_for_a_moment_is_tried_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 2))
    store.write_at("x", 7, b"new")
    assert store.read("x", 0, 12) == PATIENT_DATA[:7] + b"new" + PATIENT_DATA[10:12]


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
    assert (store.root / "x").read_bytes() == PATIENT_DATA + b"line"


def test_a_file_is_opened_anew_for_each_attempt(store: LocalStore, tmp_path: Path) -> None:
    """A file server that came back does not know the descriptors of before: ESTALE."""
    store.read("x", 0, 1)
    first = os.stat(tmp_path / "x").st_ino
    (tmp_path / "y").write_bytes(PATIENT_DATA[::-1])
    whole = os.preadv

    def stale(descriptor: int, *rest: Any) -> int:
        if os.fstat(descriptor).st_ino == first:
            os.replace(tmp_path / "y", tmp_path / "x")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        assert store.read("x", 0, 4) == PATIENT_DATA[::-1][:4]


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
    (tmp_path / "x").write_bytes(PATIENT_DATA)
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
    assert found.nbytes == len(PATIENT_DATA)


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
