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
MOST_RESIDENT = 0.02


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    command: Callable[[Path], Sequence[str]]
    rounds: int | None = None
    """In how many rounds it takes part; None: in all."""


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    programs: tuple[Program, ...]
    inputs: tuple[Path, ...] = ()
    is_cold: bool = False
    rounds: int | None = None
    """How often; None: as often as was asked for."""


@dataclass(frozen=True, slots=True)
class Results:
    samples: dict[tuple[str, str], dict[int, Sample]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, group: str, program: str, number: int, sample: Sample) -> None:
        self.samples.setdefault((group, program), {})[number] = sample

    def of(self, group: str, program: str) -> tuple[Sample, ...]:
        return tuple(self.samples.get((group, program), {}).values())


def run_group(
    group: Group, results: Results, place: Path, *, rounds: int, environment: Mapping[str, str], say: Say
) -> None:
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
    start = number % max(1, len(programs))
    return (*programs[start:], *programs[:start])


def _run(group: Group, program: Program, output: Path, environment: Mapping[str, str]) -> Sample:
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
    if output.is_dir():
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)
