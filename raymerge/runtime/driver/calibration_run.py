"""Carries out a calibration that stands alone: the result of its stage is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raymerge.device_numerics import DeviceChoice
from raymerge.errors import Problem, TargetError
from raymerge.events import OnEvent
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import Stage
from raymerge.runtime.driver.chained_merges import begun_on
from raymerge.runtime.driver.stage_run import StageRun, work_of
from raymerge.runtime.driver.versions import stage_record
from raymerge.runtime.workers.pool import Pool

_LAYERS = DeviceChoice("cuda", "layers of a model are computed")


class CalibrationRun:
    def __init__(self, stage: Stage, output: Path, options: RunOptions, *, on_event: OnEvent) -> None:
        """Raises PlanError: the model cannot be run on these texts. OptionError: the memory limit is too
        small. TargetError: something else is at the output place."""
        self._check_place(stage, output, options)
        work = work_of(stage)
        placed = replace(stage, made_at=str(output))
        self._run = StageRun(placed, output.parent, options, work=work, on_event=on_event)
        self._run.check()
        self.num_units = work.num_units

    def carry_out(self, pool: Pool) -> Mapping[str, Any]:
        """Run with a started pool until the statistics are in place; returns their report."""
        pool.settle(lambda: begun_on(self._run.ledger_paths) or _LAYERS)
        return self._run.carry_out(pool)

    def _check_place(self, stage: Stage, output: Path, options: RunOptions) -> None:
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return
        record = stage_record(output) if output.is_dir() else {}
        if record.get("digest") == stage.digest or (record and options.replace):
            return
        if record:
            what = "holds other statistics."
            raise TargetError(Problem(str(output), what, "Add --replace, or choose another -o."))
        raise TargetError(Problem(str(output), "holds no statistics.", "Choose another -o."))
