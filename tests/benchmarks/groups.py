"""Programs that are compared with each other, run by turns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cache import evict, resident, warm
from benchmarks.measure import ProgramError, Sample, measure

Say = Callable[[str], None]
"""Receives lines for whoever waits."""
MOST_RESIDENT = 0.02
"""The part of a file that may still be cached where a cold cache is wanted."""


@dataclass(frozen=True, slots=True)
class Program:
    """One of the programs."""

    name: str
    """What the table calls it."""
    command: Callable[[Path], Sequence[str]]
    """The command, given a place that does not exist yet, to which it writes."""
    rounds: int | None = None
    """In how many rounds it takes part; None: in all."""


@dataclass(frozen=True, slots=True)
class Group:
    """Programs that do the same on the same files."""

    name: str
    """What the table calls it."""
    programs: tuple[Program, ...]
    """What is compared."""
    inputs: tuple[Path, ...] = ()
    """Files that are brought into the cache before each run, or thrown out."""
    is_cold: bool = False
    """Whether they are thrown out."""
    rounds: int | None = None
    """How often; None: as often as was asked for."""


@dataclass(frozen=True, slots=True)
class Results:
    """Samples by group, program and round."""

    samples: dict[tuple[str, str], dict[int, Sample]] = field(default_factory=dict)
    """Samples by round, by names of group and program."""
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """What went wrong, of programs that failed once and were not run again."""

    def add(self, group: str, program: str, number: int, sample: Sample) -> None:
        """Take in one run."""
        self.samples.setdefault((group, program), {})[number] = sample

    def of(self, group: str, program: str) -> tuple[Sample, ...]:
        """Every run of a program; none if it was not run."""
        return tuple(self.samples.get((group, program), {}).values())


def run_group(
    group: Group, results: Results, place: Path, *, rounds: int, environment: Mapping[str, str], say: Say
) -> None:
    """Run every program of a group once in each round, in an order that is turned round by round.

    Args:
        group: what to run.
        results: where samples go.
        place: directory for outputs; what is written is removed after each run.
        rounds: how often, unless the group says it.
        environment: of all programs.
        say: told of every run.
    """
    for number in range(group.rounds or rounds):
        for program in turned(group.programs, number):
            is_over = program.rounds is not None and number >= program.rounds
            if is_over or (group.name, program.name) in results.failures:
                continue
            try:
                sample = _run(group, program, place / "out", environment)
            except ProgramError as error:
                results.failures[group.name, program.name] = str(error)
                say(f"{group.name}: {program.name} failed: {error}")
            else:
                results.add(group.name, program.name, number, sample)
                say(f"{group.name}: {program.name} {sample.wall:.2f} s, in the run {sample.run:.2f} s")


def turned(programs: Sequence[Program], number: int) -> tuple[Program, ...]:
    """The programs in the order of a round: another one is the first in each."""
    start = number % max(1, len(programs))
    return (*programs[start:], *programs[:start])


def _run(group: Group, program: Program, output: Path, environment: Mapping[str, str]) -> Sample:
    """One run, from a cache and a disk in the same state as for every other."""
    if group.is_cold:
        evict(group.inputs)
        _check_cold(group.inputs)
    else:
        warm(group.inputs)
    os.sync()
    try:
        return measure(program.command(output), environment=environment)
    finally:
        remove(output)


def _check_cold(files: Sequence[Path]) -> None:
    for file in files:
        if (part := resident(file)) > MOST_RESIDENT:
            raise ProgramError(f"{part:.0%} of {file} stay in the page cache: something else is reading it")


def remove(output: Path) -> None:
    """Remove what a run wrote, whether it is a file or a directory; what is not there is no matter."""
    if output.is_dir():
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)
