"""Fuzzing that goes by what code the input reaches: ``make fuzz``, or ``python tests/fuzz --help``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(
    include=[f"raymerge.{name}" for name in ("checkpoints", "recipes", "planner")]
):
    from kits.fuzz_targets import Target, make_targets

from raymerge.errors import RaymergeError


def main() -> None:
    """Fuzz until time or inputs are used up; the process ends, with 0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=0, help="how long; by default as many as --runs take")
    parser.add_argument("--runs", type=int, default=-1, help="how many inputs; by default without end")
    parser.add_argument("--targets", default="", help="kinds of files, with commas between; by default all")
    parser.add_argument("--found", default=".", help="directory for an input that fails")
    parser.add_argument("--corpus", default="", help="directory for inputs that reached something new")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        names = [name for name in options.targets.split(",") if name]
        targets = list(make_targets(Path(place) / "files", names).values())
        corpus = Path(options.corpus or f"{place}/corpus")
        corpus.mkdir(parents=True, exist_ok=True)
        for number, target in enumerate(targets):
            # The first byte chooses whose file the others are.
            (corpus / f"sound-{target.name}").write_bytes(bytes([number]) + target.sample)
        flags = [f"-runs={options.runs}", f"-max_total_time={options.seconds}", "-timeout=60", "-seed=1"]
        flags += ["-rss_limit_mb=4096", "-max_len=65536", f"-artifact_prefix={options.found}/"]
        atheris.Setup([sys.argv[0], *flags, "-verbosity=0", str(corpus)], lambda data: try_one(targets, data))
        atheris.Fuzz()


def try_one(targets: list[Target], data: bytes) -> None:
    """Have the target that the first byte chooses read the others."""
    if not data:
        return
    try:
        targets[data[0] % len(targets)].read(data[1:])
    except RaymergeError:
        return


if __name__ == "__main__":
    main()
