"""A place whose tensors are in chunks as a store: each tensor of several chunks is one run of bytes of a
file.

That file is not there: its bytes are read from the chunks whenever they are asked for. Everything else is
read from the files themselves, as it is stored."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np

from raymerge.checkpoints.dcp.chunk_map import ChunkMap
from raymerge.checkpoints.dcp.layout import Layout, read_layout
from raymerge.errors import TransientError, UserError
from raymerge.storage.local.buffers import ALIGNMENT, address_of
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.store import FileInfo, ReadStore, map_reads

ASSEMBLED = ".assembled"
"""The file that is not there."""
ASSEMBLED_NBYTES = "assembled_nbytes"
"""What a plan calls its size."""
_BLOCK_NBYTES = 256 << 10
"""Most bytes that are read into memory of its own, to be put in their rows from there."""

_ELEMENT = 8
"""Bytes of the largest elements."""


class _Run(NamedTuple):
    key: str
    offset: int
    to: int
    rows: int
    width: int
    stride: int


class ChunkedStore:
    """As ``ReadStore``, over the store of the files."""

    def __init__(self, files: ReadStore) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._maps: dict[str, tuple[tuple[str, ...], ChunkMap]] = {}

    @property
    def is_far(self) -> bool:
        return self._files.is_far

    def location(self, key: str) -> str:
        return self._files.location(key)

    def files(self) -> tuple[FileInfo, ...]:
        return self._files.files()

    def info(self, key: str) -> FileInfo | None:
        return self._files.info(key)

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return self._files.infos(keys)

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        if key != ASSEMBLED:
            return self._files.read(key, offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if key != ASSEMBLED:
            self._files.read_into(key, offset, buffer)
            return
        map_reads(self, lambda run: self._fill(run, buffer), list(self._runs(offset, buffer.nbytes)))

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        own, wanted = self._direct(key, offset, nbytes), offset if like is None else like
        if own is None:
            begin = wanted % ALIGNMENT
            self.read_into(key, offset, buffer[begin : begin + nbytes])
            return begin
        begin = self._files.read_extent(*own, nbytes, buffer, again=again, like=wanted)
        # What is copied may lie anywhere; elements must begin at a multiple of their size.
        return begin if like is not None else _moved(buffer, begin, nbytes, (wanted - begin) % _ELEMENT)

    def map_extent(
        self, key: str, offset: int, nbytes: int, buffer: memoryview, maps: PageMaps
    ) -> int | None:
        own = self._direct(key, offset, nbytes)
        if own is None or (own[1] - offset) % _ELEMENT:
            return None
        return self._files.map_extent(*own, nbytes, buffer, maps)

    def check_expected(self) -> None:
        self._files.check_expected()

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _direct(self, key: str, offset: int, nbytes: int) -> tuple[str, int] | None:
        """The file and offset of a run of bytes; None where it is not one run of a file."""
        if key != ASSEMBLED:
            return key, offset
        runs = list(self._runs(offset, nbytes))
        is_one = len(runs) == 1 and runs[0].rows == 1 and runs[0].width == nbytes
        return (runs[0].key, runs[0].offset) if is_one else None

    def _runs(self, offset: int, nbytes: int) -> Iterator[_Run]:
        """What bytes of the assembled file consist of; ``to`` counts from the first one."""
        for name, begin, own in self._opened().members(offset, offset + nbytes):
            keys, chunk_map = self._map(name)
            for file, where, to, *form in chunk_map.pieces(*own):
                yield _Run(keys[file], where, begin + to, *form)

    def _fill(self, run: _Run, buffer: memoryview) -> None:
        if run.rows == 1 or run.width >= _BLOCK_NBYTES:
            for row in range(run.rows):
                to = run.to + row * run.stride
                self._files.read_into(run.key, run.offset + row * run.width, buffer[to : to + run.width])
            return
        target = np.frombuffer(buffer, dtype=np.uint8)
        at_once = max(1, _BLOCK_NBYTES // run.width)
        block = np.empty((min(at_once, run.rows), run.width), dtype=np.uint8)
        for row in range(0, run.rows, at_once):
            some = block[: min(at_once, run.rows - row)]
            self._files.read_into(run.key, run.offset + row * run.width, some.reshape(-1).data)
            begin, strides = run.to + row * run.stride, (run.stride, 1)
            reach = target[begin : begin + (len(some) - 1) * run.stride + run.width]
            np.lib.stride_tricks.as_strided(reach, some.shape, strides)[:] = some

    def prepare(self) -> None:
        """Read the layout now, so that its memory is not that of who reads first; errors are left to that."""
        with suppress(UserError, TransientError):
            self._opened()

    def _opened(self) -> Layout:
        with self._lock:
            if self._layout is None:
                self._layout = read_layout(self._files, self._files.files())
            return self._layout

    def _map(self, name: str) -> tuple[tuple[str, ...], ChunkMap]:
        layout = self._opened()
        known = self._maps.get(name)
        if known is None:
            tensor = layout.model.tensors[name]
            places = map_reads(self, lambda chunk: layout.reader.place(tensor, chunk).offset, tensor.chunks)
            keys = tuple(chunk.key for chunk in tensor.chunks)
            # Of two threads that come here at once, both find the same.
            known = self._maps[name] = keys, ChunkMap(tensor, range(len(keys)), places)
        return known


def _moved(buffer: memoryview, begin: int, nbytes: int, step: int) -> int:
    """Move bytes up by ``step``, for which such buffers have room; where they then begin."""
    if step:
        place = address_of(buffer) + begin
        ctypes.memmove(place + step, place, nbytes)
    return begin + step
