"""Say which small changes of the code the tests do not notice: ``python tests/mutations``.

Each change of ``table.py`` is made in a copy of the package, and the tests that it names are run against the
copy. A change is caught when one of them fails. Those that survive are printed, and the exit code is 1 if
there are any, or if a change no longer fits the code. Takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "raymerge"
SECONDS = 300
"""A change that makes the tests hang is caught too."""
NO_TESTS = (4, 5)
"""Exit codes of pytest for files or tests that are not there."""


def misfits(mutations: tuple[Mutation, ...]) -> list[str]:
    """Changes whose text does not stand once in its file, or whose tests are not there."""
    found = []
    for each in mutations:
        path = PACKAGE / each.file
        count = path.read_text(encoding="utf-8").count(each.old) if path.is_file() else 0
        absent = [name for name in each.tests.split() if not (ROOT / "tests" / name).is_file()]
        if count != 1 or absent:
            found.append(
                f"{each.file}: {each.old!r} stands there {count} times; tests that are absent: {absent}"
            )
    return found


def outcome(mutation: Mutation, copy: Path) -> str:
    """``caught``, ``survived``, or why that cannot be told; made and undone in a copy of the package."""
    path = copy / "raymerge" / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        run = run_tests(mutation.tests.split(), copy, timeout=SECONDS)
        if not run.returncode:
            slow = run_tests(mutation.tests.split(), copy, timeout=SECONDS, marks="slow")
            return "survived" if slow.returncode in (0, *NO_TESTS) else "caught"
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        path.write_text(text, encoding="utf-8")
    if run.returncode in NO_TESTS:
        return f"no tests: {run.stdout[-300:]}{run.stderr[-300:]}"
    return "caught"


def run_tests(
    names: Iterable[str],
    copy: Path,
    *,
    processes: int = 0,
    timeout: float | None = None,
    marks: str = "not service and not slow",
) -> subprocess.CompletedProcess[str]:
    """Run test files against a copy of the package, until one fails."""
    # -P: the checkout, which is the working directory, must not come before the copy.
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "-x"),
        *("-p", "no:cacheprovider", "-n", str(processes), "-m", marks),
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    tests = [f"tests/{name}" for name in names]
    return subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def outcomes(mutations: tuple[Mutation, ...], processes: int, place: Path) -> list[str]:
    """The outcome of each, several at a time; none where the tests fail without a change."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(processes):
        shutil.copytree(PACKAGE, place / str(number) / "raymerge")
        copies.put(place / str(number))
    names = sorted({name for each in mutations for name in each.tests.split()})
    unchanged = run_tests(names, place / "0", processes=processes)
    if unchanged.returncode:
        print(f"the tests fail without a change:\n{unchanged.stdout[-3000:]}{unchanged.stderr[-1000:]}")
        return []

    def tried(mutation: Mutation) -> str:
        copy = copies.get()
        try:
            found = outcome(mutation, copy)
        finally:
            copies.put(copy)
        print(f"{found:9} {mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
        return found

    with ThreadPoolExecutor(processes) as threads:
        return list(threads.map(tried, mutations))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--file", default="", help="only changes of files whose path has this in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="tried at a time")
    chosen = parser.parse_args(arguments)
    mutations = tuple(each for each in MUTATIONS if chosen.file in each.file)
    if wrong := misfits(mutations):
        print(*wrong, sep="\n")
        return 1
    with tempfile.TemporaryDirectory() as place:
        found = outcomes(mutations, chosen.processes, Path(place))
    count = found.count("caught")
    print(f"{count} of {len(mutations)} changes were caught")
    return int(count < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
