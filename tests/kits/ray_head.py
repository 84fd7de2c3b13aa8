"""A real Ray head with its Jobs API, on ports of its own, gone when the block is left."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PORTS = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class RayHead:
    gcs: str
    jobs: str
    token: str
    directory: Path
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


@contextmanager
def ray_head(*, cpus: int = 2) -> Iterator[RayHead]:
    token, directory = secrets.token_hex(32), Path(tempfile.mkdtemp(prefix="rmhead-", dir="/tmp"))
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--include-dashboard=true",
        f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={100 << 20}", f"--temp-dir={directory}",
        "--disable-usage-stats", *(f"--{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    settings = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        log = stack.enter_context((directory / "head.log").open("w"))
        process = subprocess.Popen(
            command, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
        )
        stack.callback(_end, process)
        gcs, jobs = (f"127.0.0.1:{ports[name]}" for name in ("port", "dashboard-port"))
        head = RayHead(gcs, f"http://{jobs}", token, directory, process.pid)
        _await(head, process)
        yield head


def _await(head: RayHead, process: subprocess.Popen[bytes]) -> None:
    end_at = time.monotonic() + _SECONDS
    request = urllib.request.Request(
        f"{head.jobs}/api/jobs/", headers={"Authorization": f"Bearer {head.token}"}
    )
    while time.monotonic() < end_at and process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"no head node: {(head.directory / 'head.log').read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.NoSuchProcess):
        kin = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        for each in (*kin, process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(kin, timeout=10)
    process.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
