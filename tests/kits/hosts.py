"""Hosts on one machine: each with a network, mounts, a name, processes and shared memory of its own.

They see the machine's files, as hosts do that share a file system, and one another over a switch. All of it
is namespaces that live as long as their first process, which ends with the one that made it: nothing stays
mounted, no name is taken, and the machine's own network is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil

_NETWORK = "10.77.0"
_SECONDS = 90.0
_ISOLATED = ("unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--kill-child", "--mount-proc")
_TOOLS = ("ip", "unshare", "nsenter")
_INIT = """
import os, select, socket, subprocess, sys
name, address = sys.argv[1:]
mount = lambda *args: subprocess.run(["mount", *args], check=True)
mount("--make-rprivate", "/")
os.makedirs("/tmp/ray", exist_ok=True)
for place, size in (("/tmp/ray", "1g"), ("/dev/shm", "512m")):
    mount("-t", "tmpfs", "-o", "size=" + size, "tmpfs", place)
with open("/dev/shm/hosts", "w") as file:
    file.write("127.0.0.1 localhost\\n" + address + " " + name + "\\n")
mount("--bind", "/dev/shm/hosts", "/etc/hosts")
socket.sethostname(name)
print("up", flush=True)
while not select.select([0], [], [], 0.2)[0]:
    # The first process takes leave of those that nobody else waits for.
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


@dataclass(slots=True)
class Host:
    name: str
    address: str
    port: str
    _outer: subprocess.Popen[str]
    _init: psutil.Process
    _switch: int

    def inside(self) -> list[str]:
        return ["nsenter", "-t", str(self._init.pid), "-n", "-m", "-u", "-i", "-p", "--"]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            [*self.inside(), *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip() or "without a word").splitlines()[-1]
            raise OSError(f"{self.name}: {' '.join(command)} ended with {done.returncode}: {last}")
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        own = _namespace(self._init.pid)
        return [each for each in psutil.process_iter() if own and _namespace(each.pid) == own]

    def clear(self) -> None:
        begun = [each for each in self.processes() if each.pid != self._init.pid]
        for each in begun:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(begun, timeout=10)

    def power_off(self) -> None:
        processes = self.processes()
        with suppress(psutil.NoSuchProcess):
            self._init.kill()
        self._outer.kill()
        self._outer.communicate()
        psutil.wait_procs(processes, timeout=10)

    def cut(self) -> None:
        _ip(self._switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        _ip(self._switch, "link", "set", self.port, "up")


def reason_against() -> str:
    """Why there can be no hosts on this machine; "" if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces of a network take Linux and root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)}"
    done = subprocess.run(
        [*_ISOLATED, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "plug"],
        capture_output=True,
        check=False,
    )
    return "namespaces or their cables cannot be made here" if done.returncode else ""


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    with ExitStack() as stack:
        switch = _begun(stack, ["unshare", "-n", "sh", "-c", "echo up; cat"])
        _ip(switch.pid, "link", "add", "br0", "type", "bridge")
        _ip(switch.pid, "link", "set", "br0", "up")
        yield [_plugged(stack, switch.pid, number) for number in range(1, count + 1)]


def _plugged(stack: ExitStack, switch: int, number: int) -> Host:
    name, address, port = f"host{number}", f"{_NETWORK}.{number}", f"port{number}"
    outer = _begun(stack, [*_ISOLATED, sys.executable, "-c", _INIT, name, address])
    (init,) = psutil.Process(outer.pid).children()
    host = Host(name, address, port, outer, init, switch)
    stack.callback(host.power_off)
    _ip(switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
    _ip(switch, "link", "set", port, "master", "br0", "up")
    _ip(init.pid, "addr", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip(init.pid, "link", "set", link, "up")
    # Programs find their own address by asking for the way to somewhere far away.
    _ip(init.pid, "route", "add", "default", "dev", "eth0")
    return host


def _begun(stack: ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
    """A process that ends when its input does: with this one, or with the stack; it has said that it is up.

    Before that it may not have left this process's own namespaces, which nothing is to be done to.
    """
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "up":
        raise OSError(f"no namespaces: {command[0]} ended with {process.wait()}")
    return process


def _ip(pid: int, *args: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *args], check=True, capture_output=True)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
