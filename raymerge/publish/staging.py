"""Where a checkpoint grows until it is verified and published.

For a directory it grows beside its place and is renamed into it. The staging directory is named by the plan's
digest, and gets a new mark each time it is begun. A worker with this mark writes the same bytes to the same
places, so one that was given up and goes on is harmless; one with another mark writes nothing.

Object stores cannot rename: shards are written under their final names. Small files grow in a local control
directory and are mirrored below the place's run record, so that any machine can resume the run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from raymerge.checkpoints.adapters import ADAPTER_WEIGHTS_FILE
from raymerge.checkpoints.files import ADAPTER_CONFIG_FILE, INDEX_FILE, MODEL_CARD, SAFETENSORS
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.errors import IncompleteError, OptionError, PlanError, Problem, TargetError, TransientError
from raymerge.execute.receipts import UNFINISHED
from raymerge.merge_plan.plan import weight_files
from raymerge.merge_plan.tables import Plan, load_plan, save_plan
from raymerge.options import RunOptions
from raymerge.publish import lease as leases
from raymerge.publish import output_place
from raymerge.publish import record as run_record
from raymerge.publish.chunked_shards import ChunkedShards
from raymerge.publish.object_shards import (
    RemoteShards,
    ShardOrder,
    ShardWork,
    check_attempt,
    shard_orders,
    upload_bytes,
)
from raymerge.publish.record import sync_directory
from raymerge.publish.shards import SegmentWork, Shards
from raymerge.storage.addresses import is_object_place, is_remote, parse_place, shown
from raymerge.storage.local.store import LocalStore, check_disk_space, nearest
from raymerge.storage.objects.writer import LARGEST_OBJECT, ObjectWriter, unconditional
from raymerge.storage.store import FileInfo, ReadStore
from raymerge.storage.temporary import OwnDirectory
from raymerge.units import format_size
from raymerge.verifier.structure import PROVENANCE_FILE

_PLAN = "plan"
RECIPE = "recipe.yml"
NUMERICS = "numerics.json"
_ELSEWHERE = "Choose another -o."
_RESUME = "Go back to that recipe and those sources to resume it, or give --replace to discard it."


class _Staging(ABC):
    def __init__(self, output: Path, plan: Plan, *, place: Path | str | None = None) -> None:
        """``output`` is absolute and without links; ``place`` is the output place where that differs."""
        self.output = output
        self.place = output if place is None else place
        self.name = shown(str(self.place))
        self.root = output.parent / f"{_prefix(output)}{plan.digest[:16]}"
        self._plan = plan

    @property
    def ledger_path(self) -> Path:
        return self.root / run_record.RECORD / run_record.NAME

    @property
    def attempt_id(self) -> str:
        """The mark of this beginning; "" before it."""
        return run_record.attempt_id_of(self.root / run_record.RECORD)

    @abstractmethod
    def discard(self) -> None:
        """Remove what is there of this plan, durably; raises OSError if nothing could be changed."""

    @abstractmethod
    def _lease(self, *, of_steps: bool) -> leases.LeaseStore:
        """The lease of the place, or of its intermediate results in a directory elsewhere."""

    @property
    @abstractmethod
    def _stop_request(self) -> leases.StopRequest: ...

    @contextmanager
    def lock(self, *, of_steps: bool = False) -> Iterator[leases.Lease]:
        """Hold the output place against other runs, on any machine; with ``of_steps`` while intermediate
        results are made in a directory elsewhere.

        Raises TargetError: another process holds it, or nothing can be written there."""
        with leases.leased(self._lease(of_steps=of_steps), self._plan.digest) as lease:
            try:
                yield lease
            finally:
                # One that came too late to be heeded was for nobody else.
                self._stop_request.withdraw()

    def check_unheld(self) -> None:
        """Raises TargetError if another process of this machine holds the place."""
        leases.check_unheld(self._lease(of_steps=False), self._plan.digest)

    def check_conditions(self, conditions: Mapping[str, Any]) -> None:
        """Raises TargetError if an unfinished run began under other conditions. Changes nothing."""
        before = run_record.Ledger.conditions(self.ledger_path)
        run_record.check_agreement(
            before, conditions, where=self.name, what="an unfinished run of this recipe"
        )

    def sweep(self, files: Collection[str]) -> None:
        """Delete all that an earlier attempt left but the run record and ``files``."""
        record = {run_record.NAME, RECIPE, NUMERICS, run_record.JOURNAL, f"{_PLAN}/manifest.json"}
        record |= {f"{_PLAN}/{table}.arrow" for table in self._plan.tables}
        expected = {*files, *(f"{run_record.RECORD}/{name}" for name in record)}
        # A directory sorts before what is in it, so that backwards it may have become empty.
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.root).as_posix() not in expected:
                path.unlink()

    def _write_record(self, conditions: Mapping[str, Any]) -> None:
        """Make everything but the ledger durable, before there is one."""
        record = self.root / run_record.RECORD
        record.mkdir(parents=True, exist_ok=True)
        if not self._holds_plan():
            save_plan(self._plan, record / _PLAN)
        with LocalStore(record) as store:
            store.write_atomic(RECIPE, str(self._plan.manifest["recipe_text"]).encode())
            store.write_atomic(NUMERICS, numerics_bytes(conditions["numerics"]))
        if not self.ledger_path.exists() or not self.attempt_id:
            run_record.begin(record)
        for directory in (self.root, self.root.parent):
            sync_directory(directory)

    def _holds_plan(self) -> bool:
        try:
            return load_plan(self.root / run_record.RECORD / _PLAN).digest == self._plan.digest
        except PlanError:
            return False

    def _discard_others(self, conditions: Mapping[str, Any], *, replace: bool) -> None:
        """Remove a run begun under other conditions, if the user asked for that, or under unknown ones."""
        before = run_record.Ledger.conditions(self.ledger_path)
        if not replace:
            self.check_conditions(conditions)
        if not run_record.agree(before, conditions):
            self.discard()

    def _refuse_other_plan(self, manifest: Mapping[str, Any], where: str) -> None:
        what = f"an unfinished run is {where}, and it was of another plan"
        facts = run_record.difference(manifest, self._plan.manifest)
        raise TargetError(Problem(self.name, f"{what}: {facts}.", _RESUME))


class LocalStaging(_Staging):
    _what = "the output"

    def prepare(self, conditions: Mapping[str, Any], *, replace: bool) -> run_record.Ledger:
        self.check(replace=replace)
        # An unfinished run makes no links: writing would follow them.
        for link in [each for each in self.root.rglob("*") if each.is_symlink()]:
            link.unlink(missing_ok=True)
        for other in self.others():
            run_record.throw_away(other, self.output)
        for replaced in self._replaced() if self._is_filled() else []:
            shutil.rmtree(replaced, ignore_errors=True)
        run_record.remove_thrown_away(self.output)
        self._discard_others(conditions, replace=replace)
        check_disk_space(self.output.parent, self.missing_bytes(), what=self._what)
        self._write_record(conditions)
        return run_record.Ledger(self.ledger_path, conditions)

    def shards(self, store: LocalStore, layout: ReadStore | None) -> Shards:
        return Shards(self._plan, store) if layout is None else ChunkedShards(self._plan, store, layout)

    def work(self, segments: SegmentWork) -> SegmentWork:
        return segments

    @property
    def beside_bytes(self) -> int:
        """Bytes of memory that a lane takes beside its result."""
        return 0

    def keep_journal(self) -> None: ...

    def check(self, *, replace: bool) -> None:
        self._check_output(replace=replace)
        self._check_parent()
        for other in () if replace else self.others():
            self._refuse_other_plan(run_record.object_at(other / output_place.MANIFEST), f"in {other.name}")

    def missing_bytes(self) -> int:
        """Bytes of disk that no shard has reserved yet."""
        files = weight_files(self._plan)
        return sum(max(0, nbytes - self._reserved_bytes(key)) for key, nbytes in files.items())

    def _reserved_bytes(self, key: str) -> int:
        """Of a file, under either of its names: they are made in their full length."""
        for name in (key, key + UNFINISHED):
            with suppress(OSError):
                return (self.root / name).stat().st_size
        return 0

    def publish(self, *, replace: bool) -> None:
        """Rename the directory into the output place, durably, and only then delete the old output.

        After a crash between two steps the old output or the new one is whole, and the same command finishes;
        leftovers of the old one go with the next run there."""
        self._check_output(replace=replace)
        self._close_record()
        if self._is_filled():
            taken = {path.name for path in self._replaced()}
            names = (f".{self.output.name}.replaced{number or ''}" for number in itertools.count())
            self.output.rename(self.output.parent / next(name for name in names if name not in taken))
        self.root.rename(self.output)
        sync_directory(self.output.parent)
        # It is in its place: a signal ends no more than the clearing up.
        with suppress(KeyboardInterrupt):
            for old in self._replaced():
                shutil.rmtree(old, ignore_errors=True)

    def _close_record(self) -> None:
        run_record.Ledger(self.ledger_path, {}).record_files(file_states(self.root))

    def take_back(self) -> None:
        """Make what this plan published an unfinished run again, under ``lock``; an unfinished run that is
        there already goes on instead. The next run compares every byte with its receipt."""
        # What cannot be renamed is made anew, and publishing says why it cannot be replaced.
        with suppress(OSError):
            if not self.root.exists():
                self.output.rename(self.root)

    def discard(self) -> None:
        run_record.throw_away(self.root, self.output)

    def others(self) -> list[Path]:
        """Staging directories of other plans for the same place, and nothing else that has such a name."""
        ours = re.compile(re.escape(_prefix(self.output)) + "[0-9a-f]+")
        beside = sorted(each for each in self.output.parent.glob(".*") if ours.fullmatch(each.name))
        return [other for other in beside if other != self.root and other.is_dir() and not other.is_symlink()]

    def _lease(self, *, of_steps: bool) -> leases.LeaseFile:
        return leases.LeaseFile(output_place.steps_beside(self.output) if of_steps else self.output)

    @property
    def _stop_request(self) -> leases.StopRequest:
        return leases.StopRequest(self.output)

    @contextmanager
    def lock(self, *, of_steps: bool = False) -> Iterator[leases.Lease]:
        self._check_parent()
        with super().lock(of_steps=of_steps) as lease:
            yield lease

    def _replaced(self) -> list[Path]:
        ours = re.compile(re.escape(f".{self.output.name}.replaced") + "[0-9]*")
        return sorted(each for each in self.output.parent.glob(".*") if ours.fullmatch(each.name))

    def _is_filled(self) -> bool:
        return self.output.is_dir() and any(self.output.iterdir())

    def _check_output(self, *, replace: bool) -> None:
        if os.path.ismount(self.output):
            what = "another file system is mounted here, and a mounted directory cannot be renamed."
            raise TargetError(Problem(self.name, what, "Give a directory inside it as -o."))
        if self._is_filled():
            if not replace:
                remedy = "Choose another -o, or give --replace to replace it once the merge is verified."
                raise TargetError(Problem(self.name, "this directory is not empty.", remedy))
            self._check_replaceable()
        elif self.output.exists() and not self.output.is_dir():
            what = "a file is in the place of the output directory."
            raise TargetError(Problem(self.name, what, _ELSEWHERE))

    def _check_replaceable(self) -> None:
        names = sorted(os.listdir(self.output))
        if not output_place.is_checkpoint(names, run_record.object_at(self.output / output_place.MANIFEST)):
            raise TargetError(output_place.no_checkpoint(self.name, names))
        is_recorded = (self.output / output_place.MANIFEST).is_file()
        foreign = output_place.foreign_files(
            output_place.keys_below(self.output), self._recorded_files, is_recorded=is_recorded
        )
        if (key := next(foreign, None)) is not None:
            raise TargetError(output_place.no_part(self.name, key))

    def _recorded_files(self) -> output_place.RecordedFiles:
        try:
            provenance = (self.output / PROVENANCE_FILE).read_bytes()
        except OSError:
            provenance = b""
        return output_place.recorded_files(
            run_record.Ledger.conditions(self.output / run_record.RECORD / run_record.NAME), provenance
        )

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
        raise TargetError(Problem(self.name, what, _ELSEWHERE))


class UnitStaging(LocalStaging):
    """Of what is made in units, by a plan without tables."""

    def __init__(self, output: Path, plan: Plan, nbytes: Callable[[], int], what: str) -> None:
        """``nbytes`` gives the most that the directory takes before it is published; ``what`` is what is
        made, for messages."""
        super().__init__(output, plan)
        self._nbytes = nbytes
        self._what = what

    @property
    def units(self) -> Path:
        """Where units leave their files. A worker that was given up may still be at one of an earlier
        beginning, which had another directory."""
        return self.root / f"units-{self.attempt_id}"

    def missing_bytes(self) -> int:
        """0 for what is begun: nobody knows how much of its space is taken by now."""
        return 0 if self.ledger_path.exists() else self._nbytes()


class ResultStaging(UnitStaging):
    """Of the result of a stage: what is in its place may be replaced."""

    def _check_replaceable(self) -> None: ...


class AdapterStaging(UnitStaging):
    """Of an adapter, which peft loads: it has no record once it is published."""

    def _check_replaceable(self) -> None:
        names = sorted(os.listdir(self.output))
        if not {ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE} <= {*names}:
            raise TargetError(output_place.no_checkpoint(self.name, names, "adapter"))
        if foreign := [each for each in names if each not in _ADAPTER_FILES]:
            raise TargetError(output_place.no_part(self.name, foreign[0], "adapter"))

    def _close_record(self) -> None:
        shutil.rmtree(self.root / run_record.RECORD)
        run_record.sync_directory(self.root)


_ADAPTER_FILES = frozenset({ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, MODEL_CARD})


def is_untouched(output: Path) -> bool:
    """Whether the files of a checkpoint are still those that were published, by their marks alone."""
    published = run_record.Ledger.files(output / run_record.RECORD / run_record.NAME)
    if published is None:
        return False
    marks = file_states(output)
    return all(marks.get(key) == attempt_id for key, attempt_id in published.items())


def numerics_bytes(numerics: Mapping[str, str]) -> bytes:
    return (json.dumps(dict(numerics), indent=2, sort_keys=True) + "\n").encode()


def file_states(root: Path) -> dict[str, list[int]]:
    """Size, time of change and inode of every file beside the run record, by its key."""
    marks: dict[str, list[int]] = {}
    for path in root.rglob("*"):
        key = path.relative_to(root)
        if path.is_file() and key.parts[0] != run_record.RECORD:
            status = path.stat()
            marks[key.as_posix()] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return marks


def _prefix(output: Path) -> str:
    return f".{output.name}.raymerge-"


_BEGUN = f"{run_record.RECORD}/{run_record.ATTEMPT}"
_FETCHED = (output_place.MANIFEST, _BEGUN, f"{run_record.RECORD}/{run_record.JOURNAL}")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_AT_ONCE = 4 << 20
_ASIDE_SECONDS = 5.0
PROBE = f"{run_record.RECORD}/probe-"
"""What the keys of objects begin with that are written only to find out whether that goes."""


class RemoteStaging(_Staging):
    def __init__(self, place: str, plan: Plan, *, scratch: str | None = None) -> None:
        """``scratch`` is a directory of workers for shards until they are uploaded; None for none.

        Raises OptionError without the client for such stores, CheckpointError without credentials."""
        control = OwnDirectory()
        weakref.finalize(self, control.remove)
        super().__init__(control.path / "output", plan, place=place)
        self._writer = ObjectWriter(place)
        self._scratch = scratch
        self._shards: RemoteShards | None = None
        self._held: leases.Lease | None = None
        self._begun = ""
        self._is_tried = self._is_fetched = self._is_published = False
        self._probes: frozenset[str] = frozenset()
        # What nobody waits for.
        self._asides = ObjectWriter(place, seconds=_ASIDE_SECONDS)
        journal = self.root / run_record.RECORD / run_record.JOURNAL
        self._journal = run_record.JournalMirror(
            self._asides, journal, f"{run_record.RECORD}/{run_record.JOURNAL}", self._is_mine
        )

    def prepare(self, conditions: Mapping[str, Any], *, replace: bool) -> run_record.Ledger:
        """What is to be replaced is deleted now: first what makes it a checkpoint."""
        self.check(replace=replace)
        self._begun = ""
        if not self._is_ours(self._listed()):
            self.discard()
        self.fetch()
        self._discard_others(conditions, replace=replace)
        self._write_record(conditions)
        self._begun = run_record.attempt_id_of(self.root / run_record.RECORD)
        # Those of killed processes; of a living one they are gone by the time that this is published.
        self._probes = frozenset(each.key for each in self._writer.files() if each.key.startswith(PROBE))
        # Whoever finds the manifest knows whose the place is.
        for key in (
            output_place.MANIFEST,
            f"{run_record.RECORD}/{RECIPE}",
            f"{run_record.RECORD}/{NUMERICS}",
            _BEGUN,
        ):
            self._upload(key, self._check_held)
        # Only now: whoever looks for another mark before it completes an upload finds that it is gone. Those
        # that have looked already can still come late, unless theirs are aborted.
        self._abort_uploads()
        return run_record.RemoteLedger(
            self.ledger_path, conditions, self._writer, self.attempt_id, self._confirm
        )

    @property
    def attempt_id(self) -> str:
        """Known also after its file was swept away."""
        return self._begun or super().attempt_id

    @contextmanager
    def lock(self, *, of_steps: bool = False) -> Iterator[leases.Lease]:
        with super().lock(of_steps=of_steps) as lease:
            if of_steps:
                yield lease
                return
            self._held = lease
            with self._journal.mirroring():
                yield lease

    def keep_journal(self) -> None:
        self._journal.mirror()

    def check(self, *, replace: bool) -> None:
        """What it writes to try the place is deleted again."""
        self._check_sizes()
        listed = self._listed()
        if not self._is_tried:
            check_writable(self._writer)
            self._is_tried = True
        keys = {each.key for each in listed}
        if output_place.is_empty(keys) or self._is_ours(listed):
            return
        if not output_place.is_checkpoint(keys, self._manifest()):
            raise TargetError(output_place.no_checkpoint(self.name, keys))
        if replace:
            if foreign := self._foreign_files(keys):
                raise TargetError(output_place.no_part(self.name, min(foreign)))
            return
        if self._is_unfinished(keys):
            self._refuse_other_plan(self._manifest(), "here")
        raise TargetError(
            Problem(
                self.name,
                "this place is not empty.",
                "Choose another -o, or give --replace to delete what is there before the merge begins: an "
                "object store cannot keep it until the new one is verified.",
            )
        )

    @property
    def ledger_path(self) -> Path:
        """The fetched ledger; raises TargetError where that is refused."""
        if not self._is_fetched:
            self.fetch()
        return super().ledger_path

    @property
    def beside_bytes(self) -> int:
        return upload_bytes(self._orders, self._scratch)

    @cached_property
    def _orders(self) -> tuple[ShardOrder, ...]:
        return shard_orders(self._plan)

    def missing_bytes(self) -> int:
        return 0

    def fetch(self) -> None:
        """Fetch into the control directory what of an unfinished run of this plan is needed."""
        self._is_fetched = True
        shutil.rmtree(self.root, ignore_errors=True)
        if not self._is_ours(self._listed()):
            return
        for key in _FETCHED:
            if (there := self._writer.get(key)) is not None:
                path = self.root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(there[0])
        run_record.RemoteLedger.fetch(self.ledger_path, self._writer, self.attempt_id)

    def shards(self, store: LocalStore, layout: ReadStore | None) -> RemoteShards:
        assert layout is None
        self._shards = RemoteShards(self._plan, self._orders, store, self._writer)
        return self._shards

    def work(self, segments: SegmentWork) -> ShardWork:
        return ShardWork(segments, (str(self.place),), (self._orders,), self._scratch)

    def publish(self, *, replace: bool) -> None:  # noqa: ARG002 - what was there is gone
        """Write all small files, and last the index, or the config where there is none. Raises
        IncompleteError if a shard was exchanged, or the place is no longer that of this run."""
        last = next((key for key in (INDEX_FILE, CONFIG_FILE) if (self.root / key).is_file()), None)
        own = self._plan["shards"].column("name").to_pylist()
        files = [path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()]
        small = sorted(set(files) - {last, _BEGUN, *own}, key=lambda key: (key == CONFIG_FILE, key))
        for key in small:
            # All of them together may take longer than it takes to be taken for dead.
            self._upload(key, self._confirm)
        expected = {*own, *small, last, leases.LEASE}
        # Of what an earlier attempt left, nothing is to be taken for a part of the checkpoint.
        left = sorted((self._parts() - expected) | self._probes)
        self._confirm()
        self._writer.delete(key for key in left if key.endswith(_WEIGHTS))
        if self._shards is not None:
            self._shards.check()
        if last is not None:
            self._upload(last, self._confirm)
        self._is_published = True
        # It is in its place: a signal ends no more than the clearing up.
        with suppress(KeyboardInterrupt, IncompleteError):
            self._confirm()
            self._writer.delete(key for key in left if _is_record(key))
            self._abort_uploads(small)

    def discard(self) -> None:
        """Delete the checkpoint or unfinished run at the place, but not the lease: first what makes it a
        checkpoint, last what says whose it is, so that after a crash no receipt is believed.

        A request to stop stays: it may have come while intermediate results were made."""
        keys = self._parts() - {leases.STOP}
        first = [key for key in (INDEX_FILE, CONFIG_FILE) if key in keys]
        # While the record says that they are parts.
        first += sorted(
            key for key in keys - {*first} if not _is_record(key) and not SAFETENSORS.are_in([key])
        )
        ledger = [key for key in keys if key.startswith(f"{run_record.RECORD}/ledger")]
        manifest = [key for key in keys if key == output_place.MANIFEST]
        with self._journal.lock:
            for some in (first, ledger, sorted({*keys} - {*first, *ledger, *manifest}), manifest):
                # One that comes late is what may be lost of another's.
                self._check_held()
                self._writer.delete(some)
            shutil.rmtree(self.root, ignore_errors=True)

    def _lease(self, *, of_steps: bool) -> leases.LeaseObject:
        return leases.LeaseObject(self._writer, leases.STEPS_LEASE if of_steps else leases.LEASE)

    @property
    def _stop_request(self) -> leases.StopRequest:
        return leases.StopRequest(self._asides)

    def _confirm(self) -> None:
        """Raises IncompleteError if the place is no longer that of this run."""
        self._check_held()
        check_attempt(self._writer, self.attempt_id)

    def _check_held(self) -> None:
        if self._held is not None:
            self._held.confirm()

    def _abort_uploads(self, files: Collection[str] = ()) -> None:
        """Abort what killed processes left of uploads of shards, of the record and of these files."""
        ours = {*self._plan["shards"].column("name").to_pylist(), *files}
        self._writer.abort_uploads(
            lambda key: key in ours or _is_record(key) or _SHARD.fullmatch(key) is not None
        )

    def _upload(self, key: str, guard: Callable[[], None]) -> None:
        """Write a file of the control directory; ``guard`` raises where nothing may be written any more."""
        path, done = self.root / key, 0
        with path.open("rb") as file, self._writer.stream(key, path.stat().st_size, guard=guard) as stream:
            while chunk := file.read(_AT_ONCE):
                stream.write(done, chunk)
                done += len(chunk)
            stream.finish()

    def _listed(self) -> list[FileInfo]:
        passing = (leases.LEASE, leases.STEPS_LEASE, PROBE)
        return [each for each in self._writer.files() if not each.key.startswith(passing)]

    def _parts(self) -> set[str]:
        """Every object at the place that belongs to the checkpoint or to a run towards it."""
        keys = {each.key for each in self._listed()}
        return keys - self._foreign_files(keys)

    def _foreign_files(self, keys: Collection[str]) -> set[str]:
        return {
            *output_place.foreign_files(keys, self._recorded_files, is_recorded=output_place.MANIFEST in keys)
        }

    def _recorded_files(self) -> output_place.RecordedFiles:
        ledger = self._writer.content(f"{run_record.RECORD}/{run_record.NAME}")
        provenance = self._writer.content(PROVENANCE_FILE)
        return output_place.recorded_files(run_record.conditions_in(ledger), provenance)

    def _is_ours(self, listed: Collection[FileInfo]) -> bool:
        is_open = self._is_unfinished({each.key for each in listed})
        return is_open and self._manifest().get("digest") == self._plan.digest

    def _is_mine(self) -> bool:
        begun = self._asides.get(_BEGUN)
        return self._is_published if begun is None else begun[0].decode("ascii", "replace") == self.attempt_id

    def _is_unfinished(self, keys: Collection[str]) -> bool:
        """By the mark of its beginning, which goes when it is published."""
        return _BEGUN in keys or (output_place.MANIFEST in keys and not {CONFIG_FILE, INDEX_FILE} & {*keys})

    def _manifest(self) -> Mapping[str, Any]:
        return run_record.object_in(self._writer.content(output_place.MANIFEST))

    def _check_sizes(self) -> None:
        shards = self._plan["shards"].select(["name", "nbytes"]).to_pylist()
        large = [each for each in shards if each["nbytes"] > LARGEST_OBJECT]
        if large:
            nbytes, most = format_size(large[0]["nbytes"]), format_size(LARGEST_OBJECT)
            what = f"the shard {large[0]['name']} has {nbytes}, and an object has at most {most}."
            raise TargetError(Problem(self.name, what, "Give a smaller shard_size in the recipe."))


def _is_record(key: str) -> bool:
    return key.startswith(f"{run_record.RECORD}/")


Staging: TypeAlias = LocalStaging | RemoteStaging


def check_writable(writer: ObjectWriter) -> None:
    """Raises TargetError if objects cannot be written, deleted and conditionally created at a place, or lose
    their metadata; OptionError if the store knows no conditions. What it writes is deleted again."""
    run = leases.myself("").run
    key = f"{PROBE}{run}"
    try:
        writer.put_new(key, b"raymerge looks whether it can write here\n", stamp=run)
        is_refused = writer.put_new(key, b"") is None
        info = writer.info(key)
    except TransientError as error:
        if (kms_key := parse_place(writer.place).options.kms_key) is None:
            raise
        remedy = "A server without a key service may answer so: then take kms_key out of storage:."
        raise TransientError(f"{error} It was asked to encrypt with {kms_key}. {remedy}") from error
    finally:
        writer.delete([key])
    if not is_refused:
        raise TargetError(unconditional(writer.location("")))
    if info is not None and info.stamp != run:
        what = "objects here do not keep their metadata, by which a run knows its own shards."
        remedy = "Have the server, or what stands before it, keep it; or take another store or a directory."
        raise TargetError(Problem(writer.location(""), what, remedy))


def real_directory(place: str, options: RunOptions) -> Path:
    """A local output place without links; raises what ``staging_of`` raises."""
    if options.scratch is not None:
        what = "a shard is written to a directory at once, and waits nowhere until it is uploaded."
        raise OptionError(Problem("--scratch", what, "Leave it out, or give an object store as -o."))
    real = os.path.realpath(place)
    output_place.check_printable(real)
    return Path(real)


def staging_of(output: Path | str, plan: Plan, options: RunOptions) -> Staging:
    """The staging for an output.

    Raises TargetError for a name that cannot be written down, OptionError for a place that cannot be written
    to or without its client, CheckpointError without credentials."""
    place = str(output)
    if not is_remote(place):
        return LocalStaging(real_directory(place, options), plan)
    output_place.check_printable(place)
    if not is_object_place(place):
        what = "nothing can be written there."
        raise OptionError(
            Problem(shown(place), what, "Give a directory, or an s3://, gs:// or az:// place as -o.")
        )
    address = parse_place(place)
    if address.options.kms_key is not None and address.scheme != "s3":
        what = f"it is a key of AWS, and nothing at {shown(place)} would be encrypted with it."
        raise OptionError(Problem("storage: kms_key", what, "Take it out, or give an s3:// place as -o."))
    return RemoteStaging(place, plan, scratch=options.scratch)
