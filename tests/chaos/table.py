"""What came of the faults, as the table that ``make chaos`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEAST_KILLS, LEAST_RUNS = 200, 20
"""Of processes killed at random, and of runs that they are killed in."""
_HEADING = (
    "| fault | times injected | segments redone | bytes lost | final digests equal | seconds |",
    "|---|---:|---:|---:|---|---:|",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, over all runs that it was injected into."""

    fault: str
    injected: int = 0
    wanted: int = 1
    """How often it was to be done, at least."""
    redone: int = 0
    """Segments that were in work then, and were made again."""
    lost_bytes: int = 0
    """Bytes that were durable then, and were made again."""
    right: int = 0
    runs: int = 0
    seconds: float = 0.0
    broken: str = ""
    """The promise that was broken; empty for none."""
    skipped: str = ""
    """Why it was not injected; empty where it was."""
    is_random: bool = False
    """Whether it is processes that are killed at moments that nobody chose."""

    @property
    def is_kept(self) -> bool:
        """Whether all that was to be tried was tried, and every promise was kept."""
        whole = self.runs > 0 and self.right == self.runs and not self.lost_bytes
        return whole and self.injected >= max(self.wanted, 1) and not (self.broken or self.skipped)

    @property
    def is_broken(self) -> bool:
        """Whether it was to be tried here, and is not kept."""
        return not (self.is_kept or self.skipped)

    @property
    def verdict(self) -> str:
        return "left out" if self.skipped else "BROKEN" if self.is_broken else "kept"


@dataclass(frozen=True, slots=True)
class Total:
    kills: int
    runs: int
    """Runs that they were killed in."""
    right: int
    """Those whose output is that of an undisturbed one."""
    broken: int
    left_out: int

    @property
    def is_enough(self) -> bool:
        """Whether a whole ``make chaos`` may say that it has shown what it is for."""
        return not self.broken and self.kills >= LEAST_KILLS and self.right == self.runs >= LEAST_RUNS

    def __str__(self) -> str:
        random = f"random kills: {self.kills} in {self.runs} runs, of which {self.right} are right"
        return f"{random}; lines broken: {self.broken}, left out: {self.left_out}"


def total(rows: Iterable[Row]) -> Total:
    listed = tuple(rows)
    random = [row for row in listed if row.is_random]
    return Total(
        sum(row.injected for row in random),
        sum(row.runs for row in random),
        sum(row.right for row in random),
        sum(row.is_broken for row in listed),
        sum(bool(row.skipped) for row in listed),
    )


def table(rows: Iterable[Row]) -> str:
    return "\n".join((*_HEADING, *map(_line, rows)))


def _line(row: Row) -> str:
    if row.skipped:
        return f"| {row.fault} | left out: {row.skipped} | | | | |"
    equal = "yes" if row.is_kept else "**no**"
    told = f"{equal}, {row.right} of {row.runs}" + (f"; {row.broken}" if row.broken else "")
    if row.injected < row.wanted and not row.broken:
        told += f"; it was to be injected {row.wanted} times"
    cells = (row.fault, row.injected, row.redone, row.lost_bytes, told, f"{row.seconds:.0f}")
    return f"| {' | '.join(map(str, cells))} |"
