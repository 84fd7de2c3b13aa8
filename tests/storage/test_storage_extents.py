"""Shared extents of files, copies within a file system, ranges, and reads through Arrow."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.reflink_mount import reflink_mount

from raymerge.errors import CheckpointError, DiskSpaceError
from raymerge.storage.local import store as local_store
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.local.copying import BLOCK_NBYTES
from raymerge.storage.local.store import LocalStore, Residency
from raymerge.storage.store import Extent, Range, coalesce, read_together

NUM_BLOCKS = 5000
"""More than one request takes (16 MiB)."""


@pytest.fixture
def reflink_store(tmp_path: Path) -> Iterator[LocalStore]:
    """A store on an XFS image of its own, mounted from a loop device."""
    with reflink_mount(tmp_path) as place, LocalStore(place) as store:
        yield store


def write_twins(store: LocalStore, *, shift: int) -> bytes:
    """File ``a`` holds data, file ``b`` the same data behind ``shift`` bytes."""
    data = os.urandom(NUM_BLOCKS * BLOCK_NBYTES + 100)
    for key, lead in (("a", b""), ("b", b"x" * shift)):
        store.create(key, len(lead) + len(data))
        store.write_at(key, 0, lead + data)
        store.sync(key)
    return data


def test_equal_extents_share_storage_and_read_the_same(reflink_store: LocalStore) -> None:
    data = write_twins(reflink_store, shift=BLOCK_NBYTES)
    os.sync()
    free = os.statvfs(reflink_store.location("a")).f_bfree
    shared = reflink_store.share("b", BLOCK_NBYTES, with_key="a", with_offset=0, nbytes=len(data))
    assert shared == NUM_BLOCKS * BLOCK_NBYTES
    os.sync()
    assert os.statvfs(reflink_store.location("a")).f_bfree - free > NUM_BLOCKS * 0.9
    assert reflink_store.read("b", BLOCK_NBYTES, len(data)) == data
    reflink_store.write_at("a", 0, b"other")
    assert reflink_store.read("b", BLOCK_NBYTES, len(data)) == data


def test_ranges_that_start_within_blocks_share_the_blocks_inside(reflink_store: LocalStore) -> None:
    data = write_twins(reflink_store, shift=BLOCK_NBYTES)
    shared = reflink_store.share("b", BLOCK_NBYTES + 96, with_key="a", with_offset=96, nbytes=len(data) - 96)
    assert shared == (NUM_BLOCKS - 1) * BLOCK_NBYTES


def test_unequal_bytes_are_never_shared(reflink_store: LocalStore) -> None:
    data = write_twins(reflink_store, shift=BLOCK_NBYTES)
    reflink_store.write_at("b", BLOCK_NBYTES, b"another")
    assert reflink_store.share("b", BLOCK_NBYTES, with_key="a", with_offset=0, nbytes=4 * BLOCK_NBYTES) == 0
    assert reflink_store.read("a", 0, 100) == data[:100]


@pytest.mark.parametrize(("shift", "nbytes"), [(96, 8 * BLOCK_NBYTES), (BLOCK_NBYTES, BLOCK_NBYTES - 1)])
def test_what_does_not_fill_blocks_is_left_alone(tmp_path: Path, shift: int, nbytes: int) -> None:
    with LocalStore(tmp_path) as store:
        write_twins(store, shift=shift)
        assert store.share("b", shift, with_key="a", with_offset=0, nbytes=nbytes) == 0


def test_a_filesystem_that_cannot_share_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("raymerge.storage.local.copying.fcntl.ioctl", refuse)
    with LocalStore(tmp_path) as store:
        data = write_twins(store, shift=BLOCK_NBYTES)
        shared = store.share("b", BLOCK_NBYTES, with_key="a", with_offset=0, nbytes=len(data))
        assert shared == 0
        assert store.read("b", BLOCK_NBYTES, len(data)) == data


NBYTES = 1_200_345
"""The last block is not full."""
DATA = random.Random(1).randbytes(NBYTES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    (tmp_path / "x").write_bytes(DATA)
    with LocalStore(tmp_path) as found:
        forget_pages(found, "x")
        yield found


def forget_pages(store: LocalStore, key: str) -> None:
    descriptor = os.open(store.location(key), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of every direct read; all that are long enough are direct, whatever is cached."""
    seen: list[tuple[int, int]] = []
    real = local_store.read_direct

    def spy(descriptor: int, offset: int, view: memoryview) -> int:
        seen.append((offset, len(view)))
        return real(descriptor, offset, view)

    monkeypatch.setattr(local_store, "read_direct", spy)
    monkeypatch.setattr(local_store, "_DIRECT_READ_MIN", 1)
    monkeypatch.setattr("raymerge.storage.local.store.Residency.is_cached", lambda *_: False)
    return seen


def extent(store: LocalStore, offset: int, nbytes: int, *, key: str = "x", again: bool = False) -> bytes:
    buffer = aligned_buffer(buffer_nbytes(nbytes))
    position = store.read_extent(key, offset, nbytes, buffer, again=again)
    assert position == offset % ALIGNMENT
    return bytes(buffer[position : position + nbytes])


def refuse(code: int) -> Callable[..., int]:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return refused


class TestBytes:
    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(offset=st.integers(0, NBYTES), nbytes=st.integers(0, NBYTES), again=st.booleans())
    @pytest.mark.usefixtures("direct_reads")
    def test_any_extent(self, store: LocalStore, offset: int, nbytes: int, again: bool) -> None:
        nbytes = min(nbytes, NBYTES - offset)
        assert extent(store, offset, nbytes, again=again) == DATA[offset : offset + nbytes]

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, NBYTES])
    @pytest.mark.parametrize("size", ["blocks", "part"])
    def test_up_to_the_end(
        self, store: LocalStore, nbytes: int, size: str, direct_reads: list[tuple[int, int]]
    ) -> None:
        if size == "blocks":
            (store.root / "x").write_bytes(DATA + bytes(-NBYTES % ALIGNMENT))
        whole = (store.root / "x").read_bytes()
        offset = len(whole) - nbytes
        assert extent(store, offset, nbytes) == whole[offset:]
        assert len(direct_reads) == (nbytes > 0)

    @pytest.mark.usefixtures("direct_reads")
    def test_what_was_just_written_through_the_cache(self, store: LocalStore) -> None:
        store.write_at("x", 500_001, b"new" * 1000)
        expected = DATA[:500_001] + b"new" * 1000 + DATA[503_001:]
        assert extent(store, 0, NBYTES) == expected

    def test_after_short_reads(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, direct_reads: list[tuple[int, int]]
    ) -> None:
        whole = os.preadv
        for most in (ALIGNMENT, 100):  # in the middle of a block only a file's end should be, yet all is read
            monkeypatch.setattr(os, "preadv", lambda fd, views, at, n=most: whole(fd, [views[0][:n]], at))
            assert extent(store, 5000, 50_000) == DATA[5000:55_000]
        assert direct_reads == [(4096, 53_248)] * 2

    @settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(offset=st.integers(0, 9000), like=st.integers(0, 9000), nbytes=st.integers(0, 40_000))
    def test_from_the_cache_they_begin_where_they_will_be_written(
        self, store: LocalStore, offset: int, like: int, nbytes: int
    ) -> None:
        store.read("x", 0, NBYTES)
        buffer = aligned_buffer(buffer_nbytes(nbytes))
        position = store.read_extent("x", offset, nbytes, buffer, like=like)
        assert position == like % ALIGNMENT
        assert bytes(buffer[position : position + nbytes]) == DATA[offset : offset + nbytes]

    def test_past_the_cache_they_begin_as_in_their_file(
        self, store: LocalStore, direct_reads: list[tuple[int, int]]
    ) -> None:
        buffer = aligned_buffer(buffer_nbytes(50_000))
        assert store.read_extent("x", 4099, 50_000, buffer, like=7) == 3
        assert bytes(buffer[3:50_003]) == DATA[4099:54_099]
        assert len(direct_reads) == 1

    def test_a_buffer_that_is_not_aligned_is_filled_through_the_cache(
        self, store: LocalStore, direct_reads: list[tuple[int, int]]
    ) -> None:
        buffer = aligned_buffer(buffer_nbytes(50_000) + ALIGNMENT)[64:]
        position = store.read_extent("x", 4099, 50_000, buffer)
        assert bytes(buffer[position : position + 50_000]) == DATA[4099:54_099]
        assert direct_reads == []


class TestChoice:
    @pytest.fixture
    def choices(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Length of every read that went past the cache, which is left as the system has it."""
        (store.root / "x").write_bytes(DATA * 2)
        forget_pages(store, "x")
        with (store.root / "x").open("rb") as file:
            if Residency().is_cached(file.fileno(), 0, NBYTES):
                pytest.skip("the page cache keeps the files of this file system")
        seen: list[int] = []
        real = local_store.read_direct

        def spy(descriptor: int, offset: int, view: memoryview) -> int:
            seen.append(len(view))
            return real(descriptor, offset, view)

        monkeypatch.setattr(local_store, "read_direct", spy)
        return seen

    def test_what_is_not_cached_is_read_past_the_cache_and_stays_out(
        self, store: LocalStore, choices: list[int]
    ) -> None:
        for _ in range(2):
            assert extent(store, 5, NBYTES) == DATA[5:] + DATA[:5]
        assert len(choices) == 2

    def test_what_is_cached_comes_from_there(self, store: LocalStore, choices: list[int]) -> None:
        store.read("x", 0, 2 * NBYTES)
        extent(store, 5, NBYTES)
        assert choices == []

    def test_what_is_read_again_gets_into_the_cache(self, store: LocalStore, choices: list[int]) -> None:
        extent(store, 5, NBYTES, again=True)
        extent(store, 5, NBYTES)
        assert choices == []


class TestWithoutDirectReads:
    def test_refused_when_read(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, direct_reads: list[tuple[int, int]]
    ) -> None:
        monkeypatch.setattr(local_store, "read_direct", refuse(errno.EINVAL))
        assert extent(store, 3, 400_000) == DATA[3:400_003]
        monkeypatch.setattr(local_store, "read_direct", refuse(errno.EIO))
        assert extent(store, 3, 400_000) == DATA[3:400_003]
        assert direct_reads == []


class TestErrors:
    @pytest.mark.parametrize("is_direct", [True, False])
    @pytest.mark.parametrize("offset", [NBYTES - 600_000, NBYTES - 10, NBYTES, NBYTES // 4096 * 4096])
    def test_an_early_end(
        self, store: LocalStore, offset: int, is_direct: bool, request: pytest.FixtureRequest
    ) -> None:
        if is_direct:
            request.getfixturevalue("direct_reads")
        message = rf"x: ends at byte {NBYTES}, but bytes {offset} to {offset + 700_000} were wanted"
        with pytest.raises(CheckpointError, match=message):
            extent(store, offset, 700_000)

    def test_a_buffer_without_room(self, store: LocalStore) -> None:
        with pytest.raises(ValueError, match="too few for 4096 to read"):
            store.read_extent("x", 0, 4096, aligned_buffer(buffer_nbytes(4096))[:-ALIGNMENT])


WRITTEN = 300_123
"""The last block is not full."""
WRITE_HALF = """
import sys
from pathlib import Path
from raymerge.storage.local.store import LocalStore

half, number = int(sys.argv[2]), int(sys.argv[3])
for _ in range(5):
    LocalStore(Path(sys.argv[1])).write_extent("x", number * half, memoryview(bytes([number]) * half))
"""
SLOW_FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def writable(tmp_path: Path) -> Iterator[LocalStore]:
    with LocalStore(tmp_path) as found:
        yield found


@pytest.fixture
def direct_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and length of every direct write; one block is enough for one, two in flight at once."""
    seen: list[tuple[int, int]] = []
    real = local_store.write_direct

    def spy(descriptor: int, offset: int, view: memoryview) -> int:
        seen.append((offset, len(view)))
        return real(descriptor, offset, view)

    monkeypatch.setattr(local_store, "write_direct", spy)
    monkeypatch.setattr(local_store, "_DIRECT_WRITE_MIN", ALIGNMENT)
    monkeypatch.setattr(local_store, "BOUNCE_NBYTES", 8 * ALIGNMENT)
    monkeypatch.setattr(local_store, "BOUNCE_COUNT", 2)
    return seen


def placed(data: bytes, shift: int) -> memoryview:
    """The bytes in memory that begins ``shift`` bytes behind a page."""
    buffer = aligned_buffer(len(data) + shift)[shift : shift + len(data)]
    buffer[:] = data
    return buffer


class TestWrittenBytes:
    @settings(deadline=None, max_examples=30, suppress_health_check=SLOW_FIXTURES)
    @given(
        writes=st.lists(
            st.tuples(
                st.integers(0, WRITTEN),
                st.integers(0, 100_000),
                st.integers(0, 2 * ALIGNMENT),
                st.sampled_from(["like", "any", "readonly", "in place"]),
            ),
            max_size=8,
        ),
        seed=st.integers(0, 1000),
    )
    @pytest.mark.usefixtures("direct_writes")
    def test_any_writes_over_each_other(
        self, tmp_path: Path, writes: list[tuple[int, int, int, str]], seed: int
    ) -> None:
        model = bytearray(WRITTEN)
        with LocalStore(tmp_path) as writable:
            writable.remove("x")
            writable.create("x", WRITTEN)
            for offset, length, shift, kind in writes:
                data = random.Random(seed + offset).randbytes(min(length, WRITTEN - offset))
                model[offset : offset + len(data)] = data
                if kind == "in place":
                    writable.write_at("x", offset, placed(data, shift))
                elif kind == "readonly":
                    writable.write_extent("x", offset, memoryview(data))
                else:
                    writable.write_extent(
                        "x", offset, placed(data, offset % ALIGNMENT if kind == "like" else shift)
                    )
                probe = random.Random(offset).randrange(WRITTEN)
                assert writable.read("x", probe, WRITTEN - probe) == model[probe:]
            writable.sync("x")
        assert (tmp_path / "x").read_bytes() == model

    @settings(deadline=None, max_examples=20, suppress_health_check=SLOW_FIXTURES)
    @given(
        cuts=st.lists(st.integers(0, WRITTEN), max_size=30),
        lead=st.integers(0, 3 * ALIGNMENT),
        seed=st.integers(0, 1000),
        again=st.booleans(),
    )
    @pytest.mark.usefixtures("direct_writes")
    def test_threads_that_share_blocks(
        self, tmp_path: Path, cuts: list[int], lead: int, seed: int, again: bool
    ) -> None:
        """Also over a file that a former run wrote, whose blocks are not fresh."""
        data = random.Random(seed).randbytes(WRITTEN)
        pieces = list(pairwise(sorted({0, WRITTEN, *cuts})))
        random.Random(seed).shuffle(pieces)
        with LocalStore(tmp_path) as writable, ThreadPoolExecutor(4) as pool:
            if not again:
                writable.remove("x")
            writable.create("x", WRITTEN + lead)
            memory = placed(bytes(lead % ALIGNMENT) + data, 0)[lead % ALIGNMENT :]

            def write(piece: tuple[int, int]) -> None:
                begin, end = piece
                where = memory[begin:end] if begin % 2 else placed(data[begin:end], begin % 77)
                writable.write_extent("x", lead + begin, where)

            list(pool.map(write, pieces))
            assert writable.read("x", lead, WRITTEN) == data
        assert (tmp_path / "x").read_bytes()[lead:] == data

    def test_two_processes_write_the_halves_of_one_block(self, writable: LocalStore) -> None:
        half = (3 << 20) + 2000
        writable.create("x", 2 * half)
        arguments = [sys.executable, "-c", WRITE_HALF, str(writable.root), str(half)]
        writers = [subprocess.Popen([*arguments, number]) for number in "01"]
        assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
        assert (writable.root / "x").read_bytes() == b"\0" * half + b"\1" * half

    def test_a_sparse_file(self, writable: LocalStore, direct_writes: list[tuple[int, int]]) -> None:
        (writable.root / "x").touch()
        os.truncate(writable.root / "x", WRITTEN)
        writable.write_extent("x", 50_000, placed(b"x" * 100_000, 0))
        assert writable.read("x", 0, WRITTEN) == bytes(50_000) + b"x" * 100_000 + bytes(WRITTEN - 150_000)
        assert direct_writes


class TestWriteChoice:
    @pytest.mark.parametrize("length", [3 * ALIGNMENT, 5 * ALIGNMENT + 1, 100_000])
    @pytest.mark.parametrize("offset", [0, 4095, 4096, 10_000])
    def test_whole_blocks_go_directly_from_where_they_lie(
        self, writable: LocalStore, offset: int, length: int, direct_writes: list[tuple[int, int]]
    ) -> None:
        writable.create("x", WRITTEN)
        writable.write_extent("x", offset, placed(b"x" * length, offset % ALIGNMENT))
        first, end = -(-offset // ALIGNMENT) * ALIGNMENT, (offset + length) // ALIGNMENT * ALIGNMENT
        assert direct_writes == [(first, end - first)]

    def test_others_go_by_way_of_a_copy(self, tmp_path: Path, direct_writes: list[tuple[int, int]]) -> None:
        with LocalStore(tmp_path) as writable:
            writable.create("x", WRITTEN)
            writable.write_extent("x", 100, placed(b"x" * 100_000, 0))
        assert direct_writes == [(4096, 32_768), (36_864, 32_768), (69_632, 28_672)]


class TestWithoutDirectWrites:
    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, None])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_refused_when_opened(
        self,
        writable: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        code: int | None,
        shift: int,
        direct_writes: list[tuple[int, int]],
    ) -> None:
        """None: a system that does not know direct files. Each way is refused once, and not tried again."""
        whole, asked, direct = os.open, list[int](), os.O_DIRECT

        def opened(path: str, flags: int, *rest: int) -> int:
            if flags & direct and code:
                asked.append(flags)
                raise OSError(code, os.strerror(code))
            return whole(path, flags, *rest)

        monkeypatch.setattr(local_store, "_DIRECT_READ_MIN", 1)
        monkeypatch.setattr("raymerge.storage.local.store.Residency.is_cached", lambda *_: False)
        monkeypatch.setattr(local_store, "read_direct", None)
        if code is None:
            monkeypatch.delattr(os, "O_DIRECT")
        monkeypatch.setattr(os, "open", opened)
        with LocalStore(writable.root) as fresh:
            fresh.create("x", WRITTEN)
            for number in (1, 2):
                fresh.write_extent("x", 0, placed(bytes([number]) * WRITTEN, shift))
                buffer = aligned_buffer(buffer_nbytes(WRITTEN))
                begin = fresh.read_extent("x", 0, WRITTEN, buffer)
                assert buffer[begin : begin + WRITTEN] == bytes([number]) * WRITTEN
        assert len(asked) == (2 if code else 0)
        assert direct_writes == []

    @pytest.mark.parametrize("shift", [0, 8])
    @pytest.mark.parametrize("good", [0, 1, 2])
    def test_refused_when_written(
        self,
        writable: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        shift: int,
        good: int,
        direct_writes: list[tuple[int, int]],
    ) -> None:
        """Also after some pieces went well."""
        whole, turns, data = os.pwrite, iter(range(100)), random.Random(3).randbytes(WRITTEN)

        def written(descriptor: int, view: memoryview, offset: int) -> int:
            if next(turns) == good:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return whole(descriptor, view, offset)

        monkeypatch.setattr(local_store, "_DIRECT_MOST", 8 * ALIGNMENT)
        monkeypatch.setattr(os, "pwrite", written)
        writable.create("x", WRITTEN)
        writable.write_extent("x", 0, placed(data, shift))
        assert writable.read("x", 0, WRITTEN) == data
        tried = len(direct_writes)
        writable.write_extent("x", 0, placed(data[::-1], shift))
        assert len(direct_writes) == tried
        assert writable.read("x", 0, WRITTEN) == data[::-1]

    @pytest.mark.parametrize("most", [ALIGNMENT, 5000, 100])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_goes_on_after_short_writes(
        self,
        writable: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        most: int,
        shift: int,
        direct_writes: list[tuple[int, int]],
    ) -> None:
        whole, data = os.pwrite, random.Random(most).randbytes(100_000)
        writable.create("x", WRITTEN)

        def stingy(descriptor: int, view: memoryview, offset: int) -> int:
            # A file system may take a part of a block although it asks for whole ones; we write it through
            # the ordinary descriptor, since a direct one of this file system would refuse.
            with (writable.root / "x").open("r+b") as file:
                return whole(file.fileno(), view[:most], offset)

        monkeypatch.setattr(os, "pwrite", stingy)
        writable.write_extent("x", 4000, placed(data, 4000 + shift))
        assert writable.read("x", 4000, 100_000) == data
        assert direct_writes


class TestWriteErrors:
    @pytest.mark.usefixtures("direct_writes")
    @pytest.mark.parametrize("shift", [0, 8])
    def test_a_full_disk(self, writable: LocalStore, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
        def refuse(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writable.create("x", WRITTEN)
        monkeypatch.setattr(os, "pwrite", refuse)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
        with pytest.raises(DiskSpaceError, match=r"x: cannot take 100000 more bytes: .* 95904 bytes"):
            writable.write_extent("x", 0, placed(b"x" * 100_000, shift))

    @pytest.mark.usefixtures("direct_writes")
    def test_other_errors_stay_what_they_are_and_change_nothing(
        self, writable: LocalStore, monkeypatch: pytest.MonkeyPatch, direct_writes: list[tuple[int, int]]
    ) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        writable.create("x", WRITTEN)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", broken)
            with pytest.raises(OSError, match="not permitted"):
                writable.write_extent("x", 0, placed(b"x" * 100_000, 0))
        writable.write_extent("x", 0, placed(b"x" * 100_000, 0))
        assert len(direct_writes) == 2


ranges = st.lists(st.builds(Range, st.integers(0, 400), st.integers(0, 60)), max_size=25)
gaps = st.integers(0, 40)
limits = st.integers(1, 200)


def reads(extents: tuple[Extent, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(extent.offset, extent.nbytes, extent.members) for extent in extents]


def test_order_given_does_not_matter_and_members_name_positions() -> None:
    given_order = [Range(20, 5), Range(0, 5), Range(5, 5)]
    assert reads(coalesce(given_order, gap=0, limit=100)) == [(0, 10, (1, 2)), (20, 5, (0,))]


def test_a_range_above_the_limit_stays_whole_and_takes_in_what_it_holds() -> None:
    wanted = [Range(0, 50), Range(10, 5), Range(50, 5)]
    assert reads(coalesce(wanted, gap=0, limit=20)) == [(0, 50, (0, 1)), (50, 5, (2,))]


@settings(deadline=None, max_examples=100)
@given(ranges, gaps, limits)
def test_every_range_lies_whole_in_one_extent_that_is_tight(
    wanted: list[Range], gap: int, limit: int
) -> None:
    extents = coalesce(wanted, gap=gap, limit=limit)
    assert sorted(at for extent in extents for at in extent.members) == list(range(len(wanted)))
    assert [extent.offset for extent in extents] == sorted(extent.offset for extent in extents)
    for extent in extents:
        members = [wanted[at] for at in extent.members]
        assert extent.offset == min(member.offset for member in members)
        assert extent.offset + extent.nbytes == max(member.end for member in members)
        assert extent.nbytes <= max(limit, *(member.nbytes for member in members))


@settings(deadline=None, max_examples=100)
@given(ranges, gaps)
def test_no_hole_above_the_gap_is_read_and_none_below_is_left(wanted: list[Range], gap: int) -> None:
    extents = coalesce(wanted, gap=gap, limit=10**9)
    for extent in extents:
        reached = extent.offset
        for at in extent.members:
            assert wanted[at].offset - reached <= gap
            reached = max(reached, wanted[at].end)
    for before, after in pairwise(extents):
        assert after.offset - (before.offset + before.nbytes) > gap


class InFile(NamedTuple):
    key: str
    offset: int
    nbytes: int


@pytest.mark.parametrize(("limit", "requests"), [(1 << 20, 4), (2 << 20, 2), (8 << 20, 1)])
def test_what_is_read_together_is_cut_by_its_limit(limit: int, requests: int, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(4 << 20)
    (tmp_path / "a").write_bytes(data)
    stored = [InFile("a", start, 1 << 20) for start in range(0, len(data), 1 << 20)]
    with LocalStore(tmp_path) as store:
        sizes = list[int]()

        def read(key: str, offset: int, nbytes: int) -> bytes:
            sizes.append(nbytes)
            return store.read(key, offset, nbytes)

        counted: Any = SimpleNamespace(read=read)
        parts = list(read_together(counted, stored, readers=2, limit=limit))
    assert [bytes(own) for _, own in parts] == [data[each.offset :][: each.nbytes] for each, _ in parts]
    assert (len(sizes), sum(sizes), len(parts)) == (requests, len(data), 4)
