"""What no cluster could do is refused when a profile is read."""

from __future__ import annotations

from typing import Any

import pytest
from kits.kubernetes_profiles import SHARED, kubernetes_data, kubernetes_profile

from raymerge.deploy.profiles import profile_from_mapping
from raymerge.errors import ProfileError

SCALED = {"autoscaling": {"enabled": True}}


def said(change: dict[str, Any], group: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """What is said about a profile, by its lines."""
    with pytest.raises(ProfileError) as caught:
        profile_from_mapping(kubernetes_data(change, group, **sections))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("change", "group", "sections", "expected"),
    [
        # Bounds.
        (SCALED, {"replicas": 3, "max_replicas": 2}, {}, "workers[0].replicas: 3 replicas are not from 0"),
        (SCALED, {"min_replicas": 4, "max_replicas": 3, "replicas": 4}, {}, "are not from 4"),
        (SCALED, {"replicas": 0}, {}, "may never have a pod"),
        ({}, {"replicas": 0}, {}, "the group has no pods"),
        ({}, {"max_replicas": 4}, {}, "max_replicas has no meaning without autoscaling"),
        ({}, {"idle_timeout_seconds": 9}, {}, "idle_timeout_seconds has no meaning without autoscaling"),
        ({}, {"replicas": -1}, {}, "-1 is out of range"),
        ({"workers": []}, {}, {}, "there is no group of workers"),
        # Kueue.
        ({"queue": "q", **SCALED}, {}, {}, "Kueue reserves what a run needs"),
        (
            {"queue": "q", "workers": [{"name": f"g{n}", "cpu": 1, "memory": "4Gi"} for n in range(8)]},
            {},
            {},
            "Kueue takes at most 7 groups of workers; there are 8",
        ),
        # Names, images, versions.
        ({}, {"name": "CPU_1"}, {}, "'CPU_1' cannot be a name on Kubernetes"),
        ({"image": "raymerge"}, {}, {}, "names no version"),
        ({"image": "Ray merge:1"}, {}, {}, "is not the name of an image"),
        ({"ray_version": "latest"}, {}, {}, "'latest' is not a version of Ray"),
        ({"ray_version": "2.51.9"}, {}, {}, "knows no tokens; they came with 2.52"),
        ({"token_auth": False, "token_secret": "s"}, {}, {}, "but token_auth is false"),
        ({"submission_mode": "Foo"}, {}, {}, "'Foo' is not known here"),
        ({"labels": {"a b": "x"}}, {}, {}, "'a b' cannot be the key of a label"),
        ({"labels": {"team": "a b"}}, {}, {}, "'a b' cannot be the value of a label"),
        ({"labels": {"ray.io/cluster": "x"}}, {}, {}, "'ray.io/cluster' is set by raymerge or the operator"),
        ({"annotations": {"/x": "y"}}, {}, {}, "'/x' cannot be the key of an annotation"),
        # Amounts.
        ({}, {"cpu": 0}, {}, "0 is nothing"),
        ({}, {"cpu": "8 cores"}, {}, "'8 cores' is not an amount"),
        ({}, {"memory": 32}, {}, "32 means 32 bytes. Write it with its unit, like 32Gi."),
        ({}, {"memory": "32GiB"}, {}, "'32GiB' is not an amount"),
        ({}, {"gpus": 1, "gpu_resource": "gpu"}, {}, "'gpu' is not the name of a resource"),
        # Workers and devices.
        (
            {},
            {},
            {"run": {"device": "cuda"}},
            "run.device: cuda is asked for, but no group of workers has GPUs",
        ),
        (
            {},
            {},
            {"run": {"workers": 17}},
            "run.workers: 17 workers are asked for, but the pods hold at most 16",
        ),
        ({}, {}, {"run": {"workers": 5, "threads": 4}}, "5 workers of 4 threads are asked for, but the pods"),
        ({}, {"gpus": 2}, {"run": {"workers": 5, "device": "cuda"}}, "5 workers are asked for, but the pods"),
        (SCALED, {"max_replicas": 3}, {"run": {"workers": 25}}, "the pods hold at most 24"),
        ({}, {}, {"run": {"threads": 9}}, "no pod has processors for a worker of 9 threads"),
        ({}, {}, {"run": {"memory": "32GiB"}}, "but no pod has more than"),
        # Volumes.
        ({"volumes": [SHARED, {**SHARED, "name": "b"}]}, {}, {}, "two volumes are mounted at /mnt/models"),
        ({"volumes": [SHARED, {**SHARED, "mount_path": "/b"}]}, {}, {}, "two volumes are named 'models'"),
        ({"volumes": [{**SHARED, "mount_path": "/dev"}]}, {}, {}, "would hide /dev/shm"),
        ({"volumes": [{**SHARED, "mount_path": "/etc/raymerge/x"}]}, {}, {}, "would hide /etc/raymerge"),
        ({"volumes": [{**SHARED, "mount_path": "mnt"}]}, {}, {}, "'mnt' is not an absolute path"),
        ({"volumes": [{**SHARED, "mount_path": "/a/../b"}]}, {}, {}, "is not an absolute path"),
        (
            {"volumes": [{**SHARED, "name": "shared-mem"}]},
            {},
            {},
            "'shared-mem' is the name of a volume that",
        ),
        ({"volumes": [{**SHARED, "secret": "s"}]}, {}, {}, "the volume has 2 sources, pvc and secret"),
        ({"volumes": [{"name": "a", "mount_path": "/a"}]}, {}, {}, "the volume has no source"),
        ({"volumes": [{**SHARED, "sub_path": "/a"}]}, {}, {}, "'/a' is not a path within a volume"),
        ({"volumes": [{**SHARED, "sub_path": "a/../b"}]}, {}, {}, "is not a path within a volume"),
        (
            {"volumes": [{"name": "a", "mount_path": "/a", "empty_dir": {}, "sub_path": "b"}]},
            {},
            {},
            "sub_path: only a volume with a claim has a sub_path",
        ),
        # Where pods run.
        ({}, {"runtime_class": "Nvidia"}, {}, "runtime_class: 'Nvidia' cannot be a name"),
        ({"head": {"affinity": []}}, {}, {}, "head.affinity: [] is no affinity; expected a map"),
        ({}, {"affinity": {"node_affinity": {}}}, {}, "'node_affinity' is no kind of affinity"),
        ({}, {"affinity": {"nodeAffinity": {"required": []}}}, {}, "are no rules of an affinity"),
        # Environment and tolerations.
        ({"env": {"RAY_ADDRESS": "x"}}, {}, {}, "'RAY_ADDRESS' is set by the operator"),
        ({"env": {"S3_SECRET_KEY": "x"}}, {}, {}, "'S3_SECRET_KEY' is a secret by its name"),
        (
            {},
            {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            {},
            "a value has no meaning",
        ),
        ({}, {"tolerations": [{"value": "b"}]}, {}, "a toleration without a key"),
        ({"security": {"run_as_user": 0}}, {}, {}, "0 is out of range"),
        # The output place.
        ({}, {}, {"output": "merged"}, "output: 'merged' is relative to a directory of this machine"),
        ({}, {}, {"output": "hf://org/name"}, "hf://org/name can be read from, and not written to"),
        (
            {},
            {},
            {"run": {"steps": "below"}},
            "run.steps: 'below' is relative to a directory of this machine",
        ),
        (
            {"volumes": [{**SHARED, "read_only": True}]},
            {},
            {"run": {"steps": "/mnt/models/x"}},
            "run.steps: /mnt/models/x is on no volume that every pod mounts, shared and writable",
        ),
        ({}, {}, {"output": "/mnt/models/x"}, "is on no volume that every pod mounts, shared and writable"),
        ({"volumes": [{**SHARED, "read_only": True}]}, {}, {"output": "/mnt/models/x"}, "is on no volume"),
        ({"volumes": [SHARED]}, {"volumes": []}, {"output": "/mnt/models/x"}, "is on no volume"),
        ({"volumes": [SHARED]}, {}, {"output": "/mnt/models"}, "is on no volume"),
        ({"volumes": [SHARED]}, {}, {"output": "file:///mnt/models2/x"}, "/mnt/models2/x is on no volume"),
        (
            {"volumes": [{"name": "a", "mount_path": "/a", "empty_dir": {}}]},
            {},
            {"output": "/a/x"},
            "is on no volume",
        ),
        (
            {"volumes": [SHARED, {"name": "a", "mount_path": "/mnt/models/tmp", "empty_dir": {}}]},
            {},
            {"output": "/mnt/models/tmp/x"},
            "is on no volume",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, Any], group: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    lines = said(change, group, sections)
    assert len(lines) == 1, lines
    assert expected in lines[0]


def test_two_groups_of_one_name_are_refused_once() -> None:
    twice = [{"name": "a", "cpu": 1, "memory": "4Gi"}, {"name": "a", "cpu": 1, "memory": "4Gi"}]
    (line,) = said({"workers": twice}, {}, {})
    assert "two groups are named 'a'" in line


@pytest.mark.parametrize(
    "output", ["s3://b/x", "gs://b/x", "/mnt/models/x", "/mnt/models/a/b", "file:///mnt/models/x"]
)
def test_an_output_that_every_pod_reaches_is_taken(output: str) -> None:
    assert kubernetes_profile({"volumes": [SHARED]}, output=output).output == output


def test_a_node_directory_counts_as_shared_and_rounded_processors_hold_workers() -> None:
    volume = {"name": "nfs", "mount_path": "/nfs", "host_path": "/srv/nfs"}
    profile = kubernetes_profile(
        {"volumes": [volume]}, {"cpu": "7500m"}, output="/nfs/x", run={"workers": 16}
    )
    assert profile.run.workers == 16


def test_infeasible_sections_of_a_target_that_is_not_used_are_left_alone() -> None:
    """Workers and output are those of the target; what is wrong in itself is told all the same."""
    data = kubernetes_data({}, {}, run={"device": "cuda"}, output="merged")
    data["target"] = "local"
    assert profile_from_mapping(data).kubernetes is not None
    data["kubernetes"]["ray_version"] = "2.40.0"
    with pytest.raises(ProfileError, match="knows no tokens"):
        profile_from_mapping(data)


def test_a_full_profile_is_written_and_read_back_the_same() -> None:
    scratch = {"name": "s", "mount_path": "/s", "empty_dir": {"size_limit": "9Gi"}}
    spread = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
    whole = {
        "volumes": [{**SHARED, "sub_path": "a"}, scratch],
        "env": {"A": "b"},
        "security": {"fs_group": 5},
    }
    group = {
        "max_replicas": 5,
        "gpus": 2,
        "labels": {"disk": "nvme"},
        "affinity": {"podAntiAffinity": spread},
    }
    group |= {"tolerations": [{"operator": "Exists"}], "runtime_class": "nvidia"}
    profile = kubernetes_profile({**whole, **SCALED}, group, storage={"region": "x"})
    assert profile_from_mapping(profile.model_dump(mode="json", exclude_defaults=True)) == profile
