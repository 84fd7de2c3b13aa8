"""Examines segments of a plan with a pool, writing nothing: an audit and a report do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from raymerge.checkpoints.dcp.layout import is_chunked
from raymerge.checkpoints.header import read_header
from raymerge.deferred import torch
from raymerge.documents.fields import FaultError
from raymerge.errors import CheckpointError, OptionError, Problem
from raymerge.events import OnEvent, PartInHand, SegmentDone, Started
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.plan import Plan
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import names_file
from raymerge.publish.chunks import output_store
from raymerge.publish.finish import STORY, places_in
from raymerge.publish.output_place import MANIFEST
from raymerge.publish.record import NAME, RECORD, Ledger, object_at
from raymerge.publish.shards import costliest_first, file_numbers
from raymerge.recipes.entry import ModelReference, parse_reference
from raymerge.runtime.driver.run import do_parts, planned
from raymerge.runtime.driver.versions import stage_record
from raymerge.runtime.workers.pool import Pool, Receipts, Runner
from raymerge.runtime.workers.sizing import free_memory, usual_budget
from raymerge.storage.addresses import chunked_place, is_remote, parent_and_name
from raymerge.storage.open import Lookup, open_store, resolve_source
from raymerge.storage.store import ReadStore
from raymerge.units import format_size

_NOT_KEPT = "it is made of what a stage or another merge made, which was not kept (--keep-intermediates)"


@dataclass(slots=True)
class Located:
    """Sources by their index in the plan."""

    roots: list[str] = field(default_factory=list)
    """Directories; "." for absent ones."""
    files: list[SourceFile] = field(default_factory=list)
    absent: dict[int, str] = field(default_factory=dict)
    """Why tensors that read a source cannot be audited."""
    problems: list[Problem] = field(default_factory=list)
    """What the user can change about that."""


def locate_sources(plan: Plan, output: Path, given: Mapping[str, str], steps: Sequence[Path]) -> Located:
    """Find the sources of an output where they were, or by ``given``, directories by the recipe's names. One
    that is gone or changed is reported, and does not stop the audit of the others.

    ``output`` has the record; ``steps`` are where intermediate results may be, if they were kept."""
    located, entries = Located(), plan.manifest["sources"]
    located.problems += _unknown(given, [entry["name"] for entry in entries])
    versions = Ledger.versions(output / RECORD / NAME)
    places = places_in(object_at(output / STORY))
    for number, entry in enumerate(entries):
        if "made_by" in entry:
            root, lack = _intermediate(steps, entry), _NOT_KEPT
            before: Mapping[str, str] = {}
        else:
            root, lack = _root(entry["name"], given, places), f"{entry['name']} is not there"
            is_given = entry["name"] in given
            before = {} if is_given or number >= len(versions) else versions[number]
        files = [] if root is None else _files(number, root, entry)
        if root is not None:
            lack = _changed(files, entry, before)
        is_whole = not is_chunked(key for key, *_ in entry["files"])
        located.roots.append("." if root is None else root if is_whole else chunked_place(root))
        if not lack:
            located.files += files
            continue
        located.absent[number] = lack
        if "made_by" not in entry:
            remedy = f"Say where it is as it was: --source '{entry['name']}=DIRECTORY'."
            located.problems.append(Problem(f"source {entry['name']}", f"{lack}.", remedy))
    return located


def _unknown(given: Mapping[str, str], names: list[str]) -> Iterator[Problem]:
    for name in given:
        if name not in names:
            what = f"the output has no source of this name; its sources are {', '.join(names)}."
            yield Problem(f"--source {name}", what, "Name one of these.")


def _intermediate(steps: Sequence[Path], entry: Mapping[str, Any]) -> str | None:
    """Where the result of a stage or intermediate merge is kept, or None."""
    for place in (place for each in steps if each.is_dir() for place in sorted(each.iterdir())):
        if entry["made_by"] in (stage_record(place).get("digest"), object_at(place / MANIFEST).get("digest")):
            return str(place)
    return None


def _root(name: str, given: Mapping[str, str], places: Mapping[str, str]) -> str | None:
    try:
        reference = parse_reference(name, exists=os.path.isdir)
    except FaultError:
        return None
    tried: list[tuple[str | None, str | None]] = [(given.get(name), None)]
    if name not in given:
        tried = [(places.get(name), None), (reference.path, reference.revision)]
    for path, revision in tried:
        if path is None:
            continue
        expanded = os.path.expanduser(str(path))
        # Servers are asked for what the user names, and not for what a record says.
        is_asked = name in given and is_remote(expanded)
        if names_file(ModelReference(expanded)) and (is_asked or not is_remote(expanded)):
            return parent_and_name(expanded)[0]
        try:
            return resolve_source(expanded, revision, lookup=Lookup(offline=not is_asked))
        except CheckpointError:
            continue
    return None


def _files(number: int, root: str, entry: Mapping[str, Any]) -> list[SourceFile]:
    with open_store(root) as store:
        infos = store.infos([key for key, _, _ in entry["files"]])
    return [
        SourceFile(number, root, each.key, each.nbytes, each.version)
        for each in infos.values()
        if each is not None
    ]


def _changed(files: list[SourceFile], entry: Mapping[str, Any], before: Mapping[str, str]) -> str:
    """How a source differs from what was read, by headers and times; "" for not at all."""
    name, there = entry["name"], {file.key: file for file in files}
    for key, nbytes, digest in entry["files"]:
        file = there.get(key)
        if file is None:
            return f"{name} has no {key} any more"
        if file.nbytes != nbytes or not _has_header(file, digest):
            return f"{key} of {name} is another file than was merged"
        if before.get(key, file.version) != file.version:
            return f"{key} of {name} was written to since it was merged"
    return ""


def _has_header(file: SourceFile, digest: str) -> bool:
    if not file.key.endswith(".safetensors"):
        return True
    try:
        with open_store(file.root) as store:
            return read_header(store, file.key, file.nbytes, file.version).digest == digest
    except CheckpointError:
        return False


class Examiner(Protocol):
    def examine(self, segment: int) -> tuple[dict[str, Any], int]:
        """What there is to say of a segment, as JSON values, and the bytes read for it."""

    def abort(self) -> None: ...


class ExamineSpec(Protocol):
    @property
    def plan(self) -> Plan: ...

    @property
    def budget(self) -> int: ...

    def examiner(self, sources: Sequence[ReadStore], output: ReadStore | None) -> Examiner: ...


@dataclass(frozen=True, slots=True)
class ExamineWork:
    """Everything that workers need to examine segments of a plan, but their numbers; nothing is written."""

    spec: ExamineSpec
    output: str | None
    """Place of the checkpoint that the plan made; None where it made none."""
    roots: tuple[str, ...]
    files: tuple[SourceFile, ...]
    slots: int
    part: ClassVar[str] = "segment"

    @property
    def place(self) -> Path | None:
        """The output's directory; None where it is in no file system."""
        return None if self.output is None or is_remote(self.output) else Path(self.output)

    def reads(self) -> tuple[frozenset[int], ...]:
        return file_numbers(self.files, files_read(self.spec.plan))

    def lessened(self, number: int, budget: int | None) -> int | None:  # noqa: ARG002 - all parts are alike
        """None: with less memory fewer tensors would be examined."""
        return None

    def open(self, device: torch.device, name: str) -> Runner:  # noqa: ARG002 - float64 is for processors
        sources = [open_store(root) for root in self.roots]
        output = None if self.output is None else output_store(self.spec.plan, self.output)
        stores = (*sources, *([] if output is None else [output]))
        return _ExamineRunner(self.spec.examiner(sources, output), stores, name)


@dataclass(frozen=True, slots=True)
class _ExamineRunner:
    examiner: Examiner
    stores: Sequence[ReadStore]
    name: str

    def run(self, number: int, budget: int | None = None) -> Receipt:  # noqa: ARG002 - see ``lessened``
        began = time.monotonic()
        answer, read_bytes = self.examiner.examine(number)
        receipt = Receipt(number, read_bytes, 0, round(time.monotonic() - began, 6), self.name, {})
        return replace(receipt, report=answer)

    def in_hand(self) -> tuple[PartInHand, ...]:
        return ()

    def abort(self) -> None:
        """Let the segments in hand fail at their next tensor or sample."""
        self.examiner.abort()

    def close(self) -> None:
        for store in self.stores:
            store.close()


LEAST_BUDGET = 16 << 20
"""Bytes of memory that a segment in hand takes at least."""
_FIXED = 8 << 20
# Bytes of it for counts of magnitudes, and for what is read to be compared byte by byte.
_STOPPED = "stopped at once. The same command begins anew."


def slots_and_budget(options: RunOptions, pool: Pool) -> tuple[int, int]:
    """Segments that a worker examines at once, and the bytes of memory that each may take."""
    budget = options.memory or usual_budget(options, free_memory())
    if budget < LEAST_BUDGET:
        least = format_size(LEAST_BUDGET)
        what = f"a worker may use {format_size(budget)}, and this takes {least}."
        raise OptionError(Problem("--memory", what, f"Give {least} or more."))
    slots = max(1, min(pool.threads, budget // LEAST_BUDGET))
    return slots, max(1, budget // slots - _FIXED)


_Found = TypeVar("_Found")


def examined(
    plan: Plan,
    work: ExamineWork,
    pool: Pool,
    read: Callable[[Mapping[str, Any]], _Found],
    *,
    on_event: OnEvent,
    peak: int,
) -> dict[int, _Found]:
    """What ``read`` makes of the report of each segment, in the order of segments; fewer than there are if it
    was stopped. ``peak``: bytes of memory of a worker."""
    costs = plan["segments"].column("cost").to_pylist()
    on_event(planned(plan, peak))
    on_event(Started(pool.workers, pool.device, 0, 0, pool.threads))
    by_segment: dict[int, _Found] = {}

    def take(receipts: Receipts) -> None:
        for each in receipts:
            by_segment[each.segment] = read(each.report)
            cost = costs[each.segment]
            on_event(SegmentDone(each.segment, each.worker, each.read_bytes, 0, cost, each.seconds))

    do_parts(pool, work, costliest_first(costs), take, on_event=on_event, at_once=_STOPPED)
    return dict(sorted(by_segment.items()))
