"""The page on Kubernetes, followed: its profile is valid, its commands run, its messages are really said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kits.command_line import run_command
from kits.kube_api import kube_api
from kits.kube_cases import admits
from kits.kube_store import CLAIM, NAMESPACE, RAYJOB

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
RECIPE = "merge_method: linear\nmodels: [{model: /models/a, parameters: {weight: 1}}]\ndtype: bfloat16\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (block,) = re.findall(r"```yaml\n(# profile\.yml\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "profile.yml").write_text(block.replace("REGISTRY", "registry.example"))
    (tmp_path / "recipe.yml").write_text(RECIPE)
    return tmp_path


def test_its_profile_renders(folder: Path) -> None:
    (command,) = re.findall(r"`raymerge (cluster render [^`]*)`", PAGE)
    done = run_command(*command.split(), cwd=folder)
    assert done.code == 0, done.text
    config, job = yaml.safe_load_all(done.text)
    assert (config["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2


def test_its_commands_lead_to_a_rayjob(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = re.findall(r"^raymerge (submit .*?) *(?:#.*)?$", PAGE, re.MULTILINE)
    assert len(steps) == 3
    with kube_api(namespace="raymerge", admits=admits()) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(folder / "config")))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        refused = run_command(*steps[0].split(), cwd=folder)
        assert refused.code == 2
        assert "has no persistent volume claim models" in refused.text
        api.store.create(CLAIM, "raymerge", CLAIM.body("models"))
        checked = run_command(*steps[0].split(), cwd=folder)
        assert (checked.code, api.store.list(RAYJOB)) == (0, []), checked.text
        sent = run_command(*steps[1].split(), "--detach", cwd=folder)
        assert sent.code == 0, sent.text
        (job,) = api.store.list(RAYJOB)
        name = job["metadata"]["name"]
        for verb in ("status", "stop"):
            done = run_command(verb, name, cwd=folder)
            assert done.code == 0, done.text
        assert api.store.list(RAYJOB) == []
        assert api.store.list(NAMESPACE)


def test_its_messages_are_those_that_are_said() -> None:
    _, _, table = PAGE.partition("## What is said, and what to do")
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    said = [each for row in rows for each in re.findall(r"`([^`]+)`", row.split("|")[1])]
    sources = "".join(path.read_text() for path in (ROOT / "raymerge" / "deploy").rglob("*.py"))
    text = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert len(said) > 15
    assert [each for each in said if not all(part in text for part in each.split(" ... "))] == []
