"""Small files of a place as files of this machine, for libraries that want a directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.open import open_store
from raymerge.storage.own_directory import OwnDirectory

_MOST_NBYTES = 1 << 30
"""Bytes of all files together; the largest tokenizers have a tenth of it."""


@contextmanager
def fetched(place: str, keys: Iterable[str]) -> Iterator[Path]:
    """A directory with some files of a place: the place itself where it is local, else copies.

    Copies lie in a temporary directory, which is removed when the block ends. Keys that are not there are
    left out.

    Raises:
        CheckpointError: the files cannot be read, or are larger than any that are read whole.
    """
    if not is_remote(place):
        yield Path(parse_place(place).text)
        return
    wanted = frozenset(keys)
    with OwnDirectory() as directory, open_store(place) as store:
        found = [info for info in store.files() if info.key in wanted]
        nbytes = sum(info.nbytes for info in found)
        if nbytes > _MOST_NBYTES:
            what = (
                f"the {len(found)} files beside its weights have {nbytes} bytes, too many to be copied here."
            )
            raise CheckpointError(Problem(shown(place), what, "Take what is no part of the model out."))
        for info in found:
            path = directory / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(info.key, 0, info.nbytes))
        yield directory
