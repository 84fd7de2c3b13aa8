"""A place whose tensors are in chunks as a store: each tensor of several chunks is one run of bytes of a
file.

That file is not there: its bytes are read from the chunks whenever they are asked for. Everything else is
read from the files themselves, as it is stored."""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.dcp.chunk_map import ChunkMap
from raymerge.checkpoints.dcp.layout import Layout, read_layout
from raymerge.errors import TransientError, UserError
from raymerge.storage.local.buffers import address_of
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.store import FileInfo, ReadStore, UnmappedStore, WriteStore, map_reads

ASSEMBLED = ".assembled"
"""The file that is not there."""
ASSEMBLED_NBYTES = "assembled_nbytes"
"""What a plan calls its size."""
_BLOCK_NBYTES = 256 << 10
"""Most bytes that are moved through memory of its own, between a file and the rows that they are put in."""
_ELEMENT = 8
"""Bytes of the largest elements."""


class Run(NamedTuple):
    """``rows * width`` bytes of a file, that stand in rows of ``width`` bytes, ``stride`` apart."""

    key: str
    offset: int
    to: int
    rows: int
    width: int
    stride: int


Members = Iterable[tuple[str, int, tuple[int, int]]]
"""Names of tensors in a run of bytes, where each begins in it, and which of its bytes these are."""
TensorChunks = tuple[Sequence[str], ChunkMap]
"""The files of a tensor's chunks, by number, and what lies where in them."""


def fill(files: ReadStore, run: Run, buffer: memoryview) -> None:
    """Read a run into the places that its bytes have in ``buffer``."""
    if run.rows == 1 or run.width >= _BLOCK_NBYTES:
        for row in range(run.rows):
            to = run.to + row * run.stride
            files.read_into(run.key, run.offset + row * run.width, buffer[to : to + run.width])
        return
    block = np.empty((min(_rows_at_once(run), run.rows), run.width), dtype=np.uint8)
    for offset, part in _blocks(run, buffer):
        some = block[: len(part)]
        files.read_into(run.key, offset, some.reshape(-1).data)
        part[:] = some


def empty(files: WriteStore, run: Run, buffer: memoryview) -> None:
    """Write a run from the places that its bytes have in ``buffer``."""
    if run.rows == 1 or run.width >= _BLOCK_NBYTES:
        for row in range(run.rows):
            to = run.to + row * run.stride
            files.write_at(run.key, run.offset + row * run.width, buffer[to : to + run.width])
        return
    for offset, part in _blocks(run, buffer):
        files.write_at(run.key, offset, np.ascontiguousarray(part).reshape(-1).data)


def _rows_at_once(run: Run) -> int:
    return max(1, _BLOCK_NBYTES // run.width)


def _blocks(run: Run, buffer: memoryview) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Some rows of a run at a time: where they begin in the file, and their bytes in ``buffer``."""
    target = np.frombuffer(buffer, dtype=np.uint8)
    for row in range(0, run.rows, _rows_at_once(run)):
        rows = min(_rows_at_once(run), run.rows - row)
        begin = run.to + row * run.stride
        reach = target[begin : begin + (rows - 1) * run.stride + run.width]
        part = np.lib.stride_tricks.as_strided(reach, (rows, run.width), (run.stride, 1))
        yield run.offset + row * run.width, part


class AssemblingStore(UnmappedStore):
    """As ``ReadStore``, over the store of the files, with one file more: its bytes are in chunks of the
    others."""

    def __init__(
        self, files: ReadStore, keys: Collection[str], locate: Callable[[str], TensorChunks]
    ) -> None:
        """``keys``: the names of the file; ``locate`` gives where the chunks of a tensor are."""
        self._files = files
        self._keys = keys
        self._locate = locate
        self._chunks: dict[str, TensorChunks] = {}

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
        if key not in self._keys:
            return self._files.read(key, offset, nbytes)
        return super().read(key, offset, nbytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if key not in self._keys:
            self._files.read_into(key, offset, buffer)
            return
        runs = list(self._runs(offset, buffer.nbytes))
        map_reads(self._files, lambda run: fill(self._files, run, buffer), runs)

    def check_expected(self) -> None:
        self._files.check_expected()

    def close(self) -> None:
        self._files.close()

    def chunks_of(self, name: str) -> TensorChunks:
        known = self._chunks.get(name)
        if known is None:
            # Of two threads that come here at once, both find the same.
            known = self._chunks[name] = self._locate(name)
        return known

    def _runs(self, offset: int, nbytes: int) -> Iterator[Run]:
        """What bytes of the file consist of; ``to`` counts from the first one."""
        for name, begin, own in self._members(offset, offset + nbytes):
            keys, chunk_map = self.chunks_of(name)
            for file, where, to, *form in chunk_map.pieces(*own):
                yield Run(keys[file], where, begin + to, *form)

    @abstractmethod
    def _members(self, begin: int, end: int) -> Members:
        """What of which tensors is in a run of bytes of the file."""


class ChunkedStore(AssemblingStore):
    """With the tensors of a training checkpoint that are in chunks."""

    def __init__(self, files: ReadStore) -> None:
        super().__init__(files, (ASSEMBLED,), self._located)
        self._lock = threading.Lock()
        self._layout: Layout | None = None

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
            return super().read_extent(key, offset, nbytes, buffer, like=like)
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

    def _direct(self, key: str, offset: int, nbytes: int) -> tuple[str, int] | None:
        """The file and offset of a run of bytes; None where it is not one run of a file."""
        if key != ASSEMBLED:
            return key, offset
        runs = list(self._runs(offset, nbytes))
        is_one = len(runs) == 1 and runs[0].rows == 1 and runs[0].width == nbytes
        return (runs[0].key, runs[0].offset) if is_one else None

    def prepare(self) -> None:
        """Read the layout now, so that its memory is not that of who reads first; errors are left to that."""
        with suppress(UserError, TransientError):
            self.layout()

    def layout(self) -> Layout:
        with self._lock:
            if self._layout is None:
                self._layout = read_layout(self._files, self._files.files())
            return self._layout

    def _members(self, begin: int, end: int) -> Members:
        return self.layout().members(begin, end)

    def _located(self, name: str) -> TensorChunks:
        layout = self.layout()
        tensor = layout.model.tensors[name]
        places = map_reads(self, lambda chunk: layout.reader.place(tensor, chunk).offset, tensor.chunks)
        return tuple(chunk.key for chunk in tensor.chunks), ChunkMap(tensor, range(len(places)), places)


def _moved(buffer: memoryview, begin: int, nbytes: int, step: int) -> int:
    """Move bytes up by ``step``, for which such buffers have room; where they then begin."""
    if step:
        place = address_of(buffer) + begin
        ctypes.memmove(place + step, place, nbytes)
    return begin + step
