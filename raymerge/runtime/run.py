"""Carries out a plan: stage, run segments, finish the directory, verify, publish."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from raymerge.assemble.finish import (
    check_shards,
    finish_companions,
    finish_config,
    finished_files,
    parents_of,
)
from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    NonFiniteError,
    Problem,
    RaymergeError,
    TargetError,
)
from raymerge.execute.receipts import Receipt
from raymerge.planner.sources import Source, holdings
from raymerge.planner.tables import Plan
from raymerge.runtime.budget import check_free, fit_budget
from raymerge.runtime.events import (
    OnEvent,
    Planned,
    Published,
    SegmentDone,
    Started,
    Stopping,
    Verified,
)
from raymerge.runtime.ledger import Ledger
from raymerge.runtime.options import RunOptions
from raymerge.runtime.pool import Pool, Stop, Work
from raymerge.runtime.shards import Shards
from raymerge.runtime.staging import Staging
from raymerge.storage.local import LocalStore
from raymerge.storage.open import open_store
from raymerge.verifier.structure import Verdict, verify_structure

_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
        errno.EXDEV,
    }
)
"""What the system would refuse again, however often the command is given."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A published checkpoint."""

    output: Path
    """Where it is."""
    digest: str
    """Digest of its plan."""
    verdict: Verdict
    """The structure verdict."""
    receipts: tuple[Receipt, ...]
    """Receipts of all segments, those of earlier runs included."""
    seconds: float
    """Wall time of this run."""


class Run:
    """One run of one plan towards one output directory."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Source],
        output: Path,
        options: RunOptions,
        *,
        on_event: OnEvent,
        began: float | None = None,
    ) -> None:
        """
        Args:
            plan: what to do.
            sources: its sources, opened.
            output: directory of the new checkpoint.
            options: how to run.
            on_event: receives progress; called in this thread, and from a signal handler on Ctrl-C.
            began: ``time.monotonic()`` when the user's command began; None for now.

        Raises:
            PlanError: something stands in the plan's way.
            OptionError: the memory limit is too small for it, or more than is free.
            TargetError: the output would lie over, in or around a source.
        """
        self._plan = plan.require()
        self._sources = sources
        self._options = options
        self._on_event = on_event
        self._staging = Staging(_real(output), plan)
        self._began = time.monotonic() if began is None else began
        self.projection = fit_budget(plan, options)
        check_free(options)
        _check_apart(self._staging.output, sources)

    def check(self) -> None:
        """Find what is wrong with the output place before any worker is started.

        Raises:
            TargetError: it is taken, or holds another plan's unfinished run.
        """
        self._staging.check(replace=self._options.replace)

    def announce(self) -> None:
        """Emit ``Planned``."""
        segments = self._plan["segments"]
        self._on_event(
            Planned(
                digest=self._plan.digest,
                tensors=len(self._plan["tensors"]),
                output_bytes=sum(self._plan["shards"].column("nbytes").to_pylist()),
                total_bytes=sum(segments.column("cost").to_pylist()),
                segments=len(segments),
                projected_peak=self.projection.peak,
            )
        )

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the checkpoint is published.

        Raises:
            TargetError: the output place is taken or holds another plan's unfinished run.
            NonFiniteError: a source holds NaN or infinity; the staging directory is removed.
            CheckpointError: a source was changed while it was read.
            IncompleteError: stopped by a signal or worn out; the same command goes on from here.
            VerificationError: what was written is not what was planned.
        """
        try:
            with self._staging.lock():
                return self._carry_out(pool)
        except RaymergeError:
            raise
        except OSError as error:
            if error.errno in _LASTING:
                place = str(error.filename or self._staging.output)
                what = f"the system refused it: {error.strerror}."
                raise TargetError(
                    Problem(place, what, "Choose another -o, or clear what is there.")
                ) from error
            raise IncompleteError(
                f"reading or writing failed: {error}. What is done is kept: the same command goes on from "
                "there."
            ) from error

    def _carry_out(self, pool: Pool) -> RunResult:
        ledger = self._staging.prepare(self._conditions(pool), replace=self._options.replace)
        with LocalStore(self._staging.root) as store:
            receipts = self._work(pool, ledger, store)
            self._finish(store)
        verdict = verify_structure(self._staging.root).require()
        self._on_event(Verified(verdict.tensors, verdict.nbytes))
        self._staging.publish(replace=self._options.replace)
        seconds = time.monotonic() - self._began
        self._on_event(Published(str(self._staging.output), seconds))
        output = self._staging.output
        proved = replace(verdict, path=str(output))
        return RunResult(output, self._plan.digest, proved, tuple(receipts.values()), seconds)

    def _conditions(self, pool: Pool) -> dict[str, Any]:
        """What must be the same for a run to go on, beside the plan."""
        return {
            "numerics": pool.numerics,
            "versions": file_versions(self._sources),
        }

    def _work(self, pool: Pool, ledger: Ledger, store: LocalStore) -> dict[int, Receipt]:
        """Receipts of all segments, when every shard has its final name."""
        shards = Shards(self._plan, store)
        receipts = shards.take_up(ledger)
        costs = self._plan["segments"].column("cost").to_pylist()
        todo = sorted((s for s in range(len(costs)) if s not in receipts), key=lambda s: (-costs[s], s))
        self._on_event(Started(pool.workers, pool.device, len(receipts), sum(costs[s] for s in receipts)))
        try:
            self._make(pool, todo, ledger, receipts)
        except NonFiniteError:
            self._staging.discard()
            raise
        if len(receipts) < len(costs):
            raise IncompleteError(
                f"stopped with {len(receipts)} of {len(costs)} segments done. They are kept: the same "
                "command goes on from there."
            )
        self._check_sources()
        shards.complete(self._on_event)
        return receipts

    def _make(self, pool: Pool, todo: Sequence[int], ledger: Ledger, receipts: dict[int, Receipt]) -> None:
        """Have segments made and add their receipts, until all are in or a stop is asked for."""
        roots = tuple(each.root for each in holdings(self._sources))
        work = Work(self._plan, roots, self._staging.root, self.projection)
        costs = self._plan["segments"].column("cost").to_pylist()
        with _stopping(self._on_event) as stop, closing(pool.run(work, todo, stop)) as made:
            for receipt in made:
                ledger.record(receipt)
                receipts[receipt.segment] = receipt
                self._on_event(
                    SegmentDone(
                        receipt.segment,
                        receipt.worker,
                        receipt.read_bytes,
                        receipt.written_bytes,
                        costs[receipt.segment],
                        receipt.seconds,
                    )
                )

    def _check_sources(self) -> None:
        """Find files that were written again since the plan was made: their bytes may be of two kinds."""
        problems = []
        for each in holdings(self._sources):
            with open_store(each.root) as store:
                now = {file.key: store.info(file.key) for file in each.files}
            problems += [
                Problem(
                    f"{each.name}: {file.key}",
                    "the file was changed while it was merged.",
                    "Leave the sources alone, and start again with --replace.",
                )
                for file in each.files
                if (found := now[file.key]) is None or found.version != file.version
            ]
        if problems:
            raise CheckpointError(problems)

    def _finish(self, store: LocalStore) -> None:
        donor = self._sources[int(self._plan.manifest["donor"])]
        check_shards(self._plan, store)
        with open_store(donor.checkpoint.root) as files:
            finish_companions(
                self._plan,
                files,
                store,
                companions=donor.checkpoint.companions,
                parents=parents_of(self._sources),
            )
            finish_config(self._plan, files, store, donor_config=donor.checkpoint.config)
        self._staging.sweep(finished_files(self._plan, donor.checkpoint.companions))


def file_versions(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Versions of all files that are read, as a run's ledger keeps them."""
    return [
        {"name": each.name, "files": [[file.key, file.version] for file in each.files]}
        for each in holdings(sources)
    ]


def _real(output: Path) -> Path:
    """The output place without links, under a name that can be written down."""
    real = os.path.realpath(output)
    if not real.isprintable():
        what = "the name holds characters that cannot be written."
        raise TargetError(Problem(ascii(str(output)), what, "Choose another -o."))
    return Path(real)


def _check_apart(output: Path, sources: Sequence[Source]) -> None:
    """An output over a source would destroy it; one inside a source would become part of it."""
    alone = {each.checkpoint.root for each in sources if each.checkpoint.is_single_file}
    for source in holdings(sources):
        root = Path(source.root).resolve()
        if source.root in alone and root != output and output not in root.parents:
            # The directory of a single file is no checkpoint, and may hold anything beside it.
            continue
        if root == output or output in root.parents or root in output.parents:
            relation = "is" if root == output else "holds" if output in root.parents else "lies inside"
            raise TargetError(
                Problem(
                    str(output),
                    f"the output place {relation} the source {source.name}.",
                    "Choose another -o, outside the sources.",
                )
            )


@contextmanager
def _stopping(on_event: OnEvent) -> Iterator[Stop]:
    """First Ctrl-C or SIGTERM: finish the segments in hand. Second: stop at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_: int, __: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.request()
        on_event(Stopping())

    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(
            "stopped at once. Finished segments are kept: the same command goes on from there."
        ) from error
    finally:
        for number, old in zip(wanted, before, strict=True):
            signal.signal(number, old)
