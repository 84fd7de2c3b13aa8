"""A merge with a stage before it, whose work is as small as it can be and fails where a test says so."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raymerge.api import plan_for
from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.events import OnEvent
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Source, Stage, make_stage, prepared_of
from raymerge.planner.merges import PlannedMerge
from raymerge.runtime.driver.chained_merges import MergeJob, steps_directory
from raymerge.runtime.driver.run import RunResult
from raymerge.runtime.driver.stage_run import StageWork
from raymerge.runtime.workers.pool import InlinePool, Pool
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

UNITS = 4
WIDTH = 8
LEAST_BUDGET = 1_000_000


@dataclass(frozen=True, slots=True)
class PieceWork:
    """Each unit makes one row of the result from the last bytes of the base; they are joined at the end."""

    stage: Stage
    pause: float = 0.0
    steps: int = 1
    dies_once: str = ""
    always_dies: bool = False
    fails_with: Exception | None = None
    gpu_fails_with: Exception | None = None
    threads_file: str = ""
    objection: str = ""
    wrong_header: bool = False
    spill_nbytes: int = 0
    report: Mapping[str, Any] | None = None

    @property
    def num_units(self) -> int:
        return UNITS

    def costs(self) -> tuple[int, ...]:
        return tuple(100 * (1 + unit) for unit in range(UNITS))

    def least_budget(self) -> int:
        return LEAST_BUDGET

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        assert budget >= LEAST_BUDGET
        return 2 * self.stage.layout.nbytes + busy * self.spill_nbytes

    def check(self) -> None:
        if self.objection:
            raise PlanError(Problem(self.stage.place, self.objection, "Change it."))

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        assert budget >= LEAST_BUDGET
        for step in range(self.steps):
            time.sleep(self.pause / self.steps)
            tell(self.costs()[number] * (step + 1) // self.steps)
        if number == 1 and device.type == "cuda" and self.gpu_fails_with is not None:
            raise self.gpu_fails_with
        self._fail(number)
        row = struct.pack(f"<{WIDTH}f", *(number + each / 256 for each in self._weights()))
        with LocalStore(staging) as store:
            store.write_atomic(f"piece-{number}.bin", row)
        return WIDTH, len(row)

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        return {f"piece-{number}.bin": ()}

    def _fail(self, number: int) -> None:
        if self.threads_file:
            with Path(self.threads_file).open("a") as file:
                file.write(f"{torch.get_num_threads()}\n")
        if number != 1:
            return
        if self.fails_with is not None:
            raise self.fails_with
        if self.dies_once and not Path(self.dies_once).exists():
            Path(self.dies_once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.always_dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def _weights(self) -> bytes:
        assert isinstance(self.stage.spec, GateSpec)
        checkpoint = self.stage.spec.base.checkpoint
        with LocalStore(Path(checkpoint.root)) as store:
            file = checkpoint.files[0]
            return store.read(file.key, file.nbytes - WIDTH, WIDTH)

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        rows = b"".join((staging / f"piece-{number}.bin").read_bytes() for number in range(UNITS))
        header = self.stage.layout.header
        if self.wrong_header:
            header = header.replace(b"router", b"rooter")
        (staging / RESULT_FILE).write_bytes(header + rows)
        return {"rows": UNITS} if self.report is None else self.report


def gate_stage(base: Source, *, name: str = "router-rows", seed: int = 0) -> Stage:
    spec = GateSpec(base, "random", (), (), (0,), WIDTH, seed, 1.0, 0.01, ())
    return make_stage(
        name=name,
        title=f"{name} from {Path(base.name).name}",
        place="recipe.yml:3:1",
        spec=spec,
        tensors=[TensorSpec("router.0", DType.F32, (UNITS, WIDTH))],
        version="0",
    )


def with_stage(merge: PlannedMerge, stage: Stage, output: Path) -> PlannedMerge:
    first, *others = merge.sources
    first = replace(first, prepared=(*first.prepared, prepared_of(stage, steps_directory(output))))
    return replace(merge, stages=(*merge.stages, stage), sources=(first, *others))


def staged(recipes: Any, output: Path, *, seed: int = 0) -> tuple[PlannedMerge, ...]:
    *before, last = plan_for(recipes, output)
    return (*before, with_stage(last, gate_stage(last.sources[0], seed=seed), output))


@dataclass(frozen=True, slots=True)
class Works:
    settings: Mapping[str, Any]

    def __call__(self, stage: Stage) -> StageWork:
        return PieceWork(stage, **self.settings)


def run_chain(
    merges: Sequence[PlannedMerge],
    output: Path,
    options: RunOptions | None = None,
    *,
    on_event: OnEvent = lambda _: None,
    pool: Pool | None = None,
    **settings: Any,
) -> RunResult:
    options = options or RunOptions(inline=True)
    chain = MergeJob(merges, output, options, on_event=on_event, works=Works(settings))
    chain.check()
    used = pool or InlinePool("cpu", on_event=on_event)
    try:
        used.start()
        return chain.carry_out(used)
    finally:
        used.close()
