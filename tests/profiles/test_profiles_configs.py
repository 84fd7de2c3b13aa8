"""The profiles of ``configs/run`` are valid, commented, and what their manifests are made of."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from raymerge.deploy.profiles import Profile, load_profile, parse_profile
from raymerge.deploy.profiles.sections import (
    Autoscaling,
    ClusterSection,
    EmptyDir,
    Head,
    JobSection,
    Kubernetes,
    RunSettings,
    SecurityContext,
    Toleration,
    Volume,
    WorkerGroup,
)
from raymerge.storage.addresses import StoreOptions

SECTIONS = (
    Profile,
    RunSettings,
    ClusterSection,
    JobSection,
    Kubernetes,
    Head,
    WorkerGroup,
    Toleration,
    Autoscaling,
    Volume,
    EmptyDir,
    SecurityContext,
)

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "run"
TARGETS = {
    "laptop": "local",
    "node-8-gpus": "local",
    "ray-cluster": "cluster",
    "ray-job": "job",
    "kubernetes-gpu": "kubernetes",
    "kubernetes-cpu-s3": "kubernetes",
}


def test_every_target_has_a_profile() -> None:
    assert {path.stem for path in FOLDER.glob("*.yml")} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_a_profile_is_valid_and_says_how_it_is_used(name: str) -> None:
    path = FOLDER / f"{name}.yml"
    assert load_profile(path).target == TARGETS[name]
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"--profile configs/run/{name}.yml" in text


HINTS = {
    "ray-job": ["headers_from_env: {X-Proxy-Authorization: PROXY_TOKEN}"],
    "kubernetes-gpu": ["queue: merges", "node_selector: {nvidia.com/gpu.product: NVIDIA-H200}"],
    "kubernetes-cpu-s3": [
        "endpoint: https://minio.example:9000",
        "node_selector: {kubernetes.io/arch: amd64}",
        "volumes:",
        "  - {name: scratch, mount_path: /scratch, empty_dir: {size_limit: 200Gi}}",
        "  - {name: shared, mount_path: /shared, pvc: shared}",
        "env_from_secrets: [s3-credentials]",
    ],
}


@pytest.mark.parametrize("name", HINTS)
def test_what_a_profile_suggests_in_comments_is_valid_when_it_is_uncommented(name: str) -> None:
    text = (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
    before = parse_profile(text)
    for hint in HINTS[name]:
        assert f"# {hint}\n" in text
        text = text.replace(f"# {hint}\n", f"{hint}\n")
    assert parse_profile(text) != before


def test_the_page_on_profiles_names_every_key_and_every_file() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9.-]+)`", page))
    keys = {name for section in SECTIONS for name in section.model_fields}
    keys |= {each.name for each in fields(StoreOptions)}
    assert keys - named == set()
    assert {f"{name}.yml" for name in TARGETS} <= named
