"""The limit: the fastest program that reads every input byte once and writes the output's bytes durably.

``python limit.py OUT FIRST [MORE ...]`` copies FIRST to OUT and reads MORE, all at the same time. A merge
whose output is as large as its first input can be no faster than that. It prints when it began and when the
output had its name, as ``raymerge submit --json`` does, so that the start of Python does not count. With
``--copies`` it writes so many copies of FIRST, as merges of several outputs do.

What makes it fast: large reads into few buffers that are used again, large direct writes from page-aligned
buffers into a file whose blocks are allocated beforehand, more of them in flight than one, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

BLOCK_NBYTES = 4 << 20
COPIERS = 3
READERS = 1
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Block:
    fd: int
    offset: int
    nbytes: int


class Blocks:
    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        # The interpreter takes the next number of a count in one step: no lock is needed.
        self._numbers = count()

    def __iter__(self) -> Iterator[Block]:
        while (number := next(self._numbers)) < len(self._blocks):
            yield self._blocks[number]


def run_limit(inputs: list[Path], output: Path, *, direct: bool = False, copies: int = 1) -> None:
    outputs = [output.with_name(f"{output.name}{number or ''}") for number in range(copies)]
    parts = [each.with_name(f"{each.name}.part") for each in outputs]
    nbytes = inputs[0].stat().st_size
    with ExitStack() as opened:
        sources = opened.enter_context(opened_inputs(inputs, direct=direct))
        targets = [opened.enter_context(opened_output(part, nbytes)) for part in parts]
        first, *more = [_blocks(fd) for fd in sources]
        copied, read = Blocks(first), Blocks([block for blocks in more for block in blocks])
        with ThreadPoolExecutor(COPIERS + READERS) as threads:
            copiers = [threads.submit(_copy, copied, targets, read) for _ in range(COPIERS)]
            readers = [threads.submit(_read, read) for _ in range(READERS)]
            for each in (*copiers, *readers):
                each.result()
        for target in targets:
            os.ftruncate(target, nbytes)
            os.fdatasync(target)
    for part, place in zip(parts, outputs, strict=True):
        part.replace(place)
    _sync_directory(output.parent)


@contextmanager
def opened_inputs(paths: list[Path], *, direct: bool) -> Iterator[list[int]]:
    fds = [_open(path, os.O_RDONLY, direct=direct) for path in paths]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def opened_output(path: Path, nbytes: int) -> Iterator[int]:
    fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, direct=True)
    try:
        os.posix_fallocate(fd, 0, max(1, _padded(nbytes)))
        yield fd
    finally:
        os.close(fd)


def _open(path: Path, flags: int, *, direct: bool) -> int:
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:
            # A file system that knows no direct requests, as those in memory; buffered ones are its best.
            pass
    return os.open(path, flags, 0o644)


def _blocks(fd: int) -> list[Block]:
    end = os.fstat(fd).st_size
    return [Block(fd, start, min(BLOCK_NBYTES, end - start)) for start in range(0, end, BLOCK_NBYTES)]


def _copy(blocks: Blocks, targets: list[int], then: Blocks) -> None:
    with closing(mmap.mmap(-1, BLOCK_NBYTES)) as buffer, memoryview(buffer) as view:
        for block in blocks:
            _fill(view, block)
            with view[: _padded(block.nbytes)] as data:
                for target in targets:
                    written = os.pwrite(target, data, block.offset)
                    assert written == len(data)
    _read(then)


def _read(blocks: Blocks) -> None:
    with closing(mmap.mmap(-1, BLOCK_NBYTES)) as buffer, memoryview(buffer) as view:
        for block in blocks:
            _fill(view, block)


def _fill(view: memoryview, block: Block) -> None:
    with view[: _padded(block.nbytes)] as data:
        if (found := os.preadv(block.fd, [data], block.offset)) != block.nbytes:
            raise OSError(f"{found} bytes were read where {block.nbytes} were expected")


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tell(event: str) -> None:
    sys.stdout.write(json.dumps({"event": event}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the copy of the first input")
    parser.add_argument("inputs", type=Path, nargs="+", help="what is read; the first is copied")
    parser.add_argument("--direct", action="store_true", help="read past the page cache")
    parser.add_argument("--copies", type=int, default=1, help="how many outputs are written")
    asked = parser.parse_args()
    tell("started")
    run_limit(asked.inputs, asked.output, direct=asked.direct, copies=asked.copies)
    tell("published")


if __name__ == "__main__":
    main()
