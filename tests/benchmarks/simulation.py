"""Print what the simulator predicts and what real runs take: ``python tests/benchmarks/simulation.py``.

In every round it is measured what the storage, the cores and the methods give, and what a segment costs
beyond that, inline and on a worker. Then each merge is carried out, inline and with one and two workers. What
the medians of these figures predict is compared with the medians of the times. Nothing is taken from the
merges that are predicted. With --write the table goes to docs/measurements.md too. With --speeds only the
speed of every method is measured, and printed as raymerge/planner/simulate_speeds.toml has it. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.cache import warm
from benchmarks.measure import machine
from benchmarks.parents import SIZES, Size, make_parents, weights_of
from benchmarks.programme import TOKENIZER
from benchmarks.recipes import METHODS, VERBATIM, numbers_of, recipe
from benchmarks.speeds import SpeedBench
from benchmarks.storage_probe import Gives, measure_machine
from benchmarks.tables import markdown, replaced, telling

from raymerge.api import plan, submit
from raymerge.events import Event, SegmentDone
from raymerge.merge_plan.plan import Plan
from raymerge.methods import methods
from raymerge.options import RunOptions
from raymerge.planner.simulation import Cluster, MethodSpeeds, Simulation, simulate_plan
from raymerge.runtime.workers.sizing import cores_here

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 1 << 30
COMPUTED = tuple(name for name in METHODS if name not in VERBATIM)
"""Merges that can be compared; what copies bytes leaves that to the system, which is not simulated."""
NEAR = 0.25
"""How far a prediction may be from the real time, as a part of it."""
SIMULATION = "simulation"
_TITLES = ("merge", "run", "predicted, s", "measured, s", "ratio", "within 25 %", "predicted limiter")


@dataclass(frozen=True, slots=True)
class Merge:
    recipe: Mapping[str, Any]
    plan: Plan
    inputs: tuple[Path, ...]


def merge_of(method: str, parents: Sequence[Path], layers: int) -> Merge:
    merged = recipe(method, parents, layers)
    inputs = tuple(weights_of(parents[number]) for number in numbers_of(method))
    return Merge(merged, plan(merged).require(), inputs)


@dataclass(frozen=True, slots=True)
class Comparison:
    merge: str
    run: str
    predicted: float
    measured: float
    limiter: str

    @property
    def is_near(self) -> bool:
        return abs(self.predicted / self.measured - 1) <= NEAR


@dataclass(frozen=True, slots=True)
class Figures:
    gives: Gives
    speeds: Mapping[int, MethodSpeeds]
    """What methods take, by the number of threads that compute at once."""
    overheads: Mapping[bool, float]
    """Seconds that are lost with each segment, by whether a run is inline."""


class BenchContext:
    def __init__(self, place: Path, merges: Mapping[str, Merge], bench: SpeedBench) -> None:
        size = SIZES["10MB"]
        self._place = place
        self._merges = tuple(merges.values())
        self._bench = bench
        self._small = merge_of("linear", make_parents(place / "small", size, TOKENIZER), size.layers)

    def figures(self, kinds: Iterable[RunOptions]) -> Figures:
        kinds = tuple(kinds)
        gives = measure_machine(self._merges[0].inputs[0], self._place)
        threads = dict.fromkeys(map(computing, kinds))
        speeds = {each: self._speeds(self._merges, each) for each in threads}
        overheads = {each.inline: self._overhead(gives, inline=each.inline) for each in kinds}
        return Figures(gives, speeds, overheads)

    def seconds(self, merge: Merge, options: RunOptions) -> float:
        return seconds_of_run(merge, self._place / "out", options)

    def _speeds(self, merges: Iterable[Merge], threads: int) -> MethodSpeeds:
        found = {
            each.method: self._bench.speed(each, rounds=1, threads=threads)
            for merge in merges
            for each in merge.plan.expressions
            if not each.is_copy
        }
        elements = {name: speed.element for name, speed in found.items()}
        tensors = {name: speed.tensor for name, speed in found.items()}
        # Nothing is copied, and nothing is left that was not measured.
        return MethodSpeeds(elements, 0.0, 0.0, tensors)

    def _overhead(self, gives: Gives, *, inline: bool) -> float:
        """Seconds that are lost with each segment.

        From a merge whose segments hold next to nothing: what the estimate lacks to take as long as that.
        """
        options = RunOptions(inline=inline, workers=None if inline else 1, memory=BUDGET, threads=1)
        found = predicted(self._small, gives, 0.0, self._speeds([self._small], 1), options)
        lost = self.seconds(self._small, options) - found.run_seconds
        return max(0.0, lost) * (found.cluster.lanes or 1) / found.segments


def medians(found: Sequence[Figures]) -> Figures:
    gives = [each.gives for each in found]
    usual = Gives(
        read=statistics.median(each.read for each in gives),
        write=statistics.median(each.write for each in gives),
        per_core=statistics.median(each.per_core for each in gives),
        cores=gives[0].cores,
    )
    speeds = {each: _median_speeds([one.speeds[each] for one in found]) for each in found[0].speeds}
    overheads = {each: statistics.median(one.overheads[each] for one in found) for each in found[0].overheads}
    return Figures(usual, speeds, overheads)


def _median_speeds(found: Sequence[MethodSpeeds]) -> MethodSpeeds:
    def of_each(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: statistics.median(each[name] for each in figures) for name in figures[0]}

    elements = of_each([each.by_method for each in found])
    tensors = of_each([each.by_tensor for each in found])
    return MethodSpeeds(elements, found[0].other, found[0].copied_byte, tensors)


def seconds_of_run(merge: Merge, output: Path, options: RunOptions) -> float:
    begins, ends = [], []

    def note(event: Event) -> None:
        if isinstance(event, SegmentDone):
            ends.append(time.perf_counter())
            begins.append(ends[-1] - event.seconds)

    # What was made or removed before is not to be written back meanwhile. What is read is to be in the cache,
    # from which the system takes what was not asked for in a while.
    os.sync()
    warm(merge.inputs)
    try:
        submit(merge.recipe, output, options, on_event=note)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return max(ends) - min(begins)


def predicted(
    merge: Merge, gives: Gives, overhead: float, speeds: MethodSpeeds, options: RunOptions
) -> Simulation:
    workers = options.workers or 1
    cores = max(1, gives.cores // workers)
    cluster = Cluster(
        workers=workers,
        read=gives.read,
        write=gives.write,
        cores=cores,
        per_core=gives.per_core,
        threads=options.threads or cores,
        overhead=overhead,
        # It is in what a segment costs.
        driver=0.0,
        startup=0.0,
    )
    return simulate_plan(merge.plan, cluster, options.memory or BUDGET, speeds=speeds)


def compare(
    place: Path, size: Size, bench: SpeedBench, asked: argparse.Namespace, *, say: Callable[[str], None]
) -> Iterator[Comparison]:
    models = make_parents(place / "models", size, TOKENIZER)
    merges = {name: merge_of(name, models, size.layers) for name in asked.methods}
    kinds = dict(runs(cores_here(), with_ray=not asked.no_ray))
    context = BenchContext(place, merges, bench)
    found: list[Figures] = []
    times: dict[tuple[str, str], list[float]] = {each: [] for each in product(merges, kinds)}
    for _ in range(asked.rounds + 1):
        found.append(context.figures(kinds.values()))
        for (name, kind), taken in times.items():
            taken.append(context.seconds(merges[name], kinds[kind]))
    # The first round finds what is still to be compiled.
    figures = medians(found[1:])
    say(_told(figures))
    for (name, kind), taken in times.items():
        options = kinds[kind]
        overhead, speeds = figures.overheads[options.inline], figures.speeds[computing(options)]
        simulated = predicted(merges[name], figures.gives, overhead, speeds, options)
        yield Comparison(name, kind, simulated.run_seconds, statistics.median(taken[1:]), simulated.limiter)


def computing(options: RunOptions) -> int:
    return options.threads or 1


def runs(cores: int, *, with_ray: bool) -> Iterator[tuple[str, RunOptions]]:
    for threads in dict.fromkeys((1, cores)):
        yield f"inline, {_threads(threads)}", RunOptions(inline=True, memory=BUDGET, threads=threads)
    for workers in (1, 2) if with_ray else ():
        threads = max(1, cores // workers)
        options = RunOptions(workers=workers, memory=BUDGET, threads=threads)
        yield f"{workers} worker{'s' * (workers > 1)}, {_threads(threads)}", options


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _told(figures: Figures) -> str:
    gives, speeds = figures.gives, figures.speeds
    lost = " and ".join(
        f"{seconds * 1e3:.1f} ms {'inline' if is_inline else 'on a worker'}"
        for is_inline, seconds in figures.overheads.items()
    )
    methods_told = "; ".join(
        f"{name} {_listed(found.by_method[name] * 1e9 for found in speeds.values())} ns "
        f"and {_listed(found.by_tensor[name] * 1e6 for found in speeds.values())} us"
        for name in next(iter(speeds.values())).by_method
    )
    return (
        f"Reads {gives.read / 1e9:.2f} GB/s while {gives.write / 1e9:.2f} GB/s are written durably; a core "
        f"moves {gives.per_core / 1e9:.2f} GB/s; with each segment {lost} are lost. "
        f"For an element of every input, and for a tensor, where {_listed(speeds)} threads compute: "
        f"{methods_told}."
    )


def _listed(numbers: Iterable[float]) -> str:
    return " / ".join(f"{each:.3g}" for each in numbers)


def section(command: str, told: str, found: Sequence[Comparison]) -> str:
    rows = [
        (each.merge, each.run, f"{each.predicted:.2f}", f"{each.measured:.2f}",
         f"{each.predicted / each.measured:.2f}", "yes" if each.is_near else "**no**", each.limiter)
        for each in found
    ]  # fmt: skip
    near = sum(each.is_near for each in found)
    verdict = f"Within {NEAR:.0%} of the real time: {near} of {len(found)} predictions."
    table = markdown(_TITLES, rows, numbers=(2, 3, 4))
    return "\n\n".join([f"`{command}`; {machine()}.", told, table, verdict]) + "\n"


def _print_speeds() -> None:
    with tempfile.TemporaryDirectory() as made:
        bench = SpeedBench(Path(made))
        print(f"copied_byte = {bench.copied_byte_seconds() * 1e9:.2g}")
        decoded, encoded = bench.code_seconds()
        print(f"decoded = {decoded * 1e9:.2g}\nencoded = {encoded * 1e9:.2g}\n\n[methods]")
        found = {}
        for name, method in methods().items():
            found[name] = bench.method_speed(method)
            print(f"{name} = {found[name].element * 1e9:.3g}", flush=True)
    print("\n[tensors]")
    for name, speed in found.items():
        print(f"{name} = {speed.tensor * 1e6:.2g}")


def asked_for(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--speeds", action="store_true", help="only measure the speed of every method")
    parser.add_argument("--layers", type=int, default=16, help="layers of a model; 16 are 0.4 GB")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind; the median counts")
    parser.add_argument(
        "--methods", nargs="+", choices=COMPUTED, metavar="NAME", default=["linear", "ties"],
        help=f"linear and ties unless given; of {', '.join(COMPUTED)}",
    )  # fmt: skip
    parser.add_argument("--place", help="directory for models and outputs: that of the storage in question")
    parser.add_argument("--no-ray", action="store_true", help="runs in this process only")
    parser.add_argument("--write", action="store_true", help="write the table to docs/measurements.md")
    return parser.parse_args(arguments)


def command(arguments: Sequence[str]) -> str:
    told = telling(arguments, values=("--place",), flags=("--write",))
    return shlex.join([".venv/bin/python", "tests/benchmarks/simulation.py", *told])


def main() -> int:
    asked = asked_for(sys.argv[1:])
    torch.set_num_threads(1)
    if asked.speeds:
        _print_speeds()
        return 0
    told: list[str] = []
    found = []
    with tempfile.TemporaryDirectory(dir=asked.place) as made:
        place, size = Path(made), Size(hidden=1024, width=2816, layers=asked.layers, vocab=16000)
        bench = SpeedBench(place / "speeds")
        for each in compare(place, size, bench, asked, say=told.append):
            found.append(each)
            times = f"predicted {each.predicted:.2f} s, took {each.measured:.2f} s"
            print(f"{each.merge}, {each.run}: {times}", file=sys.stderr, flush=True)
    text = section(command(sys.argv[1:]), "".join(told), found)
    print(f"\n{text}")
    if asked.write:
        document = ROOT / "docs" / "measurements.md"
        written = replaced(document.read_text(encoding="utf-8"), text, SIMULATION)
        document.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
