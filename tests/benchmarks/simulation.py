"""Print what the simulator predicts and what real runs take: ``python tests/benchmarks/simulation.py``.

What the storage, a core and the methods give is measured first, in the same run; then merges are carried out
and simulated with those figures, inline and with one and two workers. With --write the table goes to
docs/measurements.md too. With --speeds only the speed of every method is measured, and printed as
raymerge/planner/simulate_speeds.toml has it. Nothing else should run meanwhile.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.machine import machine
from benchmarks.parents import SIZES, Size, make_parents, weights_of
from benchmarks.programme import TOKENIZER
from benchmarks.recipes import METHODS, VERBATIM, recipe
from benchmarks.speeds import SpeedBench
from benchmarks.tables import markdown, replaced

from raymerge.api import plan, submit
from raymerge.methods import methods
from raymerge.planner.memory import LOAD_MOST
from raymerge.planner.plan import Plan
from raymerge.planner.simulate import Cluster, Limiter, Simulation, simulate_plan
from raymerge.planner.simulate_speeds import MethodSpeeds
from raymerge.runtime.budget import fit_budget
from raymerge.runtime.events import Event, SegmentDone
from raymerge.runtime.options import RunOptions
from raymerge.runtime.sizing import cores_here
from raymerge.storage.buffers import aligned_buffer, room_for
from raymerge.storage.local import LocalStore
from raymerge.storage.speed import measure_read, measure_write

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 1 << 30
COMPUTED = tuple(name for name in METHODS if name not in VERBATIM)
"""Merges that can be compared; what copies bytes leaves that to the system, which is not simulated."""
NEAR = 0.15
"""How far a prediction may be from the real time, as a part of it."""
SIMULATION = "simulation"
"""What the marks around these results say."""
_TITLES = ("merge", "run", "predicted, s", "measured, s", "ratio", "within 15 %", "predicted limiter")


@dataclass(frozen=True, slots=True)
class Gives:
    """What this machine gives."""

    read: float
    """Bytes per second read from files as they are, in the system's cache or not."""
    write: float
    """Bytes per second written durably."""
    per_core: float
    """Bytes per second that a core reads or writes."""
    cores: int
    """Cores."""
    overhead: float = 0.0
    """Seconds that a lane loses with each segment."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and what became of it."""

    merge: str
    """What was merged."""
    run: str
    """How it was run."""
    predicted: float
    """Seconds."""
    measured: float
    """Seconds: the median of some runs."""
    limiter: str
    """What is said to take the time."""

    @property
    def is_near(self) -> bool:
        """Whether the prediction holds."""
        return abs(self.predicted / self.measured - 1) <= NEAR


def measure_machine(file: Path, place: Path, *, seconds: float) -> Gives:
    """Read a file and write another one for a while."""
    buffer = aligned_buffer(2 * room_for(LOAD_MOST))
    nbytes = file.stat().st_size
    with LocalStore(file.parent) as source, LocalStore(place) as target:
        read, read_seconds = _moving(lambda: measure_read(source, file.name, nbytes, buffer, seconds=seconds))
        write, write_seconds = _moving(lambda: measure_write(target, "probe", nbytes, seconds=seconds))
    # Of the bytes of a merge more are read than written.
    per_byte = (3 * read_seconds + write_seconds) / 4
    return Gives(read, write, 1 / per_byte, cores_here())


def _moving(measure: Callable[[], float]) -> tuple[float, float]:
    """A measured speed in bytes per second, and processor seconds for each byte."""
    began, used = time.perf_counter(), time.process_time()
    speed = measure()
    return speed, (time.process_time() - used) / (speed * (time.perf_counter() - began))


def _segment_overhead(place: Path) -> float:
    """Seconds that a lane loses with each segment, from a merge whose segments hold next to nothing."""
    models = make_parents(place / "small", SIZES["10MB"], TOKENIZER)
    small = recipe("linear", models, SIZES["10MB"].layers)
    options = RunOptions(inline=True, memory=BUDGET, threads=1)
    made = plan(small).require()
    times = [seconds_of_run(small, place / "out", options) for _ in range(4)][1:]
    return statistics.median(times) * fit_budget(made, options).lanes / len(made["segments"])


def seconds_of_run(merged: Mapping[str, Any], output: Path, options: RunOptions) -> float:
    """From the begin of the first segment, when workers have the plan, to the end of the last one."""
    begins, ends = [], []

    def note(event: Event) -> None:
        if isinstance(event, SegmentDone):
            ends.append(time.perf_counter())
            begins.append(ends[-1] - event.seconds)

    # What was made or removed before is not to be written back meanwhile.
    os.sync()
    try:
        submit(merged, output, options, on_event=note)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return max(ends) - min(begins)


def predicted(made: Plan, gives: Gives, speeds: MethodSpeeds, options: RunOptions) -> Simulation:
    """What the simulator says of a run on this machine."""
    workers = options.workers or 1
    cores = max(1, gives.cores // workers)
    cluster = Cluster(
        workers=workers,
        read=gives.read,
        write=gives.write,
        cores=cores,
        per_core=gives.per_core,
        threads=options.threads or cores,
        overhead=gives.overhead,
        startup=0.0,
    )
    return simulate_plan(made, cluster, options.memory or BUDGET, speeds=speeds)


def speeds_of(plans: Mapping[str, Plan], bench: SpeedBench) -> MethodSpeeds:
    """What the methods of some plans take here, with the settings that they have there."""
    found = {
        each.method: bench.seconds(each)
        for made in plans.values()
        for each in made.expressions
        if not each.is_copy
    }
    return MethodSpeeds(found, other=max(found.values()), copied_byte=bench.copied_byte_seconds())


def compare(
    place: Path, size: Size, bench: SpeedBench, asked: argparse.Namespace, *, say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Merge and simulate.

    Args:
        place: directory for models and outputs.
        size: of the models.
        bench: measures methods.
        asked: what the command line asks for.
        say: told what predictions are made of.
    """
    models = make_parents(place / "models", size, TOKENIZER)
    gives = measure_machine(weights_of(models[0]), place, seconds=asked.seconds)
    gives = replace(gives, overhead=_segment_overhead(place))
    recipes = {name: recipe(name, models, size.layers) for name in asked.methods}
    plans = {name: plan(each).require() for name, each in recipes.items()}
    speeds = speeds_of(plans, bench)
    say(_told(gives, speeds))
    for name, made in plans.items():
        for kind, options in runs(gives.cores, with_ray=not asked.no_ray):
            simulated = predicted(made, gives, speeds, options)
            # The first run finds caches and compiled loops that are still to be filled.
            times = [seconds_of_run(recipes[name], place / "out", options) for _ in range(asked.rounds + 1)][
                1:
            ]
            measured = statistics.median(times)
            yield Comparison(name, kind, simulated.run_seconds, measured, limiter(simulated))


def limiter(simulated: Simulation) -> str:
    """What most of the run is spent on, start-up and end apart, as they are not compared."""
    return next(each for each in simulated.shares if each not in (Limiter.START_UP, Limiter.FINISHING))


def runs(cores: int, *, with_ray: bool) -> Iterator[tuple[str, RunOptions]]:
    """How each merge is run, by what the table calls it."""
    for threads in dict.fromkeys((1, cores)):
        yield f"inline, {_threads(threads)}", RunOptions(inline=True, memory=BUDGET, threads=threads)
    for workers in (1, 2) if with_ray else ():
        threads = max(1, cores // workers)
        options = RunOptions(workers=workers, memory=BUDGET, threads=threads)
        yield f"{workers} worker{'s' * (workers > 1)}, {_threads(threads)}", options


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _told(gives: Gives, speeds: MethodSpeeds) -> str:
    """What predictions are made of."""
    listed = ", ".join(f"{name} {value * 1e9:.2f}" for name, value in speeds.by_method.items())
    return (
        f"Reads {gives.read / 1e9:.2f} GB/s, writes {gives.write / 1e9:.2f} GB/s durably; a core moves "
        f"{gives.per_core / 1e9:.2f} GB/s; {gives.overhead * 1e3:.1f} ms are lost with each segment; "
        f"nanoseconds for an element of every input: {listed}."
    )


def section(command: str, told: str, found: Sequence[Comparison]) -> str:
    """The results as Markdown, with the verdict."""
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
    """The table of ``simulate_speeds.toml``."""
    with tempfile.TemporaryDirectory() as made:
        bench = SpeedBench(Path(made))
        print(f"copied_byte = {bench.copied_byte_seconds() * 1e9:.2g}\n\n[methods]")
        for name, method in methods().items():
            print(f"{name} = {bench.method_seconds(method) * 1e9:.3g}", flush=True)


def asked_for(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--speeds", action="store_true", help="only measure the speed of every method")
    parser.add_argument("--layers", type=int, default=16, help="layers of a model; 16 are 0.4 GB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind; the median counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long storage is measured")
    parser.add_argument(
        "--methods", nargs="+", choices=COMPUTED, metavar="NAME", default=["linear", "ties"],
        help=f"linear and ties unless given; of {', '.join(COMPUTED)}",
    )  # fmt: skip
    parser.add_argument("--place", help="directory for models and outputs: that of the storage in question")
    parser.add_argument("--no-ray", action="store_true", help="runs in this process only")
    parser.add_argument("--write", action="store_true", help="write the table to docs/measurements.md")
    return parser.parse_args(arguments)


def command(arguments: Sequence[str]) -> str:
    """The command that repeats a run, without what changes no number."""
    silent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    silent.add_argument("--place")
    silent.add_argument("--write", action="store_true")
    telling = silent.parse_known_args(arguments)[1]
    return shlex.join([".venv/bin/python", "tests/benchmarks/simulation.py", *telling])


def main() -> int:
    """Measure, and print a line for each run and the table at the end."""
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
