"""The Slurm script, as it is, under a real Slurm with two nodes on this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from chaos.yard import Place, Yard, make_yard
from kits.merge_cases import digests
from kits.slurm_cluster import PROGRAMS, SlurmCluster, slurm_cluster

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "slurm" / "raymerge.sbatch"
SMALL = ("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2G", "--time=00:30:00")
SECONDS = 300.0

_missing = [name for name in PROGRAMS if shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") is None]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.service,
    pytest.mark.skipif(
        bool(_missing),
        reason=f"there is no {', '.join(_missing)}: `apt-get install slurm-wlm munge` as root brings them",
    ),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return make_yard(tmp_path_factory.mktemp("yard"), layers=8)


def _submit(slurm: SlurmCluster, place: Place, *flags: str) -> str:
    merge = (str(SCRIPT), str(place.yard.recipe), str(place.output), "--workers", "2", "--threads", "1")
    settings = {"RAYMERGE_HEAD_IP": "127.0.0.1", **place.disk()}
    return slurm.submit(place.yard.root, *SMALL, *flags, *merge, **settings)


def _work(place: Place, segments: int) -> None:
    end_at = time.monotonic() + SECONDS
    while place.count() < segments:
        assert time.monotonic() < end_at, _log(place)
        time.sleep(0.05)


def _log(place: Place) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(place.yard.root.glob("raymerge-*.log")))


def _is_over(job: Mapping[str, str]) -> bool:
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def _finish(slurm: SlurmCluster, place: Place, job: str, restarts: int) -> None:
    place.pause(0)
    done = slurm.until(job, _is_over, SECONDS)
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), (
        _log(place)
    )
    assert digests(place.output) == place.yard.expected


def _return_node(slurm: SlurmCluster, node: str, job: str) -> None:
    """What was to be killed there is killed when it is back: sites have a job wait longer than that, too."""
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now+75")
    slurm.start_node(node)


def test_two_nodes_make_what_one_process_makes(slurm: SlurmCluster, yard: Yard) -> None:
    place = yard.place("whole")
    job = _submit(slurm, place)
    _finish(slurm, place, job, 0)
    assert not Path(f"/tmp/raymerge-{job}").exists()


def test_a_job_whose_time_is_up_is_begun_again_and_goes_on(slurm: SlurmCluster, yard: Yard) -> None:
    place = yard.place("time")
    place.pause(0.1)
    job = _submit(slurm, place)
    _work(place, 4)
    place.pause(1)
    hours, minutes, _ = slurm.job(job)["RunTime"].split(":")
    # The script is told a minute before.
    slurm.ask("scontrol", "update", f"jobid={job}", f"timelimit={60 * int(hours) + int(minutes) + 2}")
    slurm.until(job, lambda state: state["Restarts"] == "1", SECONDS)
    assert not Path(f"/tmp/raymerge-{job}").exists()
    done = place.count()
    _finish(slurm, place, job, 1)
    assert f"going on: {done} of " in _log(place)


def test_a_death_of_the_drivers_node_has_the_job_begun_again(slurm: SlurmCluster, yard: Yard) -> None:
    place = yard.place("driver")
    place.pause(0.1)
    job = _submit(slurm, place)
    _work(place, 4)
    slurm.kill_node("one")
    slurm.until(job, lambda state: state["Restarts"] == "1", SECONDS)
    done = place.count()
    _return_node(slurm, "one", job)
    _finish(slurm, place, job, 1)
    assert f"going on: {done} of " in _log(place)


def test_a_checkpoint_published_before_a_dead_node_is_missed_is_not_in_the_jobs_way(
    slurm: SlurmCluster, yard: Yard
) -> None:
    place = yard.place("workers")
    place.pause(0.1)
    job = _submit(slurm, place)
    _work(place, 4)
    slurm.kill_node("two")
    place.pause(0)
    end_at = time.monotonic() + SECONDS
    while not place.output.exists():
        assert time.monotonic() < end_at, _log(place)
        time.sleep(0.05)
    # As Slurm does when it misses the node, which may come too late for this job.
    slurm.ask("scontrol", "requeue", job)
    slurm.until(job, lambda state: state["Restarts"] == "1", SECONDS)
    _return_node(slurm, "two", job)
    _finish(slurm, place, job, 1)
