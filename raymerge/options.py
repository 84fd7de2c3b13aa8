"""How to run. No option changes a byte of the output or is part of a plan's digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from raymerge.errors import OptionError, Problem
from raymerge.storage.addresses import NO_OPTIONS, StoreOptions, is_path, shown

STEPS_WANTED = (
    "this recipe has results between, and they need a directory: an object store cannot hold them.",
    "Give --steps DIR, or write run: {steps: DIR} in the profile: on one machine any directory, on several "
    "one that all of them see under the same path.",
)


Device = Literal["auto", "cpu", "cuda"]

USUAL_PATIENCE = 600.0
"""Seconds. Requests to slow storage take less, and progress of computation is observed."""
_MOST_THREADS = 256
"""Of a worker; machines with more cores have several workers."""
_MOST_WORKERS = 10_000
"""Each is an actor; Ray itself is not tested with more, and fails to start with billions."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    workers: int | None = None
    """None: one per GPU, or without GPUs one for each 3 or 4 CPU cores, at most 8 on a machine."""
    memory: int | None = None
    """Bytes of a worker beyond an idle one; None: a share of free memory, at most 512 MiB or what the plan
    needs; 1 GiB with ``address``."""
    device: Device = "auto"
    """``auto`` takes a working GPU if matrices are decomposed or model layers computed."""
    address: str | None = None
    inline: bool | None = None
    """In this process, without Ray; None: where a merge is so small that Ray would take longer to start."""
    replace: bool = False
    """Replace the output, and discard unfinished runs of other plans there."""
    keep_intermediates: bool = False
    """Keep results of stages and intermediate merges beside the output."""
    threads: int | None = None
    """Computing threads of a worker; None: its cores, at most 4."""
    patience: float | None = None
    """Seconds without progress of its part after which a Ray worker is replaced; None: ten minutes."""
    storage: StoreOptions = NO_OPTIONS
    scratch: str | None = None
    """Directory on each worker for shards until upload to an object store; None: not on disk."""
    steps: str | None = None
    """Directory for results of stages and intermediate merges, visible to all workers; None: beside a local
    output."""
    growing: bool = False
    """Whether the cluster adds machines for waiting workers, which join later."""
    run: str = ""
    """Name of the submission, if its target may restart it."""

    def __post_init__(self) -> None:
        if problems := [Problem(*each) for each in self._refused()]:
            raise OptionError(problems)

    def _refused(self) -> Iterator[tuple[str, str, str]]:
        workers, threads = self.workers, self.threads
        if workers is not None and workers < 1:
            yield "--workers", f"{workers} workers cannot do anything.", "Give 1 or more."
        if workers is not None and workers > _MOST_WORKERS:
            what = f"{workers} workers are more than Ray is tested with."
            yield "--workers", what, f"Give at most {_MOST_WORKERS}."
        if threads is not None and threads < 1:
            yield "--threads", f"{threads} threads compute nothing.", "Give 1 or more."
        if threads is not None and threads > _MOST_THREADS:
            what = f"{threads} threads of one worker would wait for each other."
            yield "--threads", what, f"Give at most {_MOST_THREADS}, and more --workers."
        if self.memory is not None and self.memory < 1:
            yield "--memory", f"{self.memory} bytes hold nothing.", "Give a size such as 4GiB."
        if self.scratch is not None and not (self.scratch.strip() and is_path(self.scratch)):
            remedy = "Give a path of the machines that merge, like /tmp, or leave it out."
            yield "--scratch", f"'{shown(self.scratch)}' is no path of a directory.", remedy
        if self.steps is not None and not (self.steps.strip() and is_path(self.steps)):
            remedy = "Give a path that all machines of the run see, like /mnt/shared/steps, or leave it out."
            yield "--steps", f"'{shown(self.steps)}' is no path of a directory.", remedy
        if self.patience is not None and not self.patience > 0:
            yield "--patience", f"in {self.patience:g} seconds nobody gets on.", "Give more than 0."
        if self.inline and self.address is not None:
            what = "a run in this process has no cluster address."
            yield "--inline", what, "Drop --address or --inline."
        if self.inline and workers not in (None, 1):
            yield "--inline", "a run in this process is one worker.", "Drop --workers or --inline."
