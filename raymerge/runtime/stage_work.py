"""The work of a stage: units, which are independent of each other, and a conclusion from all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from raymerge.errors import IncompleteError
from raymerge.execute.receipts import Receipt
from raymerge.execute.threads import one_thread
from raymerge.planner.sources import Source
from raymerge.planner.stages import GateSpec, Stage
from raymerge.runtime.pool import Runner


class StageWork(Protocol):
    """How a stage is carried out. Made on the driver, from the stage; travels to the workers pickled."""

    @property
    def num_units(self) -> int:
        """Units that the work is cut into, whatever the number of workers and their memory."""

    def costs(self) -> tuple[int, ...]:
        """Bytes that each unit reads, for progress."""

    def least_budget(self) -> int:
        """Bytes of memory without which no unit can be done."""

    def check(self) -> None:
        """Find what stands in the way, from headers, configs and tokenizers alone.

        Raises:
            PlanError: with all problems.
        """

    def unit(self, number: int, *, staging: Path, device: torch.device, budget: int) -> tuple[int, int]:
        """Do one unit on a worker and leave its files in ``staging``, durably.

        The files have names of their own and come into place whole: a worker that was given up may write
        the same unit at the same time.

        Returns:
            Bytes read and bytes written.
        """

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """On the driver, after all units: leave the result in ``staging``, as the stage's layout says.

        Returns:
            What is worth knowing of the result, as JSON values.
        """


def work_of(stage: Stage) -> StageWork:
    """What carries a stage out."""
    if isinstance(stage.spec, GateSpec):
        from raymerge.router import gate_work

        return gate_work(stage)
    from raymerge.alignment import align_work

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

    @property
    def slots(self) -> int:
        """One: a unit may use the whole budget."""
        return 1

    @property
    def part(self) -> str:
        """A unit."""
        return "unit"

    def open(self, device: torch.device, name: str) -> Runner:
        """A runner on the device."""
        return UnitRunner(self, device, name)


class UnitRunner:
    """Does units in one process, one at a time."""

    def __init__(self, work: UnitWork, device: torch.device, name: str) -> None:
        self._work = work
        self._device = device
        self._name = name

    def run(self, number: int) -> Receipt:
        """Do one unit.

        Raises:
            IncompleteError: the GPU has too little memory.
        """
        began, wanted = time.monotonic(), self._work
        try:
            # The bytes of a result are those of one thread, wherever it is made.
            with one_thread():
                read, written = wanted.work.unit(
                    number, staging=wanted.staging, device=self._device, budget=wanted.budget
                )
        except torch.OutOfMemoryError as error:
            raise IncompleteError(
                f"the GPU of {self._name} has too little memory: {str(error).splitlines()[0]} A worker may "
                f"use {wanted.budget} bytes there now. What is done is kept: give a smaller --memory to the "
                "same command and it goes on, or --device cpu to begin again there."
            ) from error
        return Receipt(number, read, written, round(time.monotonic() - began, 6), self._name, {})

    def abort(self) -> None:
        """A unit that is begun goes on to its end; nothing uses what it leaves before its receipt is in."""

    def close(self) -> None:
        """Nothing is held open between units."""
