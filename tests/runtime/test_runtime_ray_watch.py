"""Which of the processes that a raylet starts are its agents."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from raymerge.runtime.workers.ray_environment import agents_of, is_agent

PACKAGE = Path(ray.__file__).parent


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-u", f"{PACKAGE}/dashboard/agent.py", "--metrics-agent-port=1"],
        ["python", "-u", f"{PACKAGE}/_private/runtime_env/agent/main.py", "--runtime-env-agent-port=1"],
        ["ray::DashboardAgent"],
        ["ray::RuntimeEnvAgent"],
    ],
)
def test_agents_are_known_by_their_scripts_and_titles(command: list[str]) -> None:
    assert is_agent(command)
    assert command[2:] == [] or Path(command[2]).is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/home/agent/ray/_private/workers/default_worker.py", "--runtime-env-agent-port=1"],
        ["python", f"{PACKAGE}/_private/workers/default_worker.py", "--metrics-agent-port=1"],
        ["ray::IDLE"],
        ["ray::MergeWorker"],
    ],
)
def test_workers_are_none(command: list[str]) -> None:
    assert not is_agent(command)


def test_a_child_that_ends_meanwhile_hides_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended() -> list[str]:
        raise psutil.NoSuchProcess(7)

    gone = SimpleNamespace(pid=7, cmdline=ended)
    agent = SimpleNamespace(pid=8, cmdline=lambda: ["ray::RuntimeEnvAgent"])
    raylet = SimpleNamespace(children=lambda: [gone, agent])
    monkeypatch.setattr(psutil, "Process", lambda _: raylet)
    assert agents_of([1]) == [8]
