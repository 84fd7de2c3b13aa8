"""A real Slurm on this machine: one controller, and the daemons of two nodes; gone when the block is left."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kits.ray_head import free_ports

Job = Mapping[str, str]
"""The fields of ``scontrol show job``."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("one", "two")
_DOWN_SECONDS = 10
_CONFIGURATION = """\
ClusterName=raymerge
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A job that is queued again begins once its old credentials have expired.
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SlurmdTimeout={down}
ReturnToService=2
KillWait=5
MailProg=/bin/true
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE
"""


@dataclass
class SlurmCluster:
    root: Path
    nodes: dict[str, psutil.Popen] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell has: Slurm, raymerge and ray on its PATH."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
        places = (str(Path(sys.executable).parent), own.get("PATH", ""), "/usr/sbin", "/sbin")
        return {**own, "PATH": os.pathsep.join(places), "SLURM_CONF": str(self.configuration)}

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, folder: Path, *arguments: str, **settings: str) -> str:
        """Queue a batch script from ``folder``; the job's number."""
        command, environment = ["sbatch", "--parsable", *arguments], {**self.environment, **settings}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> Job:
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, number: str, is_so: Callable[[Job], bool], seconds: float) -> Job:
        end_at = time.monotonic() + seconds
        while not is_so(job := self.job(number)):
            assert time.monotonic() < end_at, (job, self.logs())
            time.sleep(0.2)
        return job

    def start_node(self, name: str) -> None:
        self.nodes[name] = _daemon(self.environment, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """As when the power fails: its daemon, those of its steps, and every process of theirs."""
        _kill([self.nodes.pop(name)])
        log = self.root / f"slurmd-{name}.log"
        for step in [each for each in psutil.process_iter() if _writes(each, log)]:
            # The daemon first, which would tell that its process has ended.
            for each in (step, *_below(step)):
                with suppress(psutil.Error):
                    each.kill()

    def logs(self) -> str:
        paths = sorted(self.root.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in paths)


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    # Sockets are in it, whose paths may have about a hundred characters.
    root = Path(tempfile.mkdtemp(prefix="rmslurm-", dir="/tmp"))
    cluster = SlurmCluster(root)
    ports, host = free_ports(3), socket.gethostname().partition(".")[0]
    cluster.configuration.write_text(
        _CONFIGURATION.format(root=root, ports=ports, host=host, down=_DOWN_SECONDS)
    )
    (root / "munge").mkdir()
    (root / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (root / "munge" / "key").chmod(0o400)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = (f"--{option}={root / 'munge' / name}" for option, name in names.items())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.callback(_end, cluster)
        started = [_daemon(cluster.environment, "munged", "--foreground", "--force", *munge)]
        stack.callback(_kill, started)
        _await(lambda: (root / "munge" / "socket").exists())
        started.append(_daemon(cluster.environment, "slurmctld", "-D"))
        for name in NODES:
            cluster.start_node(name)
        _await(lambda: _num_idle(cluster) == len(NODES))
        yield cluster


def _kill(daemons: Iterable[psutil.Popen]) -> None:
    for each in daemons:
        each.kill()
        each.wait()


def _num_idle(cluster: SlurmCluster) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True)
    return len(done.stdout.split())


def _end(cluster: SlurmCluster) -> None:
    for name in NODES:
        if name in cluster.nodes:
            cluster.kill_node(name)


def _writes(process: psutil.Process, log: Path) -> bool:
    with suppress(psutil.Error):
        return process.name() == "slurmstepd" and str(log) in (each.path for each in process.open_files())
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _daemon(environment: Mapping[str, str], *command: str) -> psutil.Popen:
    quiet = subprocess.DEVNULL
    return psutil.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)


def _await(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    end_at = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end_at
        time.sleep(0.1)
