"""What units of a stage left in the staging directory, and whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from raymerge.errors import CheckpointError
from raymerge.storage.local.store import LocalStore
from raymerge.storage.ranges import Range

_CHUNK = 1 << 20


def digests_of(staging: Path, files: Mapping[str, Sequence[Range]]) -> dict[str, str]:
    """xxh3_128 hex of ranges of files, by the key; a file that is not there whole has none.

    Args:
        staging: the directory.
        files: by the key, the ranges in the order in which they are read; without any, the whole file.
    """
    with LocalStore(staging) as store:
        found = ((key, _digest(store, key, ranges)) for key, ranges in files.items())
        return {key: digest for key, digest in found if digest is not None}


def _digest(store: LocalStore, key: str, ranges: Sequence[Range]) -> str | None:
    file = store.info(key)
    if file is None:
        return None
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    try:
        for wanted in ranges or (Range(0, file.nbytes),):
            for offset in range(wanted.offset, wanted.end, _CHUNK):
                chunk = buffer[: min(_CHUNK, wanted.end - offset)]
                store.read_into(key, offset, chunk)
                hasher.update(chunk)
    except CheckpointError:
        return None
    return hasher.hexdigest()
