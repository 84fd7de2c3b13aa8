"""Stages and merges that use each other's results, carried out one after the other towards one output.

The results between lie in a directory beside the output: checkpoints that ordinary runs made, and what
stages prepared. The same command keeps those that are still what their plans say, and that nobody wrote to
since; they are removed when the output is in place.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raymerge.assemble.finish import kept_companions
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, PlanError, Problem, TargetError, UserError
from raymerge.planner.explain import StageLine
from raymerge.planner.planned import PlannedMerge
from raymerge.planner.sources import Source
from raymerge.planner.stages import Stage
from raymerge.recipes import Recipe
from raymerge.runtime.commits import forget_commits, keep_commits
from raymerge.runtime.device_decision import settle_device
from raymerge.runtime.events import OnEvent, StepKept, StepStarted
from raymerge.runtime.journal import Journal
from raymerge.runtime.ledger import NAME, Ledger
from raymerge.runtime.options import RunOptions
from raymerge.runtime.output_place import check_steps, stop_request_of
from raymerge.runtime.pool import Pool
from raymerge.runtime.prepared import awaits_results, over_results, with_stage_results
from raymerge.runtime.room import disk_nbytes
from raymerge.runtime.run import Run, RunResult
from raymerge.runtime.stage_results import stage_record
from raymerge.runtime.stage_run import StageRun, is_stage_made
from raymerge.runtime.stage_work import StageWork, work_of
from raymerge.runtime.staging import RECORD, Staging, check_room, is_untouched
from raymerge.runtime.versions import file_versions
from raymerge.storage.addresses import is_remote
from raymerge.storage.fetched import fetched
from raymerge.verifier.structure import RECORD_PLAN, verify_structure

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
            merges: at least one, planned with ``steps_directory(output)`` as the place of results.
            output: directory of the new checkpoint, or a place in an object store with its options.
            options: how to run.
            on_event: receives progress, as in ``Run``.
            began: ``time.monotonic()`` when the user's command began; None for now.
            works: what carries each stage out.
            journal: opened with the record of the output; None for none.

        Raises:
            PlanError: something stands in the last plan's way, or in a stage's.
            OptionError: the memory limit is too small for a plan or a stage, or more than is free.
            TargetError: the output would lie over, in or around a source.
        """
        self._merges = tuple(merges)
        self._output = output
        self._root = steps_directory(output)
        self._options = options
        self._on_event = on_event
        self._began = began
        self._works = works
        self._journal = journal
        self._stop_request = stop_request_of(output, options)
        self._stages = tuple(stage for merge in self._merges for stage in merge.stages)
        self._known: dict[str, StageWork] = {}
        check_steps(output, num_merges=len(self._merges), num_stages=len(self._stages))
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
            OptionError: there is not enough room for the stages and what comes after them.
        """
        for run in reversed(self._runs):
            run.check()
        if self._stages:
            wanted = disk_nbytes(self._merges, self._place, self._root, staging_of=self._staging_nbytes)
            check_room(self._root.parent, wanted, what="the output, with what is made before it,")

    def carry_out(self, pool: Pool) -> RunResult:
        """Run with a started pool until the output is published; raises what ``Run.carry_out`` raises.

        What was begun under other conditions is refused before anything is made again on the way to it.
        Whatever is raised, the results between stay, and the same command goes on from there.
        """
        settle_device(pool, self._merges, self._output, ledgers=tuple(self._ledgers()))
        *before, last = self._merges
        if not before and not last.stages:
            return _carried_out(self._runs[-1], pool)
        self.check()
        with Staging(self._root, last.plan).lock():
            self._check_conditions(pool)
            keep_commits(self._root, [source for merge in self._merges for source in merge.sources])
            for merge in before:
                self._have(merge, pool)
            if before:
                self._on_event(StepStarted(*self._step(last)))
            result = _carried_out(self._run(last, self._ready(last, pool)), pool)
            forget_commits(self._root)
            if not self._options.keep_intermediates:
                shutil.rmtree(self._root, ignore_errors=True)
        return result

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
            raise TargetError(_problems(errors))

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
        if _is_kept(merge, self._root, pool):
            self._on_event(StepKept(*self._step(merge)))
            return
        self._on_event(StepStarted(*self._step(merge)))
        sources = self._ready(merge, pool)
        if _digest_at(place) == merge.plan.digest:
            Staging(Path(os.path.realpath(place)), merge.plan).take_back()
        _carried_out(self._run(merge, sources), pool)

    def _ready(self, merge: PlannedMerge, pool: Pool) -> tuple[Source, ...]:
        """The sources of a merge as they are, once its stages are carried out."""
        results = _with_results(merge, self._root)
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
        # What is at the place of a result between is ours, and no longer what is wanted.
        options = self._options if is_last else replace(self._options, replace=True)
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


def steps_directory(output: Path | str) -> Path:
    """Where the results between are, each by its name: beside the output, out of sight.

    Beside a place in an object store there are none, and the directory is never made.
    """
    if is_remote(str(output)):
        return Path(os.devnull) / "steps"
    real = Path(os.path.realpath(output))
    return real.parent / f".{real.name}.raymerge.steps"


def kept_steps(merges: Sequence[PlannedMerge], output: Path | str) -> frozenset[str]:
    """Names of the merges that are made already, as far as can be told without workers and without weights.

    A worker with another device or another version of torch makes them again. One whose files were touched
    is not among them, though it may turn out that all its bytes are right.
    """
    root = steps_directory(output)
    found: set[str] = set()
    for merge in merges[:-1]:
        if found.issuperset(merge.uses.values()) and _is_kept(merge, root):
            found.add(str(merge.recipe.name))
    return frozenset(found)


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


def _with_results(merge: PlannedMerge, root: Path) -> tuple[Source, ...]:
    """The sources of a merge, with the results of other merges as they are."""
    wanted = merge.plan.manifest["sources"]
    return tuple(
        _found(source, root / merge.uses[source.index], wanted[source.index]["made_by"])
        if source.index in merge.uses
        else source
        for source in merge.sources
    )


def _found(source: Source, place: Path, digest: str) -> Source:
    """A source as it lies on disk, if it was made by the plan of that digest."""
    checkpoint = open_checkpoint(place, source.name)
    if _digest_at(place) != digest:
        what = "it is no longer the result that was planned with; something else changed it meanwhile."
        raise CheckpointError(Problem(str(place), what, "Give the command again."))
    return replace(source, checkpoint=checkpoint)


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


def _is_kept(merge: PlannedMerge, root: Path, pool: Pool | None = None) -> bool:
    """Whether the result of a merge that others use is there, and those of its stages; None for any pool."""
    numerics, of_stages = (None, None) if pool is None else (pool.numerics, pool.stage_numerics)
    results = _with_results(merge, root)
    stages = [over_results(stage, results) for stage in merge.stages]
    if not all(is_stage_made(root / stage.name, stage, of_stages) for stage in stages):
        return False
    return _is_made(root / str(merge.recipe.name), merge, with_stage_results(results, root), numerics)


def _is_made(
    place: Path,
    merge: PlannedMerge,
    sources: Sequence[Source],
    numerics: Mapping[str, str] | None = None,
) -> bool:
    """Whether a directory holds, untouched, what a merge makes of these sources; None for any numerics."""
    if _digest_at(place) != merge.plan.digest:
        return False
    before = Ledger.conditions(place / RECORD / NAME) or {}
    if before.get("versions") != file_versions(sources):
        return False
    if numerics is not None and before.get("numerics") != numerics:
        return False
    if not (is_untouched(place) and _has_companions(place, merge, sources)):
        return False
    return not verify_structure(place).problems


def _digest_at(place: Path) -> str | None:
    """Digest of the plan that a checkpoint was made by, as its record says."""
    try:
        found = json.loads((place / RECORD_PLAN / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("digest") if isinstance(found, dict) else None


def _has_companions(place: Path, merge: PlannedMerge, sources: Sequence[Source]) -> bool:
    """Whether the files that are copied are still those of the donor: no plan speaks of what is in them."""
    donor = sources[int(merge.plan.manifest["donor"])].checkpoint
    kept = kept_companions(merge.plan, donor.companions)
    with fetched(donor.root, kept) as theirs:
        return all(
            (place / key).is_file() and filecmp.cmp(place / key, theirs / key, shallow=False) for key in kept
        )
