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
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import open_reference
from raymerge.planner.inspection import Inspection, inspect_checkpoint
from raymerge.publish.output_place import place_of
from raymerge.recipes import parse_reference
from raymerge.runtime.driver.load_copy import copy_to_load
from raymerge.runtime.driver.replay import ReplayVerdict, replay_checkpoint
from raymerge.runtime.workers.budget import free_memory
from raymerge.storage.addresses import shown
from raymerge.verifier.compare import Comparison, compare_checkpoints
from raymerge.verifier.load import LoadVerdict, load_checkpoint

_MOST_THREADS = 8
_NOWHERE: Mapping[str, str] = MappingProxyType({})


def verify_load(
    path: str | Path,
    *,
    memory: int | None = None,
    trust_remote_code: bool = False,
    scratch: str | None = None,
) -> LoadVerdict:
    """Verify that transformers loads a checkpoint with strict keys, and runs it where it fits the memory.

    Args:
        path: its directory, or its address: then it is copied to a directory for as long as it takes.
        memory: bytes that it may take; None for what is free. Of a larger model only names and shapes are
            compared.
        trust_remote_code: whether Python files of the checkpoint may be run, where transformers does not
            know its model.
        scratch: directory for the copy of one that lies elsewhere; None for that of what is temporary.

    Raises:
        OptionError: the address says no place, or nothing can be written to ``scratch``.
        CheckpointError: it lies elsewhere, and cannot be read.
    """
    free, place = free_memory(), str(place_of(path, RunOptions()))
    room = free if memory is None else min(memory, free)
    with copy_to_load(place, memory=room, scratch=scratch) as copy:
        return load_checkpoint(
            copy.root,
            # A copy may take memory too: directories of what is temporary are often there.
            memory=min(room, free_memory()),
            trust_remote_code=trust_remote_code,
            name=shown(place),
            lack=copy.lack,
        )


def replay(path: str | Path, sources: Mapping[str, str] = _NOWHERE) -> ReplayVerdict:
    """Derive the provenance of a checkpoint anew from its recipe and sources, and compare; reads its bytes.

    Sources are fetched from nowhere but where the caller says that they are: of the Hub, its cache has what
    is named there, or it is absent.

    Args:
        path: its directory, or its address.
        sources: where sources are now, by the names that the recipe has for them; others are looked for
            where they were.

    Raises:
        OptionError: the address says no place.
    """
    return replay_checkpoint(place_of(path, RunOptions()), sources)


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
