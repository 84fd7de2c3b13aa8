"""Runs on Kubernetes from end to end: the operator runs their drivers, on a Ray head of this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from kits.command_line import Outcome, run_command
from kits.kube_api import TOKEN, KubeApi, kube_api
from kits.kube_cases import admits, claim, kube_profile
from kits.kube_operator import Operator, operator
from kits.kube_store import CONFIGMAP, RAYCLUSTER, RAYJOB, RefusalError
from kits.merge_cases import INLINE, Family, digests, recipes
from kits.ray_head import RayHead, ray_head

from raymerge.api import submit, verify

pytestmark = [pytest.mark.ray, pytest.mark.service]
SECONDS = 60.0


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(cpus=2) as made:
        yield made


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with kube_api(admits=admits()) as server:
        claim(server)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield server


@pytest.fixture
def keeper(api: KubeApi, head: RayHead, tmp_path: Path) -> Iterator[Operator]:
    with operator(api, tmp_path / "mounts", head) as made:
        yield made


def _write(folder: Path, recipe: Mapping[str, Any], shared: Path, **kubernetes: Any) -> tuple[str, str]:
    (folder / "recipe.yml").write_text(yaml.safe_dump(dict(recipe)))
    (folder / "profile.yml").write_text(yaml.safe_dump(kube_profile(shared, **kubernetes)))
    return str(folder / "recipe.yml"), str(folder / "profile.yml")


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _halted(
    keeper: Operator, run: str, output: Path, *, after: psutil.Process | None = None
) -> psutil.Process:
    """The worker of a run, stopped once it has done something; ``after`` is that of the attempt before."""
    worker, had, until = None, _done(output), time.monotonic() + SECONDS
    while True:
        worker = worker or _worker(keeper, after)
        if worker is not None and _done(output) > had + 1:
            worker.suspend()
            return worker
        assert time.monotonic() < until, "no segment is done"
        assert (run, "Failed") not in keeper.seen, _message(keeper, run)
        time.sleep(0.002 if worker else 0.2)


def _message(keeper: Operator, run: str) -> str:
    return str(keeper.api.store.get(RAYJOB, "merges", run)["status"].get("message"))


def _done(output: Path) -> int:
    ledgers = output.parent.glob(f".{output.name}.raymerge-*/raymerge/ledger.jsonl")
    return max((len(each.read_bytes().splitlines()) for each in ledgers), default=0)


def _worker(keeper: Operator, besides: psutil.Process | None) -> psutil.Process | None:
    """A worker of this head: others of this machine may have some too."""
    assert keeper.head is not None
    for process in psutil.Process(keeper.head.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process != besides and "".join(process.cmdline()[:1]).startswith("ray::MergeWorker"):
                return process
    return None


def _until(keeper: Operator, state: tuple[str, str]) -> None:
    until = time.monotonic() + SECONDS
    while state not in keeper.seen:
        assert time.monotonic() < until, keeper.seen
        time.sleep(0.02)


def test_a_run_that_fails_is_tried_again_is_stopped_and_goes_on_to_the_same_bytes(
    keeper: Operator, api: KubeApi, medium: Family, tmp_path: Path
) -> None:
    recipe = recipes(medium)["linear"]
    shared = Path(os.path.commonpath([medium.base, tmp_path]))
    output, files = tmp_path / "there", _write(tmp_path, recipe, shared)
    submit(files[0], tmp_path / "here", INLINE)

    def command(verb: str, *args: str) -> Outcome:
        return run_command(verb, *args, cwd=tmp_path)

    sending = ("submit", files[0], "-o", str(output), "--profile", files[1])
    sent = command(*sending, "--detach", "--json")
    assert sent.code == 0, sent.text
    run = _events(sent.text)[-1]["run"]

    # The driver dies; the operator begins again with a new cluster, which goes on.
    first = _halted(keeper, run, output)
    keeper.driver(run).kill()
    _until(keeper, (run, "Retrying"))
    _halted(keeper, run, output, after=first)
    told = command("status", run, "--json")
    (report,) = _events(told.text)
    assert (report["state"], report["details"]["attempt"]) == ("running", "2 of 3")
    made = int(report["details"]["segments"].partition(" of ")[0])
    assert made >= 2
    assert "attempt 2 of 3" in report["message"]

    # Somebody else submits the same, and stops it: nothing of it is left in the cluster.
    again = command(*sending, "--detach", "--json")
    assert _events(again.text)[-1] == {
        "event": "submitted",
        "run": run,
        "target": "kubernetes",
        "output": str(output),
        "is_new": False,
    }
    stopped = command("stop", run, "--json")
    assert (stopped.code, _events(stopped.text)[-1]["state"]) == (0, "stopped")
    assert [api.store.list(each) for each in (RAYJOB, RAYCLUSTER, CONFIGMAP)] == [[], [], []]
    assert not output.exists()

    # Submitted once more, and followed, it ends with what a run on this machine makes.
    ended = command(*sending, "--json")
    assert ended.code == 0, ended.text
    events = _events(ended.text)
    (started,) = (each for each in events if each["event"] == "started")
    assert started["done_segments"] >= made
    assert events[-1]["event"] == "published"
    assert digests(output) == digests(tmp_path / "here")
    assert verify(output).problems == ()
    done = command("status", events[0]["run"])
    assert "succeeded" in done.text
    assert TOKEN not in str(api.asked)
    assert keeper.head is not None
    assert keeper.head.token not in ended.text + str([body for _, _, body in api.asked])


def test_a_driver_that_finds_its_place_taken_fails_with_its_words_and_code_and_is_not_begun_again(
    keeper: Operator, api: KubeApi, medium: Family, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    shared = Path(os.path.commonpath([medium.base, tmp_path]))
    files = _write(tmp_path, recipes(medium)["linear"], shared, backoff_limit=2)
    ended = run_command("submit", files[0], "-o", str(tmp_path / "out"), "--profile", files[1], cwd=tmp_path)
    assert ended.code == 2, ended.text
    assert "not empty" in ended.text
    (job,) = api.store.list(RAYJOB)
    run, driver = job["metadata"]["name"], job["status"]
    assert (driver["jobStatus"], driver["jobDeploymentStatus"]) == ("STOPPED", "Complete")
    assert (run, "Retrying") not in keeper.seen
    told = run_command("status", run, cwd=tmp_path)
    assert "failed" in told.text
    assert "not empty" in told.text


def test_a_rendered_run_is_stopped_at_its_output_place_and_applied_as_often_as_one_likes(
    keeper: Operator, api: KubeApi, medium: Family, tmp_path: Path
) -> None:
    recipe, output = recipes(medium)["linear"], tmp_path / "there"
    shared = Path(os.path.commonpath([medium.base, tmp_path]))
    files = _write(tmp_path, recipe, shared)
    with open(files[1], "a") as profile:
        profile.write(f"output: {output}\n")
    rendered = run_command("cluster", "render", files[1], "--recipe", files[0], cwd=tmp_path)
    config, job = yaml.safe_load_all(rendered.text)
    run = job["metadata"]["name"]

    def applied() -> None:
        for kind in (CONFIGMAP, RAYJOB):
            with suppress(RefusalError):
                api.store.delete(kind, "merges", run)
        until = time.monotonic() + SECONDS
        while any(each["metadata"]["name"] == run for each in api.store.list(RAYJOB)):
            assert time.monotonic() < until
            time.sleep(0.05)
        keeper.seen.clear()
        for kind, body in ((CONFIGMAP, config), (RAYJOB, job)):
            api.store.create(kind, "merges", body)

    applied()
    _halted(keeper, run, output)
    # From a machine that knows of the place and of nothing else.
    stopped = run_command("stop", str(output), cwd=tmp_path)
    assert stopped.code == 0, stopped.text
    _until(keeper, (run, "Complete"))
    assert api.store.get(RAYJOB, "merges", run)["status"]["jobStatus"] == "STOPPED"
    assert (run, "Retrying") not in keeper.seen
    applied()
    _until(keeper, (run, "Complete"))
    assert api.store.get(RAYJOB, "merges", run)["status"]["jobStatus"] == "SUCCEEDED", _message(keeper, run)
    made = output.stat().st_ino
    applied()
    _until(keeper, (run, "Complete"))
    assert api.store.get(RAYJOB, "merges", run)["status"]["jobStatus"] == "SUCCEEDED", _message(keeper, run)
    assert output.stat().st_ino == made
