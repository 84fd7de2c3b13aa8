"""Reading extents past the page cache: the same bytes and errors as through it, from any offset."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymerge.errors import CheckpointError, UnreadableError
from raymerge.storage.local import store as local_store
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.local.store import LocalStore, Residency

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
    buffer = aligned_buffer(room_for(nbytes))
    position = store.read_extent(key, offset, nbytes, buffer, again=again)
    assert position == offset % ALIGNMENT
    return bytes(buffer[position : position + nbytes])


def refuse(code: int) -> Callable[..., int]:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return refused


class TestBytes:
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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

    @pytest.mark.parametrize("cached", [(0, 0), (0, NBYTES // 3), (NBYTES // 2, NBYTES), (0, NBYTES)])
    def test_whatever_part_is_cached(self, store: LocalStore, cached: tuple[int, int]) -> None:
        begin, end = cached
        store.read("x", begin, end - begin)
        assert extent(store, 777, NBYTES - 1000) == DATA[777:-223]

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

    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(offset=st.integers(0, 9000), like=st.integers(0, 9000), nbytes=st.integers(0, 40_000))
    def test_from_the_cache_they_begin_where_they_will_be_written(
        self, store: LocalStore, offset: int, like: int, nbytes: int
    ) -> None:
        store.read("x", 0, NBYTES)
        buffer = aligned_buffer(room_for(nbytes))
        position = store.read_extent("x", offset, nbytes, buffer, like=like)
        assert position == like % ALIGNMENT
        assert bytes(buffer[position : position + nbytes]) == DATA[offset : offset + nbytes]

    def test_past_the_cache_they_begin_as_in_their_file(
        self, store: LocalStore, direct_reads: list[tuple[int, int]]
    ) -> None:
        buffer = aligned_buffer(room_for(50_000))
        assert store.read_extent("x", 4099, 50_000, buffer, like=7) == 3
        assert bytes(buffer[3:50_003]) == DATA[4099:54_099]
        assert len(direct_reads) == 1

    def test_a_buffer_that_is_not_aligned_is_filled_through_the_cache(
        self, store: LocalStore, direct_reads: list[tuple[int, int]]
    ) -> None:
        buffer = aligned_buffer(room_for(50_000) + ALIGNMENT)[64:]
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

    @pytest.mark.usefixtures("direct_reads")
    def test_a_file_that_may_not_be_read(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "preadv", refuse(errno.EACCES))
        with pytest.raises(UnreadableError, match="x: cannot be read at byte 4: Permission denied"):
            extent(store, 4, 500_000)

    def test_a_buffer_without_room(self, store: LocalStore) -> None:
        with pytest.raises(ValueError, match="too few for 4096 to read"):
            store.read_extent("x", 0, 4096, aligned_buffer(room_for(4096))[:-ALIGNMENT])
