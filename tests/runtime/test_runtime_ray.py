"""The Ray pool: workers that die, errors that travel, and a connection that leaves no trace."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.command_line import run_command
from kits.driver_process import driver, finish, kin_of, wait_for_receipts
from kits.merge_cases import Family, digests, make_family, merge, recipes

from raymerge.api import submit
from raymerge.errors import IncompleteError, NonFiniteError, OptionError
from raymerge.events import Event, SegmentDone, Started, WorkerLost
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.sizing import most_lanes
from raymerge.runtime.workers.worker import MergeWorker

pytestmark = pytest.mark.ray

TWO = RunOptions(workers=2, memory=16 << 20)
CONFIG = {"architectures": ["OddForCausalLM"], "model_type": "odd"}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[RayPool]:
    made: list[RayPool] = []
    original = RayPool.__init__

    def noting(self: RayPool, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(RayPool, "__init__", noting)
    return made


def _use_worker(monkeypatch: pytest.MonkeyPatch, worker: type[Any], **more: Any) -> None:
    monkeypatch.setattr(ray_pool, "RayPool", functools.partial(RayPool, worker=worker, **more))


def _slow() -> type[Any]:
    """Defined in here, so that Ray sends the class itself to workers that cannot import this file."""

    class Slow(MergeWorker):
        def run(self, segment: int) -> dict[str, Any]:
            time.sleep(0.15)
            return super().run(segment)

    return Slow


def _failing(error: Exception) -> type[Any]:
    class Failing(MergeWorker):
        def run(self, segment: int) -> dict[str, Any]:
            raise error

    return Failing


def test_a_killed_worker_costs_nothing_but_time(
    medium: Family, tmp_path: Path, ray_cluster: Any, pools: list[RayPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_worker(monkeypatch, _slow())
    events: list[Event] = []
    lost_pid: list[int] = []

    def on_event(event: Event) -> None:
        events.append(event)
        # One that works: the other may have been slow to start.
        if isinstance(event, SegmentDone) and not lost_pid:
            victim = next(each for each in pools[0].group.actors if each.name == event.worker)
            lost_pid.append(ray_cluster.get(victim.handle.ready.remote())["pid"])
            os.kill(lost_pid[0], signal.SIGKILL)

    recipe = recipes(medium)["linear"]
    submit(recipe, tmp_path / "out", TWO, on_event=on_event)
    (lost,) = (event for event in events if isinstance(event, WorkerLost))
    assert lost.worker == next(event.worker for event in events if isinstance(event, SegmentDone))
    assert lost.reason
    # One more than it has lanes for.
    assert 1 <= len(lost.segments) <= most_lanes(TWO) + 1
    done = [event for event in events if isinstance(event, SegmentDone)]
    assert sorted(event.segment for event in done) == list(range(len(done)))
    merge(recipe, tmp_path / "undisturbed")
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


@pytest.mark.slow
def test_ctrl_c_drains_the_workers(
    medium: Family, tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_worker(monkeypatch, _slow())
    done: list[int] = []

    def on_event(event: Event) -> None:
        if isinstance(event, SegmentDone):
            done.append(event.segment)
            if len(done) == 3:
                signal.raise_signal(signal.SIGINT)

    recipe = recipes(medium)["linear"]
    with pytest.raises(IncompleteError, match="stopped with"):
        submit(recipe, tmp_path / "out", TWO, on_event=on_event)
    # Before the third, what came with it, and what both workers were given in the place of that.
    assert 3 <= len(done) <= 2 + 2 * 2 * (most_lanes(TWO) + 1)
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments == len(done)


@pytest.mark.slow
def test_a_workers_finding_arrives_as_it_was_raised(tmp_path: Path, ray_cluster: Any) -> None:
    write_checkpoint(tmp_path / "one", {"a.weight": torch.tensor([1.0, float("nan")])}, CONFIG)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "one")}]}
    with pytest.raises(NonFiniteError) as caught:
        submit(recipe, tmp_path / "out", TWO)
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path / 'one'}: a.weight"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (OSError(5, "Input/output error"), IncompleteError, "Input/output error.*the same command goes on"),
        (ZeroDivisionError("a bug"), ZeroDivisionError, "(?s)a bug"),
    ],
)
def test_other_errors_of_workers_arrive_too(
    error: Exception,
    raised: type[Exception],
    said: str,
    small: Family,
    tmp_path: Path,
    ray_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use_worker(monkeypatch, _failing(error))
    with pytest.raises(raised, match=said):
        submit(recipes(small)["linear"], tmp_path / "out", TWO)


@pytest.mark.slow
def test_unequal_workers_are_refused(
    medium: Family, tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(MergeWorker):
        def ready(self) -> dict[str, Any]:
            return {**super().ready(), "numerics": {"device": "cpu", "torch": self._name}}

    _use_worker(monkeypatch, Odd)
    with pytest.raises(OptionError, match=r"workers: they differ in device or torch version.*worker-1"):
        submit(recipes(medium)["linear"], tmp_path / "out", TWO)


# The connection


@pytest.mark.slow
def test_an_embedded_ray_leaves_standard_output_and_the_machine_as_they_were(
    medium: Family, tmp_path: Path
) -> None:
    """A worker is killed on the way, which Ray by itself would announce on standard output."""
    home = tmp_path / "home"
    home.mkdir()
    current = Path("/tmp/ray/ray_current_cluster")
    before = current.stat().st_mtime_ns if current.exists() else None
    # As in a job of another Ray, which has an environment.
    job = {"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}
    decoy = {"HOME": str(home), "RAY_ADDRESS": "127.0.0.1:1", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    output = tmp_path / "out"
    with driver(recipes(medium)["linear"], output, workers=1, pause=0.1, environment=decoy) as process:
        wait_for_receipts(output, 2)
        kin = kin_of(process)
        (victim,) = kin.workers
        victim.kill()
        events = finish(process)
    assert [event["worker"] for event in events if event["event"] == "worker_lost"] == ["worker-0"]
    assert events[-1]["event"] == "published"
    assert list(home.iterdir()) == []
    assert (current.stat().st_mtime_ns if current.exists() else None) == before
    # Not all of this name: other tests run beside this one.
    assert kin.directories
    assert not [each for each in kin.directories if Path(each).exists()]


_CONNECT = """
import sys
from raymerge.errors import OptionError
from raymerge.runtime.workers.ray_environment import RayConnection
connection = RayConnection(sys.argv[1])
try:
    connection.open()
except OptionError as error:
    print(error)
finally:
    connection.close()
"""


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "http://127.0.0.1:8265"])
def test_an_address_without_a_cluster_is_refused_soon(address: str) -> None:
    address = address.format(port=_closed_port())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _CONNECT, address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(f"--address {address}: no Ray cluster can be reached there (")
    assert "with HOST:PORT of its head" in done.stdout


def test_a_head_node_that_does_not_answer_is_told_with_the_way_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that other tests have connected to a cluster would stay connected.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models"))["linear"]))
    outcome = run_command("submit", str(recipe), "-o", "out", "--address", "127.0.0.1:9", cwd=tmp_path)
    assert outcome.code == 2
    assert "no Ray cluster can be reached there" in outcome.text
    assert "--address http://HEAD:8265" in outcome.text


@pytest.mark.slow
def test_what_rays_handler_makes_of_a_signal_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Ray starts its own handler is in force, which ends the process with the signal's number."""

    def interrupted(_: RayConnection) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(RayConnection, "_start", interrupted)
    connection = RayConnection(None)
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        connection.open()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_what_ray_raises_when_it_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_: RayConnection) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr(RayConnection, "_start", late)
    connection = RayConnection(None)
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    with pytest.raises(OptionError, match=r"does not start \(The current node timed out during startup\)"):
        connection.open()


_PROCESSES = """
import json, psutil
from raymerge.runtime.workers.ray_environment import RayConnection
connection = RayConnection(None, num_cpus=1)
node = connection.ray._private.node.Node
before = dict(vars(node))
connection.open()
kin = psutil.Process().children(recursive=True)
print(json.dumps([" ".join(each.cmdline()) for each in kin]), vars(node) == before)
connection.close()
"""


@pytest.mark.slow
def test_an_embedded_ray_starts_no_process_without_use() -> None:
    """Neither its web server nor its autoscaler nor what forwards logs; and Ray is left as it was."""
    done = subprocess.run([sys.executable, "-c", _PROCESSES], capture_output=True, text=True, check=True)
    listed, _, is_unchanged = done.stdout.strip().rpartition(" ")
    commands = json.loads(listed)
    assert any("raylet" in each for each in commands)
    helpers = ("dashboard/dashboard.py", "monitor.py", "log_monitor.py")
    assert not [each for each in commands if any(name in each for name in helpers)]
    assert is_unchanged == "True"


@pytest.mark.usefixtures("ray_cluster")
def test_workers_look_for_no_module_in_the_current_directory() -> None:
    connection = RayConnection(None, num_cpus=2)
    connection.open()
    try:
        worker = connection.ray._private.worker.global_worker
        assert os.getcwd() not in worker.core_worker.get_job_config().py_driver_sys_path
    finally:
        connection.close()


@pytest.mark.slow
def test_no_module_beside_a_recipe_is_run(small: Family, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(small)["linear"]))
    for name in ("numba", "torch", "safetensors", "json", "raymerge"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/was_run', 'w')")
    code = "from raymerge.cli.main import main; main()"
    subprocess.run(
        [sys.executable, "-P", "-c", code, "submit", recipe, "-o", "out", "--workers", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=tmp_path,
        check=True,
    )
    assert not (tmp_path / "was_run").exists()
