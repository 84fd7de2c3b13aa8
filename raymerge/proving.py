"""What the Python API has to prove, compare and look at checkpoints that are there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from raymerge.checkpoints.source import Checkpoint
from raymerge.documents.faults import FaultError
from raymerge.errors import CheckpointError, OptionError, Problem
from raymerge.planner.inspection import Inspection, inspect_checkpoint
from raymerge.planner.sources import open_reference
from raymerge.recipes import parse_reference
from raymerge.runtime.budget import free_memory
from raymerge.runtime.replay import ReplayVerdict, replay_checkpoint
from raymerge.storage.addresses import shown
from raymerge.storage.open import local_store
from raymerge.verifier.compare import Comparison, compare_checkpoints
from raymerge.verifier.load import LoadVerdict, load_checkpoint

_MOST_THREADS = 8
_NOWHERE: Mapping[str, str] = MappingProxyType({})


def verify_load(
    path: str | Path, *, memory: int | None = None, trust_remote_code: bool = False
) -> LoadVerdict:
    """Verify that transformers loads a checkpoint with strict keys, and runs it where it fits the memory.

    Args:
        path: its directory.
        memory: bytes that it may take; None for what is free. Of a larger model only names and shapes are
            compared.
        trust_remote_code: whether Python files of the checkpoint may be run, where transformers does not
            know its model.

    Raises:
        OptionError: it is in no directory of this machine.
    """
    free = free_memory()
    return load_checkpoint(
        _directory(path),
        memory=free if memory is None else min(memory, free),
        trust_remote_code=trust_remote_code,
    )


def replay(
    path: str | Path, sources: Mapping[str, str] = _NOWHERE, *, pickled_weights: bool = False
) -> ReplayVerdict:
    """Derive the provenance of a checkpoint anew from its recipe and sources, and compare; reads its bytes.

    Nothing is fetched from the Hub: its cache has what is named there, or it is absent.

    Args:
        path: its directory.
        sources: where sources are now, by the names that the recipe has for them; others are looked for
            where they were.
        pickled_weights: whether pickled weights may be read, where the recipe in the record says so.

    Raises:
        OptionError: it is in no directory of this machine.
    """
    return replay_checkpoint(_directory(path), sources, pickled=pickled_weights)


def diff(a: str | Path, b: str | Path, *, threads: int | None = None) -> Comparison:
    """Compare two checkpoints, byte by byte and by numbers, whatever files and layouts they lie in.

    Args:
        a: a directory, or a Hub name with or without a revision.
        b: another.
        threads: how many tensors are compared at once; None for as many as there are cores, at most 8.

    Raises:
        CheckpointError: one of them is absent, broken, or of a kind that cannot be read.
        OptionError: there cannot be so many threads.
    """
    if threads is not None and threads < 1:
        what = f"{threads} threads cannot compare anything."
        raise OptionError(Problem("--threads", what, "Give 1 or more, or leave it out."))
    usual = min(_MOST_THREADS, os.cpu_count() or 1)
    return compare_checkpoints(_opened(a), _opened(b), threads=threads or usual)


def inspect(path: str | Path) -> Inspection:
    """What a checkpoint holds, from its headers; it is a directory, or a Hub name with or without a revision.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    return inspect_checkpoint(_opened(path))


def _directory(path: str | Path) -> Path:
    """What must be a directory of this machine; raises OptionError."""
    return local_store(str(path)).root


def _opened(path: str | Path) -> Checkpoint:
    """The headers of a checkpoint that a user names."""
    text = str(path)
    try:
        reference = parse_reference(text, exists=os.path.isdir)
    except FaultError as error:
        raise CheckpointError([Problem(text, fault.what, fault.remedy) for fault in error.faults]) from error
    if reference.lora_path is not None:
        raise CheckpointError(Problem(text, "this names an adapter on a model.", "Give the model alone."))
    checkpoint = open_reference(reference)
    # Its options say where it is found, and not which it is.
    return replace(checkpoint, name=shown(checkpoint.name))
