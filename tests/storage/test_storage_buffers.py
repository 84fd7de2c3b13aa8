"""Page-aligned memory and the pool of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymerge.storage.local.buffers import (
    ALIGNMENT,
    BufferPool,
    address_of,
    aligned_buffer,
    room_for,
    round_up,
)

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

    def test_a_view_keeps_it_and_the_last_one_frees_it(self) -> None:
        """In a process of its own, where nothing else maps or frees memory."""
        first, second = _said(
            "before = mapped()",
            f"view = aligned_buffer({512 * MIB})[100:200]",
            "print(mapped() - before)",
            "del view",
            "print(mapped() - before)",
        )
        assert first >= 512 * MIB > second

    def test_takes_no_memory_beyond_what_is_asked(self) -> None:
        (grown,) = _said(
            "before = resident()",
            f"buffer = aligned_buffer({33 * MIB})",
            "buffer[::4096] = bytes(len(buffer) // 4096)",
            "print(resident() - before)",
        )
        assert 33 * MIB - MIB <= grown <= 33 * MIB + MIB


class TestPlaces:
    @given(nbytes=st.integers(0, 1 << 40), offset=st.integers(0, 1 << 40))
    def test_there_is_room_for_the_blocks_around_any_extent(self, nbytes: int, offset: int) -> None:
        first, end = offset // ALIGNMENT * ALIGNMENT, round_up(offset + nbytes)
        assert end - first <= room_for(nbytes) <= nbytes + 3 * ALIGNMENT
        assert room_for(nbytes) % ALIGNMENT == 0


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

    def test_gives_the_same_memory_again_until_cleared(self) -> None:
        pool = BufferPool(2, ALIGNMENT)
        with pool.borrow() as buffer:
            buffer[:1] = b"x"
        with pool.borrow() as again:
            assert again[0] == ord("x")
        pool.clear()
        with pool.borrow() as fresh:
            assert fresh[0] == 0

    def test_gets_it_back_from_one_who_fails(self) -> None:
        pool = BufferPool(1, ALIGNMENT)
        for _ in range(3):
            with pytest.raises(RuntimeError), pool.borrow():
                raise RuntimeError


_MEMORY = """
import mmap
from pathlib import Path
from raymerge.storage.local.buffers import aligned_buffer
def pages(place): return int(Path("/proc/self/statm").read_text().split()[place]) * mmap.PAGESIZE
def mapped(): return pages(0)
def resident(): return pages(1)
"""


def _said(*lines: str) -> list[int]:
    """What a process of these lines prints."""
    code = _MEMORY + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]
