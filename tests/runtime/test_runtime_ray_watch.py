"""Which of the processes that a raylet starts are its agents."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from raymerge.runtime.workers import agent_stand_in
from raymerge.runtime.workers.ray_environment import RayConnection, _with_stand_ins, agents_of, is_agent

PACKAGE = Path(ray.__file__).parent


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-u", f"{PACKAGE}/dashboard/agent.py", "--metrics-agent-port=1"],
        ["python", "-u", f"{PACKAGE}/_private/runtime_env/agent/main.py", "--runtime-env-agent-port=1"],
        ["ray::DashboardAgent"],
        ["ray::RuntimeEnvAgent"],
        ["python", "-IS", agent_stand_in.__file__, "1"],
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
    assert shlex.split(stand_in) == [sys.executable, "-IS", agent_stand_in.__file__, str(os.getpid())]
    # A release of Ray whose raylet reads no such files has agents of its own.
    del raylet.RUNTIME_ENV_AGENT_PORT_NAME
    assert _with_stand_ins(raylet, COMMAND) == COMMAND


@pytest.mark.parametrize(
    ("parents", "drivers", "looks"),
    [((7, 7, 7, 1), (True,) * 3, 2), ((1,) * 9, (True, True, False), 2), ((1,) * 9, (False,), 0)],
    ids=["raylet", "driver of a raylet that was gone before", "both gone before"],
)
def test_a_stand_in_ends_with_the_raylet_or_the_driver(
    parents: Sequence[int], drivers: Sequence[bool], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, states, waits = iter(parents), iter(drivers), list[float]()

    def signal(process: int, number: int) -> None:
        assert (process, number) == (5, 0)
        if not next(states):
            raise ProcessLookupError

    monkeypatch.setattr(os, "getppid", lambda: next(numbers))
    monkeypatch.setattr(os, "kill", signal)
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(sys, "argv", ["agent_stand_in.py", "5"])
    runpy.run_path(agent_stand_in.__file__, run_name="__main__")
    assert len(waits) == looks


def test_a_stand_in_whose_raylet_and_driver_end_at_once_is_not_left() -> None:
    script = f'"{sys.executable}" -IS "{agent_stand_in.__file__}" $$ & echo $!'
    # Within another shell, which takes leave of it: who has ended is there until then.
    both = f"sh -c {shlex.quote(script)}; true"
    shell = subprocess.run(["sh", "-c", both], stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    assert shell.stdout.strip().isdecimal()
    # Its output, which it shares with the shell, has ended: so has it.


def test_an_embedded_ray_takes_no_environment_from_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its agents could prepare it, and stand-ins are in their place."""
    names = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
    monkeypatch.setenv(names[0], '{"runtime_env": {"env_vars": {"A": "1"}}}')
    monkeypatch.setenv(names[1], "hooks.hook")
    connection = RayConnection(None)
    before, seen = dict(os.environ), list[list[str | None]]()
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "shutdown", lambda: None)
    monkeypatch.setattr(connection.ray, "init", lambda **_: seen.append([*map(os.environ.get, names)]))
    connection.open()
    connection.close()
    assert seen == [[None, None]]
    assert dict(os.environ) == before
