"""Print through how much of the package a merge goes: ``python tests/benchmarks/trace.py``.

A linear merge of two models of two layers is planned and carried out inline under a profiler. Printed are the
files entered, the functions, the calls, and how often one call is followed by a call in another file. A
second merge is counted, so that what is imported or compiled once does not count. With --files the files and
the most frequent changes are listed. Ends with 1 if there are more than MAX_FILES or MAX_CHANGES.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kits.checkpoint_maker import tiny_llama

import raymerge
from raymerge.options import RunOptions

PACKAGE = str(Path(raymerge.__file__).parent) + "/"
MAX_FILES = 100
MAX_CHANGES = 5000


@dataclass
class Trace:
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often a call in one file is followed, on the same thread, by one in another."""
    latest: dict[int, str] = field(default_factory=dict)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        self.calls[file, frame.f_code.co_qualname] += 1
        thread = threading.get_ident()
        before = self.latest.get(thread, file)
        if before != file:
            self.edges[before.removeprefix(PACKAGE), file.removeprefix(PACKAGE)] += 1
        self.latest[thread] = file

    @property
    def changes(self) -> int:
        return self.edges.total()

    @property
    def files(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            found[file.removeprefix(PACKAGE)] += count
        return found


def traced(work: Callable[[], object]) -> Trace:
    trace = Trace()
    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def trace_linear_merge(place: Path) -> tuple[Trace, Trace]:
    for name, seed in (("one", 1), ("two", 2)):
        tiny_llama(place / name, seed=seed)
    models = [
        {"model": str(place / name), "parameters": {"weight": weight}}
        for name, weight in (("one", 0.3), ("two", 0.7))
    ]
    recipe = {"merge_method": "linear", "dtype": "bfloat16", "models": models}
    options = RunOptions(inline=True)

    def submit(output: str) -> None:
        raymerge.submit(recipe, place / output, options=options)

    submit("first")
    return traced(lambda: raymerge.plan(recipe)), traced(lambda: submit("second"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files with their calls")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        planned, merged = trace_linear_merge(Path(place))
    print("|  | files | functions | calls | changes of file |\n|---|--:|--:|--:|--:|")
    for title, trace in (("plan", planned), ("whole merge", merged)):
        counts = (len(trace.files), len(trace.calls), trace.calls.total(), trace.changes)
        print(f"| {title} | " + " | ".join(f"{each:,}" for each in counts) + " |")
    if chosen.files:
        for file, count in merged.files.most_common():
            print(f"{count:8,}  {file}")
        for (before, after), count in merged.edges.most_common(40):
            print(f"{count:8,}  {before} -> {after}")
    return int(len(merged.files) > MAX_FILES or merged.changes > MAX_CHANGES)


if __name__ == "__main__":
    sys.exit(main())
