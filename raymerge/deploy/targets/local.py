"""Runs known by the records beside their output places, on this machine or any that sees these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raymerge.deploy.targets.target import RunReport, RunState
from raymerge.errors import OptionError, Problem, RaymergeError, TransientError
from raymerge.publish import run_records
from raymerge.publish.lease import DEAD_SECONDS, LeaseView
from raymerge.publish.record import ENDED, NAME, entries_of
from raymerge.storage.addresses import join, shown
from raymerge.storage.retry import KEPT
from raymerge.units import format_duration, format_size

GOES_ON = "Submit it again: it goes on from there."
_RESUMABLE = 3
_ASKED = "stopping"
_LOOKERS = 16


@dataclass(frozen=True, slots=True)
class Progress:
    segments: int
    nbytes: int
    total_segments: int | None
    """None if unknown."""
    total_nbytes: int | None
    stage: str
    """The last stage or merge begun before it; "" for none."""
    ended: Mapping[str, Any] | None
    """The event that ended it, if any."""
    is_asked: bool
    """Whether its last event is a requested stop."""

    def __str__(self) -> str:
        if self.stage and not self.segments:
            return f"{self.stage} was begun"
        total = "" if self.total_segments is None else f" of {self.total_segments}"
        return f"{self.segments}{total} segments are done"

    def details(self) -> dict[str, str]:
        segments, nbytes = str(self.segments), format_size(self.nbytes)
        if self.total_segments is not None:
            segments += f" of {self.total_segments}"
        if self.total_nbytes is not None:
            nbytes += f" of {format_size(self.total_nbytes)}"
        return {"segments": segments, "bytes": nbytes} | ({"before it": self.stage} if self.stage else {})


def report_of(records: run_records.RunRecords) -> RunReport:
    """Raises OSError: the place cannot be read."""
    lease, begun = records.hold(), records.begun()
    if lease is not None and lease.is_alive:
        return _running(records.place, lease, None if begun is None else _progress(begun))
    published = records.published()
    if begun is not None and not run_records.is_older(begun, published):
        return _unfinished(records.place, lease, _progress(begun))
    if published is not None:
        return _published(records.place, published)
    if lease is not None:
        what = f"{_died(lease)}; it had not begun to write the output. {GOES_ON}"
        return RunReport(records.place, RunState.FAILED, records.place, what)
    if records.has_steps():
        what = f"nobody makes it; what was made on the way is kept beside it. {GOES_ON}"
        return RunReport(records.place, RunState.STOPPED, records.place, what)
    what = f"there is nothing of raymerge at {records.place}: no checkpoint, and no unfinished run."
    return RunReport(records.place, RunState.UNKNOWN, records.place, what)


def _progress(record: run_records.Record) -> Progress:
    entries = (entry.get("receipt") for entry in entries_of(record(NAME)))
    receipts = {
        each["segment"]: each
        for each in entries
        if isinstance(each, dict) and isinstance(each.get("segment"), int)
    }
    nbytes = sum(
        _number(each, key) or 0 for each in receipts.values() for key in ("read_bytes", "written_bytes")
    )
    planned: Mapping[str, Any] = {}
    ended: Mapping[str, Any] | None = None
    stage, kind = "", ""
    for event in run_records.events_of(record):
        kind = str(event.get("event"))
        if kind == "planned":
            planned, ended, stage = event, None, ""
        elif kind == "stage_started":
            stage, ended = f"the stage '{event.get('title')}'", None
        elif kind == ENDED:
            ended = event
    totals = _number(planned, "segments"), _number(planned, "total_bytes")
    return Progress(len(receipts), nbytes, *totals, stage, ended, is_asked=kind == _ASKED)


def _running(place: str, lease: LeaseView, progress: Progress | None) -> RunReport:
    by = "another process" if lease.holder is None else str(lease.holder)
    how_far = "it has not begun to write the output yet" if progress is None else str(progress)
    details = {"by": by, "last sign of life": f"{format_duration(lease.silent_seconds)} ago"}
    details |= {} if progress is None else progress.details()
    return RunReport(place, RunState.RUNNING, place, f"{by} makes it: {how_far}.", details)


def _unfinished(place: str, lease: LeaseView | None, progress: Progress) -> RunReport:
    state, details, ended = RunState.STOPPED, progress.details(), progress.ended
    if lease is not None and not progress.is_asked:
        state, message = RunState.FAILED, f"{_died(lease)}; {progress}. {GOES_ON}"
    elif ended is None:
        message = f"nobody makes it; {progress}. {GOES_ON}"
    else:
        code = _number(ended, "exit_code") or 0
        details["exit_code"] = str(code)
        message = f"{progress}. {GOES_ON} It ended with: {ended.get('message')}"
        if code != _RESUMABLE:
            state, message = RunState.FAILED, f"it ended with an error: {ended.get('message')}"
    return RunReport(place, state, place, message, details)


def _died(lease: LeaseView) -> str:
    by = "the process that made it" if lease.holder is None else str(lease.holder)
    return f"{by} died, or shows no sign of life for {DEAD_SECONDS:g} s"


def _published(place: str, record: run_records.Record) -> RunReport:
    story = run_records.read_object(record, run_records.STORY)
    seconds = story.get("seconds")
    details = {"finished": str(story.get("finished", "")), "exit_code": "0"}
    if isinstance(seconds, int | float):
        details["took"] = format_duration(seconds)
    what = "the checkpoint is published, and was verified before."
    return RunReport(place, RunState.SUCCEEDED, place, what, details)


def _number(fields: Mapping[str, Any], key: str) -> int | None:
    value = fields.get(key)
    return value if isinstance(value, int) else None


_HEED_SECONDS = 30.0
"""Limit for a run to heed a stop request; one that hangs in a storage request takes longer."""
_LOOK_SECONDS = 0.5
_AGAIN = "Whatever makes it is not touched by that: ask again later."


@dataclass(frozen=True, slots=True)
class PlaceRuns:
    records: Callable[[str], run_records.RunRecords] = run_records.records_of

    def report(self, run: str) -> RunReport:
        with _looking(run):
            records = self.records(run)
            report = report_of(records)
            # A checkpoint or a run towards one is there, and says so.
            is_one = report.state is RunState.SUCCEEDED or records.begun() is not None
            outputs = {} if is_one else records.outputs()
            return self._of_sweep(run, report, outputs) if outputs else report

    def _of_sweep(self, place: str, own: RunReport, outputs: Mapping[str, run_records.Failure]) -> RunReport:
        """``own`` is the report of the directory of the outputs, where results between have theirs."""

        def report(name: str) -> RunReport:
            each = report_of(self.records(join(place, name)))
            failure = outputs[name]
            if each.state is not RunState.SUCCEEDED and failure:
                is_stopped = _number(failure, "exit_code") == _RESUMABLE
                state = RunState.STOPPED if is_stopped else RunState.FAILED
                each = replace(each, state=state, message=str(failure.get("message")))
            elif each.state is RunState.UNKNOWN:
                each = replace(each, state=RunState.QUEUED, message="it is not begun.")
            return replace(each, run=name)

        with ThreadPoolExecutor(_LOOKERS) as threads:
            each = tuple(threads.map(report, outputs))
        states = [own.state, *(one.state for one in each)]
        made = states.count(RunState.SUCCEEDED)
        order = (RunState.RUNNING, RunState.FAILED, RunState.STOPPED)
        state = next((one for one in order if one in states), RunState.STOPPED)
        state = RunState.SUCCEEDED if made == len(each) else state
        message = f"{made} of {len(each)} outputs are published."
        if state in (RunState.FAILED, RunState.STOPPED):
            message = f"{message} The same command goes on with the others."
        return RunReport(own.run, state, own.output, message, outputs=each)

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        with _looking(run):
            yield from run_records.journal_lines(self.records(run), follow=follow)

    def stop(self, run: str) -> RunReport:
        """Ask the run's process to stop, and wait a while; raises OptionError if the request cannot be
        written."""
        with _looking(run):
            records = self.records(run)
            story_before = _story(records)
            lease = records.hold()
            if lease is None or lease.holder is None or not lease.is_alive:
                return self._stop_sweep(run)
            records.ask_to_stop(lease.holder)
            ends_at = time.monotonic() + _HEED_SECONDS
            while run_records.is_made(records) and time.monotonic() < ends_at:
                time.sleep(_LOOK_SECONDS)
            report = report_of(records)
            is_as_before = _story(records) == story_before
        if report.state is RunState.RUNNING:
            asked = "It was asked to stop, and has not done so yet."
            return replace(report, message=f"{report.message} {asked}")
        if report.state is RunState.UNKNOWN or (report.state is RunState.SUCCEEDED and is_as_before):
            # What is published there, if anything, is what it was to replace.
            what = f"{lease.holder} has stopped before it began to write the output. {GOES_ON}"
            return replace(report, state=RunState.STOPPED, message=what)
        return report

    def _stop_sweep(self, place: str) -> RunReport:
        """One process makes all outputs, so that any of them that is being made is asked."""
        report = self.report(place)
        for each in report.outputs:
            if each.state is RunState.RUNNING:
                self.stop(join(place, each.run))
                return self.report(place)
        return report


def _story(records: run_records.RunRecords) -> dict[str, Any]:
    published = records.published()
    return {} if published is None else run_records.read_object(published, run_records.STORY)


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
