"""Drivers that begin at once: forked from a process that has imported what a merge needs.

A command spends seconds of processor time on imports before it does anything that a kill could hurt. Where
commands are killed a hundred times over, they are forked behind those imports instead; from there on they run
what the entry point runs, in processes and with files of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_IMPORTED = (
    "raymerge.cli.main",
    "raymerge.cli.submit",
    "raymerge.api",
    "raymerge.runtime.driver.run",
    "torch",
)


class ForkedDriver:
    """One command in a forked process, with as much of ``subprocess.Popen`` as is asked of it."""

    def __init__(
        self, arguments: Sequence[str], said: BinaryIO, complained: BinaryIO, environment: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_IMPORTED])
        given = list(arguments), said.name, complained.name, dict(environment)
        self._process = context.Process(target=_drive, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("raymerge", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, signal: int) -> None:
        os.kill(self.pid, signal)


def _drive(arguments: list[str], said: str, complained: str, environment: dict[str, str]) -> None:
    os.setsid()
    for number, name in ((1, said), (2, complained)):
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    # A Python that starts by itself finds the disk on its path.
    runpy.run_path(str(Path(__file__).parent / "disk" / "sitecustomize.py"))
    sys.argv = ["raymerge", *arguments]
    from raymerge.cli.main import main

    main()
