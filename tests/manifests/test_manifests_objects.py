"""Manifests of objects, and the rules that they keep."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kits.crd import kept, schema_errors, trimmed
from kits.kube_operator import broken_rules
from kits.kubernetes_profiles import OUTPUT, RECIPE, SHARED, kubernetes_data, kubernetes_profile

from raymerge.deploy import manifests
from raymerge.deploy.manifests import as_yaml, check, output_digest, raycluster, rayjob, render_name
from raymerge.deploy.profiles import Profile, parse_profile, profile_from_mapping
from raymerge.errors import OptionError, ProfileError, RecipeError

RUN = "raymerge-0123456789ab"
SCALED = {"autoscaling": {"enabled": True, "idle_timeout_seconds": 30, "upscaling_mode": "Conservative"}}
GPU_GROUP = {
    "name": "gpu",
    "replicas": 2,
    "cpu": 16,
    "memory": "128Gi",
    "gpus": 4,
    "labels": {"disk": "nvme"},
    "node_selector": {"nvidia.com/gpu.product": "H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]
        }
    },
    "runtime_class": "nvidia",
}
VOLUMES = [
    SHARED,
    {"name": "team", "mount_path": "/mnt/team", "pvc": "models", "sub_path": "teams/merging"},
    {"name": "scratch", "mount_path": "/scratch", "empty_dir": {"size_limit": "9Gi"}},
    {"name": "nvme", "mount_path": "/nvme", "host_path": "/srv/nvme", "read_only": True},
    {"name": "certs", "mount_path": "/certs", "secret": "certs"},
    {"name": "notes", "mount_path": "/notes", "config_map": "notes"},
]


def job_of(profile: Profile) -> dict[str, Any]:
    """The RayJob of a run."""
    return rayjob(profile, RECIPE, OUTPUT, RUN)[1]


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of all kinds of pods: the head's first."""
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize(
    ("change", "group"),
    [
        ({}, {}),
        ({"submission_mode": "K8sJobMode"}, {}),
        ({"submission_mode": "SidecarMode"}, {}),
        ({"token_auth": False, "ray_version": "2.40.0"}, {}),
        ({"token_secret": "token"}, {}),
        (SCALED, {"min_replicas": 0, "max_replicas": 9, "idle_timeout_seconds": 20}),
        ({"queue": "merges", "priority_class": "low"}, {}),
        ({"volumes": VOLUMES}, {"volumes": [SHARED]}),
        ({"workers": [GPU_GROUP, {"name": "cpu", "cpu": "7500m", "memory": "30Gi"}]}, {}),
        ({"workers": [{**GPU_GROUP, "gpu_resource": "nvidia.com/mig-1g.5gb"}]}, {}),
        ({"env": {"A": "b"}, "env_from_secrets": ["s3"], "image_pull_secrets": ["pull"]}, {}),
        ({"service_account": "sa", "labels": {"team": "x"}, "annotations": {"why": "this"}}, {}),
        ({"ttl_seconds": 0, "backoff_limit": 0, "active_deadline_seconds": 60}, {}),
        ({"head": {"affinity": GPU_GROUP["affinity"], "runtime_class": "runc"}}, {}),
        ({"security": {"run_as_user": 7, "run_as_group": 8, "fs_group": None}}, {}),
    ],
)
def test_every_variant_is_valid_for_the_server_and_the_operator(
    change: dict[str, Any], group: dict[str, Any]
) -> None:
    profile = kubernetes_profile(change, group)
    for manifest in (job_of(profile), *raycluster(profile, "standing")):
        assert schema_errors(manifest) == []
        assert broken_rules(manifest) == []
        assert json.loads(json.dumps(manifest)) == manifest


NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=20)
GROUPS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "replicas": st.integers(1, 9),
        "cpu": st.sampled_from([1, "500m", "16"]),
        "memory": st.sampled_from(["4Gi", "4096Mi", "1Ti"]),
    },
    optional={"gpus": st.integers(0, 8), "labels": st.dictionaries(NAMES, NAMES, max_size=2)},
)
# No container has a variable with it, and the profile refuses it.
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
SECTIONS = st.fixed_dictionaries(
    {"workers": st.lists(GROUPS, min_size=1, max_size=7, unique_by=lambda group: group["name"])},
    optional={
        "autoscaling": st.fixed_dictionaries({"enabled": st.booleans()}),
        "submission_mode": st.sampled_from(["HTTPMode", "K8sJobMode", "SidecarMode"]),
        "token_auth": st.booleans(),
        "env": st.dictionaries(st.text("ABC_", min_size=1, max_size=5), VALUES, max_size=3),
    },
)


@settings(max_examples=20, deadline=None)
@given(SECTIONS)
@example({"workers": [{"name": "a", "replicas": 1, "cpu": 1, "memory": "4Gi"}], "env": {"A": "a\x85b"}})
def test_whatever_a_profile_says_is_valid_for_the_server_and_the_operator(section: dict[str, Any]) -> None:
    manifest = job_of(kubernetes_profile(section))
    assert schema_errors(manifest) == []
    assert broken_rules(manifest) == []
    assert yaml.safe_load(as_yaml([manifest])) == manifest


def test_the_driver_is_started_by_safe_characters_and_reads_data_files() -> None:
    config, job = rayjob(kubernetes_profile(), RECIPE, OUTPUT, RUN)
    entrypoint = "raymerge submit /etc/raymerge/recipe.yml --profile /etc/raymerge/profile.yml --json"
    assert job["spec"]["entrypoint"] == f"{entrypoint} --run {RUN}"
    assert job["spec"]["submissionMode"] == "HTTPMode"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert job["spec"]["backoffLimit"] == 2
    assert config["metadata"]["name"] == job["metadata"]["name"] == RUN
    assert config["data"]["recipe.yml"] == RECIPE
    inside = parse_profile(config["data"]["profile.yml"])
    assert inside == kubernetes_profile().for_inside(OUTPUT)
    assert (inside.target, inside.cluster.address, inside.output) == ("cluster", "auto", OUTPUT)
    head, worker = pods_of(job)
    mount = {"name": "raymerge-config", "mountPath": "/etc/raymerge", "readOnly": True}
    assert mount in head["containers"][0]["volumeMounts"]
    assert {"name": "raymerge-config", "configMap": {"name": RUN}} in head["volumes"]
    assert "volumes" not in worker


def test_no_worker_is_placed_on_the_head_and_tokens_are_asked_for() -> None:
    cluster = job_of(kubernetes_profile({"token_secret": "t"}))["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    # The only form that all operators know.
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    assert cluster["authOptions"] == {"mode": "token", "secretName": "t"}
    assert cluster["rayVersion"] == "2.60.0"
    open_cluster = job_of(kubernetes_profile({"token_auth": False}))["spec"]["rayClusterSpec"]
    assert open_cluster["authOptions"] == {"mode": "disabled"}


def test_pods_are_not_root_reap_what_is_orphaned_and_have_time_to_end() -> None:
    for pod in pods_of(job_of(kubernetes_profile({"termination_grace_seconds": 90}))):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["shareProcessNamespace"] is True
        assert pod["terminationGracePeriodSeconds"] == 90
        assert pod["automountServiceAccountToken"] is False


def test_autoscaling_is_that_of_version_2_within_bounds() -> None:
    profile = kubernetes_profile(SCALED, {"max_replicas": 9, "idle_timeout_seconds": 20})
    cluster = job_of(profile)["spec"]["rayClusterSpec"]
    options = cluster["autoscalerOptions"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert (options["version"], options["idleTimeoutSeconds"]) == ("v2", 30)
    assert options["upscalingMode"] == "Conservative"
    group = cluster["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (0, 2, 9)
    assert group["idleTimeoutSeconds"] == 20
    # The driver asks for workers that wait for pods.
    config, _ = rayjob(profile, RECIPE, OUTPUT, RUN)
    assert parse_profile(config["data"]["profile.yml"]).cluster.autoscaling
    fixed, _ = rayjob(kubernetes_profile(cluster={"autoscaling": True}), RECIPE, OUTPUT, RUN)
    assert not parse_profile(fixed["data"]["profile.yml"]).cluster.autoscaling
    head, worker = pods_of(job_of(profile))
    assert head["restartPolicy"] == worker["restartPolicy"] == "Never"
    # It asks the API server for pods.
    assert (head["automountServiceAccountToken"], worker["automountServiceAccountToken"]) == (True, False)


def test_groups_that_do_not_scale_have_fixed_bounds() -> None:
    (group,) = job_of(kubernetes_profile())["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 2)


def test_gpus_are_limits_and_told_to_ray_where_the_operator_does_not_know_them() -> None:
    job = job_of(kubernetes_profile({"workers": [GPU_GROUP]}))
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "cpu": "16",
        "memory": "128Gi",
        "nvidia.com/gpu": "4",
    }
    assert "resources" not in group
    assert group["labels"] == {"disk": "nvme"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H200"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (pod["affinity"], pod["runtimeClassName"]) == (GPU_GROUP["affinity"], "nvidia")
    head, _ = pods_of(job)
    assert not {"affinity", "runtimeClassName"} & set(head)
    slices = {**GPU_GROUP, "gpu_resource": "nvidia.com/mig-1g.5gb"}
    (other,) = job_of(kubernetes_profile({"workers": [slices]}))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert other["rayStartParams"]["num-gpus"] == "4"
    assert "resources" not in other
    assert "num-gpus" not in group["rayStartParams"]


def test_every_kind_of_volume_is_mounted() -> None:
    head, worker = pods_of(job_of(kubernetes_profile({"volumes": VOLUMES})))
    assert worker["volumes"] == [
        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "team", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "scratch", "emptyDir": {"sizeLimit": "9Gi"}},
        {"name": "nvme", "hostPath": {"path": "/srv/nvme", "type": "Directory"}},
        {"name": "certs", "secret": {"secretName": "certs"}},
        {"name": "notes", "configMap": {"name": "notes"}},
    ]
    assert worker["containers"][0]["volumeMounts"] == [
        {"name": "models", "mountPath": "/mnt/models"},
        {"name": "team", "mountPath": "/mnt/team", "subPath": "teams/merging"},
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "nvme", "mountPath": "/nvme", "readOnly": True},
        {"name": "certs", "mountPath": "/certs", "readOnly": True},
        {"name": "notes", "mountPath": "/notes", "readOnly": True},
    ]
    assert head["volumes"][:-1] == worker["volumes"]


def test_a_queue_of_kueue_lets_the_run_go() -> None:
    job = job_of(kubernetes_profile({"queue": "merges", "priority_class": "low"}))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "merges"
    assert job["spec"]["suspend"] is True
    assert {pod["priorityClassName"] for pod in pods_of(job)} == {"low"}
    (standing,) = raycluster(kubernetes_profile({"queue": "merges"}), "standing")
    assert standing["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "merges"
    assert standing["spec"]["suspend"] is True


def test_runs_are_found_by_their_output_whatever_its_options() -> None:
    _, job = rayjob(kubernetes_profile(), RECIPE, f"{OUTPUT}?region=x", RUN)
    assert job["metadata"]["labels"]["raymerge.io/output"] == output_digest(OUTPUT)
    assert output_digest(OUTPUT) == output_digest(f"{OUTPUT}/") != output_digest(f"{OUTPUT}2")
    assert job["metadata"]["annotations"]["raymerge.io/output"] == OUTPUT


def test_the_operator_finds_pods_by_its_own_name_of_the_application() -> None:
    job = job_of(kubernetes_profile({"labels": {"team": "x"}}))
    groups = job["spec"]["rayClusterSpec"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert "app.kubernetes.io/name" not in labels
        assert labels["team"] == "x"
        assert labels["app.kubernetes.io/instance"] == RUN


def test_the_same_texts_give_the_same_bytes_and_name() -> None:
    profile = kubernetes_profile({"volumes": VOLUMES})
    first = as_yaml(rayjob(profile, RECIPE, OUTPUT, RUN))
    assert first == as_yaml(rayjob(kubernetes_profile({"volumes": VOLUMES}), RECIPE, OUTPUT, RUN))
    assert list(yaml.safe_load_all(first)) == list(rayjob(profile, RECIPE, OUTPUT, RUN))
    # The recipe is to be read: as it was written, and nothing stands for something else.
    assert "  recipe.yml: |\n    merge_method: linear\n    models:\n" in first
    assert "&id" not in first
    assert render_name("a", "b") == render_name("a", "b") != render_name("ab", "")


def test_a_profile_without_the_section_makes_nothing() -> None:
    for make in (lambda: rayjob(Profile(), RECIPE, OUTPUT, RUN), lambda: raycluster(Profile(), RUN)):
        with pytest.raises(ProfileError, match="has no section 'kubernetes'"):
            make()


_CONTAINER = ("rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ((), {"backofLimit": 1}),
        (_CONTAINER, {"imag": "x"}),
        ((), {"ttlSecondsAfterFinished": "300"}),
        (("rayClusterSpec", "headGroupSpec"), {"template": None}),
        (("rayClusterSpec", "headGroupSpec", "rayStartParams"), {"num-cpus": 0}),
    ],
)
def test_the_check_of_the_schema_finds_what_is_wrong(
    path: tuple[str | int, ...], change: dict[str, Any]
) -> None:
    job = json.loads(json.dumps(job_of(kubernetes_profile({"volumes": VOLUMES}))))
    place = job["spec"]
    for step in path:
        place = place[step]
    place.update(change)
    assert len(schema_errors(job)) == 1


@pytest.mark.slow
def test_the_kept_schemas_are_those_of_kuberay(shared_root: Path) -> None:
    assert trimmed(shared_root / "kuberay") == kept()


def reasons(recipe: str, output: str = OUTPUT, name: str = RUN, **change: Any) -> list[str]:
    """Why a run is refused."""
    with pytest.raises(OptionError) as caught:
        check(kubernetes_profile(change), recipe, output, name, "r.yml")
    return str(caught.value).splitlines()


def _recipe(path: str) -> str:
    return RECIPE.replace("s3://models/a", path)


@pytest.mark.parametrize(
    "path", ["./a", "a", "a/b/c", "~/a", "../a", "org/here", "s3://x/y+./adapter", "s3://x/y+/mnt/adapter"]
)
def test_models_of_this_machine_are_refused_at_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    (reason,) = reasons(_recipe(path))
    assert reason.startswith("r.yml:3:5: ")


@pytest.mark.parametrize(
    "path", ["org/name", "hf://org/name@main", "gs://b/x", "/mnt/models/a", "org/name@main+/mnt/models/b"]
)
def test_models_that_pods_see_are_taken(path: str) -> None:
    check(kubernetes_profile({"volumes": [SHARED]}), _recipe(path), OUTPUT, RUN)


def test_results_of_the_same_file_are_no_paths() -> None:
    chain = f"name: first\n{RECIPE}---\n{_recipe('first')}"
    output = "/mnt/models/out"
    check(kubernetes_profile({"volumes": [SHARED]}), chain, output, RUN)


def test_all_reasons_are_told_at_once() -> None:
    lines = reasons(_recipe("./a"), "merged")
    assert [line.partition(": ")[0] for line in lines] == ["-o", "r.yml:3:5"]


def test_a_profile_for_another_target_is_held_to_the_same_rules() -> None:
    """``--target kubernetes`` chooses it then."""
    data = kubernetes_data(run={"device": "cuda"})
    profile = profile_from_mapping({**data, "target": "local"})
    with pytest.raises(OptionError, match=r"profile: run\.device: cuda is asked for, but no group"):
        check(profile, RECIPE, OUTPUT, RUN)


def test_flags_are_part_of_the_entrypoint_where_a_shell_reads_them_as_they_are() -> None:
    profile = kubernetes_profile()
    job = rayjob(profile, RECIPE, OUTPUT, RUN, flags=("--replace", "--keep-intermediates"))[1]
    assert job["spec"]["entrypoint"].endswith(f"--json --run {RUN} --replace --keep-intermediates")
    check(profile, RECIPE, OUTPUT, RUN, flags=("--replace",))
    with pytest.raises(OptionError, match=r"spec\.entrypoint: a shell would read"):
        check(profile, RECIPE, OUTPUT, RUN, flags=("$(reboot)",))


def test_a_recipe_that_no_config_map_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**19 < manifests._MAX_CONFIG_NBYTES < 2**20
    monkeypatch.setattr(manifests, "_MAX_CONFIG_NBYTES", 2000)
    (reason,) = reasons(RECIPE + "# and so on\n" * 200)
    assert "a config map holds" in reason


def test_other_errors_keep_their_kind() -> None:
    with pytest.raises(RecipeError):
        check(kubernetes_profile(), "merge_method: nothing\n", OUTPUT, RUN)
    with pytest.raises(ProfileError):
        check(Profile(), RECIPE, OUTPUT, RUN)


def test_secrets_reach_no_manifest() -> None:
    """There is no way for one into a profile or recipe; what names a secret is all that is sent."""
    data = kubernetes_data({"env": {"X": "hf_" + "a" * 34}})
    with pytest.raises(ProfileError):
        profile_from_mapping(data)
    with pytest.raises(RecipeError):
        check(kubernetes_profile(), _recipe("s3://me:pass@b/x"), OUTPUT, RUN)
