"""The results as Markdown, which is also what is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import programme as run
from benchmarks.groups import Results
from benchmarks.ratios import in_run, middle, ratio, whole
from benchmarks.recipes import METHODS
from benchmarks.targets import Target, above_idle, stated_memory

BENCH = "make bench"

_TITLES = (
    "merge", "program", "whole, s", "in the run, s", "times the floor", "processor, s", "memory, MB",
    "of it own, MB", "runs",
)  # fmt: skip
_MEMORY_TITLES = ("merge", "program", "stated, MB", "above idle, MB", "times the stated")
_WORDS = {True: "yes", False: "**no**", None: "not measured"}


def section(place: str, command: str, results: Results, found: Sequence[Target]) -> str:
    head = f"`{command}`; {place}."
    failures = [f"Failed and left out: {program}, {group}." for group, program in results.failures]
    tables = (targets_table(found), memory_table(results), results_table(results))
    return "\n\n".join([head, *failures, *filter(None, tables)]) + "\n"


def results_table(results: Results) -> str:
    rows = [_row(results, group, program) for group, program in results.samples if group != run.IDLE]
    return markdown(_TITLES, rows, numbers=range(2, len(_TITLES)))


def memory_table(results: Results) -> str:
    rows = []
    for method in METHODS:
        for program in (run.INLINE, run.TIGHT):
            above, stated = above_idle(results, method, program), stated_memory(results, method, program)
            if above is not None and stated:
                numbers = (_number(stated / 1e6, 0), _number(above / 1e6, 0), _number(above / stated, 2))
                rows.append((method, program, *numbers))
    return markdown(_MEMORY_TITLES, rows, numbers=(2, 3, 4)) if rows else ""


def targets_table(found: Iterable[Target]) -> str:
    rows = [
        (
            each.text,
            _bound(each),
            _number(each.measured, 2),
            "" if each.bound is None else _WORDS[each.is_met],
        )
        for each in found
    ]
    return markdown(("target", "bound", "measured", "reached"), rows, numbers=(1, 2))


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Iterable[int] = ()) -> str:
    right = frozenset(numbers)
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    rule = ["-" * (width - (at in right)) + ":" * (at in right) for at, width in enumerate(widths)]
    lines = [_line(titles, widths, right), f"| {' | '.join(rule)} |"]
    return "\n".join([*lines, *(_line(row, widths, right) for row in rows)])


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replaced(document: str, text: str, name: str = BENCH) -> str:
    before, behind = marks(name)
    head, begin, rest = document.partition(before)
    _, end, tail = rest.partition(behind)
    if not (begin and end) or before in tail or behind in tail:
        raise ValueError(f"the document must hold {before!r} and behind it {behind!r}, each once")
    return f"{head}{before}\n\n{text.strip()}\n\n{behind}{tail}"


def _row(results: Results, group: str, program: str) -> tuple[str, ...]:
    samples = results.of(group, program)
    floor = run.COPY if (group, run.COPY) in results.samples else run.LIMIT
    return (
        group,
        program,
        _number(middle(results, group, program, whole), 2),
        _number(middle(results, group, program, in_run), 2),
        _number(ratio(results, group, program, floor, in_run), 2),
        _number(middle(results, group, program, lambda sample: sample.cpu), 1),
        _number(max(sample.peak for sample in samples) / 1e6, 0),
        _number(max(sample.own for sample in samples) / 1e6, 0),
        str(len(samples)),
    )


def _bound(target: Target) -> str:
    if target.bound is None:
        return ""
    return f"{'at most' if target.is_most else 'at least'} {target.bound:g}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _line(cells: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> str:
    aligned = (
        cell.rjust(width) if at in right else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(aligned)} |"
