"""Print what the simulator predicts and what real runs take: ``python tests/benchmarks/simulation.py``.

What the storage, a core and the methods give is measured first, in the same run; then merges are carried out
and simulated with those figures, inline and with one and two workers. With ``--speeds`` only the speed of
every method is measured, and printed as ``raymerge/planner/simulate_speeds.toml`` has it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import xxhash
from kits.checkpoint_maker import tiny_llama

from raymerge.api import plan, submit
from raymerge.methods import (
    BLOCK,
    Access,
    BaseUse,
    Method,
    Settings,
    Takes,
    Tile,
    find_method,
    gather,
    methods,
    sample_of,
)
from raymerge.planner.memory import LOAD_MOST
from raymerge.planner.plan import Plan
from raymerge.planner.simulate import Cluster, Simulation, simulate_plan
from raymerge.planner.simulate_speeds import MethodSpeeds
from raymerge.runtime.events import Event, SegmentDone
from raymerge.runtime.options import RunOptions
from raymerge.runtime.sizing import cores_here
from raymerge.storage.buffers import aligned_buffer, room_for
from raymerge.storage.local import LocalStore
from raymerge.storage.speed import measure_read, measure_write

BUDGET = 1 << 30
HIDDEN = 1024
_PIECES = 32
_KEYS = (0x0123456789ABCDEF, 0x23456789ABCDEF01, 0x456789ABCDEF0123)
_NUMBERS = {"weight": 0.3, "density": 0.3, "t": 0.5, "lambda": 1.0, "gamma": 0.02, "epsilon": 0.1}


@dataclass(frozen=True, slots=True)
class Machine:
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


def measure_machine(file: Path, place: Path, *, seconds: float) -> Machine:
    """Read a file and write another one for a while."""
    buffer = aligned_buffer(2 * room_for(LOAD_MOST))
    nbytes = file.stat().st_size
    with LocalStore(file.parent) as source, LocalStore(place) as target:
        read, read_seconds = _moving(lambda: measure_read(source, file.name, nbytes, buffer, seconds=seconds))
        write, write_seconds = _moving(lambda: measure_write(target, "probe", nbytes, seconds=seconds))
    # Of the bytes of a merge more are read than written.
    per_byte = (3 * read_seconds + write_seconds) / 4
    return Machine(read, write, 1 / per_byte, cores_here())


def _moving(measure: Callable[[], float]) -> tuple[float, float]:
    """A measured speed in bytes per second, and processor seconds for each byte."""
    began, used = time.perf_counter(), time.process_time()
    speed = measure()
    return speed, (time.process_time() - used) / (speed * (time.perf_counter() - began))


def method_seconds(method: Method, *, sources: int = 3) -> float | None:
    """Seconds of one thread for each element of every input: reading what is stored, the method, rounding.

    None for a method that needs further settings.
    """
    count = min(sources, method.max_sources or sources)
    has_base = method.base is BaseUse.REQUIRED
    length, inputs = _PIECES * BLOCK, count + has_base
    settings = _settings(method, count, (length // HIDDEN, HIDDEN))
    stored = torch.randn(1, length, generator=torch.Generator().manual_seed(0)) * 0.02
    stored = (stored + 0.001 * torch.randn(inputs, length)).to(torch.bfloat16)
    try:
        _merge(method, settings, stored, has_base=has_base)
        return min(_cpu(lambda: _merge(method, settings, stored, has_base=has_base)) for _ in range(3)) / (
            inputs * length
        )
    except (ValueError, KeyError, TypeError):
        return None


def _settings(method: Method, count: int, shape: tuple[int, int]) -> Settings:
    values: dict[str, dict[str, float | bool | int | None]] = {"global": {}, "source": {}}
    for each in method.parameters:
        values[each.scope][each.name] = _NUMBERS.get(each.name, each.default)
    keys = _KEYS[:count] if method.random else ()
    return Settings(values["global"], (values["source"],) * count, keys, shape)


def _merge(method: Method, settings: Settings, stored: torch.Tensor, *, has_base: bool) -> None:
    """Merge one tensor piece by piece, as a lane does."""
    length = stored.shape[1]
    piece = length if method.access_with(settings) is Access.MATRIX else BLOCK
    scratch = torch.empty(len(stored), piece)

    def tile(begin: int, end: int, rows: torch.Tensor) -> Tile:
        rows.copy_(stored[:, begin:end])
        base, sources = (rows[0], rows[1:]) if has_base else (None, rows)
        if base is not None and method.takes is Takes.DELTAS:
            sources.sub_(base)
        return Tile(base, sources, begin)

    def tiles() -> Iterator[Tile]:
        for begin in range(0, length, piece):
            yield tile(begin, begin + piece, scratch)

    def sample() -> Tile:
        return sample_of(tile(0, length, torch.empty(stored.shape)))

    state = gather(method, settings, length, torch.device("cpu"), tiles=tiles, sample=sample)
    hasher = xxhash.xxh3_128()
    for each in tiles():
        result = method.kernel.apply(each, settings, state).to(torch.bfloat16)
        hasher.update(result.view(torch.uint8).numpy().data)


def _copied_byte_seconds() -> float:
    """Seconds of one thread for a byte that is copied as it is, and its digest."""
    stored, target = torch.randint(256, (2, 1 << 22), dtype=torch.uint8)

    def copy() -> None:
        for _ in range(_PIECES):
            target.copy_(stored)
            xxhash.xxh3_128(target.numpy().data).hexdigest()

    return min(_cpu(copy) for _ in range(3)) / _PIECES / len(stored)


def _cpu(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _segment_overhead(place: Path) -> float:
    """Seconds that a lane loses with each segment, from a merge whose segments hold next to nothing."""
    models = _make_models(place / "small", hidden=256, layers=8, vocab=2000)
    recipe = _recipe("linear", models)
    lanes, segments = 2, len(plan(recipe)["segments"])
    options = RunOptions(inline=True, memory=BUDGET, threads=lanes - 1)
    times = [_seconds_of_run(recipe, place / "out", options) for _ in range(4)][1:]
    return statistics.median(times) * lanes / segments


def _make_models(place: Path, *, hidden: int, layers: int, vocab: int) -> list[Path]:
    """A base and three fine-tunes of it."""
    base = tiny_llama(place / "p0", 0, hidden=hidden, layers=layers, vocab=vocab)
    return [base] + [
        tiny_llama(
            place / f"p{seed}", seed, hidden=hidden, layers=layers, vocab=vocab, base=base, scale=0.001
        )
        for seed in (1, 2, 3)
    ]


def _recipe(method: str, models: Sequence[Path]) -> dict[str, Any]:
    base, *others = map(str, models)
    own = {"weight": 0.3, **({"density": 0.3} if method == "ties" else {})}
    entries = [{"model": each, "parameters": own} for each in others]
    named = {"base_model": base} if method == "ties" else {}
    return {"merge_method": method, "dtype": "bfloat16", "models": entries, **named}


def _seconds_of_run(recipe: dict[str, Any], output: Path, options: RunOptions) -> float:
    """From the begin of the first segment, when workers have the plan, to the end of the last one."""
    begins, ends = [], []

    def note(event: Event) -> None:
        if isinstance(event, SegmentDone):
            ends.append(time.perf_counter())
            begins.append(ends[-1] - event.seconds)

    try:
        submit(recipe, output, options, on_event=note)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return max(ends) - min(begins)


def _predicted(made: Plan, machine: Machine, speeds: MethodSpeeds, options: RunOptions) -> Simulation:
    workers = options.workers or 1
    cores = max(1, machine.cores // workers)
    cluster = Cluster(
        workers=workers,
        read=machine.read,
        write=machine.write,
        cores=cores,
        per_core=machine.per_core,
        threads=options.threads or cores,
        overhead=machine.overhead,
        startup=0.0,
    )
    return simulate_plan(made, cluster, options.memory or BUDGET, speeds=speeds)


def _compare(models: Sequence[Path], place: Path, asked: argparse.Namespace) -> Iterator[str]:
    file = models[0] / "model.safetensors"
    machine = measure_machine(file, place, seconds=asked.seconds)
    machine = replace(machine, overhead=_segment_overhead(place))
    found = {name: method_seconds(_found(name)) or 0.0 for name in asked.methods}
    speeds = MethodSpeeds(found, other=max(found.values()), copied_byte=_copied_byte_seconds())
    yield (
        f"reads {machine.read / 1e9:.2f} GB/s, writes {machine.write / 1e9:.2f} GB/s durably, a core moves "
        f"{machine.per_core / 1e9:.2f} GB/s, {machine.cores} cores, "
        f"{machine.overhead * 1e3:.1f} ms are lost with each segment; nanoseconds an element of every input: "
        + ", ".join(f"{name} {value * 1e9:.2f}" for name, value in found.items())
    )
    yield f"{'merge':10s} {'workers':>10s} {'predicted':>10s} {'measured':>10s} {'ratio':>6s}  limiter"
    inline = RunOptions(inline=True, memory=BUDGET, threads=machine.cores)
    by_ray = [
        RunOptions(workers=number, memory=BUDGET, threads=max(1, machine.cores // number))
        for number in (1, 2)
    ]
    for name in asked.methods:
        recipe = _recipe(name, models)
        made = plan(recipe).require()
        for options in (replace(inline, threads=1), inline, *([] if asked.no_ray else by_ray)):
            predicted = _predicted(made, machine, speeds, options)
            # The first run finds caches and compiled loops that are still to be filled.
            times = [_seconds_of_run(recipe, place / "out", options) for _ in range(asked.rounds + 1)][1:]
            yield _line(name, options, predicted, statistics.median(times))


def _line(name: str, options: RunOptions, predicted: Simulation, measured: float) -> str:
    kind = f"inline x{options.threads}" if options.inline else f"ray {options.workers} x{options.threads}"
    seconds = predicted.run_seconds
    times = f"{seconds:9.2f}s {measured:9.2f}s {seconds / measured:6.2f}"
    return f"{name:10s} {kind:>10s} {times}  {predicted.limiter}"


def _found(name: str) -> Method:
    method = find_method(name)
    if method is None:
        raise SystemExit(f"there is no method {name}")
    return method


def _print_speeds() -> None:
    """The method table of ``simulate_speeds.toml``."""
    print(f"copied_byte = {_copied_byte_seconds() * 1e9:.2g}\n\n[methods]")
    for name, method in methods().items():
        seconds = method_seconds(method)
        note = "# not measured here" if seconds is None else ""
        print(f"{'# ' if seconds is None else ''}{name} = {(seconds or 0) * 1e9:.3g}{note}", flush=True)


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--speeds", action="store_true", help="only measure the speed of every method")
    parser.add_argument("--layers", type=int, default=16, help="layers of a model; 16 are 0.4 GB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind; the median counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long storage is measured")
    parser.add_argument("--methods", nargs="+", default=["linear", "ties"], help="linear, ties")
    parser.add_argument("--place", help="directory for models and outputs: that of the storage in question")
    parser.add_argument("--no-ray", action="store_true", help="runs in this process only")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, and print a line for each run."""
    asked = _asked(sys.argv[1:])
    torch.set_num_threads(1)
    if asked.speeds:
        _print_speeds()
        return 0
    with tempfile.TemporaryDirectory(dir=asked.place) as made:
        place = Path(made)
        models = _make_models(place, hidden=HIDDEN, layers=asked.layers, vocab=16000)
        for line in _compare(models, place, asked):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
