"""An output place in an object store, which renames nothing: shards come under their final names.

All small files grow in a local control directory, as they would beside a local output, and are mirrored below
the place's run record, so that any machine can take up what another one began.

The journal of a run whose output is in an object store, mirrored for whoever asks meanwhile how it goes.

It is no ground for anything, so nothing waits for it and nothing ends by it: it has a thread and a connection
of its own, and what the store refuses is tried again a few seconds later.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from raymerge.checkpoints.index import INDEX_FILE, SAFETENSORS
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.errors import IncompleteError, Problem, TargetError
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.tables import Plan
from raymerge.publish.attempt import MARK, RECORD, mark_of
from raymerge.publish.conditions import difference
from raymerge.publish.journal import JOURNAL, entries_of
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.output_contents import (
    MANIFEST,
    RecordedFiles,
    foreign_files,
    is_checkpoint,
    is_empty,
    no_checkpoint,
    no_part,
    recorded_files,
)
from raymerge.publish.remote_lease import PROBE, RemoteLease, check_unheld, check_writable, leased
from raymerge.publish.remote_shards import RemoteShards
from raymerge.publish.segment_work import SegmentWork
from raymerge.publish.shard_work import ShardOrder, ShardWork, check_mark, shard_orders
from raymerge.publish.staging import RECIPE, Staging
from raymerge.publish.stop_request import STOP, StopRequest
from raymerge.storage.addresses import shown
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import LARGEST_OBJECT, ObjectWriter, stream_bytes
from raymerge.storage.retry import KEPT
from raymerge.storage.store import FileInfo
from raymerge.storage.temporary import OwnDirectory
from raymerge.units import format_size
from raymerge.verifier.structure import PROVENANCE_FILE

_TRIED = 10


class RemoteLedger(Ledger):
    """A ledger that is durable once its last piece is an object: no object can be appended to.

    Pieces are kept by the mark of the run's beginning, and none is written over another: a process that
    was taken for dead and goes on can neither add to the ledger of another run nor take from it.
    """

    def __init__(
        self,
        path: Path,
        conditions: Mapping[str, Any],
        writer: ObjectWriter,
        record: str,
        mark: str,
        guard: Callable[[], None],
    ) -> None:
        """
        Args:
            path: the local file, with all that was there when the run began.
            conditions: as in ``Ledger``.
            writer: of the output place.
            record: key of the run record.
            mark: of the run's beginning.
            guard: raises where the place is no longer that of this run.
        """
        self._writer = writer
        self._guard = guard
        self._record = record
        self._mark = mark
        self._next = 1 + max((_number(key) for key in self._pieces()), default=0)
        super().__init__(path, conditions)

    @staticmethod
    def fetch(path: Path, writer: ObjectWriter, record: str, mark: str) -> None:
        """Have the local file as the objects say; none where there are no objects."""
        whole = writer.get(f"{record}/{NAME}")
        if whole is None:
            path.unlink(missing_ok=True)
            return
        pieces = [writer.get(key) for key in pieces_of((each.key for each in writer.files()), record, mark)]
        texts = [whole[0], *(each[0] for each in pieces if each is not None)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts))

    def begin(self, receipts: Mapping[int, Receipt]) -> None:
        """Begin anew; who looks meanwhile finds the old receipts, some of them, or these."""
        super().begin(receipts)
        old = self._pieces()
        self._writer.put_only(f"{self._record}/{NAME}", self._path.read_bytes(), self._guard)
        self._writer.delete(old)

    def _append(self, *entries: Mapping[str, Any]) -> None:
        before = self._path.stat().st_size
        super()._append(*entries)
        with self._path.open("rb") as file:
            file.seek(before)
            text = file.read()
        # A piece that is there is of a process that was taken for dead, and as true as ours, or is ours, if
        # an answer was lost.
        for number in range(self._next, self._next + _TRIED):
            key = f"{self._record}/ledger/{self._mark}/{number:08d}.jsonl"
            if self._writer.put_new(key, text) is not None:
                self._next = number + 1
                return
        raise IncompleteError(f"{self._writer.location(key)}: another process writes there. {KEPT}")

    def _pieces(self) -> list[str]:
        return pieces_of((each.key for each in self._writer.files()), self._record, self._mark)


def pieces_of(keys: Iterable[str], record: str, mark: str) -> list[str]:
    """Those of some keys that are pieces of the ledger of one beginning, in order."""
    found = (key for key in keys if key.startswith(f"{record}/ledger/{mark}/") and _number(key) > 0)
    return sorted(found, key=_number)


def _number(key: str) -> int:
    name = key.rpartition("/")[2].removesuffix(".jsonl")
    return int(name) if name.isdecimal() and len(name) < 19 else 0


_PAUSE_SECONDS = 5.0


class JournalMirror:
    """Keeps an object as a local file is."""

    def __init__(self, writer: ObjectWriter, journal: Path, key: str, is_ours: Callable[[], bool]) -> None:
        """
        Args:
            writer: of the output place; the mirror's own, without patience.
            journal: the local file; need not exist.
            key: of the object.
            is_ours: whether the place is still that of this run; asked just before each time.
        """
        self._writer = writer
        self._journal = journal
        self._key = key
        self._is_ours = is_ours
        self._nbytes = 0
        self.lock = threading.Lock()
        """Nothing is written while somebody has it."""

    @contextmanager
    def mirroring(self) -> Iterator[None]:
        """Have it written every few seconds until the block ends."""
        ended = threading.Event()

        def go_on() -> None:
            while not ended.wait(_PAUSE_SECONDS):
                self.mirror()

        threading.Thread(target=go_on, name="journal", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def mirror(self) -> None:
        """Write it now, if the store lets it and there is anything new; raises nothing."""
        with suppress(Exception), self.lock:
            if self._journal.stat().st_size != self._nbytes and self._is_ours():
                text = self._journal.read_bytes()
                self._writer.put(self._key, text)
                self._nbytes = len(text)


LEASE = f"{RECORD}/lease.json"
"""Key of the lease."""
STEPS_LEASE = f"{RECORD}/steps-lease.json"
"""Key of the lease of whoever makes, elsewhere, what comes before."""
_BEGUN = f"{RECORD}/{MARK}"
_FETCHED = (MANIFEST, _BEGUN, f"{RECORD}/{JOURNAL}")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Shards of any plan."""
_AT_ONCE = 4 << 20
_ASIDE_SECONDS = 5.0
_PROBES = f"{RECORD}/{PROBE}-"


class RemoteStaging(Staging):
    """The output place of one plan in an object store."""

    def __init__(self, place: str, plan: Plan, *, scratch: str | None = None) -> None:
        """
        Args:
            place: the output place, with its options.
            plan: what is made.
            scratch: directory of workers where a shard is until it is uploaded; None: nowhere.

        Raises:
            OptionError: what speaks to such stores is not installed.
            CheckpointError: there are no credentials.
        """
        control = OwnDirectory()
        weakref.finalize(self, control.remove)
        super().__init__(control.path / "output", plan)
        self.name = shown(place)
        self.place = place
        self._writer = ObjectWriter(place)
        self._scratch = scratch
        self._shards: RemoteShards | None = None
        self._lease: RemoteLease | None = None
        self._begun = ""
        self._is_tried = self._is_fetched = self._is_published = False
        self._probes: frozenset[str] = frozenset()
        # What nobody waits for.
        self._asides = ObjectWriter(place, seconds=_ASIDE_SECONDS)
        journal = self.root / RECORD / JOURNAL
        self._journal = JournalMirror(self._asides, journal, f"{RECORD}/{JOURNAL}", self._is_mine)

    def prepare(self, conditions: Mapping[str, Any], *, replace: bool) -> Ledger:
        """Have the record there, new or as an earlier run of this plan left it, under ``lock``.

        What is to be replaced is deleted now: first what makes it a checkpoint, then all else.

        Raises:
            TargetError: the output place is taken, or an unfinished run differs from this one.
        """
        self.check(replace=replace)
        self._begun = ""
        if not self._is_ours(self._listed()):
            self.discard()
        self.fetch()
        self._discard_others(conditions, replace=replace)
        self._write_record(conditions)
        self._begun = mark_of(self.root / RECORD)
        # Those of killed processes; of a living one they are gone by the time that this is published.
        self._probes = frozenset(each.key for each in self._writer.files() if each.key.startswith(_PROBES))
        # Whoever finds the manifest knows whose the place is.
        for key in (MANIFEST, f"{RECORD}/{RECIPE}", f"{RECORD}/numerics.json", _BEGUN):
            self._upload(key, self._check_held)
        # Only now: whoever looks for another mark before it completes an upload finds that it is gone. Those
        # that have looked already can still come late, unless theirs are aborted.
        self._abort_uploads()
        return RemoteLedger(self.ledger_path, conditions, self._writer, RECORD, self.mark, self._confirm)

    @property
    def mark(self) -> str:
        """What tells this beginning from others, even when its file was swept away; "" before it is begun."""
        return self._begun or super().mark

    @contextmanager
    def lock(self) -> Iterator[RemoteLease]:
        """Hold the output place against other runs, on this machine or on others.

        Raises:
            TargetError: another process holds it, or nothing can be written there.
        """
        with leased(self._writer, LEASE, self._plan.digest) as lease, self._journal.mirroring():
            self._lease = lease
            try:
                yield lease
            finally:
                StopRequest.in_store(self._asides).withdraw()

    @contextmanager
    def lock_steps(self) -> Iterator[None]:
        """Hold the output place while what comes before this plan is made in a directory elsewhere.

        Raises:
            TargetError: another process does, or nothing can be written there.
        """
        with leased(self._writer, STEPS_LEASE, self._plan.digest):
            try:
                yield
            finally:
                StopRequest.in_store(self._asides).withdraw()

    def keep_journal(self) -> None:
        """Have the journal in the record as it is now, as far as the store lets it."""
        self._journal.mirror()

    def check_unheld(self) -> None:
        """Find out whether another process of this machine makes it now; raises TargetError."""
        check_unheld(self._writer, LEASE, self._plan.digest)

    def check(self, *, replace: bool) -> None:
        """Find what is wrong with the output place; what is tried there is gone afterwards.

        Raises:
            TargetError: it is taken, cannot be written to, holds another plan's unfinished run, or takes no
                objects of such a size.
        """
        self._check_sizes()
        found = self._listed()
        if not self._is_tried:
            check_writable(self._writer, RECORD)
            self._is_tried = True
        keys = {each.key for each in found}
        if is_empty(keys) or self._is_ours(found):
            return
        if not is_checkpoint(keys, self._manifest()):
            raise TargetError(no_checkpoint(self.name, keys))
        if replace:
            if foreign := self._foreign_files(keys):
                raise TargetError(no_part(self.name, min(foreign)))
            return
        if self._is_unfinished(keys):
            difference_found = difference(self._manifest(), self._plan.manifest)
            raise TargetError(
                Problem(
                    self.name,
                    f"an unfinished run is here, and it was of another plan: {difference_found}.",
                    "Go back to that recipe and those sources to resume it, or give --replace to discard it.",
                )
            )
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
        """Where the ledger is, once it was fetched; raises TargetError where that is refused."""
        if not self._is_fetched:
            self.fetch()
        return super().ledger_path

    @property
    def beside_bytes(self) -> int:
        """Bytes of memory that a lane takes for the shard that it uploads."""
        orders = self._orders
        kept = (0 if self._scratch is not None else each.early_bytes for each in orders)
        return max((k + stream_bytes(each.nbytes) for k, each in zip(kept, orders, strict=True)), default=0)

    @cached_property
    def _orders(self) -> tuple[ShardOrder, ...]:
        """How each shard is made; of a large plan it takes seconds to find out."""
        return shard_orders(self._plan)

    def missing_bytes(self) -> int:
        """0: nobody knows how much room a store has."""
        return 0

    def fetch(self) -> None:
        """Have in the control directory what an unfinished run of this plan left, as far as it is read."""
        self._is_fetched = True
        shutil.rmtree(self.root, ignore_errors=True)
        if not self._is_ours(self._listed()):
            return
        for key in _FETCHED:
            if (found := self._writer.get(key)) is not None:
                path = self.root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(found[0])
        RemoteLedger.fetch(self.ledger_path, self._writer, RECORD, self.mark)

    def shards(self, store: LocalStore) -> RemoteShards:
        """The shards, whose headers come into ``store``, the control directory."""
        self._shards = RemoteShards(self._plan, self._orders, store, self._writer)
        return self._shards

    def work(self, segments: SegmentWork) -> ShardWork:
        """What workers are to do."""
        return ShardWork(segments, str(self.place), self._scratch, self._orders)

    def publish(self, *, replace: bool) -> None:  # noqa: ARG002 - what was there is gone
        """Write all small files, and last the index, or the config where there is none.

        Raises:
            IncompleteError: a shard is no longer the one that was made, or the place that of this run.
        """
        last = next((key for key in (INDEX_FILE, CONFIG_FILE) if (self.root / key).is_file()), None)
        own = self._plan["shards"].column("name").to_pylist()
        files = [path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()]
        small = sorted(set(files) - {last, _BEGUN, *own}, key=lambda key: (key == CONFIG_FILE, key))
        for key in small:
            # All of them together may take longer than it takes to be taken for dead.
            self._upload(key, self._confirm)
        wanted = {*own, *small, last, LEASE}
        # Of what an earlier attempt left, nothing is to be taken for a part of the checkpoint.
        left = sorted((self._parts() - wanted) | self._probes)
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
        """Delete the checkpoint at the place, or what there is of it, but for the lease: first what makes it
        one, last what says whose it is, so that after a crash no receipt is believed.

        A request to stop stays: it may have come while what is before this plan was made.
        """
        keys = self._parts() - {STOP}
        first = [key for key in (INDEX_FILE, CONFIG_FILE) if key in keys]
        # While the record says that they are parts.
        first += sorted(
            key for key in keys - {*first} if not _is_record(key) and not SAFETENSORS.are_in([key])
        )
        ledger = [key for key in keys if key.startswith(f"{RECORD}/ledger")]
        manifest = [key for key in keys if key == MANIFEST]
        with self._journal.lock:
            for some in (first, ledger, sorted({*keys} - {*first, *ledger, *manifest}), manifest):
                # One that comes late is what may be lost of another's.
                self._check_held()
                self._writer.delete(some)
            shutil.rmtree(self.root, ignore_errors=True)

    def _confirm(self) -> None:
        """See by what lies there that the place is still that of this run; raises IncompleteError."""
        self._check_held()
        check_mark(self._writer, self.mark)

    def _check_held(self) -> None:
        """See that the lease is still that of this run; raises IncompleteError."""
        if self._lease is not None:
            self._lease.confirm()

    def _abort_uploads(self, files: Collection[str] = ()) -> None:
        """Abort what killed processes left of shards, of the record and of these files."""
        ours = {*self._plan["shards"].column("name").to_pylist(), *files}
        self._writer.abort_uploads(
            lambda key: key in ours or _is_record(key) or _SHARD.fullmatch(key) is not None
        )

    def _upload(self, key: str, guard: Callable[[], None]) -> None:
        """Write a file of the control directory; ``guard`` raises where nothing more is to be written."""
        path, done = self.root / key, 0
        with path.open("rb") as file, self._writer.stream(key, path.stat().st_size, guard=guard) as stream:
            while chunk := file.read(_AT_ONCE):
                stream.write(done, chunk)
                done += len(chunk)
            stream.finish()

    def _listed(self) -> list[FileInfo]:
        """Every object at the place but those that come and go."""
        passing = (LEASE, STEPS_LEASE, _PROBES)
        return [each for each in self._writer.files() if not each.key.startswith(passing)]

    def _parts(self) -> set[str]:
        """Every object at the place that is the checkpoint's, or of a run towards it."""
        keys = {each.key for each in self._listed()}
        return keys - self._foreign_files(keys)

    def _foreign_files(self, keys: Collection[str]) -> set[str]:
        """Objects at the place that are no part of the checkpoint there."""
        return {*foreign_files(keys, self._recorded_files, is_recorded=MANIFEST in keys)}

    def _recorded_files(self) -> RecordedFiles:
        """What the record at the place lists."""
        ledger, provenance = (self._writer.get(key) for key in (f"{RECORD}/{NAME}", PROVENANCE_FILE))
        first = next(entries_of(b"" if ledger is None else ledger[0]), {})
        conditions = first.get("conditions")
        known = conditions if isinstance(conditions, dict) else None
        return recorded_files(known, b"" if provenance is None else provenance[0])

    def _is_ours(self, found: Collection[FileInfo]) -> bool:
        """Whether these are an unfinished run of this plan."""
        is_open = self._is_unfinished({each.key for each in found})
        return is_open and self._manifest().get("digest") == self._plan.digest

    def _is_mine(self) -> bool:
        """Whether the place is that of this run, begun or published."""
        begun = self._asides.get(_BEGUN)
        return self._is_published if begun is None else begun[0].decode("ascii", "replace") == self.mark

    def _is_unfinished(self, keys: Collection[str]) -> bool:
        """Whether a run is on its way there: the mark of its beginning goes when it is published."""
        return _BEGUN in keys or (MANIFEST in keys and not {CONFIG_FILE, INDEX_FILE} & {*keys})

    def _manifest(self) -> Mapping[str, Any]:
        found = self._writer.get(MANIFEST)
        try:
            record = json.loads(found[0]) if found is not None else {}
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _check_sizes(self) -> None:
        shards = self._plan["shards"].select(["name", "nbytes"]).to_pylist()
        large = [each for each in shards if each["nbytes"] > LARGEST_OBJECT]
        if large:
            nbytes, most = format_size(large[0]["nbytes"]), format_size(LARGEST_OBJECT)
            what = f"the shard {large[0]['name']} has {nbytes}, and an object has at most {most}."
            raise TargetError(Problem(self.name, what, "Give a smaller shard_size in the recipe."))


def _is_record(key: str) -> bool:
    return key.startswith(f"{RECORD}/")
