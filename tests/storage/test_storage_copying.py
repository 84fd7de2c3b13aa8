"""Ranges copied by the file system: for real on XFS where it can be mounted, and with systems that refuse."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.reflink_mount import reflink_mount

from raymerge.errors import CheckpointError
from raymerge.storage.local import copying
from raymerge.storage.local.copying import BLOCK_NBYTES, inner_blocks, mount_of
from raymerge.storage.local.store import LocalStore

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
