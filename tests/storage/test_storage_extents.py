"""Sharing of equal extents: for real on a reflink filesystem where one can be mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.reflink_mount import reflink_mount

from raymerge.storage.local.copying import BLOCK_NBYTES
from raymerge.storage.local.store import LocalStore

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
