"""The work of a stage: units, which are independent of each other, and a conclusion from all of them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from raymerge.device_numerics import Fallback
from raymerge.errors import CheckpointError, IncompleteError
from raymerge.execute.receipts import Receipt
from raymerge.execute.threads import one_thread
from raymerge.merge_plan.files_read import SourceFile
from raymerge.planner.inputs.source import GateSpec, Source, Stage
from raymerge.runtime.driver.interruptions import STOPPED_AT_ONCE
from raymerge.runtime.workers.pool import UNIT, Runner
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

_PREFIX = "progress-"
_EVERY_SECONDS = 0.5


@contextmanager
def telling(
    staging: Path, unit: int, aborted: threading.Event, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """What a unit is to call now and then with the bytes that it has read so far.

    It writes them down at most twice a second. A number that cannot be written is no reason to give up, and
    none is kept when the unit ends.

    Args:
        staging: where the number is written to.
        unit: whose number.
        aborted: set once the unit is to be given up; the next call raises ``IncompleteError`` then.
        clock: seconds.
    """
    path, told_at = staging / f"{_PREFIX}{unit}", -_EVERY_SECONDS

    def tell(nbytes: int) -> None:
        nonlocal told_at
        if aborted.is_set():
            raise IncompleteError(STOPPED_AT_ONCE)
        now = clock()
        if now - told_at >= _EVERY_SECONDS:
            told_at = now
            with suppress(OSError):
                _write(path, nbytes)

    try:
        yield tell
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def told(staging: Path) -> dict[int, int]:
    """Bytes read so far, by the unit in hand."""
    found: dict[int, int] = {}
    for path in staging.glob(f"{_PREFIX}*"):
        # A unit may end while its number is read.
        with suppress(OSError, ValueError):
            found[int(path.name.removeprefix(_PREFIX))] = int(path.read_text(encoding="ascii"))
    return found


def _write(path: Path, nbytes: int) -> None:
    """Put the number into place whole; it need not survive a power cut."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    part.write_text(str(nbytes), encoding="ascii")
    part.replace(path)


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


class StageWork(Protocol):
    """How a stage is carried out. Made on the driver, from the stage; travels to the workers pickled."""

    @property
    def num_units(self) -> int:
        """Units that the work is cut into, whatever the number of workers and their memory."""

    def costs(self) -> tuple[int, ...]:
        """Bytes that each unit reads, for progress."""

    def least_budget(self) -> int:
        """Bytes of memory without which no unit can be done."""

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Bytes of disk that the staging directory takes at most, the result included.

        Args:
            budget: bytes of memory that a worker may use; what does not fit may go to disk.
            busy: units that are in hand at once, at most.
        """

    def check(self) -> None:
        """Find what stands in the way, from headers, configs and tokenizers alone.

        Raises:
            PlanError: with all problems.
        """

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Do one unit on a worker and leave its files in ``staging``, durably.

        A worker that was given up may write the same unit at the same time: the same bytes to the same
        places.

        Args:
            number: of the unit.
            staging: where the files of all units are.
            device: what it computes on.
            budget: bytes of memory that it may use.
            tell: called now and then with the bytes read so far; may raise, to have the unit given up.

        Returns:
            Bytes read and bytes written.
        """

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """What a unit leaves in ``staging``: ranges of files by the key; without any, the whole file.

        Nothing else writes there, so that it can be told later whether it is still what was left.
        """

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """On the driver, after all units: leave the result in ``staging``, as the stage's layout says.

        Returns:
            What is worth knowing of the result, as JSON values.
        """


def work_of(stage: Stage) -> StageWork:
    """What carries a stage out."""
    if isinstance(stage.spec, GateSpec):
        from raymerge.stages.router import gate_work

        return gate_work(stage)
    from raymerge.stages.alignment import align_work

    return align_work(stage)


def sources_of_stage(stage: Stage) -> tuple[Source, ...]:
    """The models that a stage reads."""
    spec = stage.spec
    return (spec.base,) if isinstance(spec, GateSpec) else (spec.reference, spec.other)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Everything that workers need to do units of a stage, but their numbers."""

    work: StageWork
    """What is done."""
    staging: Path
    """Where units leave their files, reachable from every worker."""
    budget: int
    """Bytes of memory that a worker may use."""
    files: tuple[SourceFile, ...] = ()
    """The files of the stage's sources."""

    @property
    def slots(self) -> int:
        """One: a unit may use the whole budget."""
        return 1

    @property
    def part(self) -> str:
        """A unit."""
        return UNIT

    @property
    def place(self) -> Path:
        """Where units leave their files."""
        return self.staging

    def reads(self) -> tuple[frozenset[int], ...]:
        """Which files a unit reads is not known beforehand, so it may be all of them."""
        return (frozenset(range(len(self.files))),) * self.work.num_units

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of what the unit had; all units need the same."""
        del number
        had, least = self.budget if budget is None else budget, self.work.least_budget()
        return max(least, had // 2) if had > least else None

    def open(self, device: torch.device, name: str) -> Runner:
        """A runner on the device."""
        return UnitRunner(self, device, name)


class UnitRunner:
    """Does units in one process, one at a time."""

    def __init__(self, work: UnitWork, device: torch.device, name: str) -> None:
        self._work = work
        self._fallback = Fallback(device)
        self._name = name
        self._aborted = threading.Event()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Do one unit, with the work's budget or a smaller one.

        Where a GPU fails, or has too little memory, the unit is done on the processor, and the receipt has a
        note of it.

        Raises:
            IncompleteError: ``abort`` was called.
        """
        began, wanted = time.monotonic(), self._work
        budget = wanted.budget if budget is None else budget
        # The bytes of a result are those of one thread, wherever it is made.
        with one_thread(), telling(wanted.staging, number, self._aborted) as tell:
            do = partial(wanted.work.unit, number, staging=wanted.staging, budget=budget, tell=tell)
            (read, written), note = self._fallback.run(lambda device, note: (do(device=device), note))
        digests, seconds = digests_of(wanted.staging, wanted.work.files(number)), time.monotonic() - began
        return Receipt(number, read, written, round(seconds, 6), self._name, digests, note=note)

    def abort(self) -> None:
        """Have the unit in hand fail when it next tells how far it is; nothing uses what it leaves."""
        self._aborted.set()

    def close(self) -> None:
        """Nothing is held open between units."""
