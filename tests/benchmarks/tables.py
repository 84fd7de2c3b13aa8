"""What was measured, as targets and tables: medians, ratios within a round, and Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import programme as run
from benchmarks.groups import Results
from benchmarks.measure import Sample
from benchmarks.recipes import METHODS, VERBATIM

Quantity = Callable[[Sample], float]


def whole(sample: Sample) -> float:
    return sample.wall


def in_run(sample: Sample) -> float:
    return sample.run


def memory(sample: Sample) -> float:
    return float(sample.peak)


def own_memory(sample: Sample) -> float:
    return float(sample.own)


def middle(results: Results, group: str, program: str, quantity: Quantity) -> float | None:
    found = [quantity(sample) for sample in results.of(group, program)]
    return median(found) if found else None


def ratio(results: Results, group: str, over: str, under: str, quantity: Quantity) -> float | None:
    """The median over rounds of one program's number divided by another's in the same round.

    None where no round has both, or what is divided by is nothing.
    """
    above = results.samples.get((group, over), {})
    below = results.samples.get((group, under), {})
    found = [
        quantity(above[number]) / quantity(below[number])
        for number in above
        if number in below and quantity(below[number])
    ]
    return median(found) if found else None


def add_fastest(results: Results, group: str, name: str, programs: tuple[str, ...]) -> None:
    for program in programs:
        for number, sample in results.samples.get((group, program), {}).items():
            best = results.samples.get((group, name), {}).get(number)
            if best is None or sample.run < best.run:
                results.add(group, name, number, sample)


# What is to be reached


ELEMENTWISE = ("linear", "task_arithmetic", "slerp", "dare_linear", "dare_ties")
STATISTICAL = ("ties", "breadcrumbs", "della", "sce", "model_stock", "karcher")
TIGHT_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    bound: float | None
    is_most: bool
    """Whether the number must not be above the bound; else it must not be below."""
    measured: float | None

    @property
    def is_met(self) -> bool | None:
        if self.measured is None or self.bound is None:
            return None
        return self.measured <= self.bound if self.is_most else self.measured >= self.bound


def targets(results: Results) -> Iterator[Target]:
    yield from _against_the_limit(results)
    yield from _against_the_peer(results)
    yield from _of_memory(results)
    yield _least(
        results,
        f"{run.SCALED}: 2 workers against 1, one thread each, in the run",
        1.7,
        (run.SCALED, run.ONE, run.TWO),
        in_run,
    )
    report = ratio(results, "linear", run.REPORT, run.INLINE, whole)
    yield Target("linear: whole process with a report of its parents, times that without", 1.1, True, report)
    plan = middle(results, run.PLAN, "raymerge plan", whole)
    yield Target("raymerge plan of a 7B pair, whole process, seconds", 3.0, True, plan)
    for program, bound in ((run.DEFAULT, 2.5), (run.RAY, 12.0)):
        submit = middle(results, run.SUBMIT, program, whole)
        yield Target(f"{run.SUBMIT}, {program}: whole process, seconds", bound, True, submit)


def _against_the_limit(results: Results) -> Iterator[Target]:
    for methods, bound in ((ELEMENTWISE, 1.5), (STATISTICAL, 3.0)):
        for method in methods:
            found = ratio(results, method, run.INLINE, run.LIMIT, in_run)
            yield Target(f"{method}: in the run, times the limit", bound, True, found)
    for method in run.ON_RAY:
        found = ratio(results, method, run.RAY, run.INLINE, in_run)
        yield Target(f"{method}: in the run on a Ray worker, times --inline", 1.15, True, found)
    for method in run.COLD:
        found = ratio(results, run.cold_name(method), run.INLINE, run.LIMIT, in_run)
        yield Target(f"{run.cold_name(method)}: in the run, times the limit", 1.1, True, found)
    for method in VERBATIM:
        found = ratio(results, method, run.INLINE, run.COPY, in_run)
        yield Target(f"{method}: in the run, times cp + sync", 0.75, True, found)


def _against_the_peer(results: Results) -> Iterator[Target]:
    for method, bound in (("linear", 6), ("ties", 20)):
        text = f"{method}: mergekit's time over --inline's, start-up apart"
        yield _least(results, text, bound, (method, run.PEER, run.INLINE), in_run)
    for method, ray, inline in (("linear", 1.5, 4), ("ties", 8, 15)):
        text = f"{method}: mergekit's whole process over raymerge's with embedded Ray"
        yield _least(results, text, ray, (method, run.PEER, run.RAY), whole)
        text = f"{method}: mergekit's whole process over --inline's"
        yield _least(results, text, inline, (method, run.PEER, run.INLINE), whole)
    # Inputs that mergekit maps are no memory that it needs, though they count as long as they lie there.
    for method in ("linear", "ties"):
        for program in (run.INLINE, run.RAY):
            text = f"{method}: mergekit's own memory over that of {program}"
            compared = (method, run.PEER, program)
            yield _least(results, text, 10, compared, own_memory)
            yield _least(results, f"{text}, mapped files counted", None, compared, memory)


def _of_memory(results: Results) -> Iterator[Target]:
    found = [used for method in METHODS if (used := _use(results, method)) is not None]
    text = f"memory above idle over what the plan states, the worst of {len(found)} merges"
    yield Target(text, 1.0, True, max(found, default=None))
    above = above_idle(results, "linear", run.TIGHT)
    tight = None if above is None else above / TIGHT_NBYTES
    yield Target("linear with 256 MiB: memory above idle over 256 MiB", 1.0, True, tight)
    times = ratio(results, "linear", run.TIGHT, run.INLINE, in_run)
    yield Target("linear with 256 MiB: in the run, times that with ample memory", 1.15, True, times)


def _use(results: Results, method: str) -> float | None:
    above, stated = above_idle(results, method, run.INLINE), stated_memory(results, method, run.INLINE)
    return above / stated if above is not None and stated else None


def stated_memory(results: Results, method: str, program: str) -> int | None:
    return next((sample.projected for sample in results.of(method, program)), None)


def above_idle(results: Results, method: str, program: str) -> float | None:
    idle = results.of(run.IDLE, method)
    found = results.of(method, program)
    return max(sample.peak for sample in found) - idle[-1].peak if idle and found else None


def _least(
    results: Results, text: str, bound: float | None, compared: tuple[str, str, str], quantity: Quantity
) -> Target:
    group, over, under = compared
    return Target(text, bound, False, ratio(results, group, over, under, quantity))


# Markdown


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


def telling(arguments: Sequence[str], *, values: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments without those options, which say where something is made and not what is measured."""
    silent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in values:
        silent.add_argument(name)
    for name in flags:
        silent.add_argument(name, action="store_true")
    return silent.parse_known_args(arguments)[1]


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
