"""Each rule of KubeRay's operator, broken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from kits.kubernetes_profiles import OUTPUT, RECIPE, SHARED, kubernetes_data, kubernetes_profile

from raymerge.deploy.manifests import broken_rules, check, raycluster, rayjob
from raymerge.deploy.profiles import Profile, profile_from_mapping
from raymerge.errors import OptionError, ProfileError, RecipeError

RUN = "raymerge-0123456789ab"


def sample(**change: Any) -> dict[str, Any]:
    """A valid RayJob."""
    return copy.deepcopy(rayjob(kubernetes_profile(change), RECIPE, OUTPUT, RUN)[1])


def set_at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field; None removes it."""

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        for step in path[:-1]:
            node = node[step] if isinstance(step, int) else node.setdefault(step, {})
        if value is None:
            node.pop(path[-1])
        else:
            node[path[-1]] = value

    return change


CLUSTER = ("spec", "rayClusterSpec")
GROUP = (*CLUSTER, "workerGroupSpecs", 0)
V2 = {"version": "v2"}
SIDECAR = set_at("spec", "submissionMode", value="SidecarMode")
HEAD_NEVER = set_at(*CLUSTER, "headGroupSpec", "template", "spec", "restartPolicy", value="Never")
QUEUED = set_at("metadata", "labels", "kueue.x-k8s.io/queue-name", value="q")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ([set_at("metadata", "name", value="0raymerge")], "metadata.name"),
        ([set_at("metadata", "name", value="Raymerge")], "metadata.name"),
        ([set_at("metadata", "name", value="a" * 48)], "metadata.name"),
        ([set_at("spec", "submissionMode", value="Foo")], "spec.submissionMode"),
        (
            [
                set_at("spec", "suspend", value=True),
                set_at("spec", "shutdownAfterJobFinishes", value=False),
                set_at("spec", "ttlSecondsAfterFinished", value=0),
            ],
            "spec.suspend",
        ),
        ([set_at("spec", "shutdownAfterJobFinishes", value=False)], "spec.ttlSecondsAfterFinished"),
        ([set_at("spec", "backoffLimit", value=-1)], "spec.backoffLimit"),
        ([set_at("spec", "activeDeadlineSeconds", value=0)], "spec.activeDeadlineSeconds"),
        ([set_at("spec", "entrypoint", value="echo $HOME")], "spec.entrypoint"),
        ([set_at("spec", "entrypoint", value=None)], "spec.entrypoint"),
        ([set_at("spec", "rayClusterSpec", value=None)], "spec"),
        ([set_at("spec", "clusterSelector", "ray.io/cluster", value="x")], "spec.clusterSelector"),
        ([set_at("spec", "submissionMode", value="InteractiveMode")], "spec.backoffLimit"),
        ([SIDECAR], "spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy"),
        (
            [SIDECAR, HEAD_NEVER, set_at("spec", "submitterPodTemplate", value={})],
            "spec.submitterPodTemplate",
        ),
        ([SIDECAR, HEAD_NEVER, set_at("spec", "submitterConfig", value={})], "spec.submitterConfig"),
        ([set_at("spec", "managedBy", value="me")], "spec.managedBy"),
        ([set_at("spec", "deletionStrategy", "onSuccess", value={})], "spec.deletionStrategy"),
        (
            [
                set_at("spec", "deletionStrategy", "onSuccess", value={}),
                set_at("spec", "deletionStrategy", "deletionRules", value=[]),
            ],
            "spec.deletionStrategy",
        ),
        (
            [set_at("spec", "deletionStrategy", "deletionRules", value=[{"condition": {}}])],
            "spec.deletionStrategy.deletionRules[0].condition",
        ),
        ([set_at(*CLUSTER, "managedBy", value="me")], "spec.rayClusterSpec.managedBy"),
        ([set_at(*CLUSTER, "rayVersion", value="2.51.0")], "spec.rayClusterSpec.rayVersion"),
        ([set_at(*CLUSTER, "rayVersion", value=None)], "spec.rayClusterSpec.rayVersion"),
        (
            [set_at(*CLUSTER, "authOptions", "enableK8sTokenAuth", value=True)],
            "spec.rayClusterSpec.authOptions.enableK8sTokenAuth",
        ),
        (
            [set_at(*CLUSTER, "headGroupSpec", "resources", "CPU", value="0")],
            "spec.rayClusterSpec.headGroupSpec.rayStartParams",
        ),
        (
            [
                set_at(*GROUP, "resources", "disk", value="1"),
                set_at(*GROUP, "rayStartParams", "resources", value="{}"),
            ],
            "spec.rayClusterSpec.workerGroupSpecs[0].rayStartParams",
        ),
        (
            [set_at(*GROUP, "rayStartParams", "labels", value="a=b")],
            "spec.rayClusterSpec.workerGroupSpecs[0].rayStartParams",
        ),
        ([set_at(*GROUP, "minReplicas", value=3)], "spec.rayClusterSpec.workerGroupSpecs[0].minReplicas"),
        ([set_at(*GROUP, "replicas", value=3)], "spec.rayClusterSpec.workerGroupSpecs[0].replicas"),
        (
            [set_at(*GROUP, "idleTimeoutSeconds", value=3)],
            "spec.rayClusterSpec.workerGroupSpecs[0].idleTimeoutSeconds",
        ),
        (
            [set_at(*GROUP, "template", "spec", "containers", value=[])],
            "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.containers",
        ),
        (
            [
                set_at(*CLUSTER, "enableInTreeAutoscaling", value=True),
                set_at(*CLUSTER, "autoscalerOptions", value=V2),
                HEAD_NEVER,
            ],
            "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.restartPolicy",
        ),
        ([QUEUED], "spec.suspend"),
        (
            [
                QUEUED,
                set_at("spec", "suspend", value=True),
                set_at(*CLUSTER, "enableInTreeAutoscaling", value=True),
            ],
            "enableInTreeAutoscaling",
        ),
    ],
)
def test_a_broken_rule_is_found_at_its_place(changes: list[Any], where: str) -> None:
    job = sample()
    assert broken_rules(job) == []
    for change in changes:
        change(job)
    (problem,) = broken_rules(job)
    assert problem.where == f"RayJob {job['metadata']['name']}: {where}"


def test_two_groups_of_one_name_and_too_many_for_a_queue_are_found() -> None:
    job = sample(queue="q")
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    groups += [copy.deepcopy(groups[0]) for _ in range(7)]
    found = [problem.where.partition(": ")[2] for problem in broken_rules(job)]
    assert found == [
        *(f"spec.rayClusterSpec.workerGroupSpecs[{index}].groupName" for index in range(1, 8)),
        "workerGroupSpecs",
    ]


def test_a_standing_cluster_has_rules_too() -> None:
    (cluster,) = raycluster(kubernetes_profile(), "standing")
    cluster["spec"]["rayVersion"] = "2.40.0"
    cluster["spec"]["authOptions"]["enableK8sTokenAuth"] = True
    assert [problem.where for problem in broken_rules(cluster)] == ["RayCluster standing: spec.rayVersion"]
    assert broken_rules({"kind": "ConfigMap", "metadata": {"name": "0"}}) == []


def reasons(recipe: str, output: str = OUTPUT, name: str = RUN, **change: Any) -> list[str]:
    """Why a run is refused."""
    with pytest.raises(OptionError) as caught:
        check(
            kubernetes_profile(change), recipe, output, name, "r.yml", exists=lambda path: path == "org/here"
        )
    return str(caught.value).splitlines()


def _recipe(path: str) -> str:
    return RECIPE.replace("s3://models/a", path)


@pytest.mark.parametrize(
    "path", ["./a", "a", "a/b/c", "~/a", "../a", "org/here", "s3://x/y+./adapter", "s3://x/y+/mnt/adapter"]
)
def test_models_of_this_machine_are_refused_at_their_place(path: str) -> None:
    (reason,) = reasons(_recipe(path))
    assert reason.startswith("r.yml:3:5: ")


@pytest.mark.parametrize(
    "path", ["org/name", "hf://org/name@main", "gs://b/x", "/mnt/models/a", "org/name@main+/mnt/models/b"]
)
def test_models_that_pods_see_are_taken(path: str) -> None:
    check(kubernetes_profile({"volumes": [SHARED]}), _recipe(path), OUTPUT, RUN, exists=lambda _: False)


def test_results_of_the_same_file_are_no_paths() -> None:
    chain = f"name: first\n{RECIPE}---\n{_recipe('first')}"
    output = "/mnt/models/out"
    check(kubernetes_profile({"volumes": [SHARED]}), chain, output, RUN, exists=lambda _: False)


def test_all_reasons_are_told_at_once() -> None:
    lines = reasons(_recipe("./a"), "merged", "9" * 48)
    assert [line.partition(": ")[0] for line in lines] == [
        "-o",
        "r.yml:3:5",
        f"RayJob {'9' * 48}",
        f"RayJob {'9' * 48}",
    ]


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


def test_a_recipe_that_no_config_map_holds_is_refused() -> None:
    (reason,) = reasons(RECIPE + "# and so on\n" * 90_000)
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
