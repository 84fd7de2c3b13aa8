"""Measure merges against the storage and against mergekit: ``make bench``, or ``python tests/benchmarks``.

Makes models, makes an environment with mergekit, runs every program by turns on the same files, and prints
three tables: what is to be reached, memory as stated and as measured, and everything that was measured. Takes
some 25 minutes on two cores, five with --quick, and up to 12 GB of disk. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peer, picture
from benchmarks import programme as run
from benchmarks.groups import Group, Results, remove, run_group
from benchmarks.measure import machine
from benchmarks.parents import SIZES
from benchmarks.recipes import VERBATIM
from benchmarks.tables import add_fastest, replaced, section, targets, telling

ROOT = Path(__file__).resolve().parents[2]
_MEASURED = ("10MB", "0.25GB", "1GB")
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    asked = _asked(sys.argv[1:])
    measured = {size: _measured(asked, size) for size in asked.sizes}
    told = command(sys.argv[1:])
    text = "\n".join(
        section(f"parents of {size}, {machine()}", told, results, list(targets(results)))
        for size, results in measured.items()
    )
    print(f"\n{text}", flush=True)
    if asked.write:
        document = ROOT / "docs" / "measurements.md"
        document.write_text(replaced(document.read_text(encoding="utf-8"), text), encoding="utf-8")
        picture.main()
    return int(any(results.failures for results in measured.values()))


def _measured(asked: argparse.Namespace, size: str) -> Results:
    options = ("--memory", asked.memory) if asked.memory else ()
    yard = run.Yard(asked.place / "yard", size, _peer(asked), options=options, is_quick=asked.quick)
    results = Results()
    try:
        _run_all(asked, yard, results)
    finally:
        if not asked.keep:
            shutil.rmtree(yard.root, ignore_errors=True)
    return results


def command(arguments: Sequence[str]) -> str:
    told = telling(arguments, values=("--place", "--peer"), flags=("--keep", "--write"))
    return f'make bench BENCH="{shlex.join(told)}"' if told else "make bench"


def _run_all(asked: argparse.Namespace, yard: run.Yard, results: Results) -> None:
    def measure(group: Group) -> None:
        environment = {**os.environ, **_ENVIRONMENT}
        run_group(group, results, yard.root, rounds=asked.rounds, environment=environment, say=_say)

    _say(f"making the parents of {yard.size}")
    yard.parents()
    measure(run.idle_group(yard, asked.methods))
    for method in asked.methods:
        if method in VERBATIM:
            _make_reference(yard, method)
        measure(run.warm_group(yard, method))
        remove(yard.reference(method))
    for method in run.COLD if asked.cold else ():
        if method in asked.methods:
            measure(run.cold_group(yard, method))
            add_fastest(results, run.cold_name(method), run.LIMIT, (run.DIRECT, run.BUFFERED))
    for group in run.small_groups(yard) if asked.small else ():
        measure(group)


def _make_reference(yard: run.Yard, method: str) -> None:
    remove(yard.reference(method))
    making = run.submit(yard.recipe(method), "--inline")(yard.reference(method))
    # Where it fails ``cp`` finds nothing, and the tables say so.
    subprocess.run(making, check=False, stdout=subprocess.DEVNULL)


def _peer(asked: argparse.Namespace) -> Path | None:
    if asked.no_peer:
        return None
    if asked.peer is not None:
        return peer.interpreter(asked.peer)
    _say("making the environment of mergekit (minutes the first time)")
    return peer.install(asked.place / "peer", ROOT / "constraints.txt")


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--sizes", type=_sizes, help=f"of a parent: {', '.join(_MEASURED)} (1GB)")
    parser.add_argument("--rounds", type=int, help="runs of each program but the slowest (3)")
    parser.add_argument("--methods", type=_methods, default=_methods(""), help="names between commas (all)")
    parser.add_argument("--memory", help="memory limit of raymerge (its own default)")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, help="from a cold cache too (yes)")
    parser.add_argument(
        "--small", action=argparse.BooleanOptionalAction, default=True, help="start-up too (yes)"
    )
    parser.add_argument("--quick", action="store_true", help="small parents, one round, nothing slow")
    parser.add_argument("--no-peer", action="store_true", help="without mergekit")
    parser.add_argument("--peer", type=Path, metavar="VENV", help="an environment that has mergekit")
    parser.add_argument("--place", type=Path, default=ROOT / "build" / "bench", help="where files are made")
    parser.add_argument("--keep", action="store_true", help="keep the models")
    parser.add_argument("--write", action="store_true", help="write tables and picture to docs")
    asked = parser.parse_args(arguments)
    asked.sizes = asked.sizes or (["0.25GB"] if asked.quick else ["1GB"])
    asked.rounds = asked.rounds or (1 if asked.quick else 3)
    asked.cold = not asked.quick if asked.cold is None else asked.cold
    asked.place = asked.place.resolve()
    return asked


def _sizes(text: str) -> list[str]:
    sizes = text.split(",")
    if unknown := [size for size in sizes if size not in _MEASURED or size not in SIZES]:
        raise argparse.ArgumentTypeError(f"no size is called {', '.join(unknown)}")
    return sizes


def _methods(text: str) -> tuple[str, ...]:
    try:
        return run.check_methods([name for name in text.split(",") if name])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
