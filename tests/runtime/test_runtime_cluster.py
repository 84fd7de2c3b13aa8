"""A running cluster of two nodes, reached by ``--address``: the same bytes as in one process."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kits.merge_cases import digests, make_family, recipes

import raymerge
from raymerge.errors import OptionError
from raymerge.runtime.workers.ray_environment import RayConnection

_DRIVE = """
import json, subprocess, sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, connect=False, head_node_args={**node, "include_dashboard": False})
try:
    cluster.add_node(**node)
    command = [*sys.argv[1:], "--address", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
finally:
    cluster.shutdown()
print(json.dumps({"code": done.returncode, "said": done.stdout, "errors": done.stderr}))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_a_running_cluster_change_no_byte(tmp_path: Path) -> None:
    recipe = recipes(make_family(tmp_path / "models", hidden=256))["ties"]
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    raymerge.submit(tmp_path / "recipe.yml", tmp_path / "inline", raymerge.RunOptions(inline=True))
    submit = [sys.executable, "-c", "from raymerge.cli.main import main; main()", "submit"]
    paths = [str(tmp_path / "recipe.yml"), "-o", str(tmp_path / "cluster"), "--workers", "2", "--json"]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVE, *submit, *paths],
        env={**os.environ, **secret, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, found
    events = [json.loads(line) for line in found["said"].splitlines()]
    (started,) = (event for event in events if event["event"] == "started")
    # Which of the two makes how many of so few segments is chance.
    assert started["workers"] == ["worker-0", "worker-1"]
    assert {event["worker"] for event in events if event["event"] == "segment_done"} <= {*started["workers"]}
    assert digests(tmp_path / "cluster") == digests(tmp_path / "inline")


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
    """Some of that is of no class of its own."""

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
