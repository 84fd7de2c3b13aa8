"""Stages and merges that use each other's results, carried out in order towards one output.

Intermediate results lie in a directory beside the output, or where the user says. The same command keeps
those that still match their plans and that nobody wrote to since; they are removed when the output is in
place."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from raymerge.checkpoints.source import open_checkpoint
from raymerge.device_numerics import DeviceChoice
from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    OptionError,
    PlanError,
    Problem,
    TargetError,
    UserError,
)
from raymerge.events import OnEvent, StepKept, StepStarted
from raymerge.merge_plan.plan import planned_layout, weight_files
from raymerge.methods import find_method
from raymerge.options import STEPS_WANTED, RunOptions
from raymerge.planner.explain import StageLine
from raymerge.planner.inputs.sources import RepairSpec, Source, Stage, TransplantSpec, holdings
from raymerge.planner.merges import PlannedMerge, planned_as_measured
from raymerge.publish.finish import kept_companions, read_record
from raymerge.publish.lease import stop_request_at
from raymerge.publish.output_place import INSIDE, MANIFEST, relation, steps_directory
from raymerge.publish.record import NAME, RECORD, Journal, Ledger, object_at
from raymerge.publish.staging import LocalStaging, is_untouched, staging_of
from raymerge.recipes.schema import Recipe
from raymerge.runtime.driver.run import Asked, Run, RunResult
from raymerge.runtime.driver.stage_run import (
    StageRun,
    StageWork,
    awaits_results,
    is_stage_made,
    over_results,
    with_stage_results,
    work_of,
)
from raymerge.runtime.driver.versions import file_versions, forget_commits, keep_commits, stage_record
from raymerge.runtime.workers.pool import Pool
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.local.store import LocalStore, check_disk_space, nearest
from raymerge.storage.temporary import fetched
from raymerge.verifier.structure import PROVENANCE_FILE, verify_structure

_ELSEWHERE = "Choose another --steps."


def check_places(output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge], root: Path) -> None:
    """Raises OptionError for an output that cannot be written where it is to be, and unless ``root`` is a
    harmless, writable directory for intermediate results."""
    problems = dict.fromkeys(place_problems(output, options, merges, root))
    if options.steps is not None and has_steps(merges):
        place = nearest(root.parent)
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            what = f"{place} is a file." if not place.is_dir() else f"you may not write in {place}."
            problems[Problem(options.steps, what, _ELSEWHERE)] = None
    if problems:
        raise OptionError(problems)


def place_problems(
    output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge], root: Path | None = None
) -> Iterator[Problem]:
    """What is wrong with the place of the output, and the directory ``root`` of intermediate results (None
    for the output's own), by their names: they may be another machine's."""
    if is_remote(str(output)) and planned_layout(merges[-1].plan) is not None:
        what = "objects are written from begin to end, and files of chunks of a 'layout' are not."
        remedy = "Give a directory as -o, and copy the result there; or take 'layout' out."
        yield Problem(shown(str(output)), what, remedy)
    if not has_steps(merges):
        return
    if options.steps is None and is_remote(str(output)):
        yield Problem(shown(str(output)), *STEPS_WANTED)
        return
    root = root or steps_directory(output, options.steps)
    if (verb := relation(str(root), str(output))) is not None:
        yield Problem(str(root), f"the directory for results between {verb} the output place.", _ELSEWHERE)
    # It is removed at the end, with all that is in it.
    for name, model, is_file in _models(merges):
        verb = relation(str(root), model)
        # Beside the output it lies inside what the output lies inside, which is refused for that.
        if verb is not None and not (verb == INSIDE and (is_file or options.steps is None)):
            what = f"the directory for results between {verb} the source {name}."
            yield Problem(str(root), what, _ELSEWHERE)


def chosen_steps(output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge]) -> str:
    """The user's directory for intermediate results, if there are any; else ""."""
    is_chosen = options.steps is not None and has_steps(merges)
    return str(steps_directory(output, options.steps)) if is_chosen else ""


def has_steps(merges: Sequence[PlannedMerge]) -> bool:
    return len(merges) > 1 or bool(merges[-1].stages)


def _models(merges: Sequence[PlannedMerge]) -> Iterator[tuple[str, str, bool]]:
    """Name and place of every model and adapter from outside, and whether it is one file."""
    for source in (each for merge in merges for each in merge.sources):
        if source.checkpoint.unwritten is None:
            yield source.checkpoint.name, source.checkpoint.root, source.checkpoint.is_single_file
        if source.adapter is not None:
            yield source.adapter.name, source.adapter.root, False


@contextmanager
def holding_steps(root: Path, merges: Sequence[PlannedMerge]) -> Iterator[None]:
    """Hold the directory of these merges' intermediate results, which ``drop_steps`` ends. What stages of
    other recipes left there is removed."""
    with LocalStaging(root, merges[-1].plan).lock():
        stages = [stage for merge in merges for stage in merge.stages]
        used = {stage.directory for stage in stages}
        names = "|".join({re.escape(stage.name) for stage in stages})
        made = re.compile(rf"\.?((?:{names})-[0-9a-f]{{16}})(\.raymerge-.*)?")
        for each in root.iterdir() if stages and root.is_dir() else ():
            if (match := made.fullmatch(each.name)) is not None and match[1] not in used:
                shutil.rmtree(each, ignore_errors=True)
        keep_commits(root, [source for merge in merges for source in merge.sources])
        yield


def drop_steps(root: Path, options: RunOptions) -> None:
    """Once what is made of them is in place."""
    forget_commits(root)
    if not options.keep_intermediates:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a submission takes beside what is taken by now."""

    steps: int
    """Most bytes at one time before the output."""
    results: int
    output: int
    """0 in an object store."""

    @property
    def together(self) -> int:
        return max(self.steps, self.results + self.output)


def check_disk(
    disk: Disk, steps: Path, output: Path | str, *, is_chosen: bool, what: str = "the output"
) -> None:
    """Raises OptionError without room for ``disk``; ``is_chosen``: the user named the directory ``steps``;
    ``what`` is made."""
    option = "--steps" if is_chosen else "-o"
    if disk.steps and not is_remote(str(output)) and _is_one_disk(steps, Path(output)):
        whole = f"{what}, with what is made before it,"
        check_disk_space(steps.parent, disk.together, what=whole, option=option)
        return
    if disk.steps:
        check_disk_space(steps.parent, disk.steps, what=f"what is made before {what}", option=option)
    if not is_remote(str(output)):
        check_disk_space(Path(os.path.realpath(output)).parent, disk.output, what=what)


def disk_nbytes(
    merges: Sequence[PlannedMerge],
    place_of: Callable[[PlannedMerge], Path | str],
    steps: Path,
    *,
    staging_of: Callable[[Stage], int],
    counted: set[Path] | None = None,
) -> Disk:
    """Bytes beside what is taken by now, which includes what is made or begun. Intermediate results stay
    until the last merge is published. ``staging_of`` gives what a stage takes until its result is in place.
    ``counted``: places of results that other outputs count. They are left out, and those of this one added.
    """
    counted = set() if counted is None else counted
    stored = most = output = 0
    for merge in merges:
        for stage in merge.stages:
            result = steps / stage.directory
            is_begun = any(steps.glob(f".{stage.directory}.raymerge-*"))
            if not (result in counted or is_begun or result.exists()):
                most = max(most, stored + staging_of(stage))
                stored += stage.layout.nbytes
            counted.add(result)
        place = place_of(merge)
        nbytes = 0 if place in counted else _missing_nbytes(merge, place, steps)
        if merge is merges[-1]:
            output = nbytes
        else:
            stored += nbytes
            counted.add(Path(place))
        most = max(most, stored)
    return Disk(most, stored, output)


def _missing_nbytes(merge: PlannedMerge, place: Path | str, steps: Path) -> int:
    """Bytes of disk for the result of a merge, unless it is there or begun; less unfinished runs of other
    plans, which are removed before where they are not to be replaced."""
    if is_remote(str(place)):
        return 0
    place = Path(place)
    if place.parent == steps and place.exists():
        return 0
    staging = LocalStaging(Path(os.path.realpath(place)), merge.plan)
    nbytes = 0 if staging.root.exists() else sum(weight_files(merge.plan).values())
    left = (each for other in staging.others() for each in other.rglob("*"))
    return nbytes - sum(each.lstat().st_blocks * 512 for each in left)


def _is_one_disk(one: Path, other: Path) -> bool:
    places = (Path(os.path.realpath(each)) for each in (one, other))
    first, second = (nearest(each).stat().st_dev for each in places)
    return first == second


def kept_steps(
    merges: Sequence[PlannedMerge], output: Path | str, steps: str | None = None
) -> frozenset[str]:
    """Names of the merges that are made already, as far as can be told without workers and weights.

    A worker with another device or version of torch makes them again. One whose files were touched is left
    out, though all its bytes may prove right."""
    root = steps_directory(output, steps)
    names: set[str] = set()
    for merge in merges[:-1]:
        if names.issuperset(merge.uses.values()) and is_kept(merge, root):
            names.add(str(merge.recipe.name))
    return frozenset(names)


def with_results(merge: PlannedMerge, root: Path) -> tuple[Source, ...]:
    entries = merge.plan.manifest["sources"]
    return tuple(
        _found(source, root / merge.uses[source.index], entries[source.index]["made_by"])
        if source.index in merge.uses
        else source
        for source in merge.sources
    )


def _found(source: Source, place: Path, digest: str) -> Source:
    """A source on disk, if the plan of that digest made it."""
    checkpoint = open_checkpoint(place, source.name)
    # Only now: what was written to before it was opened is found here, and after that by its version.
    if digest_at(place) != digest or not _is_as_made(place):
        what = "it is no longer the result that was planned with; something else changed it meanwhile."
        raise CheckpointError(Problem(str(place), what, "Give the command again."))
    # What somebody laid beside them since is no part of it.
    published = Ledger.files(place / RECORD / NAME) or {}
    companions = tuple(key for key in checkpoint.companions if key in published)
    read = replace(checkpoint, companions=companions, contents=_contents(place))
    return replace(source, checkpoint=read)


def _contents(place: Path) -> str:
    """A digest of its contents, by its own record; "" where that has none."""
    try:
        with LocalStore(place) as store:
            record = read_record(store, PROVENANCE_FILE)
    except CheckpointError:
        return ""
    record = {key: record.get(key) for key in ("plan", "numerics", "tensors", "files")}
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def is_kept(merge: PlannedMerge, root: Path, pool: Pool | None = None) -> bool:
    """Whether an intermediate merge and its stages are made; None for any pool."""
    numerics, of_stages = (None, None) if pool is None else (pool.numerics, pool.stage_numerics)
    results = with_results(merge, root)
    stages = [over_results(stage, results) for stage in merge.stages]
    if not all(is_stage_made(root / stage.directory, stage, of_stages) for stage in stages):
        return False
    return _is_made(root / str(merge.recipe.name), merge, with_stage_results(results, root), numerics)


def _is_made(
    place: Path, merge: PlannedMerge, sources: Sequence[Source], numerics: Mapping[str, str] | None = None
) -> bool:
    """Whether a directory holds, untouched, the merge of these sources; None for any numerics."""
    if digest_at(place) != merge.plan.digest:
        return False
    before = Ledger.conditions(place / RECORD / NAME) or {}
    if before.get("versions") != file_versions(holdings(sources)):
        return False
    if numerics is not None and before.get("numerics") != numerics:
        return False
    if not (_is_as_made(place) and _has_companions(place, merge, sources)):
        return False
    # Companions are compared above, and what lies beside them is not read.
    return verify_structure(place).are_tensors_sound


def _is_as_made(place: Path) -> bool:
    """Whether nobody wrote to a result, and its record covers it; reads no weights."""
    return is_untouched(place) and _contents(place) != ""


def digest_at(place: Path) -> str | None:
    """The digest of its plan in a checkpoint's record."""
    return object_at(place / MANIFEST).get("digest")


def _has_companions(place: Path, merge: PlannedMerge, sources: Sequence[Source]) -> bool:
    """Whether copied files are still the donor's: no plan has their contents."""
    donor = sources[int(merge.plan.manifest["donor"])].checkpoint
    names = kept_companions(merge.plan, donor.companions)
    with fetched(donor.root, names) as theirs:
        return all(
            (place / key).is_file() and filecmp.cmp(place / key, theirs / key, shallow=False) for key in names
        )


def device_for(merges: Sequence[PlannedMerge], ledgers: Iterable[Path]) -> DeviceChoice:
    """The device that ``device: auto`` takes where there is a GPU; a rule, so that it is predictable.

    A GPU where matrices are decomposed or layers computed; otherwise processors, which are faster than
    storage (docs/design/0022). A run goes on where it began: ``ledgers`` are those of unfinished runs and
    intermediate results, the most telling first."""
    if (begun := begun_on(ledgers)) is not None:
        return begun
    specs = [stage.spec for merge in merges for stage in merge.stages]
    if any(not isinstance(spec, TransplantSpec) for spec in specs):
        return DeviceChoice("cuda", "what comes before the merge computes layers of a model")
    if any(spec.approximation == "omp" for spec in specs if isinstance(spec, TransplantSpec)):
        return DeviceChoice("cuda", "omp compares each new row with those of all shared tokens")
    names = {expression.method for merge in merges for expression in merge.plan.expressions}
    decomposing = sorted(name for name in names if (method := find_method(name)) and method.decomposes)
    if decomposing:
        return DeviceChoice("cuda", f"{decomposing[0]} decomposes matrices")
    return DeviceChoice("cpu", "storage limits this merge, and a GPU would not help")


def begun_on(ledgers: Iterable[Path]) -> DeviceChoice | None:
    begun = next(filter(None, map(_device_of, ledgers)), None)
    if begun is None:
        return None
    return DeviceChoice("cpu" if begun == "cpu" else "cuda", "what is there was begun on it")


def _device_of(ledger: Path) -> str | None:
    """The kind of device a ledger was begun on; None also where the place cannot be read."""
    try:
        numerics = (Ledger.conditions(ledger) or {}).get("numerics")
    except OSError:
        return None
    device = numerics.get("device") if isinstance(numerics, dict) else None
    return device if isinstance(device, str) else None


Works = Callable[[Stage], StageWork]


class MergeJob:
    """One submission: merges in the order in which they need each other; the last is the output."""

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
        root: Path | None = None,
        asked: Asked | None = None,
    ) -> None:
        """``merges`` are planned with ``root`` as the place of results, None for ``steps_directory`` of the
        output; ``began`` is ``time.monotonic()`` at the begin of the user's command, None for now; ``works``
        carry out stages; ``journal`` is opened with the record of the output; ``asked`` None for a request at
        the output place.

        Raises what ``Run`` raises, and OptionError without a directory for intermediate results."""
        self._merges = tuple(merges)
        self._output = output
        self._root = root or steps_directory(output, options.steps)
        check_places(output, options, self._merges, self._root)
        self._options = options
        self._on_event = on_event
        self._began = began
        self._works = works
        self._journal = journal
        self._asked = asked or stop_request_at(output, options).is_made
        self._stages = tuple(stage for merge in self._merges for stage in merge.stages)
        # By directory: stages of one name may read other texts.
        self._known: dict[str, StageWork] = {}
        self._runs = self._possible_runs()
        self.is_stopped = False
        """Whether it was asked to stop; all may be made nevertheless."""

    @property
    def run(self) -> Run:
        """Of the output, over the results before it; as they were planned until they are made."""
        return self._runs[-1]

    @property
    def most_segments(self) -> int | None:
        """More workers would be idle. None with a stage over other merges, whose units are unknown yet."""
        if len(self._known) < len({stage.directory for stage in self._stages}):
            return None
        segments = (len(merge.plan["segments"]) for merge in self._merges)
        return max(*segments, *(work.num_units for work in self._known.values()), 1)

    def check(self) -> None:
        """Before any worker is started: raises TargetError for the place, OptionError without room."""
        for run in reversed(self._runs):
            run.check()
        if has_steps(self._merges):
            is_chosen = self._options.steps is not None
            check_disk(self.disk(), self._root, self._output, is_chosen=is_chosen)

    def disk(self, counted: set[Path] | None = None) -> Disk:
        """``counted`` as in ``disk_nbytes``."""
        if not has_steps(self._merges):
            return Disk(0, 0, self.run.missing_bytes())
        return disk_nbytes(
            self._merges, self._place, self._root, staging_of=self._staging_nbytes, counted=counted
        )

    def carry_out(self, pool: Pool, *, is_last: bool = True) -> RunResult:
        """Run with a started pool until the output is published; raises what ``Run.carry_out`` raises.
        ``is_last``: nothing else is made with the pool.

        What began under other conditions is refused before anything is made again. After any error
        intermediate results stay, and the same command goes on."""
        pool.settle(lambda: device_for(self._merges, self.ledgers()))
        if not has_steps(self._merges):
            return self.make_last(pool, is_last=is_last)
        self.check()
        with self.holding(), holding_steps(self._root, self._merges):
            self.check_conditions(pool)
            self.make_before(pool)
            self.take_results(pool)
            result = self.make_last(pool, is_last=is_last)
            drop_steps(self._root, self._options)
        return result

    def holding(self) -> AbstractContextManager[object]:
        """Hold the place beside the output, where others look, while intermediate results are made
        elsewhere."""
        if self._root == steps_directory(self._output):
            return nullcontext()
        return staging_of(self._output, self._merges[-1].plan, self._options).lock(of_steps=True)

    def make_before(self, pool: Pool) -> None:
        """Have the merges made that the last one uses."""
        for merge in self._merges[:-1]:
            self._have(merge, pool)

    def take_results(self, pool: Pool) -> None:
        """Have the stages of the last merge made, which goes on over all results."""
        *before, last = self._merges
        if before:
            self._on_event(StepStarted(*self._step(last)))
        ready = self._ready(last, pool)
        last = planned_as_measured(last, self._root)
        self._merges = (*before, last)
        self._runs = (*self._runs[:-1], self._run(last, ready))

    def make_last(self, pool: Pool, *, is_last: bool) -> RunResult:
        if is_last:
            # Behind the last run workers are idle.
            pool.conclude()
        result = self.run.carry_out(pool)
        self.is_stopped = self.run.is_stopped
        return result

    def check_conditions(self, pool: Pool) -> None:
        """Raises TargetError for what began under other conditions; changes nothing."""
        errors: list[UserError] = []
        with noting(errors):
            self._runs[-1].check_conditions(pool)
        for stage in self._stages:
            with noting(errors):
                if not awaits_results(stage):
                    self._stage_run(stage).check_conditions(pool)
        if errors:
            raise TargetError(_problems(errors)) from errors[0]

    def ledgers(self) -> Iterator[Path]:
        """Where ledgers of unfinished runs and intermediate results would be."""
        for run in reversed(self._runs):
            yield run.ledger_path
        for stage in self._stages:
            if not awaits_results(stage):
                yield from self._stage_run(stage).ledger_paths
        for merge in self._merges[:-1]:
            yield self._between(merge) / RECORD / NAME

    def _have(self, merge: PlannedMerge, pool: Pool) -> None:
        """An intermediate result, kept or made; a touched one is run again, and keeps what receipts prove."""
        place = self._between(merge)
        if is_kept(merge, self._root, pool):
            self._on_event(StepKept(*self._step(merge)))
            return
        self._on_event(StepStarted(*self._step(merge)))
        sources = self._ready(merge, pool)
        if digest_at(place) == merge.plan.digest:
            LocalStaging(Path(os.path.realpath(place)), merge.plan).take_back()
        run = self._run(merge, sources)
        run.carry_out(pool)
        if run.is_stopped:
            raise IncompleteError(
                f"stopped with {merge.recipe.name} made. It is kept: the same command goes on from there."
            )

    def _ready(self, merge: PlannedMerge, pool: Pool) -> tuple[Source, ...]:
        results = with_results(merge, self._root)
        for stage in merge.stages:
            run = self._stage_run(over_results(stage, results))
            if awaits_results(stage):
                run.check()
            run.carry_out(pool)
        return with_stage_results(results, self._root)

    def _possible_runs(self) -> tuple[Run, ...]:
        """A run of each merge, which proves that the options suit all merges and stages."""
        runs: list[Run] = []
        errors: list[UserError] = []
        for merge in self._merges:
            with noting(errors):
                runs.append(self._run(merge, merge.sources))
            for stage in merge.stages:
                with noting(errors):
                    if not awaits_results(stage):
                        self._known[stage.directory] = self._works(stage)
                        self._stage_run(stage).check()
                    elif isinstance(stage.spec, RepairSpec):
                        self._works(stage).check()
        raise_any(errors)
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
            recipes=[
                str(each.plan.manifest["recipe_text"]) for each in self._merges[: self._merges.index(merge)]
            ],
            warn_encoding_error=recipe.warn_encoding_error if isinstance(recipe, Recipe) else None,
            journal=self._journal if is_last else None,
            asked=self._asked,
        )

    def _reports(self, stages: Sequence[Stage]) -> dict[str, dict[str, Any]]:
        return {stage.directory: stage_record(self._root / stage.directory) for stage in stages}

    def _stage_run(self, stage: Stage) -> StageRun:
        number = [each.directory for each in self._stages].index(stage.directory) + 1
        return StageRun(
            stage,
            self._root,
            self._options,
            work=self._known.get(stage.directory) or self._works(stage),
            on_event=self._on_event,
            position=(number, len(self._stages)),
            asked=self._asked,
        )

    def _staging_nbytes(self, stage: Stage) -> int:
        """Most bytes of disk that a stage takes; at least its result's where no more is known yet."""
        return self._stage_run(stage).disk_nbytes() if stage.directory in self._known else stage.layout.nbytes

    def _place(self, merge: PlannedMerge) -> Path | str:
        return self._output if merge is self._merges[-1] else self._between(merge)

    def _between(self, merge: PlannedMerge) -> Path:
        return self._root / str(merge.recipe.name)

    def _step(self, merge: PlannedMerge) -> tuple[str, int, int]:
        number = next(number for number, each in enumerate(self._merges, start=1) if each is merge)
        return merge.recipe.name or "", number, len(self._merges)


def stage_lines(
    merge: PlannedMerge, options: RunOptions, *, works: Works = work_of
) -> tuple[tuple[StageLine, ...], tuple[Problem, ...]]:
    """What the stages of a merge take, as far as it is known yet, and what stands in their way."""
    errors: list[UserError] = []
    lines: list[StageLine] = []
    for stage in merge.stages:
        line = StageLine(stage.title, None, None, None, None)
        with noting(errors):
            if not awaits_results(stage):
                run = StageRun(stage, Path(), options, work=works(stage), on_event=lambda _: None)
                run.work.check()
                units, read = run.work.num_units, sum(run.work.costs())
                line = StageLine(stage.title, units, read, run.work.least_budget(), None)
                run.budget()
                line = replace(line, disk_bytes=run.disk_nbytes())
            elif isinstance(stage.spec, RepairSpec):
                works(stage).check()
        lines.append(line)
    return tuple(lines), _problems(errors)


def _problems(errors: Sequence[UserError]) -> tuple[Problem, ...]:
    return tuple(dict.fromkeys(problem for error in errors for problem in error.problems))


def raise_any(errors: Sequence[UserError]) -> None:
    """Raises all of these errors as one; returns where there is none."""
    if errors:
        # What is wrong with the recipe says more than what is wrong with how it is to be run.
        kind = type(next((error for error in errors if isinstance(error, PlanError)), errors[0]))
        raise kind(_problems(errors))


@contextmanager
def noting(errors: list[UserError]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        errors.append(error)
