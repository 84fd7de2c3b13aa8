"""Runs of this machine, and of any other that sees the same output place, by the records beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raymerge.deploy.targets.local import GOES_ON, report_of
from raymerge.deploy.targets.target import RunReport, RunState
from raymerge.errors import OptionError, Problem, RaymergeError, TransientError
from raymerge.publish.run_records import STORY, RunRecords, is_made, journal_lines, read_object, records_of
from raymerge.storage.addresses import shown
from raymerge.storage.retry import KEPT

_HEED_SECONDS = 30.0
"""How long a run may take to heed a request; one that hangs in a request to storage takes longer."""
_LOOK_SECONDS = 0.5
_AGAIN = "Whatever makes it is not touched by that: ask again later."


class PlaceRuns:
    """What is known of runs by their output places; a run's name is its place here."""

    def __init__(
        self,
        records: Callable[[str], RunRecords] = records_of,
        *,
        heed_seconds: float = _HEED_SECONDS,
    ) -> None:
        """
        Args:
            records: those of a place.
            heed_seconds: how long a run is waited for that was asked to stop.
        """
        self._records = records
        self._heed_seconds = heed_seconds

    def report(self, run: str) -> RunReport:
        """How far it is; ``UNKNOWN`` where there is nothing.

        Raises:
            OptionError: the place cannot be looked at.
        """
        with _looking(run):
            return report_of(self._records(run))

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """The lines of its journal: each an event as JSON."""
        with _looking(run):
            yield from journal_lines(self._records(run), follow=follow)

    def stop(self, run: str) -> RunReport:
        """Ask whoever makes it to stop, and wait a while for that.

        Raises:
            OptionError: no request can be left there.
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
    """What is told of the checkpoint in its place; empty where there is none."""
    published = records.published()
    return {} if published is None else read_object(published, STORY)


@contextmanager
def _looking(place: str) -> Iterator[None]:
    """Says of what fails that somebody only looked there."""
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
