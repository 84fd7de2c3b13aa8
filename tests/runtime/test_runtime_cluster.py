"""A running cluster of two nodes, reached by ``--address``: the same bytes as in one process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from raymerge.errors import OptionError
from raymerge.runtime.workers.ray_environment import RayConnection


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
