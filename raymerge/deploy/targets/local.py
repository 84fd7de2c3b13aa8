"""Runs known by the records beside their output places, on this machine or any that sees these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raymerge.deploy.targets.target import RunReport, RunState
from raymerge.errors import OptionError, Problem, RaymergeError, TransientError
from raymerge.publish.journal import ENDED, entries_of
from raymerge.publish.lease import DEAD_SECONDS, LeaseView
from raymerge.publish.ledger import NAME
from raymerge.publish.run_records import (
    STORY,
    Record,
    RunRecords,
    events_of,
    is_made,
    is_older,
    journal_lines,
    read_object,
    records_of,
)
from raymerge.storage.addresses import shown
from raymerge.storage.retry import KEPT
from raymerge.units import format_duration, format_size

GOES_ON = "Submit it again: it goes on from there."
_RESUMABLE = 3
_ASKED = "stopping"


@dataclass(frozen=True, slots=True)
class Done:
    """Progress of an unfinished run."""

    segments: int
    nbytes: int
    of_segments: int | None
    """Segments in all; None if unknown."""
    of_nbytes: int | None
    stage: str
    """The last stage or merge begun before it; "" for none."""
    ended: Mapping[str, Any] | None
    """The event that ended it, if any."""
    is_asked: bool
    """Whether its last event is a requested stop."""

    def __str__(self) -> str:
        if self.stage and not self.segments:
            return f"{self.stage} was begun"
        of = "" if self.of_segments is None else f" of {self.of_segments}"
        return f"{self.segments}{of} segments are done"


def report_of(records: RunRecords) -> RunReport:
    """Raises:
    OSError: the place cannot be read.
    """
    hold, begun = records.hold(), records.begun()
    if hold is not None and hold.is_alive:
        return _running(records.place, hold, None if begun is None else done_of(begun))
    published = records.published()
    if begun is not None and not is_older(begun, published):
        return _unfinished(records.place, hold, done_of(begun))
    if published is not None:
        return _published(records.place, published)
    if hold is not None:
        what = f"{_died(hold)}; it had not begun to write the output. {GOES_ON}"
        return RunReport(records.place, RunState.FAILED, records.place, what)
    if records.has_steps():
        what = f"nobody makes it; what was made on the way is kept beside it. {GOES_ON}"
        return RunReport(records.place, RunState.STOPPED, records.place, what)
    what = f"there is nothing of raymerge at {records.place}: no checkpoint, and no unfinished run."
    return RunReport(records.place, RunState.UNKNOWN, records.place, what)


def done_of(record: Record) -> Done:
    receipts = {each["segment"]: each for each in _receipts(record)}
    nbytes = sum(_count(each, "read_bytes") + _count(each, "written_bytes") for each in receipts.values())
    planned: Mapping[str, Any] = {}
    ended: Mapping[str, Any] | None = None
    stage, kind = "", ""
    for event in events_of(record):
        kind = str(event.get("event"))
        if kind == "planned":
            planned, ended, stage = event, None, ""
        elif kind == "stage_started":
            stage, ended = f"the stage '{event.get('title')}'", None
        elif kind == ENDED:
            ended = event
    of = _known(planned, "segments"), _known(planned, "total_bytes")
    return Done(len(receipts), nbytes, *of, stage, ended, is_asked=kind == _ASKED)


def _running(place: str, hold: LeaseView, done: Done | None) -> RunReport:
    by = "another process" if hold.holder is None else str(hold.holder)
    how_far = "it has not begun to write the output yet" if done is None else str(done)
    details = {"by": by, "last sign of life": f"{format_duration(hold.silent_seconds)} ago"}
    details |= {} if done is None else _numbers(done)
    return RunReport(place, RunState.RUNNING, place, f"{by} makes it: {how_far}.", details)


def _unfinished(place: str, hold: LeaseView | None, done: Done) -> RunReport:
    details = _numbers(done)
    if hold is not None and not done.is_asked:
        return RunReport(place, RunState.FAILED, place, f"{_died(hold)}; {done}. {GOES_ON}", details)
    if done.ended is None:
        return RunReport(place, RunState.STOPPED, place, f"nobody makes it; {done}. {GOES_ON}", details)
    code, said = _count(done.ended, "exit_code"), str(done.ended.get("message"))
    details["exit_code"] = str(code)
    if code == _RESUMABLE:
        return RunReport(place, RunState.STOPPED, place, f"{done}. {GOES_ON} It ended with: {said}", details)
    return RunReport(place, RunState.FAILED, place, f"it ended with an error: {said}", details)


def _died(hold: LeaseView) -> str:
    by = "the process that made it" if hold.holder is None else str(hold.holder)
    return f"{by} died, or shows no sign of life for {DEAD_SECONDS:g} s"


def _published(place: str, record: Record) -> RunReport:
    story = read_object(record, STORY)
    seconds = story.get("seconds")
    details = {"finished": str(story.get("finished", "")), "exit_code": "0"}
    if isinstance(seconds, int | float):
        details["took"] = format_duration(seconds)
    what = "the checkpoint is published, and was verified before."
    return RunReport(place, RunState.SUCCEEDED, place, what, details)


def _numbers(done: Done) -> dict[str, str]:
    segments = str(done.segments) if done.of_segments is None else f"{done.segments} of {done.of_segments}"
    size = format_size(done.nbytes)
    nbytes = size if done.of_nbytes is None else f"{size} of {format_size(done.of_nbytes)}"
    return {"segments": segments, "bytes": nbytes} | ({"before it": done.stage} if done.stage else {})


def _receipts(record: Record) -> Iterator[Mapping[str, Any]]:
    for entry in entries_of(record(NAME)):
        receipt = entry.get("receipt")
        if isinstance(receipt, dict) and isinstance(receipt.get("segment"), int):
            yield receipt


def _count(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    return value if isinstance(value, int) else 0


def _known(found: Mapping[str, Any], key: str) -> int | None:
    value = found.get(key)
    return value if isinstance(value, int) else None


_HEED_SECONDS = 30.0
"""Limit for a run to heed a stop request; one that hangs in a storage request takes longer."""
_LOOK_SECONDS = 0.5
_AGAIN = "Whatever makes it is not touched by that: ask again later."


class PlaceRuns:
    def __init__(
        self, records: Callable[[str], RunRecords] = records_of, *, heed_seconds: float = _HEED_SECONDS
    ) -> None:
        self._records = records
        self._heed_seconds = heed_seconds

    def report(self, run: str) -> RunReport:
        with _looking(run):
            return report_of(self._records(run))

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        with _looking(run):
            yield from journal_lines(self._records(run), follow=follow)

    def stop(self, run: str) -> RunReport:
        """Ask the run's process to stop, and wait a while; raises OptionError if the request cannot be
        written.
        """
        with _looking(run):
            records = self._records(run)
            there = _story(records)
            hold = records.hold()
            if hold is None or hold.holder is None or not hold.is_alive:
                return report_of(records)
            records.ask_to_stop(hold.holder)
            ends_at = time.monotonic() + self._heed_seconds
            while is_made(records) and time.monotonic() < ends_at:
                time.sleep(_LOOK_SECONDS)
            report = report_of(records)
            is_as_before = _story(records) == there
        if report.state is RunState.RUNNING:
            asked = "It was asked to stop, and has not done so yet."
            return replace(report, message=f"{report.message} {asked}")
        if report.state is RunState.UNKNOWN or (report.state is RunState.SUCCEEDED and is_as_before):
            # What is published there, if anything, is what it was to replace.
            what = f"{hold.holder} has stopped before it began to write the output. {GOES_ON}"
            return replace(report, state=RunState.STOPPED, message=what)
        return report


def _story(records: RunRecords) -> dict[str, Any]:
    published = records.published()
    return {} if published is None else read_object(published, STORY)


@contextmanager
def _looking(place: str) -> Iterator[None]:
    """Adds to errors that the place was only read."""
    try:
        yield
    except TransientError as error:
        raise TransientError(str(error).replace(KEPT, _AGAIN)) from error
    except RaymergeError:
        # Some of them are errors of the system too.
        raise
    except OSError as error:
        what = f"the place cannot be looked at, or no request be left there: {error.strerror or error}."
        raise OptionError(Problem(shown(place), what, "Check the path and your rights there.")) from error
