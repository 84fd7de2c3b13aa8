"""Stages and merges that use each other's results, carried out one after the other towards one output.

The results between lie in a directory beside the output, or where the user says: checkpoints that ordinary
runs made, and what stages prepared. The same command keeps those that are still what their plans say, and
that nobody wrote to since; they are removed when the output is in place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raymerge.device_numerics import DeviceChoice
from raymerge.errors import IncompleteError, PlanError, Problem, TargetError, UserError
from raymerge.events import OnEvent, StepKept, StepStarted
from raymerge.methods import find_method
from raymerge.options import RunOptions
from raymerge.planner.chained_merges import PlannedMerge
from raymerge.planner.explain import StageLine
from raymerge.planner.inputs.source import Source, Stage
from raymerge.publish.attempt import RECORD
from raymerge.publish.journal import Journal
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.output_place import staging_of, stop_request_of
from raymerge.publish.staging import Staging
from raymerge.publish.steps_place import steps_directory
from raymerge.recipes import Recipe
from raymerge.runtime.driver.disk_space import check_disk, disk_nbytes
from raymerge.runtime.driver.prepared import awaits_results, over_results, with_stage_results
from raymerge.runtime.driver.result_cache import digest_at, is_kept, with_results
from raymerge.runtime.driver.run import Run, RunResult
from raymerge.runtime.driver.stage_run import StageRun, stage_record
from raymerge.runtime.driver.stage_work import StageWork, work_of
from raymerge.runtime.driver.steps import check_steps, has_steps
from raymerge.runtime.driver.versions import forget_commits, keep_commits
from raymerge.runtime.workers.pool import Pool


def device_for(merges: Sequence[PlannedMerge], ledgers: Iterable[Path]) -> DeviceChoice:
    """The device that ``device: auto`` takes where there is a GPU; a rule, so that it can be foreseen.

    A GPU where matrices are decomposed or layers of a model are computed; processors for all else, which are
    faster than storage there (docs/design/0022). What was begun goes on where it was begun.

    Args:
        merges: all merges of the submission.
        ledgers: where ledgers of unfinished runs and results between would be, the most telling first.
    """
    begun = next(filter(None, map(_device_of, ledgers)), None)
    if begun is not None:
        return DeviceChoice("cuda" if begun == "cuda" else "cpu", "what is there was begun on it")
    if any(merge.stages for merge in merges):
        return DeviceChoice("cuda", "what comes before the merge computes layers of a model")
    names = {expression.method for merge in merges for expression in merge.plan.expressions}
    decomposing = sorted(name for name in names if (method := find_method(name)) and method.decomposes)
    if decomposing:
        return DeviceChoice("cuda", f"{decomposing[0]} decomposes matrices")
    return DeviceChoice("cpu", "storage limits this merge, and a GPU would not help")


def _device_of(ledger: Path) -> str | None:
    """The kind of device that a ledger was begun on; None also where the place cannot be looked at."""
    try:
        numerics = (Ledger.conditions(ledger) or {}).get("numerics")
    except OSError:
        return None
    device = numerics.get("device") if isinstance(numerics, dict) else None
    return device if isinstance(device, str) else None


Works = Callable[[Stage], StageWork]
"""What carries each stage out."""


class Chain:
    """One submission: merges in the order in which they need each other, of which the last is the output."""

    def __init__(
        self,
        merges: Sequence[PlannedMerge],
        output: Path | str,
        options: RunOptions,
        *,
        on_event: OnEvent,
        began: float | None = None,
        works: Works = work_of,
        journal: Journal | None = None,
    ) -> None:
        """
        Args:
            merges: at least one, planned with ``steps_directory`` of the output as the place of results.
            output: directory of the new checkpoint, or a place in an object store with its options.
            options: how to run.
            on_event: receives progress, as in ``Run``.
            began: ``time.monotonic()`` when the user's command began; None for now.
            works: what carries each stage out.
            journal: opened with the record of the output; None for none.

        Raises:
            PlanError: something stands in the last plan's way, or in a stage's.
            OptionError: the memory limit is too small for a plan or a stage, or more than is free; or there
                is no directory for the results between.
            TargetError: the output would lie over, in or around a source.
        """
        self._merges = tuple(merges)
        check_steps(output, options, self._merges)
        self._output = output
        self._root = steps_directory(output, options.steps)
        self._options = options
        self._on_event = on_event
        self._began = began
        self._works = works
        self._journal = journal
        self._stop_request = stop_request_of(output, options)
        self._stages = tuple(stage for merge in self._merges for stage in merge.stages)
        self._known: dict[str, StageWork] = {}
        self._runs = self._possible_runs()

    @property
    def most_segments(self) -> int | None:
        """Segments of the merge, or units of the stage, that has most: more workers would have nothing to do.

        None where a stage is over results of other merges: its units are not known yet.
        """
        if len(self._known) < len(self._stages):
            return None
        segments = (len(merge.plan["segments"]) for merge in self._merges)
        return max(*segments, *(work.num_units for work in self._known.values()), 1)

    def check(self) -> None:
        """Find what is wrong with the output place before any worker is started.

        Raises:
            TargetError: it is taken, or holds another plan's unfinished run.
            OptionError: there is not enough room for what comes before the output, or for that with it.
        """
        for run in reversed(self._runs):
            run.check()
        if has_steps(self._merges):
            disk = disk_nbytes(self._merges, self._place, self._root, staging_of=self._staging_nbytes)
            is_chosen = self._options.steps is not None
            check_disk(disk, self._root, self._output, is_chosen=is_chosen)

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the output is published; raises what ``Run.carry_out`` raises.

        What was begun under other conditions is refused before anything is made again on the way to it.
        Whatever is raised, the results between stay, and the same command goes on from there.
        """
        *before, last = self._merges
        pool.settle(lambda: device_for(self._merges, self._ledgers()))
        if not has_steps(self._merges):
            return _concluded(self._runs[-1], pool)
        self.check()
        with self._held():
            self._check_conditions(pool)
            keep_commits(self._root, [source for merge in self._merges for source in merge.sources])
            for merge in before:
                self._have(merge, pool)
            if before:
                self._on_event(StepStarted(*self._step(last)))
            result = _concluded(self._run(last, self._ready(last, pool)), pool)
            forget_commits(self._root)
            if not self._options.keep_intermediates:
                shutil.rmtree(self._root, ignore_errors=True)
        return result

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the directory of the results between; where it is not beside the output, that place too, for
        others to see who makes it."""
        last = self._merges[-1].plan
        with ExitStack() as held:
            if self._options.steps is not None:
                held.enter_context(staging_of(self._output, last, self._options).lock_steps())
            held.enter_context(Staging(self._root, last).lock())
            yield

    def _check_conditions(self, pool: Pool) -> None:
        """Find out what may not go on with these workers, as far as it reads what is there by now."""
        errors: list[UserError] = []
        with _noting(errors):
            self._runs[-1].check_conditions(pool)
        for stage in self._stages:
            with _noting(errors):
                if not awaits_results(stage):
                    self._stage_run(stage).check_conditions(pool)
        if errors:
            raise TargetError(_problems(errors)) from errors[0]

    def _ledgers(self) -> Iterator[Path]:
        """Where ledgers of unfinished runs, and of results between, would be."""
        for run in reversed(self._runs):
            yield run.ledger_path
        for stage in self._stages:
            if not awaits_results(stage):
                yield from self._stage_run(stage).ledger_paths
        for merge in self._merges[:-1]:
            yield self._between(merge) / RECORD / NAME

    def _have(self, merge: PlannedMerge, pool: Pool) -> None:
        """Have the result of a merge that others need: the one that is there, or a new one.

        One that was touched is run again from where it was: its receipts tell which of its bytes are right.
        """
        place = self._between(merge)
        if is_kept(merge, self._root, pool):
            self._on_event(StepKept(*self._step(merge)))
            return
        self._on_event(StepStarted(*self._step(merge)))
        sources = self._ready(merge, pool)
        if digest_at(place) == merge.plan.digest:
            Staging(Path(os.path.realpath(place)), merge.plan).take_back()
        run = self._run(merge, sources)
        _carried_out(run, pool)
        if run.is_stopped:
            raise IncompleteError(
                f"stopped with {merge.recipe.name} made. It is kept: the same command goes on from there."
            )

    def _ready(self, merge: PlannedMerge, pool: Pool) -> tuple[Source, ...]:
        """The sources of a merge as they are, once its stages are carried out."""
        results = with_results(merge, self._root)
        for stage in merge.stages:
            run = self._stage_run(over_results(stage, results))
            if awaits_results(stage):
                run.check()
            run.carry_out(pool)
        return with_stage_results(results, self._root)

    def _possible_runs(self) -> tuple[Run, ...]:
        """A run of each merge, which proves that the options suit all of them, and all stages."""
        runs: list[Run] = []
        errors: list[UserError] = []
        for merge in self._merges:
            with _noting(errors):
                runs.append(self._run(merge, merge.sources))
            for stage in merge.stages:
                with _noting(errors):
                    if not awaits_results(stage):
                        self._known[stage.name] = self._works(stage)
                        self._stage_run(stage).check()
        if errors:
            # What is wrong with the recipe says more than what is wrong with how it is to be run.
            kind = type(next((error for error in errors if isinstance(error, PlanError)), errors[0]))
            raise kind(_problems(errors))
        return tuple(runs)

    def _run(self, merge: PlannedMerge, sources: Sequence[Source]) -> Run:
        is_last, recipe = merge is self._merges[-1], merge.recipe
        # What is at the place of a result between is ours, and no longer what is wanted; it is not uploaded.
        options = self._options if is_last else replace(self._options, replace=True, scratch=None)
        return Run(
            merge.plan,
            sources,
            self._place(merge),
            options,
            on_event=self._on_event,
            began=self._began if is_last else None,
            reports=self._reports(self._stages if is_last else merge.stages),
            recipes=self._recipes_before(merge),
            warn_encoding_error=recipe.warn_encoding_error if isinstance(recipe, Recipe) else None,
            journal=self._journal if is_last else None,
            stop_request=self._stop_request,
        )

    def _recipes_before(self, merge: PlannedMerge) -> tuple[str, ...]:
        """Texts of the merges whose results one may use."""
        before = self._merges[: self._merges.index(merge)]
        return tuple(str(each.plan.manifest["recipe_text"]) for each in before)

    def _reports(self, stages: Sequence[Stage]) -> dict[str, dict[str, Any]]:
        """The records of stages that were carried out; the last merge keeps those of all of them."""
        return {stage.name: stage_record(self._root / stage.name) for stage in stages}

    def _stage_run(self, stage: Stage) -> StageRun:
        number = next(n for n, each in enumerate(self._stages, start=1) if each.name == stage.name)
        return StageRun(
            stage,
            self._root,
            self._options,
            work=self._known.get(stage.name) or self._works(stage),
            on_event=self._on_event,
            position=(number, len(self._stages)),
            stop_request=self._stop_request,
        )

    def _staging_nbytes(self, stage: Stage) -> int:
        """Bytes of disk that a stage takes at most; its result at least, where no more is known yet."""
        return self._stage_run(stage).disk_nbytes() if stage.name in self._known else stage.layout.nbytes

    def _place(self, merge: PlannedMerge) -> Path | str:
        return self._output if merge is self._merges[-1] else self._between(merge)

    def _between(self, merge: PlannedMerge) -> Path:
        """Where the result of a merge is that others use."""
        return self._root / str(merge.recipe.name)

    def _step(self, merge: PlannedMerge) -> tuple[str, int, int]:
        number = next(number for number, each in enumerate(self._merges, start=1) if each is merge)
        return merge.recipe.name or "", number, len(self._merges)


def stage_lines(
    merge: PlannedMerge, options: RunOptions, *, works: Works = work_of
) -> tuple[tuple[StageLine, ...], tuple[Problem, ...]]:
    """What the stages of a merge take, and what stands in their way; reads no weights, and writes nothing.

    Of a stage over results of other merges neither is known yet.
    """
    errors: list[UserError] = []
    lines: list[StageLine] = []
    for stage in merge.stages:
        line = StageLine(stage.title, None, None, None, None)
        with _noting(errors):
            if not awaits_results(stage):
                run = StageRun(stage, Path(), options, work=works(stage), on_event=lambda _: None)
                run.work.check()
                units, read = run.work.num_units, sum(run.work.costs())
                line = StageLine(stage.title, units, read, run.work.least_budget(), None)
                run.check_memory()
                line = replace(line, disk_bytes=run.disk_nbytes())
        lines.append(line)
    return tuple(lines), _problems(errors)


def _concluded(run: Run, pool: Pool) -> RunResult:
    """The last run, behind which workers have nothing to do."""
    pool.conclude()
    return _carried_out(run, pool)


def _carried_out(run: Run, pool: Pool) -> RunResult:
    run.announce()
    return run.carry_out(pool)


def _problems(errors: Sequence[UserError]) -> tuple[Problem, ...]:
    return tuple(dict.fromkeys(problem for error in errors for problem in error.problems))


@contextmanager
def _noting(errors: list[UserError]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        errors.append(error)
