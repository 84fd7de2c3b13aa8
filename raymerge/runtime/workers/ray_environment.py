"""How Ray is set up, reached or started, and watched while it is embedded."""

from __future__ import annotations

import os
import re
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from raymerge.errors import OptionError, Problem, first_line
from raymerge.runtime.workers.sizing import available_processes
from raymerge.storage.retry import size_limit
from raymerge.storage.temporary import OwnDirectory

_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""What Ray's agents call themselves once they are up."""
_STAND_IN = str(Path(__file__).with_name("agent_stand_in.py"))
_SCRIPTS = ("/ray/dashboard/agent.py", "/ray/_private/runtime_env/agent/main.py", _STAND_IN)
_AGENTS_SECONDS, _LOOK_SECONDS = 2.0, 0.05
"""How long the raylet may take to start its agents, and from one look for them to the next."""


class RayWatch:
    """Watches processes of an embedded Ray until it is ended.

    Without the raylet, Ray ends its driver's process from within a library, silently and with status 1, at
    the next call of the object store; the raylet ends itself without one of its agents. Without the GCS every
    call blocks for most of a minute. So the driver's owner has to know first."""

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], None]) -> None:
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
    """Numbers of the processes that an embedded Ray cannot do without: raylet, GCS and agents."""
    node = ray._private.worker._global_node
    processes = {
        each.process.pid: kind
        for kind, processes in (node.all_processes if node is not None else {}).items()
        for each in processes
    }
    agents, ends_at = agents_of(processes), time.monotonic() + _AGENTS_SECONDS
    # One that is not watched takes the raylet with it, and that this process, before anything can be said.
    while len(agents) < len(_AGENTS) and time.monotonic() < ends_at:
        time.sleep(_LOOK_SECONDS)
        agents = agents_of(processes)
    return processes | dict.fromkeys(agents, "one of its agents")


def agents_of(processes: Iterable[int]) -> list[int]:
    agents: list[int] = []
    for number in processes:
        with suppress(psutil.Error):
            for child in psutil.Process(number).children():
                # One that ends meanwhile must not hide the others.
                with suppress(psutil.Error):
                    agents += [child.pid] if is_agent(child.cmdline()) else []
    return agents


def is_agent(command: Sequence[str]) -> bool:
    """Whether a command line is an agent's: those of workers name agents in options too."""
    return any(word.startswith(_AGENTS) or word.endswith(_SCRIPTS) for word in command)


OBJECT_STORE_BYTES = 200 << 20
_ANSWER_SECONDS = 5.0
_LEAST_THREADS = 128
"""Fewer an embedded Ray may not come up with: with one worker it takes about 110 on two cores, and more on
more."""
_EXEMPT = 1 << 21 | 1 << 24
"""Capabilities that the limit on processes does not hold for: CAP_SYS_ADMIN and CAP_SYS_RESOURCE."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Of an embedded cluster: processes for which there is no work would import ray while we import torch.
    "RAY_prestart_worker_first_driver": "0",
}
_HELPERS = ("start_api_server", "start_monitor", "start_log_monitor")
"""What starts, with a node of Ray, its web server, its autoscaler, and what forwards output of workers."""
_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^/\]]+)\]?:([0-9]{1,5})")


def import_ray(*, embedded: bool) -> ModuleType:
    """Import ray with quiet logs, no usage statistics, and token authentication for an embedded cluster.

    Ray reads its token at its first import, so it is chosen before; the user's token is kept."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if embedded and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    module: ModuleType = ray
    return module


class RayConnection:
    def __init__(
        self, address: str | None, *, num_cpus: int | None = None, on_end: Callable[[str], None] | None = None
    ) -> None:
        """``num_cpus`` are CPU slots of an embedded cluster, for more workers than cores; ``on_end`` is
        called from a thread with the process of an embedded cluster that has ended too early."""
        self._on_end = on_end
        self._watch: RayWatch | None = None
        self._address = address
        self._num_cpus = num_cpus
        self._directory: OwnDirectory | None = None
        self._owner = False
        self.ray = import_ray(embedded=address is None)

    def open(self) -> None:
        """Connect; an existing connection of this process is used and left open. Raises OptionError if no
        cluster answers at the address, or none can be started here."""
        if self.ray.is_initialized():
            return
        if self._address is None:
            check_limits(Path("/"))
        self._owner = True
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            if self._address is None:
                self._start()
            else:
                _check_answers(self._address)
                self.ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # some of what Ray raises is of no other class
            raise _no_ray(self._address, error) from error
        except SystemExit as error:
            # What Ray's own handler makes of SIGTERM while Ray starts; to us it is an interruption like any.
            raise KeyboardInterrupt from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)
        # Ray prints the raylet's notices to standard output, which belongs to the caller, whatever the
        # settings. ``WorkerLost`` reports the death of workers.
        self.ray._private.worker.print_to_stdstream = _do_nothing
        if self._directory is not None and self._on_end is not None:
            self._watch = RayWatch(needed_processes(self.ray), self._on_end)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._owner:
            self.ray.shutdown()
            self._owner = False
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def _start(self) -> None:
        # A short path: Ray's socket names below it must stay under 108 bytes.
        self._directory = OwnDirectory("/tmp" if os.path.isdir("/tmp") else None)
        # "local", because without an address Ray joins any cluster that it finds on this machine.
        with _jobs_environment_left_out(), _helpers_left_out(self.ray), _agents_replaced(self.ray):
            self.ray.init(
                address="local",
                num_cpus=self._num_cpus,
                # Ray opens its own directory to everybody; the one around it stays ours alone.
                _temp_dir=str(self._directory.path / "ray"),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                job_config=_own_code_only(),
            )


def _own_code_only() -> Any:
    """Keeps the current directory, where models and recipes of others may lie, from where workers look for
    modules, before all others: Ray leaves it out of jobs of its remote client alone."""
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def check_limits(root: Path) -> None:
    """Raises OptionError where limits would make an embedded Ray fail, silently and after minutes."""
    remedy = "Raise it, or give --inline to run without Ray."
    capacity = min((*available_processes(root), *_own_available_processes(root)), default=_LEAST_THREADS)
    if capacity < _LEAST_THREADS:
        what = (
            f"an embedded Ray starts more than {_LEAST_THREADS} threads, and no more than {max(0, capacity)} "
        )
        what += "may be started here, by a limit of the user (ulimit -u) or of the container (pids.max)."
        raise OptionError(Problem("ray", what, remedy))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < OBJECT_STORE_BYTES:
        what = f"an embedded Ray writes a file of {OBJECT_STORE_BYTES} bytes, and {size_limit()}."
        raise OptionError(Problem("ray", what, remedy))


def _own_available_processes(root: Path) -> Iterator[int]:
    """Threads that the user may still start; nothing where no limit holds for this process."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    own = _status(root / "proc" / "self")
    user = own.get("Uid", "0").split()[0]
    is_exempt = user == "0" or bool(int(own.get("CapEff", "0"), 16) & _EXEMPT)
    if most == resource.RLIM_INFINITY or is_exempt:
        return
    statuses = (_status(each) for each in (root / "proc").iterdir() if each.name.isdecimal())
    yield most - sum(int(each["Threads"]) for each in statuses if each.get("Uid", "").split()[:1] == [user])


def _status(process: Path) -> dict[str, str]:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _check_answers(address: str) -> None:
    """Raises OSError if nothing listens there: Ray tries for a minute, then ends the process."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is not None:
        socket.create_connection((match.group(1), int(match.group(2))), timeout=_ANSWER_SECONDS).close()


def _no_ray(address: str | None, error: Exception) -> OptionError:
    reason = first_line(error)
    if address is None:
        return OptionError(
            Problem("ray", f"an embedded Ray does not start ({reason}).", "Give --inline to run without it.")
        )
    return OptionError(
        Problem(
            f"--address {address}",
            f"no Ray cluster can be reached there ({reason}).",
            "This works on a node of that cluster alone, with HOST:PORT of its head (often port 6379), and, "
            "where it asks for a token, with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN. From any other machine "
            "give its dashboard, --address http://HEAD:8265.",
        )
    )


@contextmanager
def _helpers_left_out(ray: Any) -> Iterator[None]:
    """Start Ray without the processes that an embedded cluster has no use for: each is one more interpreter
    that imports ray while we wait for workers.

    No setting leaves them out: even without its pages the web server is started, and waited for. Releases of
    Ray without one need no change."""
    node = ray._private.node.Node
    starting = {name: getattr(node, name) for name in _HELPERS if hasattr(node, name)}
    for name in starting:
        setattr(node, name, _do_nothing)
    try:
        yield
    finally:
        for name, start in starting.items():
            setattr(node, name, start)


_OF_JOBS = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
"""What Ray takes the environment of a job from: ``ray job submit`` sets the first for its drivers."""


@contextmanager
def _jobs_environment_left_out() -> Iterator[None]:
    """Start Ray without an environment of the job, which only its agents could prepare. What that of an outer
    job has was prepared for this process, and workers of an embedded Ray inherit it."""
    values = {name: os.environ.pop(name) for name in _OF_JOBS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


_AGENT_OPTIONS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_AGENT_PORTS = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
_NO_PORT = -1


@contextmanager
def _agents_replaced(ray: Any) -> Iterator[None]:
    """Start the raylet with stand-ins for its agents. That it waits for them is most of what starting Ray
    takes; they send metrics and prepare environments of jobs, and there is neither.

    Releases of Ray whose raylet does not read the ports of agents from files keep their agents."""
    services = ray._private.services
    start = services.start_ray_process

    def start_process(command: Sequence[str], kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == "raylet":
            command = _with_stand_ins(ray._raylet, command)
        return start(command, kind, *args, **kwargs)

    services.start_ray_process = start_process
    try:
        yield
    finally:
        services.start_ray_process = start


def _with_stand_ins(raylet: Any, command: Sequence[str]) -> list[str]:
    options = dict(word.split("=", 1) for word in command if "=" in word)
    place, node = options.get("--session_dir"), options.get("--node_id")
    names = [getattr(raylet, f"{name}_PORT_NAME", None) for name in _AGENT_PORTS]
    if place is None or node is None or None in names or not hasattr(raylet, "persist_port"):
        return list(command)
    for name in names:
        # What Ray's own agent writes down where it offers no service.
        raylet.persist_port(place, node, name, _NO_PORT)
    stand_in = subprocess.list2cmdline([sys.executable, "-IS", _STAND_IN, str(os.getpid())])
    return [
        f"{option}={stand_in}" if (option := word.partition("=")[0]) in _AGENT_OPTIONS else word
        for word in command
    ]


def _do_nothing(*_: object, **__: object) -> None: ...
