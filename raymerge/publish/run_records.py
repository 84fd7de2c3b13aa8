"""What runs towards one output place left in their records, and who makes it now; read without any server."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from raymerge.checkpoints.files import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.publish import lease as leases
from raymerge.publish.output_place import MANIFEST, steps_beside
from raymerge.publish.record import (
    ATTEMPT,
    JOURNAL,
    NAME,
    RECORD,
    entries_of,
    object_at,
    object_in,
    pieces_of,
)
from raymerge.storage.addresses import is_object_place, parse_place, shown
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import ObjectWriter

STORY = "run.json"
_SWEEP = ".raymerge.sweep.json"
Record: TypeAlias = Callable[[str], bytes]
"""Reads a file of a record as far as it is written by now; empty where there is none that can be read."""
_POLL_SECONDS = 1.0
_WATCH_SECONDS = 0.5
_MOST_BYTES = 256 << 20
_ASIDE_SECONDS = 5.0


def records_of(place: str) -> RunRecords:
    """Raises OptionError or CheckpointError where the place's store cannot be reached from here."""
    return RemoteRecords(place) if is_object_place(place) else LocalRecords(place)


def journal_lines(
    records: RunRecords, *, follow: bool, pause: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """The lines of the newest journal, without line ends; ``follow`` waits for more while a process holds the
    place, and calls ``pause`` between two looks."""
    done, is_held = 0, True
    while True:
        # Looked at first, so that what was written just before the end is not missed.
        is_held = follow and is_made(records)
        text = _journal(records)
        if len(text) < done:
            done = 0
        whole = text.rfind(b"\n") + 1
        yield from text[done:whole].decode(errors="replace").splitlines()
        done = max(done, whole)
        if not is_held:
            return
        pause(_POLL_SECONDS)


def seconds_taken(records: RunRecords, run: str) -> float | None:
    """Duration of the run of this name that made the checkpoint in its place; None where another made it."""
    record = records.published()
    story = {} if record is None else read_object(record, STORY)
    return float(story.get("seconds", 0)) if story.get("run") == run else None


def is_made(records: RunRecords) -> bool:
    hold = records.hold()
    return hold is not None and hold.is_alive


def events_of(record: Record) -> Iterator[dict[str, Any]]:
    """The events of a journal, in order, each with its ``time``; other lines are left out."""
    return entries_of(record(JOURNAL))


def read_object(record: Record, key: str) -> dict[str, Any]:
    """A JSON object of a record; empty where it cannot be read."""
    return object_in(record(key))


def is_older(begun: Record, published: Record | None) -> bool:
    """Whether an unfinished run was left before the checkpoint in its place was finished."""
    if published is None:
        return False
    finished = read_object(published, STORY).get("finished")
    last = [str(event.get("time", "")) for event in events_of(begun)][-1:]
    return bool(last) and isinstance(finished, str) and last[0] < finished


def _journal(records: RunRecords) -> bytes:
    begun, published = records.begun(), records.published()
    record = published if begun is None or is_older(begun, published) else begun
    return b"" if record is None else record(JOURNAL)


def _alive_first(views: Iterator[leases.LeaseView | None]) -> leases.LeaseView | None:
    held = [view for view in views if view is not None]
    return next((view for view in held if view.is_alive), held[0] if held else None)


Failure: TypeAlias = Mapping[str, Any]
"""What an output of a sweep has failed with: ``exit_code`` and ``message``; empty for nothing."""
NO_FAILURE: Failure = MappingProxyType({})


class SweepRecord:
    """Tells of the outputs of a sweep until all are published. Nobody waits for it: it raises nothing."""

    def __init__(self, place: str) -> None:
        """``place`` is the directory of the outputs' directories, or its like in an object store."""
        self._place = place

    def write(self, outputs: Mapping[str, Failure]) -> None:
        text = json.dumps({_OUTPUTS: {name: dict(failure) for name, failure in outputs.items()}}).encode()
        with suppress(Exception):
            if is_object_place(self._place):
                ObjectWriter(self._place, seconds=_ASIDE_SECONDS).put(_SWEEP, text)
                return
            Path(self._place).mkdir(parents=True, exist_ok=True)
            with LocalStore(Path(self._place)) as store:
                store.write_atomic(_SWEEP, text)

    def remove(self) -> None:
        with suppress(Exception):
            if is_object_place(self._place):
                ObjectWriter(self._place, seconds=_ASIDE_SECONDS).delete([_SWEEP])
            else:
                (Path(self._place) / _SWEEP).unlink()


_OUTPUTS = "outputs"


def _outputs_in(record: Mapping[str, Any]) -> dict[str, Failure]:
    listed = record.get(_OUTPUTS)
    listed = listed if isinstance(listed, dict) else {}
    return {name: failure if isinstance(failure, dict) else NO_FAILURE for name, failure in listed.items()}


class LocalRecords:
    def __init__(self, place: str) -> None:
        self._path = Path(os.path.realpath(parse_place(place).text))
        self.place = place

    def hold(self) -> leases.LeaseView | None:
        """Who holds the place, or its intermediate results; None for nobody."""
        return _alive_first(map(leases.lease_view, (self._path, steps_beside(self._path))))

    def begun(self) -> Record | None:
        """Of the unfinished runs beside the place, the record that was written to last."""
        pattern = f".{self._path.name}.raymerge-"
        ledgers = [
            each / RECORD / NAME
            for each in self._path.parent.glob(".*")
            if each.name.startswith(pattern) and (each / RECORD / NAME).is_file()
        ]
        newest = max(ledgers, key=lambda each: each.stat().st_mtime, default=None)
        return None if newest is None else _reader(newest.parent)

    def published(self) -> Record | None:
        record = self._path / RECORD
        return _reader(record) if (record / STORY).is_file() else None

    def has_steps(self) -> bool:
        return steps_beside(self._path).is_dir()

    def outputs(self) -> dict[str, Failure]:
        """The outputs of a sweep below the place, by their names; of one that is over, what is published."""
        made = sorted(each.parent.parent.name for each in self._path.glob(f"[!.]*/{RECORD}/{STORY}"))
        return _outputs_in(object_at(self._path / _SWEEP)) or dict.fromkeys(made, NO_FAILURE)

    def ask_to_stop(self, holder: leases.LeaseHolder) -> None:
        """Raises OSError where no request can be left."""
        leases.StopRequest(self._path).make(holder)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _reader(directory: Path) -> Record:
    def read(key: str) -> bytes:
        try:
            with open(directory / key, "rb", opener=_opened) as file:
                return file.read(_MOST_BYTES)
        except OSError:
            # It may be renamed or begun anew at this moment.
            return b""

    return read


class RemoteRecords:
    def __init__(self, place: str, *, dead_seconds: float = leases.DEAD_SECONDS) -> None:
        """``dead_seconds`` of silence until a holder on another machine is taken for dead."""
        self._writer = ObjectWriter(place)
        self.place = shown(place)
        self._dead_seconds = dead_seconds

    def hold(self) -> leases.LeaseView | None:
        """Waits for a sign of life of a holder on another machine."""
        is_known = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            return _alive_first(
                threads.map(lambda key: self._watched(key, is_known), (leases.LEASE, leases.STEPS_LEASE))
            )

    def begun(self) -> Record | None:
        keys = self._keys()
        # The manifest comes first; the mark and the ledger may not be there yet.
        is_begun = f"{RECORD}/{ATTEMPT}" in keys or (MANIFEST in keys and not _is_whole(keys))
        return self._read if is_begun else None

    def published(self) -> Record | None:
        keys = self._keys()
        is_whole = _is_whole(keys) and f"{RECORD}/{STORY}" in keys and f"{RECORD}/{ATTEMPT}" not in keys
        return self._read if is_whole else None

    def has_steps(self) -> bool:
        """False: intermediate results are in a directory unknown to the store."""
        return False

    def outputs(self) -> dict[str, Failure]:
        keys = sorted(key.split("/") for key in self._keys())
        made = [name for name, *key in keys if "/".join(key) == f"{RECORD}/{STORY}"]
        return _outputs_in(object_in(self._writer.content(_SWEEP))) or dict.fromkeys(made, NO_FAILURE)

    def ask_to_stop(self, holder: leases.LeaseHolder) -> None:
        leases.StopRequest(self._writer).make(holder)

    def _watched(self, key: str, is_known: threading.Event) -> leases.LeaseView | None:
        """The holder of one of the leases; ``is_known`` is set once either holder is known to live."""
        lease = leases.LeaseObject(self._writer, key)
        first = lease.look()
        if first is None:
            return None
        began, waited, is_alive, holder = time.monotonic(), 0.0, False, first.holder
        if holder is not None and leases.is_here(holder):
            is_alive = leases.runs_here(holder)
        else:
            while (waited := time.monotonic() - began) < self._dead_seconds:
                there = lease.look()
                if there is None:
                    return None
                if there.sign != first.sign:
                    waited, is_alive, holder = 0.0, True, there.holder
                    break
                if is_known.wait(_WATCH_SECONDS):
                    return None
        if is_alive:
            is_known.set()
        return leases.LeaseView(holder, waited, is_alive)

    def _read(self, key: str) -> bytes:
        text = self._writer.content(f"{RECORD}/{key}")
        if key != NAME:
            return text
        attempt_id = self._writer.content(f"{RECORD}/{ATTEMPT}").decode("ascii", "replace")
        return b"\n".join((text, *map(self._writer.content, pieces_of(self._keys(), attempt_id))))

    def _keys(self) -> frozenset[str]:
        return frozenset(each.key for each in self._writer.files())


def _is_whole(keys: frozenset[str]) -> bool:
    return bool(keys & {INDEX_FILE, CONFIG_FILE})


RunRecords: TypeAlias = LocalRecords | RemoteRecords
