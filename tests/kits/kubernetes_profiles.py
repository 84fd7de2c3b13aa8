"""Profiles for Kubernetes, by what is different from a small valid one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from raymerge.deploy.profiles import Profile, profile_from_mapping

RECIPE = """\
merge_method: linear
models:
  - model: s3://models/a
    parameters: {weight: 0.5}
  - model: s3://models/b
    parameters: {weight: 0.5}
"""
OUTPUT = "s3://models/merged"
SHARED = {"name": "models", "mount_path": "/mnt/models", "pvc": "models"}

_SMALL: dict[str, Any] = {
    "target": "kubernetes",
    "kubernetes": {
        "image": "registry.example/raymerge:0.1.0",
        "ray_version": "2.60.0",
        "workers": [{"name": "cpu", "replicas": 2, "cpu": 8, "memory": "32Gi"}],
    },
}


def kubernetes_data(
    change: Mapping[str, Any] = {}, group: Mapping[str, Any] = {}, **sections: Any
) -> dict[str, Any]:
    data = {**copy.deepcopy(_SMALL), **sections}
    data["kubernetes"]["workers"][0].update(group)
    data["kubernetes"].update(change)
    return data


def kubernetes_profile(
    change: Mapping[str, Any] = {}, group: Mapping[str, Any] = {}, **sections: Any
) -> Profile:
    return profile_from_mapping(kubernetes_data(change, group, **sections))
