"""Measures what the parents of a merge do to its tensors, with a pool: before the merge, or of its output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raymerge.errors import CheckpointError, IncompleteError, Problem
from raymerge.events import OnEvent, StageStarted, UnitDone
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import load_plan
from raymerge.options import RunOptions
from raymerge.planner.explain import nbytes_by_use
from raymerge.planner.inputs.sources import Prepared, holdings
from raymerge.planner.merges import PlannedMerge
from raymerge.publish.finish import record_at
from raymerge.publish.output_place import kept_directories
from raymerge.publish.record import JOURNAL, NAME, RECORD, Ledger, entries_of
from raymerge.runtime.driver.examine import ExamineWork, examined, locate_sources, slots_and_budget
from raymerge.runtime.driver.versions import source_files
from raymerge.runtime.workers.pool import Pool
from raymerge.storage.addresses import shown
from raymerge.verifier.measure import BASE, InputKey, MeasureSpec, measured
from raymerge.verifier.measurements import Kind, Report, Speed
from raymerge.verifier.structure import RECORD_PLAN

_NOT_MADE = "it is made of what a stage or another merge makes, which is not there"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a report is about: a plan, where its sources are, and what became of it."""

    name: str
    kind: Kind
    plan: Plan
    roots: tuple[str, ...]
    files: tuple[SourceFile, ...]
    absent: Mapping[int, str]
    """Unreadable sources by index, with the reason."""
    output: str | None = None
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    stages: tuple[Speed, ...] = ()
    problems: tuple[Problem, ...] = ()
    """What the user can change about absent sources."""


def subject_of_merge(merge: PlannedMerge, name: str, kind: Kind = "recipe") -> Subject:
    """What a planned merge would do; raises PlanError where it cannot run."""
    held = holdings(merge.sources)
    made = {number for number, each in enumerate(held) if isinstance(each, Prepared)} | merge.uses.keys()
    files = tuple(each for each in source_files(held) if each.source not in made)
    roots = tuple("." if number in made else each.place for number, each in enumerate(held))
    return Subject(name, kind, merge.plan.require(), roots, files, dict.fromkeys(made, _NOT_MADE))


@contextmanager
def subject_of_output(place: Path | str, sources: Mapping[str, str], steps: str | None) -> Iterator[Subject]:
    """A checkpoint that raymerge made. Raises CheckpointError: it keeps no plan, or cannot be read."""
    name = shown(str(place))
    with record_at(str(place)) as output:
        if not (output / RECORD_PLAN).is_dir():
            what = "it keeps no plan, so nobody knows what it was made of."
            remedy = "Give a recipe, or what raymerge merged; 'raymerge diff A B --report' takes any two."
            raise CheckpointError(Problem(name, what, remedy))
        plan = load_plan(output / RECORD_PLAN)
        located = locate_sources(plan, output, sources, kept_directories(place, steps))
        receipts, stages = Ledger.read(output / RECORD / NAME), _stage_speeds(output / RECORD / JOURNAL)
        sources_of = tuple(located.roots), tuple(located.files), located.absent
        yield Subject(name, "merge", plan, *sources_of, str(place), receipts, stages, tuple(located.problems))


class ReportRun:
    def __init__(self, subject: Subject, options: RunOptions, *, is_exact: bool, on_event: OnEvent) -> None:
        self._subject, self._options = subject, options
        self._is_exact, self._on_event = is_exact, on_event

    @property
    def num_parts(self) -> int:
        return len(self._subject.plan["segments"])

    def carry_out(self, pool: Pool) -> Report:
        """Raises OptionError if workers lack the sources or the output, CheckpointError if nothing can be
        measured since sources are gone, IncompleteError if stopped."""
        subject, plan = self._subject, self._subject.plan
        slots, budget = slots_and_budget(self._options, pool)
        spec = MeasureSpec(plan, subject.absent, budget, self._is_exact)
        work = ExamineWork(spec, subject.output, subject.roots, subject.files, slots)
        pool.survey(work)
        reports = examined(plan, work, pool, dict, on_event=self._on_event, peak=slots * budget)
        if len(reports) < self.num_parts:
            what = f"stopped with {len(reports)} of {self.num_parts} segments measured."
            raise IncompleteError(f"{what} The same command begins anew.")
        return self._report(reports)

    def _report(self, reports: Mapping[int, Mapping[str, Any]]) -> Report:
        subject, plan = self._subject, self._subject.plan
        receipts = subject.receipts.values()
        errors = {int(op): sums for each in receipts for op, sums in each.encoding_errors.items()}
        result = measured(plan, reports.values(), errors)
        if subject.problems and not len(result.measurements):
            raise CheckpointError(subject.problems)
        names = [str(each["name"]) for each in plan.manifest["sources"]]
        return Report(
            name=subject.name,
            kind=subject.kind,
            method=str(plan.manifest["method"]),
            parents=tuple(_parent_name(names, key) for key in result.parents),
            base=None if result.base == BASE else names[result.base],
            measurements=result.measurements,
            routers=result.routers,
            nbytes_by_use=nbytes_by_use(plan),
            speeds=(*subject.stages, *_segment_speeds(plan, subject.receipts)),
            is_exact=self._is_exact,
            skipped=result.skipped,
            is_base_named=_is_base_named(plan.manifest["recipe"]),
            raymerge=version("raymerge"),
        )


def _is_base_named(recipe: Mapping[str, Any]) -> bool:
    models = recipe.get("models") or ()
    return recipe.get("base_model") is not None and any(
        each["model"] == recipe["base_model"]
        for each in models
        if isinstance(each, Mapping) and "model" in each
    )


def _parent_name(names: list[str], key: InputKey) -> str:
    return f"{names[key.source]} ({key.again + 1})" if key.again else names[key.source]


def _segment_speeds(plan: Plan, receipts: Mapping[int, Receipt]) -> Iterator[Speed]:
    """Segments that only copy, and those that compute."""
    copies = [each.is_copy for each in plan.expressions]
    expressions = plan["ops"].column("expression").to_pylist()
    segments = plan["segments"].select(["first_op", "num_ops"]).to_pylist()
    by_kind: dict[str, list[Receipt]] = defaultdict(list)
    for number, receipt in receipts.items():
        first, count = segments[number]["first_op"], segments[number]["num_ops"]
        is_copy = all(copies[each] for each in expressions[first : first + count])
        by_kind["copied" if is_copy else "merged"].append(receipt)
    for kind, own in sorted(by_kind.items()):
        read, written = (sum(getattr(each, name) for each in own) for name in ("read_bytes", "written_bytes"))
        yield Speed(kind, read, written, sum(each.seconds for each in own))


def _stage_speeds(journal: Path) -> tuple[Speed, ...]:
    """What the units of each stage moved, as the journal tells."""
    units: dict[str, list[Mapping[str, Any]]] = {}
    title = ""
    for entry in entries_of(journal.read_bytes()) if journal.is_file() else ():
        if entry.get("event") == StageStarted.kind():
            title = str(entry.get("title"))
        elif entry.get("event") == UnitDone.kind():
            units.setdefault(title, []).append(entry)
    return tuple(Speed(stage, *_moved(own)) for stage, own in units.items())


def _moved(entries: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    return (sum(each.get(name, 0) for each in entries) for name in _MOVED)


_MOVED = ("read_bytes", "written_bytes", "seconds")
