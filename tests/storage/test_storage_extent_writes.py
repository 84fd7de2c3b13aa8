"""Writing extents past the page cache: any offset, any memory, many threads, against a plain array."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymerge.errors import RoomError
from raymerge.storage.local import store as local_store
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.local.store import LocalStore

NBYTES = 300_123
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
def store(tmp_path: Path) -> Iterator[LocalStore]:
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


class TestBytes:
    @settings(deadline=None, max_examples=60, suppress_health_check=SLOW_FIXTURES)
    @given(
        writes=st.lists(
            st.tuples(
                st.integers(0, NBYTES),
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
        model = bytearray(NBYTES)
        with LocalStore(tmp_path) as store:
            store.remove("x")
            store.create("x", NBYTES)
            for offset, length, shift, kind in writes:
                data = random.Random(seed + offset).randbytes(min(length, NBYTES - offset))
                model[offset : offset + len(data)] = data
                if kind == "in place":
                    store.write_at("x", offset, placed(data, shift))
                elif kind == "readonly":
                    store.write_extent("x", offset, memoryview(data))
                else:
                    store.write_extent(
                        "x", offset, placed(data, offset % ALIGNMENT if kind == "like" else shift)
                    )
                probe = random.Random(offset).randrange(NBYTES)
                assert store.read("x", probe, NBYTES - probe) == model[probe:]
            store.sync("x")
        assert (tmp_path / "x").read_bytes() == model

    @settings(deadline=None, max_examples=40, suppress_health_check=SLOW_FIXTURES)
    @given(
        cuts=st.lists(st.integers(0, NBYTES), max_size=30),
        lead=st.integers(0, 3 * ALIGNMENT),
        seed=st.integers(0, 1000),
        again=st.booleans(),
    )
    @pytest.mark.usefixtures("direct_writes")
    def test_threads_that_share_blocks(
        self, tmp_path: Path, cuts: list[int], lead: int, seed: int, again: bool
    ) -> None:
        """Also over a file that a former run wrote, whose blocks are not fresh."""
        data = random.Random(seed).randbytes(NBYTES)
        pieces = list(pairwise(sorted({0, NBYTES, *cuts})))
        random.Random(seed).shuffle(pieces)
        with LocalStore(tmp_path) as store, ThreadPoolExecutor(4) as pool:
            if not again:
                store.remove("x")
            store.create("x", NBYTES + lead)
            memory = placed(bytes(lead % ALIGNMENT) + data, 0)[lead % ALIGNMENT :]

            def write(piece: tuple[int, int]) -> None:
                begin, end = piece
                where = memory[begin:end] if begin % 2 else placed(data[begin:end], begin % 77)
                store.write_extent("x", lead + begin, where)

            list(pool.map(write, pieces))
            assert store.read("x", lead, NBYTES) == data
        assert (tmp_path / "x").read_bytes()[lead:] == data

    def test_two_processes_write_the_halves_of_one_block(self, store: LocalStore) -> None:
        half = (3 << 20) + 2000
        store.create("x", 2 * half)
        arguments = [sys.executable, "-c", WRITE_HALF, str(store.root), str(half)]
        writers = [subprocess.Popen([*arguments, number]) for number in "01"]
        assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
        assert (store.root / "x").read_bytes() == b"\0" * half + b"\1" * half

    def test_a_sparse_file(self, store: LocalStore, direct_writes: list[tuple[int, int]]) -> None:
        (store.root / "x").touch()
        os.truncate(store.root / "x", NBYTES)
        store.write_extent("x", 50_000, placed(b"x" * 100_000, 0))
        assert store.read("x", 0, NBYTES) == bytes(50_000) + b"x" * 100_000 + bytes(NBYTES - 150_000)
        assert direct_writes


class TestChoice:
    @pytest.mark.parametrize("length", [3 * ALIGNMENT, 5 * ALIGNMENT + 1, 100_000])
    @pytest.mark.parametrize("offset", [0, 4095, 4096, 10_000])
    def test_whole_blocks_go_directly_from_where_they_lie(
        self, store: LocalStore, offset: int, length: int, direct_writes: list[tuple[int, int]]
    ) -> None:
        store.create("x", NBYTES)
        store.write_extent("x", offset, placed(b"x" * length, offset % ALIGNMENT))
        first, end = -(-offset // ALIGNMENT) * ALIGNMENT, (offset + length) // ALIGNMENT * ALIGNMENT
        assert direct_writes == [(first, end - first)]

    def test_others_go_by_way_of_a_copy(self, tmp_path: Path, direct_writes: list[tuple[int, int]]) -> None:
        with LocalStore(tmp_path) as store:
            store.create("x", NBYTES)
            store.write_extent("x", 100, placed(b"x" * 100_000, 0))
        assert direct_writes == [(4096, 32_768), (36_864, 32_768), (69_632, 28_672)]


class TestWithoutDirectWrites:
    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, None])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_refused_when_opened(
        self,
        store: LocalStore,
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
        with LocalStore(store.root) as fresh:
            fresh.create("x", NBYTES)
            for number in (1, 2):
                fresh.write_extent("x", 0, placed(bytes([number]) * NBYTES, shift))
                buffer = aligned_buffer(room_for(NBYTES))
                begin = fresh.read_extent("x", 0, NBYTES, buffer)
                assert buffer[begin : begin + NBYTES] == bytes([number]) * NBYTES
        assert len(asked) == (2 if code else 0)
        assert direct_writes == []

    @pytest.mark.parametrize("shift", [0, 8])
    @pytest.mark.parametrize("good", [0, 1, 2])
    def test_refused_when_written(
        self,
        store: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        shift: int,
        good: int,
        direct_writes: list[tuple[int, int]],
    ) -> None:
        """Also after some pieces went well."""
        whole, turns, data = os.pwrite, iter(range(100)), random.Random(3).randbytes(NBYTES)

        def written(descriptor: int, view: memoryview, offset: int) -> int:
            if next(turns) == good:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return whole(descriptor, view, offset)

        monkeypatch.setattr(local_store, "_DIRECT_MOST", 8 * ALIGNMENT)
        monkeypatch.setattr(os, "pwrite", written)
        store.create("x", NBYTES)
        store.write_extent("x", 0, placed(data, shift))
        assert store.read("x", 0, NBYTES) == data
        tried = len(direct_writes)
        store.write_extent("x", 0, placed(data[::-1], shift))
        assert len(direct_writes) == tried
        assert store.read("x", 0, NBYTES) == data[::-1]

    @pytest.mark.parametrize("most", [ALIGNMENT, 5000, 100])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_goes_on_after_short_writes(
        self,
        store: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        most: int,
        shift: int,
        direct_writes: list[tuple[int, int]],
    ) -> None:
        whole, data = os.pwrite, random.Random(most).randbytes(100_000)
        store.create("x", NBYTES)

        def stingy(descriptor: int, view: memoryview, offset: int) -> int:
            # A file system may take a part of a block although it asks for whole ones; we write it through
            # the ordinary descriptor, since a direct one of this file system would refuse.
            with (store.root / "x").open("r+b") as file:
                return whole(file.fileno(), view[:most], offset)

        monkeypatch.setattr(os, "pwrite", stingy)
        store.write_extent("x", 4000, placed(data, 4000 + shift))
        assert store.read("x", 4000, 100_000) == data
        assert direct_writes


class TestErrors:
    @pytest.mark.usefixtures("direct_writes")
    @pytest.mark.parametrize("shift", [0, 8])
    def test_a_full_disk(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
        def refuse(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        store.create("x", NBYTES)
        monkeypatch.setattr(os, "pwrite", refuse)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
        with pytest.raises(RoomError, match=r"x: cannot take 100000 more bytes: .* 95904 bytes"):
            store.write_extent("x", 0, placed(b"x" * 100_000, shift))

    @pytest.mark.usefixtures("direct_writes")
    def test_other_errors_stay_what_they_are_and_change_nothing(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, direct_writes: list[tuple[int, int]]
    ) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        store.create("x", NBYTES)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", broken)
            with pytest.raises(OSError, match="not permitted"):
                store.write_extent("x", 0, placed(b"x" * 100_000, 0))
        store.write_extent("x", 0, placed(b"x" * 100_000, 0))
        assert len(direct_writes) == 2
