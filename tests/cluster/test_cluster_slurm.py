"""The Slurm script, as it is: small programs play Slurm's own, and Ray is real where it matters."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from kits.merge_cases import INLINE, digests, make_family, recipes

from raymerge.api import submit

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "slurm" / "raymerge.sbatch"
SECONDS = 90.0
SRUN = """#!/bin/bash
echo "srun $*" >>"$SAID"
while [[ $1 == --* ]]; do
  if [[ $1 == --nodelist=* ]]; then export SLURMD_NODENAME=${1#*=}; fi
  shift
done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$SAID"
if [[ $1 == show ]]; then tr , '\\n' <<<"$3"; fi
"""
WAITING = """#!/bin/bash
sleep 60 &
trap "kill $!; echo told >>'$SAID'; exit 3" TERM
echo "driver $*" >>"$SAID"
wait
"""
QUIET = "#!/bin/bash\nexec sleep 60\n"


class _Allocation:
    """What a job of Slurm finds."""

    def __init__(self, root: Path, nodes: str, programs: Mapping[str, str]) -> None:
        self.said = root / "said"
        self.said.write_text("")
        folder = root / "bin"
        folder.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        number = secrets.randbelow(10**6)
        self.scratch = Path(f"/tmp/raymerge-{number}")
        self.port = 20000 + number % 10000
        self.root = root
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"])),
            "SAID": str(self.said),
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_CPUS_PER_TASK": "1",
            "RAYMERGE_HEAD_IP": "127.0.0.1",
        }

    @contextmanager
    def job(self, *args: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """The script, begun; all that it began is gone when the block is left."""
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *args],
            env={**self.environment, **environment},
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            for each in (
                (*psutil.Process(process.pid).children(recursive=True),) if process.poll() is None else ()
            ):
                each.kill()
            process.kill()
            process.communicate()

    def until(self, said: str) -> None:
        until = time.monotonic() + SECONDS
        while said not in self.said.read_text():
            assert time.monotonic() < until, self.said.read_text()
            time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.service
def test_two_nodes_make_what_one_process_makes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(recipes(make_family(tmp_path / "models"))["linear"]))
    submit(str(recipe), tmp_path / "here", INLINE)
    allocation = _Allocation(tmp_path, "first,second", {})
    args = (str(recipe), str(tmp_path / "there"), "--workers", "2", "--threads", "1", "--json")
    with allocation.job(*args) as job:
        text, _ = job.communicate(timeout=SECONDS)
    log = next(tmp_path.glob("raymerge-*-ray.log")).read_text()
    assert job.returncode == 0, text + log
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    said = allocation.said.read_text().splitlines()
    assert [line for line in said if "--head" in line and "--nodelist=first" in line]
    assert [line for line in said if "ray start --block" in line and "--nodelist=second" in line]
    assert "RAY_AUTH" not in "".join(said)
    assert not allocation.scratch.exists()
    assert not [line for line in said if "requeue" in line]


@pytest.mark.parametrize(
    ("number", "restarts", "requeued"),
    [(signal.SIGUSR1, "0", True), (signal.SIGUSR1, "50", False), (signal.SIGTERM, "0", False)],
    ids=["the-time-is-up", "too-often", "cancelled"],
)
def test_a_signal_stops_the_driver_and_has_the_job_queued_again_where_it_should(
    tmp_path: Path, number: signal.Signals, restarts: str, requeued: bool
) -> None:
    programs = {"raymerge": WAITING, "ray": QUIET, "python": "#!/bin/bash\ncat >/dev/null\n"}
    allocation = _Allocation(tmp_path, "first", programs)
    with allocation.job("recipe.yml", "/out", SLURM_RESTART_COUNT=restarts) as job:
        allocation.until("driver submit recipe.yml -o /out --address 127.0.0.1:")
        job.send_signal(number)
        text, _ = job.communicate(timeout=20)
    assert job.returncode == 3
    said = allocation.said.read_text()
    assert "told" in said
    assert ("scontrol requeue" in said) == requeued
    assert ("the same sbatch command goes on where it stopped" in text) != requeued


@pytest.mark.parametrize(
    ("nodes", "dead"), [("first", "first"), ("first,second", "first"), ("first,second,third", "third")]
)
def test_a_ray_that_does_not_start_is_not_waited_for(tmp_path: Path, nodes: str, dead: str) -> None:
    ray = f"#!/bin/bash\nif [[ $SLURMD_NODENAME == {dead} ]]; then exit 1; fi\nexec sleep 60\n"
    allocation = _Allocation(tmp_path, nodes, {"ray": ray, "python": QUIET})
    with ExitStack() as stack:
        if dead != "first":
            # The head, as far as the others can tell.
            stack.enter_context(socket.create_server(("127.0.0.1", allocation.port)))
        job = stack.enter_context(allocation.job("recipe.yml", "/out"))
        text, _ = job.communicate(timeout=20)
    assert job.returncode == 1
    assert re.search(r"Ray ended on a node before all were there; \S+-ray\.log tells why", text)


def test_it_says_how_it_is_used(tmp_path: Path) -> None:
    with _Allocation(tmp_path, "first", {}).job("recipe.yml") as job:
        text, _ = job.communicate(timeout=20)
    assert job.returncode == 2
    assert text.startswith("usage: sbatch raymerge.sbatch RECIPE OUT")
