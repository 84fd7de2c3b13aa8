"""The arithmetic of the tables: medians, and ratios of what was run in the same round."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.groups import Results
from benchmarks.measure import Sample

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
