"""How a run ends: what it made, in a few lines and as JSON, and what is useful to do next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from raymerge import events
from raymerge.cli.render.screen import counted, printable
from raymerge.cli.render.tally import Tally
from raymerge.errors import shortlist
from raymerge.units import format_duration, format_size

_COMMENT = "  # "
_PROGRAM = "raymerge"
_OUTPUTS_SHOWN = 8
_LONG = 60
"""Columns of a command that the others are not aligned with."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command that is useful next, to be pasted as it is."""

    command: str
    does: str

    @property
    def line(self) -> str:
        return f"{self.command}{_COMMENT}{self.does}"

    @staticmethod
    def of_line(line: str) -> Step:
        command, _, does = line.rpartition(_COMMENT)
        return Step(command, does)


def ending(tally: Tally, steps: Sequence[Step]) -> dict[str, Any]:
    """What the last event has as JSON beside its own fields."""
    plan = tally.plan
    summary = {
        "made": dict(plan.made) if plan is not None else {},
        "verified_tensors": tally.verified.tensors if tally.verified is not None else 0,
        "read_bytes": tally.read_bytes,
        "written_bytes": tally.written_bytes,
        "seconds": round(tally.merging_seconds, 3),
        "peak_bytes": tally.peak_bytes,
        "projected_peak": plan.projected_peak if plan is not None else 0,
    }
    return {"summary": summary, "next": [asdict(step) for step in steps]}


def summary_rows(
    tally: Tally, published: events.Published | events.OutputsPublished
) -> Iterator[tuple[str, str]]:
    """What is not known is left out: bytes that an earlier run made, memory that nobody measured."""
    plan, started = tally.plan, tally.started
    if isinstance(published, events.OutputsPublished):
        yield "outputs", f"{len(published.names)}: {shortlist(published.names, _OUTPUTS_SHOWN)}"
        if tally.outputs is not None and tally.outputs.total > 1:
            # What is known is of the last read alone.
            yield "time", format_duration(published.seconds)
            return
    if plan is not None:
        made = ", ".join(f"{number} {use}" for use, number in plan.made.items())
        tensors = f"{counted(plan.tensors, 'tensor')}, {format_size(plan.output_bytes)}"
        yield "result", f"{tensors}: {made}" if made else tensors
    if tally.made_bytes and tally.merging_seconds:
        earlier = "; the rest in an earlier run" if started is not None and started.done_bytes else ""
        yield "read", _moved(tally.read_bytes, tally.merging_seconds) + earlier
        yield "wrote", _moved(tally.written_bytes, tally.merging_seconds)
    if tally.peak_bytes and plan is not None:
        most = format_size(plan.projected_peak)
        yield "memory", f"{format_size(tally.peak_bytes)} measured, {most} planned, the most of a worker"
    by = f" with {how(started)}" if started is not None else ""
    merging = f", of it {format_duration(tally.merging_seconds)} merging" if tally.merging_seconds else ""
    yield "time", f"{format_duration(published.seconds)}{by}{merging}"
    if tally.num_warnings:
        yield "look at", f"{counted(tally.num_warnings, 'warning')} above"
    if plan is not None and plan.digest:
        yield "digest", plan.digest


def _moved(nbytes: int, seconds: float) -> str:
    return f"{format_size(nbytes)} at {format_size(round(nbytes / seconds))}/s"


def how(started: events.Started | events.StageStarted) -> str:
    threads = started.threads if isinstance(started, events.Started) else 1
    each = f" of {threads} threads" if threads > 1 else ""
    return f"{counted(len(started.workers), 'worker')}{each} on {started.device}"


def _typed(command: str) -> str:
    """A command as the shell finds it: by the path of this program if it is not on the search path."""
    name, _, rest = command.partition(" ")
    here = sys.argv[0]
    if name != _PROGRAM or shutil.which(name) or not os.access(here, os.X_OK):
        return command
    return f"{shlex.quote(min(here, os.path.relpath(here), key=len))} {rest}"


def show_next(console: Console, steps: Sequence[Step]) -> None:
    """Commands are never wrapped, so that they can be pasted; what they do is a comment where it fits."""
    if not steps:
        return
    console.print("next:", style="bold")
    commands = [printable(_typed(step.command)) for step in steps]
    widest = max((len(each) for each in commands if len(each) <= _LONG), default=0)
    for command, step in zip(commands, steps, strict=True):
        line = Text(f"  {command}")
        for width in (widest, len(command)):
            comment = f"{' ' * (width - len(command))}{_COMMENT}{step.does}"
            if not console.is_terminal or len(line) + len(comment) <= console.width:
                line.append(comment, style="dim")
                break
        console.print(line, soft_wrap=True)
