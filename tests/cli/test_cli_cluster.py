"""``raymerge cluster render``: what a submission would make, and the files of ``cluster/kuberay``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from kits.command_line import run_command
from kits.crd import schema_errors
from kits.kube_operator import broken_rules
from kits.kubernetes_profiles import RECIPE

from raymerge.deploy.profiles import load_profile
from raymerge.deploy.targets.kubernetes import KubernetesTarget
from raymerge.deploy.targets.target import Submission

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
RENDERED = {
    "kubernetes-gpu": ("kubernetes-gpu", "--recipe", "cluster/kuberay/recipe-volume.yml"),
    "kubernetes-cpu-s3": ("kubernetes-cpu-s3", "--recipe", "cluster/kuberay/recipe-s3.yml"),
    "raycluster-gpu": ("kubernetes-gpu", "--kind", "raycluster"),
}
PROFILE = """\
target: kubernetes
output: s3://models/merged
kubernetes:
  image: registry.example/raymerge:1
  ray_version: 2.60.0
  workers: [{name: cpu, cpu: 8, memory: 32Gi}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a profile and a recipe."""
    (tmp_path / "p.yml").write_text(PROFILE)
    (tmp_path / "r.yml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize("name", RENDERED)
def test_the_manifests_of_the_repository_are_the_output_for_its_profiles(name: str) -> None:
    """``UPDATE_GOLDEN=1`` writes them."""
    profile, *options = RENDERED[name]
    outcome = run_command("cluster", "render", f"configs/run/{profile}.yml", *options, cwd=ROOT)
    assert outcome.code == 0, outcome.text
    path = KUBERAY / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(outcome.text, encoding="utf-8")
    assert outcome.text == path.read_text(encoding="utf-8")
    manifests = list(yaml.safe_load_all(outcome.text))
    rays = [each for each in manifests if each["kind"] != "ConfigMap"]
    assert len(rays) == 1
    assert schema_errors(rays[0]) == []
    assert broken_rules(rays[0]) == []


def test_files_are_written_one_for_each_object(folder: Path) -> None:
    outcome = run_command("cluster", "render", "p.yml", "--recipe", "r.yml", "-o", "made/here", cwd=folder)
    assert (outcome.code, outcome.text) == (0, "")
    made = {path.name: yaml.safe_load(path.read_text()) for path in (folder / "made" / "here").iterdir()}
    assert {name: each["kind"] for name, each in made.items()} == {
        "configmap.yaml": "ConfigMap",
        "rayjob.yaml": "RayJob",
    }
    assert made["configmap.yaml"]["data"]["recipe.yml"] == RECIPE


def test_what_is_rendered_is_what_is_sent_and_its_name_follows_from_it(folder: Path) -> None:
    volume = "  volumes: [{name: models, mount_path: /mnt/models, pvc: models}]\n"
    (folder / "p.yml").write_text(
        PROFILE.replace("s3://models/merged", "file:///mnt/models/merged/") + volume
    )
    command = ("cluster", "render", "p.yml", "--recipe", "r.yml")
    rendered = [run_command(*command, cwd=folder).text for _ in range(2)]
    # Applied again, it changes nothing.
    assert rendered[0] == rendered[1]
    config, job = yaml.safe_load_all(rendered[0])
    name, output = job["metadata"]["name"], "/mnt/models/merged"
    profile = load_profile(str(folder / "p.yml"))
    sent = KubernetesTarget(server=None)._manifests(  # type: ignore[arg-type]
        Submission(RECIPE, "r.yml", output, profile, name)
    )
    assert (config, job) == sent
    assert f"--run {name}" in job["spec"]["entrypoint"]
    (folder / "r.yml").write_text(RECIPE + "# another\n")
    other = list(yaml.safe_load_all(run_command(*command, cwd=folder).text))[1]["metadata"]["name"]
    assert other != name


def test_without_a_recipe_it_is_a_cluster_that_stands(folder: Path) -> None:
    outcome = run_command("cluster", "render", "p.yml", cwd=folder)
    assert outcome.code == 0
    assert yaml.safe_load(outcome.text)["kind"] == "RayCluster"


@pytest.mark.parametrize(
    ("profile", "recipe", "options", "said"),
    [
        (PROFILE, RECIPE, ("--kind", "rayjob"), "--kind rayjob: a run needs a recipe."),
        (PROFILE.replace("output", "# output"), RECIPE, ("--recipe", "r.yml"), "does not say where the new"),
        ("target: local\noutput: s3://b/x", RECIPE, ("--recipe", "r.yml"), "has no section 'kubernetes'"),
        (PROFILE, RECIPE.replace("s3://models/a", "./a"), ("--recipe", "r.yml"), "r.yml:3:5: './a' is"),
        (PROFILE, RECIPE, ("-o", "p.yml"), "nothing can be written there"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_words(
    folder: Path, profile: str, recipe: str, options: tuple[str, ...], said: str
) -> None:
    (folder / "p.yml").write_text(profile)
    (folder / "r.yml").write_text(recipe)
    outcome = run_command("cluster", "render", "p.yml", *options, cwd=folder)
    assert outcome.code == 2
    assert said in outcome.text
