"""A stage of router rows as work for workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from raymerge.planner.inputs.source import GateSpec, Stage
from raymerge.recipes import RANDOM_GATES
from raymerge.stages.router.direct import DirectWork
from raymerge.stages.router.streamed import StreamedWork
from raymerge.storage.store import Range


class GateWork(Protocol):
    """Makes the rows of one stage; picklable.

    Its bytes depend on the number of torch's threads: whoever carries it out sets that to one.
    """

    @property
    def num_units(self) -> int:
        """Independent units; depends on the recipe and the base's tokenizer alone."""

    def costs(self) -> tuple[int, ...]:
        """Bytes that each unit reads, about."""

    def least_budget(self) -> int:
        """Fewest bytes of memory that a worker needs."""

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Most bytes of disk, the result included, with so much memory a worker and so many units in hand."""

    def check(self) -> None:
        """Find out before anything starts whether it can be done.

        Raises:
            PlanError: with all of the reasons why not.
        """

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Do one unit and leave its files in ``staging``; returns bytes read and written.

        ``tell`` is called after each layer with the bytes read so far; what it raises ends the unit.
        """

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """What a unit leaves in ``staging``: whole files."""

    def conclude(self, staging: Path) -> dict[str, Any]:
        """Make the result of all units' files, and say what is known of it: ``GateReport.to_json``."""


def gate_work(stage: Stage) -> GateWork:
    """How the router rows that a stage asks for are made.

    Raises:
        TypeError: the stage asks for something else.
    """
    if not isinstance(stage.spec, GateSpec):
        raise TypeError(f"{stage.name} asks for no router rows")
    if stage.spec.mode in RANDOM_GATES or stage.spec.mode == "cheap_embed":
        return DirectWork(stage, stage.spec)
    return StreamedWork(stage, stage.spec)
