"""Profiles and submissions for the fake Kubernetes, and what its server admits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from kits.crd import schema_errors, with_defaults
from kits.kube_api import KubeApi
from kits.kube_store import CLAIM, Admit, Json
from kits.kubernetes_profiles import kubernetes_data

from raymerge.deploy.profiles import Profile, profile_from_mapping
from raymerge.deploy.targets.target import Submission, new_run_name

IMAGE = "registry.example/raymerge:0.1.0-cpu"
CLAIMED = "data"


def admits() -> dict[str, Admit]:
    return {"RayJob": _admit, "RayCluster": _admit}


def claim(api: KubeApi) -> None:
    api.store.create(CLAIM, api.namespace, CLAIM.body(CLAIMED))


def kube_profile(data: Path, **kubernetes: Any) -> dict[str, Any]:
    volume = {"name": "data", "mount_path": str(data), "pvc": CLAIMED}
    return kubernetes_data(
        {"namespace": "merges", "image": IMAGE, "volumes": [volume], **kubernetes},
        {"replicas": 1, "cpu": 1, "memory": "2Gi"},
        run={"workers": 1, "threads": 1, "memory": "16MiB", "device": "cpu"},
    )


def profile_of(data: Path, **kubernetes: Any) -> Profile:
    return profile_from_mapping(kube_profile(data, **kubernetes))


def submission(recipe: Mapping[str, Any], output: Path | str, profile: Profile) -> Submission:
    return Submission(yaml.safe_dump(dict(recipe)), "recipe.yml", str(output), profile, new_run_name())


def _admit(given: Json, strict: bool) -> tuple[Json, list[str]]:
    wrong = schema_errors(given)
    if not strict:
        wrong = [each for each in wrong if "Additional properties" not in each]
    return with_defaults(given), wrong
