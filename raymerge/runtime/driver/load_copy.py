"""A local copy of a remote checkpoint, for transformers to load it from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymerge.checkpoints.files import INDEX_FILE, PICKLES
from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.source import CONFIG_FILE, WeightFile, open_checkpoint
from raymerge.errors import OptionError, Problem
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.local.store import write_fully
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore
from raymerge.storage.temporary import OwnDirectory, fetched
from raymerge.units import format_size

_PIECE = 16 << 20
_READERS = 4


@dataclass(frozen=True, slots=True)
class LoadCopy:
    root: Path
    lack: str
    """Why there are headers alone and no weights; "" where there are weights."""


@contextmanager
def copy_to_load(place: str, *, memory: int, scratch: str | None) -> Iterator[LoadCopy]:
    """A checkpoint's directory: the place itself where it is local, else a temporary copy.

    Weights are fetched where they fit into ``memory`` bytes and onto the disk; otherwise files have their
    full length and their headers alone. Raises CheckpointError if it cannot be read, OptionError if
    ``scratch`` cannot be written to.
    """
    if not is_remote(place):
        yield LoadCopy(Path(parse_place(place).text), "")
        return
    checkpoint = open_checkpoint(place, shown(place), pickled=True)
    small = {CONFIG_FILE, INDEX_FILE, PICKLES.index, *checkpoint.companions}
    with _directory(scratch) as here, open_store(place) as store:
        with fetched(place, small) as found:
            shutil.copytree(found, here, dirs_exist_ok=True)
        lack = _lack(sum(file.nbytes for file in checkpoint.files), memory, here)
        for file in checkpoint.files:
            copy = _copy_header if lack else _copy_whole
            copy(store, file, here / file.key)
        yield LoadCopy(here, lack)


@contextmanager
def _directory(scratch: str | None) -> Iterator[Path]:
    try:
        found = OwnDirectory(scratch)
    except OSError as error:
        what = f"nothing can be written there: {error.strerror}."
        raise OptionError(Problem(str(scratch or "--scratch"), what, "Choose another --scratch.")) from error
    with found as path:
        yield path


def _lack(nbytes: int, memory: int, here: Path) -> str:
    size, free = format_size(nbytes), shutil.disk_usage(here).free
    if nbytes > memory:
        return f"its weights have {size}, and loading may take {format_size(memory)} of memory"
    if nbytes > free:
        return f"a copy of its weights takes {size}, and {format_size(free)} are free for it (--scratch)"
    return ""


def _copy_header(store: ReadStore, file: WeightFile, path: Path) -> None:
    header = store.read(file.key, 0, read_header(store, file.key, file.nbytes, file.version).data_start)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header)
    os.truncate(path, file.nbytes)


def _copy_whole(store: ReadStore, file: WeightFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out, ThreadPoolExecutor(_READERS) as threads:

        def copy(begin: int) -> None:
            data = store.read(file.key, begin, min(_PIECE, file.nbytes - begin))
            write_fully(out.fileno(), begin, memoryview(data))

        out.truncate(file.nbytes)
        # Taken to the end, for what goes wrong in a thread to be raised here.
        list(threads.map(copy, range(0, file.nbytes, _PIECE)))
