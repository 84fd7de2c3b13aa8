"""Nodes that differ are named, servers are asked, and nobody is waited for without a limit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.fake_ray import FakeRay, Ref
from kits.kube_api import TOKEN, kube_api
from kits.kube_cases import claim, profile_of

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets.job_server import JobServer
from raymerge.deploy.targets.target import Where
from raymerge.diagnosis import cluster
from raymerge.diagnosis.check import Check, Question, examine
from raymerge.runtime.workers import node_facts
from raymerge.runtime.workers.ray_nodes import Nodes

HERE: dict[str, str | None] = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "raymerge": "0.1.0"}


def _node(host: str, **changes: Any) -> dict[str, Any]:
    versions = {**HERE, **changes.pop("versions", {})}
    plain = {
        "cpus": 4,
        "gpus": 0,
        "memory": 8 * 10**9,
        "memory_free": 6 * 10**9,
        "gpu_names": [],
        "skew": 0.0,
        "unseen": [],
    }
    return {"host": host, "versions": versions, "shared_free": 10**9, **plain, **changes}


def _told(*nodes: dict[str, Any], silent: tuple[str, ...] = ()) -> list[Check]:
    return list(cluster.nodes("head:6379", cluster.ClusterFacts(nodes, silent, 1.0), HERE))


def test_nodes_that_agree_are_well() -> None:
    checks = _told(_node("a"), _node("b", gpus=2, gpu_names=["H100", "H100"]))
    assert {check.verdict for check in checks} == {"ok"}
    assert checks[0].fact == "head:6379: 2 nodes with 8 CPU slots and 2 GPUs answered"
    assert checks[2].fact == (
        "4 CPU slots, 2 x H100, 6.00 GB free of 8.00 GB, "
        "python 3.11.7, ray 2.60.0, torch 2.13.0, raymerge 0.1.0"
    )


@pytest.mark.parametrize("name", node_facts.COMPARED)
def test_a_node_with_another_version_is_named(name: str) -> None:
    checks = _told(_node("a"), _node("b", versions={name: "9.9"}), _node("c", versions={name: None}))
    problems = [check for check in checks if check.verdict == "problem"]
    assert [(check.topic, check.fact) for check in problems] == [
        ("node b", f"{name} 9.9 where this machine has {HERE[name]}."),
        ("node c", f"{name} is absent."),
    ]


def test_nodes_that_are_silent_early_late_or_short_of_shared_memory_are_named() -> None:
    odd = [
        _node("b", skew=60.0),
        _node("c", skew=-7.5),
        _node("d", shared_free=1 << 20),
        _node("e", skew=4.0),
        _node("g", unseen=["/mnt"]),
    ]
    checks = [check for check in _told(_node("a"), *odd, silent=("f",)) if check.verdict != "ok"]
    assert [(check.topic, check.verdict, check.fact) for check in checks] == [
        ("Ray cluster", "problem", "f did not answer."),
        ("node b", "note", "its clock is 60 s ahead."),
        ("node c", "note", "its clock is 8 s behind."),
        ("node d", "note", "/dev/shm has 1.05 MB free."),
        ("node g", "problem", "it has no directory /mnt."),
    ]


@pytest.mark.parametrize(("clock", "skew"), [(99.0, -1.0), (100.5, 0.0), (103.0, 2.0)])
def test_a_clock_is_off_by_what_no_delay_explains(clock: float, skew: float) -> None:
    found = node_facts._with_skew("a", (1, 0), {"clock": clock}, (100.0, 101.0))
    assert (found["skew"], found["host"], found["cpus"]) == (skew, "a", 1)


def test_a_node_tells_of_itself_what_json_can_hold(tmp_path: Path) -> None:
    found = json.loads(json.dumps(node_facts.facts([str(tmp_path), str(tmp_path / "none")])))
    assert found["unseen"] == [str(tmp_path / "none")]
    assert found["versions"] == node_facts.versions_here()
    assert found["memory"] > found["memory_free"] > 0


def test_every_living_node_is_asked_and_the_silent_one_is_told_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(("a", "b", "gone"))
    ray.alive["gone"] = False
    monkeypatch.setattr(Nodes, "_asked", lambda _, ask, node: Ref(answers=[ask()] * (node == "a")))
    monkeypatch.setattr(ray, "cancel", lambda *_, **__: None, raising=False)
    assert Nodes(ray, is_here=False).answers(lambda: "here", seconds=1) == [
        ("a", (2, 2), "here"),
        ("b", (2, 2), None),
    ]


def _asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (tmp_path / "question.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(cluster, "_QUESTION", "question")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "fact"),
    [
        ("import time; time.sleep(60)", "head:1: Ray gives no answer within 1 seconds."),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", "gives no answer"),
        (
            "import sys; sys.exit('the GCS is gone')",
            "head:1: Ray ended the process that asked: the GCS is gone",
        ),
        ("""print('noise\\n{"problems": [["is away.", "Wake it."]]}')""", "head:1: is away."),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_a_problem_in_time(
    program: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _asking(tmp_path, monkeypatch, program)
    monkeypatch.setattr(cluster, "_GRACE_SECONDS", 0.2)
    began = time.monotonic()
    (check,) = cluster.ray_cluster("head:1", seconds=1)
    assert check.verdict == "problem"
    assert fact in check.fact
    assert time.monotonic() - began < 10


def test_an_embedded_ray_that_does_not_start_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _asking(tmp_path, monkeypatch, """print('{"problems": [["it does not start.", "Raise the limit."]]}')""")
    (refused,) = cluster.embedded_ray(seconds=20)
    _asking(tmp_path, monkeypatch, """print('{"nodes": [], "silent": ["here"], "seconds": 1}')""")
    (silent,) = cluster.embedded_ray(seconds=20)
    assert (refused.verdict, refused.fact, refused.remedy) == (
        "problem",
        "it does not start.",
        "Raise the limit.",
    )
    assert (silent.verdict, silent.remedy) == (
        "problem",
        "Give --inline to merge without Ray, in one process.",
    )


def test_what_the_nodes_say_comes_from_the_process_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _node("other", versions={**node_facts.versions_here(), "torch": "1.0"})
    answer = json.dumps({"nodes": [node], "silent": [], "seconds": 0.1})
    _asking(
        tmp_path, monkeypatch, f"import sys\nprint({answer!r} if sys.argv[1:] == ['head:1', '/mnt'] else '')"
    )
    problems = [
        each for each in cluster.ray_cluster("head:1", ["/mnt"], seconds=20) if each.verdict == "problem"
    ]
    assert [(each.topic, each.fact.split(" where")[0]) for each in problems] == [("node other", "torch 1.0")]


def test_no_module_of_the_current_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "models"
    here.mkdir()
    for name in ("json", "psutil", "question"):
        (here / f"{name}.py").write_text("open('was_run', 'w')")
    program = """import json, psutil\nprint(json.dumps({"problems": [["asked.", ""]]}))"""
    _asking(tmp_path, monkeypatch, program)
    monkeypatch.chdir(here)
    (check,) = cluster.embedded_ray(seconds=20)
    assert check.fact == "asked."
    assert not (here / "was_run").exists()


def test_the_jobs_api_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = SimpleNamespace(json=lambda: {"version": "4", "ray_version": "2.55.1"})
    client = SimpleNamespace(get_version=lambda: "4", _do_request=lambda *_: reply)
    server = JobServer("http://head:8265", {}, connect=lambda *_: client)
    monkeypatch.setattr(cluster, "open_job_server", lambda *_: server)
    checks = list(cluster.jobs_api(Where("job", "http://head:8265", Profile()), {}, HERE))
    assert checks[0].fact == "http://head:8265 answers; Ray 2.55.1 there, 2.60.0 here"
    assert checks[0].verdict == "note"


def test_kubernetes_is_asked_for_all_that_a_run_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(tmp_path)
    with kube_api() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        (lacking, _) = cluster.kubernetes(profile)
        claim(api)
        (well, beyond) = cluster.kubernetes(profile)
        api.denied.add(("create", "rayjobs"))
        (denied, _) = cluster.kubernetes(profile)
    assert (lacking.verdict, "no persistent volume claim data" in lacking.fact) == ("problem", True)
    assert (well.verdict, beyond.verdict) == ("ok", "note")
    assert f"{api.url} answers" in well.fact
    assert "may not create rayjobs" in denied.fact
    assert TOKEN not in str([lacking, well, denied])


def test_a_kubernetes_without_configuration_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (check,) = examine([Question("Kubernetes", lambda: cluster.kubernetes(profile_of(tmp_path)), 20, "")])
    assert (check.verdict, check.remedy) == ("problem", "Set KUBECONFIG to one that `kubectl` works with.")
