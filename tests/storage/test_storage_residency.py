"""Whether the page cache has an extent: asked of real files, whose pages are dropped for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymerge.storage.local.store import Residency

NBYTES = 8 << 20


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file of which nothing is cached; skips where the cache cannot be emptied (tmpfs)."""
    path = tmp_path / "x"
    path.write_bytes(os.urandom(NBYTES))
    found = os.open(path, os.O_RDONLY)
    try:
        drop(found)
        if Residency().is_cached(found, 0, NBYTES):
            pytest.skip("the page cache keeps the files of this file system")
        yield found
    finally:
        os.close(found)


def drop(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES), (12_345, 1 << 20), (NBYTES - 1, 1), (5000, 70)])
def test_what_was_read_is_cached(descriptor: int, offset: int, nbytes: int) -> None:
    residency = Residency()
    assert not residency.is_cached(descriptor, offset, nbytes)
    os.pread(descriptor, nbytes, offset)
    assert residency.is_cached(descriptor, offset, nbytes)


def test_the_greater_part_decides(descriptor: int) -> None:
    os.pread(descriptor, NBYTES, 0)
    drop(descriptor, NBYTES // 4, 0)
    assert not Residency().is_cached(descriptor, 0, NBYTES)
    assert Residency().is_cached(descriptor, 0, NBYTES // 4)
    os.pread(descriptor, NBYTES, 0)
    drop(descriptor, NBYTES * 3 // 4, 0)
    assert Residency().is_cached(descriptor, 0, NBYTES)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, NBYTES + 1), (NBYTES, 10), (1 << 40, 10)])
def test_what_the_file_does_not_have_is_left_to_an_ordinary_read(
    descriptor: int, offset: int, nbytes: int
) -> None:
    assert Residency().is_cached(descriptor, offset, nbytes)


def test_a_system_that_does_not_say_counts_as_cached(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Residency()
    monkeypatch.setattr(refusing, "_mincore", lambda *_: -1)
    assert refusing.is_cached(descriptor, 0, NBYTES)
    monkeypatch.setattr(refusing, "_mincore", None)
    assert refusing.is_cached(descriptor, 0, NBYTES)
