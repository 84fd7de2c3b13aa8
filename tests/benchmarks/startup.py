"""Print when whole commands reach each step: ``python tests/benchmarks/startup.py``.

A linear merge of three parents is submitted by turns in this process, as a small merge is by itself, and on
one worker of an embedded Ray; a pair of 7B is planned. For every step the table has the median of seconds
since the command was given: what it takes to get to the first byte is start-up, and after the last byte it is
the end. Files are in the page cache. Other work on the machine shows in wall time more than in processor
time. With --write the table goes to docs/measurements.md too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cache import warm
from benchmarks.measure import Sample, machine, measure
from benchmarks.parents import SIZES, weights_of
from benchmarks.programme import DEFAULT, RAY, Yard, pair, plan, submit
from benchmarks.tables import markdown, replaced, telling

ROOT = Path(__file__).resolve().parents[2]
START_UP = "start-up"
PLAN = "raymerge plan of a 7B pair"
TARGETS = {DEFAULT: 2.5, RAY: 6.0, PLAN: 1.0}
"""Seconds of a whole process on two cores; those of ``submit`` are for parents of 1 GB."""
STEPS = {
    "planned": "planned, workers up",
    "begun": "first byte",
    "segment_done": "last byte",
    "verified": "verified",
    "published": "published",
}
_TITLES = ("command", *STEPS.values(), "exit, s", "target: at most, s", "processor, s")


def main() -> int:
    asked = _asked(sys.argv[1:])
    yard = Yard(asked.place, asked.size, None)
    recipe, places = yard.recipe("linear"), yard.parents()
    commands = {DEFAULT: submit(recipe), RAY: submit(recipe, "--workers", "1"), PLAN: plan(pair(yard))}
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    try:
        for turn in range(asked.rounds + 1):
            for name, command in commands.items():
                warm([weights_of(each) for each in places])
                sample = measure(command(yard.root / "out"), environment=os.environ)
                shutil.rmtree(yard.root / "out", ignore_errors=True)
                # The first round finds files of Python in no cache.
                samples[name] += [sample] if turn else []
    finally:
        shutil.rmtree(yard.root / "out", ignore_errors=True)
    text = _section(samples, asked.size, telling(sys.argv[1:], values=("--place",), flags=("--write",)))
    print(text)
    if asked.write:
        document = ROOT / "docs" / "measurements.md"
        document.write_text(replaced(document.read_text(encoding="utf-8"), text, START_UP), encoding="utf-8")
    return 0


def _section(samples: Mapping[str, Sequence[Sample]], size: str, words: Sequence[str]) -> str:
    rows = [_row(name, each) for name, each in samples.items()]
    table = markdown(_TITLES, rows, numbers=range(1, len(_TITLES)))
    command = shlex.join(["python", "tests/benchmarks/startup.py", *words])
    count = len(next(iter(samples.values())))
    return f"Parents of {size}, {machine()}; median of {count}, `{command}`.\n\n{table}"


def _row(name: str, samples: Sequence[Sample]) -> tuple[str, ...]:
    def middle(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f}" if values else ""

    steps = [middle([each.steps[step] for each in samples if step in each.steps]) for step in STEPS]
    ends = middle([each.wall for each in samples]), f"{TARGETS[name]}", middle([each.cpu for each in samples])
    return (name, *steps, *ends)


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=[size for size in SIZES if size != "7B"], default="1GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=ROOT / "build" / "bench" / "yard")
    parser.add_argument("--write", action="store_true", help="write the table to docs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
