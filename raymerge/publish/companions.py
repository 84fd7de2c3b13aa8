"""Companion files (tokenizer, processors, templates, code, licence), copied byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import ReadStore, WriteStore

_CHUNK = 8 << 20
_OURS = frozenset({"config.json", "README.md"})


@dataclass(frozen=True, slots=True)
class Copied:
    """One companion in its new place."""

    key: str
    """Its key, the same in both stores."""
    nbytes: int
    """Its size in bytes."""
    digest: str
    """xxh3-128 of its bytes, in hex."""


def companion_problems(source: ReadStore, keys: Iterable[str]) -> tuple[Problem, ...]:
    """What stands in the way of copying: absent files, and names that the output itself uses."""
    present = {file.key for file in source.files()}
    problems = []
    for key in keys:
        if _is_ours(key):
            remedy = "Rename it in the source, or take it out there."
            problems.append(
                Problem(
                    source.location(key),
                    "this companion has the name of a file that the merge writes.",
                    remedy,
                )
            )
        elif key not in present:
            problems.append(
                Problem(
                    source.location(key), "this companion is gone since the plan was made.", "Plan again."
                )
            )
    return tuple(problems)


def copy_companions(source: ReadStore, target: WriteStore, keys: Iterable[str]) -> tuple[Copied, ...]:
    """Copy files byte for byte and durably, in the given order.

    Raises:
        CheckpointError: a file is absent or has the name of a file that the merge writes (nothing is copied
            then), or it shrinks while it is read.
    """
    wanted = tuple(keys)
    problems = companion_problems(source, wanted)
    if problems:
        raise CheckpointError(problems)
    sizes = {file.key: file.nbytes for file in source.files()}
    return tuple(_copy(source, target, key, nbytes=sizes[key]) for key in wanted)


def _copy(source: ReadStore, target: WriteStore, key: str, *, nbytes: int) -> Copied:
    digest = xxhash.xxh3_128()
    target.create(key, nbytes)
    for offset in range(0, nbytes, _CHUNK):
        chunk = source.read(key, offset, min(_CHUNK, nbytes - offset))
        digest.update(chunk)
        target.write_at(key, offset, chunk)
    target.sync(key)
    return Copied(key, nbytes, digest.hexdigest())


def _is_ours(key: str) -> bool:
    ends = (".safetensors", ".safetensors.index.json")
    return key in _OURS or key.startswith("raymerge/") or key.endswith(ends)
