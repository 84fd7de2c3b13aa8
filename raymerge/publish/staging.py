"""The staging directory: where a checkpoint grows beside its place, until it is verified and renamed into it.

It is named by the plan's digest, and marked anew each time it is begun. Whoever has its mark writes the same
bytes to the same places, so a worker that was given up and goes on writing does no harm; whoever has another
writes nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymerge.errors import PlanError, Problem, TargetError
from raymerge.execute.output import UNFINISHED
from raymerge.merge_plan.tables import Plan, load_plan, save_plan
from raymerge.publish.attempt import RECORD, begin, mark_of, remove_thrown_away, sync_directory, throw_away
from raymerge.publish.conditions import agree, check_agreement, difference
from raymerge.publish.journal import JOURNAL
from raymerge.publish.lease import Lease, check_unheld, leased
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.output_contents import (
    MANIFEST,
    RecordedFiles,
    foreign_files,
    is_checkpoint,
    keys_below,
    no_checkpoint,
    no_part,
    recorded_files,
)
from raymerge.publish.shards import Shards
from raymerge.publish.steps_place import steps_beside
from raymerge.publish.stop_request import StopRequest
from raymerge.storage.local.store import LocalStore, check_room, nearest
from raymerge.verifier.structure import PROVENANCE_FILE

if TYPE_CHECKING:
    from raymerge.publish.remote_lease import RemoteLease
    from raymerge.publish.remote_shards import RemoteShards
    from raymerge.publish.segment_work import SegmentWork
    from raymerge.publish.shard_work import ShardWork

_PLAN = "plan"
RECIPE = "recipe.yml"
NUMERICS = "numerics.json"
_ELSEWHERE = "Choose another -o."


class Staging:
    """The staging directory of one plan for one output place."""

    def __init__(self, output: Path, plan: Plan) -> None:
        """
        Args:
            output: the output place, an absolute path without links.
            plan: what is made.
        """
        self.output = output
        self.name = str(output)
        """What messages call the output place."""
        self.place: Path | str = output
        """The output place, as it is opened."""
        self.root = output.parent / f"{_prefix(output)}{plan.digest[:16]}"
        self._plan = plan

    @property
    def ledger_path(self) -> Path:
        """Where the ledger is."""
        return self.root / RECORD / NAME

    @property
    def mark(self) -> str:
        """What tells this beginning of the directory from others; "" before it is begun."""
        return mark_of(self.root / RECORD)

    def prepare(self, conditions: Mapping[str, Any], *, replace: bool) -> Ledger:
        """Make or take up the directory, under ``lock``.

        Raises:
            TargetError: the output place is taken, or an unfinished run differs from this one.
            OptionError: there is not enough room.
        """
        self.check(replace=replace)
        self._remove_links()
        self._discard_leftovers()
        self._discard_others(conditions, replace=replace)
        check_room(self.output.parent, self.missing_bytes())
        self._write_record(conditions)
        return Ledger(self.ledger_path, conditions)

    @contextmanager
    def lock_steps(self) -> Iterator[None]:
        """Hold the output place while what comes before this plan is made in a directory elsewhere.

        Raises:
            TargetError: another process does, or nothing can be written there.
        """
        self._check_parent()
        with leased(steps_beside(self.output), self._plan.digest):
            yield

    @contextmanager
    def lock(self) -> Iterator[Lease | RemoteLease]:
        """Hold the output place against other runs, on this machine or on others.

        Raises:
            TargetError: another process holds it, or nothing can be written there.
        """
        self._check_parent()
        with leased(self.output, self._plan.digest) as lease:
            try:
                yield lease
            finally:
                # One that came too late to be heeded was for nobody else.
                StopRequest.beside(self.output).withdraw()

    def check_unheld(self) -> None:
        """Find out whether another process of this machine makes it now; raises TargetError."""
        check_unheld(self.output, self._plan.digest)

    def shards(self, store: LocalStore) -> Shards | RemoteShards:
        """The shards, which grow in ``store``."""
        return Shards(self._plan, store)

    def work(self, segments: SegmentWork) -> SegmentWork | ShardWork:
        """What workers are to do."""
        return segments

    @property
    def beside_bytes(self) -> int:
        """Bytes of memory that a lane takes besides what it makes."""
        return 0

    def check(self, *, replace: bool) -> None:
        """Find what is wrong with the output place, changing nothing.

        Raises:
            TargetError: it is taken, cannot be written to, or an unfinished run of another plan is beside it.
        """
        self._check_output(replace=replace)
        self._check_parent()
        for other in () if replace else self.others():
            found = difference(_manifest(other), self._plan.manifest)
            raise TargetError(
                Problem(
                    str(self.output),
                    f"an unfinished run is in {other.name}, and it was of another plan: {found}.",
                    "Go back to that recipe and those sources to resume it, or give --replace to discard it.",
                )
            )

    def missing_bytes(self) -> int:
        """Bytes of disk that no shard has reserved by now."""
        shards = self._plan["shards"].select(["name", "nbytes"]).to_pylist()
        return sum(max(0, each["nbytes"] - self._reserved_bytes(each["name"])) for each in shards)

    def _reserved_bytes(self, shard: str) -> int:
        """What a shard has by now, under either of its names: files are made in their full length."""
        for name in (shard, shard + UNFINISHED):
            with suppress(OSError):
                return (self.root / name).stat().st_size
        return 0

    def check_conditions(self, conditions: Mapping[str, Any]) -> None:
        """Find out whether an unfinished run of this plan may go on, changing nothing.

        Raises:
            TargetError: it was begun under other conditions.
        """
        before = Ledger.conditions(self.ledger_path)
        check_agreement(before, conditions, where=self.name, what="an unfinished run of this recipe")

    def sweep(self, files: Collection[str]) -> None:
        """Delete what an earlier attempt left: every file but the run record and ``files``."""
        record = {NAME, RECIPE, NUMERICS, JOURNAL, f"{_PLAN}/manifest.json"}
        record |= {f"{_PLAN}/{table}.arrow" for table in self._plan.tables}
        wanted = {*files, *(f"{RECORD}/{name}" for name in record)}
        # A directory sorts before what is in it, so that backwards it may have become empty.
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.root).as_posix() not in wanted:
                path.unlink()

    def keep_journal(self) -> None:
        """Nothing: the journal is where it is looked for."""

    def publish(self, *, replace: bool) -> None:
        """Rename the directory into the output place, durably; what was there goes only after that.

        After a crash between two steps the old output or the new one is whole; the same command
        ends it, or finds it in place; what is left of the old one goes with the next run there.
        """
        self._check_output(replace=replace)
        Ledger(self.ledger_path, {}).record_files(file_marks(self.root))
        if self._is_filled():
            self.output.rename(self._free_place())
        self.root.rename(self.output)
        sync_directory(self.output.parent)
        # It is in its place: a signal ends no more than the clearing up.
        with suppress(KeyboardInterrupt):
            for old in self._replaced():
                shutil.rmtree(old, ignore_errors=True)

    def take_back(self) -> None:
        """Make what this plan published an unfinished run again, under ``lock``.

        The run that takes it up compares every byte with its receipt, and makes again what differs. Where
        there is an unfinished run already, that one goes on.
        """
        # What cannot be renamed is made anew, and publishing says why it cannot be replaced.
        with suppress(OSError):
            if not self.root.exists():
                self.output.rename(self.root)

    def discard(self) -> None:
        """Remove the directory with all that is in it; after a crash no receipt of it is believed.

        Raises:
            OSError: it stays as it was.
        """
        throw_away(self.root, self.output)

    def _write_record(self, conditions: Mapping[str, Any]) -> None:
        """Have everything but the ledger durable, before there is one."""
        record = self.root / RECORD
        record.mkdir(parents=True, exist_ok=True)
        if not self._holds_plan():
            save_plan(self._plan, record / _PLAN)
        with LocalStore(record) as store:
            store.write_atomic(RECIPE, str(self._plan.manifest["recipe_text"]).encode())
            store.write_atomic(NUMERICS, numerics_bytes(conditions["numerics"]))
        if not self.ledger_path.exists() or not self.mark:
            begin(record)
        for directory in (self.root, self.root.parent):
            sync_directory(directory)

    def _holds_plan(self) -> bool:
        try:
            return load_plan(self.root / RECORD / _PLAN).digest == self._plan.digest
        except PlanError:
            return False

    def _remove_links(self) -> None:
        """Take links out of an unfinished run, which makes none: writing would go where they lead."""
        for path in [each for each in self.root.rglob("*") if each.is_symlink()]:
            path.unlink(missing_ok=True)

    def _replaced(self) -> list[Path]:
        """Old outputs that waited until the new one was in their place."""
        ours = re.compile(re.escape(f".{self.output.name}.replaced") + "[0-9]*")
        return sorted(each for each in self.output.parent.glob(".*") if ours.fullmatch(each.name))

    def _free_place(self) -> Path:
        """Where an old output waits; what an earlier one could not be cleared of is not in its way."""
        taken = {path.name for path in self._replaced()}
        names = (f".{self.output.name}.replaced{number or ''}" for number in itertools.count())
        return self.output.parent / next(name for name in names if name not in taken)

    def _is_filled(self) -> bool:
        return self.output.is_dir() and any(self.output.iterdir())

    def _check_output(self, *, replace: bool) -> None:
        if os.path.ismount(self.output):
            what = "another file system is mounted here, and a mounted directory cannot be renamed."
            raise TargetError(Problem(str(self.output), what, "Give a directory inside it as -o."))
        if self.output.is_dir():
            if self._is_filled() and not replace:
                raise TargetError(
                    Problem(
                        str(self.output),
                        "this directory is not empty.",
                        "Choose another -o, or give --replace to replace it once the merge is verified.",
                    )
                )
            if self._is_filled():
                self._check_replaceable()
        elif self.output.exists():
            raise TargetError(
                Problem(str(self.output), "a file is in the place of the output directory.", _ELSEWHERE)
            )

    def _check_replaceable(self) -> None:
        """See that all that is in the output place belongs to a checkpoint; raises TargetError."""
        names = sorted(os.listdir(self.output))
        if not is_checkpoint(names, _manifest(self.output)):
            raise TargetError(no_checkpoint(str(self.output), names))
        is_recorded = (self.output / MANIFEST).is_file()
        foreign = foreign_files(keys_below(self.output), self._recorded_files, is_recorded=is_recorded)
        if (key := next(foreign, None)) is not None:
            raise TargetError(no_part(str(self.output), key))

    def _recorded_files(self) -> RecordedFiles:
        """What the record of the output lists."""
        try:
            provenance = (self.output / PROVENANCE_FILE).read_bytes()
        except OSError:
            provenance = b""
        return recorded_files(Ledger.conditions(self.output / RECORD / NAME), provenance)

    def _check_parent(self) -> None:
        place = nearest(self.output.parent)
        if not place.is_dir():
            what = f"{place} is a file, so no directory can be made below it."
        elif not os.access(place, os.W_OK | os.X_OK):
            what = f"you may not write in {place}."
        elif linked := [path for path in (self.output, self.root) if os.path.islink(path)]:
            what = f"{linked[0]} is a link, and what is written there would go where it leads."
        else:
            return
        raise TargetError(Problem(str(self.output), what, _ELSEWHERE))

    def others(self) -> list[Path]:
        """Staging directories of other plans for the same place; what else has such a name is not ours."""
        ours = re.compile(re.escape(_prefix(self.output)) + "[0-9a-f]+")
        found = sorted(each for each in self.output.parent.glob(".*") if ours.fullmatch(each.name))
        return [other for other in found if other != self.root and other.is_dir() and not other.is_symlink()]

    def _discard_leftovers(self) -> None:
        """Remove unfinished runs of other plans, and an old output whose successor is in place."""
        for other in self.others():
            throw_away(other, self.output)
        for replaced in self._replaced() if self._is_filled() else []:
            shutil.rmtree(replaced, ignore_errors=True)
        remove_thrown_away(self.output)

    def _discard_others(self, conditions: Mapping[str, Any], *, replace: bool) -> None:
        """Remove what was begun under other conditions, if that was asked for, or that says of none."""
        before = Ledger.conditions(self.ledger_path)
        if not replace:
            self.check_conditions(conditions)
        if not agree(before, conditions):
            self.discard()


def is_untouched(output: Path) -> bool:
    """Whether the files of a checkpoint are still those that were published; reads none of them."""
    published = Ledger.files(output / RECORD / NAME)
    if published is None:
        return False
    marks = file_marks(output)
    return all(marks.get(key) == mark for key, mark in published.items())


def numerics_bytes(numerics: Mapping[str, str]) -> bytes:
    """The file of the record that tells what bytes depend on beside the plan."""
    return (json.dumps(dict(numerics), indent=2, sort_keys=True) + "\n").encode()


def file_marks(root: Path) -> dict[str, list[int]]:
    """Size, time of the last change and number of every file beside the run record, by its key."""
    found: dict[str, list[int]] = {}
    for path in root.rglob("*"):
        key = path.relative_to(root)
        if path.is_file() and key.parts[0] != RECORD:
            status = path.stat()
            found[key.as_posix()] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def _prefix(output: Path) -> str:
    return f".{output.name}.raymerge-"


def _manifest(root: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((root / RECORD / _PLAN / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
