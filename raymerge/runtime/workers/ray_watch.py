"""Notices at once when a process that an embedded Ray cannot do without ends."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""What Ray's agents call themselves once they are up."""
_SCRIPTS = ("/ray/dashboard/agent.py", "/ray/_private/runtime_env/agent/main.py")
"""What they are started from."""


class RayWatch:
    """Watches processes of an embedded Ray until it is ended.

    Where the raylet is gone, Ray ends the process of its driver from within a library, with 1 and without a
    word, as soon as that calls the object store; and the raylet ends itself when one of its agents is gone.
    Without the GCS nothing goes on, and every call waits for it for most of a minute. So whoever owns the
    driver has to hear of it before.
    """

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], None]) -> None:
        """
        Args:
            processes: what each is called, by its number.
            on_end: called with the name of the first that ends, from a thread.
        """
        self._names: dict[int, str] = {}
        self._on_end = on_end
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number, name in processes.items():
            # Where a system has no such descriptors, nobody is told of the end.
            with suppress(OSError, AttributeError):
                self._names[os.pidfd_open(number)] = name
        self._thread = threading.Thread(target=self._wait, name="ray-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watch no longer: what ends from now on, ends as it should."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        for each in (*self._names, self._stop_read, self._stop_write):
            os.close(each)

    def _wait(self) -> None:
        waiting = select.poll()
        for each in (self._stop_read, *self._names):
            waiting.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if self._stop_read not in ready:
            self._on_end(next(self._names[each] for each in ready))


def needed_processes(ray: Any) -> dict[int, str]:
    """The processes that an embedded Ray cannot do without, by their numbers: raylet, GCS and agents."""
    node = ray._private.worker._global_node
    found = {
        each.process.pid: kind
        for kind, processes in (node.all_processes if node is not None else {}).items()
        for each in processes
    }
    agents = (agent for number in found for agent in _agents(number))
    return {**found, **dict(agents)}


def _agents(number: int) -> Iterator[tuple[int, str]]:
    """Agents that a process has started."""
    with suppress(psutil.Error):
        for child in psutil.Process(number).children():
            if is_agent(child.cmdline()):
                yield child.pid, "one of its agents"


def is_agent(command: Sequence[str]) -> bool:
    """Whether a command line is that of an agent of Ray: those of its workers name agents too, in options."""
    return any(word.startswith(_AGENTS) or word.endswith(_SCRIPTS) for word in command)
