"""Which of the processes that a raylet starts are its agents."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from raymerge.runtime.workers import agent_stand_in
from raymerge.runtime.workers.ray_environment import _with_stand_ins, agents_of, is_agent

PACKAGE = Path(ray.__file__).parent


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-u", f"{PACKAGE}/dashboard/agent.py", "--metrics-agent-port=1"],
        ["python", "-u", f"{PACKAGE}/_private/runtime_env/agent/main.py", "--runtime-env-agent-port=1"],
        ["ray::DashboardAgent"],
        ["ray::RuntimeEnvAgent"],
        ["python", "-IS", agent_stand_in.__file__],
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


COMMAND = [
    "raylet",
    "--session_dir=/tmp/session",
    "--node_id=abc",
    "--dashboard_agent_command=python agent.py --node-id=abc",
    "--runtime_env_agent_command=python main.py --node-id=abc",
    "--head",
]


def test_a_raylet_finds_stand_ins_for_its_agents_that_offer_nothing() -> None:
    ports: dict[str, tuple[str, str, int]] = {}

    def persist_port(place: str, node: str, name: str, port: int) -> None:
        ports[name] = (place, node, port)

    names = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
    raylet = SimpleNamespace(persist_port=persist_port, **{f"{each}_PORT_NAME": each for each in names})
    program, *places, dashboard, runtime, is_head = _with_stand_ins(raylet, COMMAND)
    assert [program, *places, is_head] == [*COMMAND[:3], COMMAND[-1]]
    assert ports == dict.fromkeys(names, ("/tmp/session", "abc", -1))
    stand_in = dashboard.removeprefix("--dashboard_agent_command=")
    assert runtime == f"--runtime_env_agent_command={stand_in}"
    assert shlex.split(stand_in) == [sys.executable, "-IS", agent_stand_in.__file__]
    # A release of Ray whose raylet reads no such files has agents of its own.
    del raylet.RUNTIME_ENV_AGENT_PORT_NAME
    assert _with_stand_ins(raylet, COMMAND) == COMMAND


def test_a_stand_in_ends_with_the_raylet() -> None:
    script = f'"{sys.executable}" -IS "{agent_stand_in.__file__}" & echo $!; sleep 0.2'
    shell = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    assert shell.stdout.strip().isdecimal()
    # Its output, which it shares with the shell, has ended: so has it.
