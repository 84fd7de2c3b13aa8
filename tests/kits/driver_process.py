"""A merge in a process of its own, slow enough to be hit while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PATIENCE_SECONDS = 90.0

_DRIVER = """
import functools, json, sys, time
from pathlib import Path

from raymerge.api import submit
from raymerge.execute.segment import SegmentRunner
from raymerge.runtime.workers import ray_pool
from raymerge.options import RunOptions
from raymerge.runtime.workers.worker import MergeWorker

job = json.load(sys.stdin)


class Slow(MergeWorker):
    def run(self, segment):
        time.sleep(PAUSE)
        return super().run(segment)


PAUSE = job["pause"]
if job["workers"]:
    ray_pool.RayPool = functools.partial(ray_pool.RayPool, worker=Slow)
    options = RunOptions(workers=job["workers"], memory=64 << 20, steps=job["steps"])
else:
    run = SegmentRunner.run
    SegmentRunner.run = lambda self, segment: (time.sleep(PAUSE), run(self, segment))[1]
    options = RunOptions(inline=True, steps=job["steps"])

if isinstance(job["recipe"], str):
    from raymerge.cli.main import main

    how = ["--workers", str(job["workers"])] if job["workers"] else ["--inline"]
    sys.argv = ["raymerge", "submit", job["recipe"], "-o", job["output"], "--json", *how]
    main()


def report(event):
    print(json.dumps(event.to_json()), flush=True)


submit(job["recipe"], job["output"], options, on_event=report)
"""


@contextmanager
def driver(
    recipe: Mapping[str, Any] | str,
    output: Path,
    *,
    workers: int = 0,
    pause: float = 0.0,
    environment: Mapping[str, str] | None = None,
    steps: str | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A running driver that prints its events as JSON lines.

    On leaving, its processes are ended, those of its embedded Ray too, and only those. The file of a recipe
    is given to the command line, instead of to the library; without workers it runs inline; every segment
    waits ``pause`` seconds before it begins. ``steps`` is the library's only.
    """
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings,
    )
    assert process.stdin is not None
    job = {"recipe": recipe, "output": str(output), "workers": workers, "pause": pause, "steps": steps}
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    try:
        yield process
    finally:
        kin = kin_of(process)
        process.kill()
        process.communicate()
        kin.end()


@dataclass(frozen=True, slots=True)
class Kin:
    processes: tuple[psutil.Process, ...]
    workers: tuple[psutil.Process, ...]
    directories: frozenset[str]

    def end(self) -> None:
        for each in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                # psutil compares the start time, so that a reused number is never hit.
                each.kill()
        psutil.wait_procs(self.processes, timeout=5)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def kin_of(process: Any) -> Kin:
    try:
        found = tuple(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        found = ()
    commands = {each: _command(each) for each in found}
    return Kin(
        found,
        tuple(each for each, command in commands.items() if "ray::Slow" in command),
        frozenset(re.findall(r"/tmp/raymerge-[0-9a-f]{8}-\w+", " ".join(commands.values()))),
    )


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def wait_for_receipts(output: Path, count: int) -> int:
    end_at = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end_at:
        for ledger in output.parent.glob(f".{output.name}.raymerge-*/raymerge/ledger.jsonl"):
            found = ledger.read_text().count('{"receipt"')
            if found >= count:
                return found
        time.sleep(0.02)
    raise AssertionError(f"the driver made no {count} segments in {PATIENCE_SECONDS} s")
