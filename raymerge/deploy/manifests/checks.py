"""All that stands in the way of a run on Kubernetes and can be known without asking the cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from raymerge.deploy.manifests.names import MOST_NAME
from raymerge.deploy.manifests.objects import rayjob
from raymerge.deploy.profiles.feasible import faults_between, is_mounted, steps_faults
from raymerge.deploy.profiles.kubernetes import Kubernetes
from raymerge.deploy.profiles.schema import Profile
from raymerge.errors import OptionError, Problem
from raymerge.recipes import AnyRecipe, parse_recipes
from raymerge.recipes.order import places_read
from raymerge.recipes.reference import Exists
from raymerge.storage.addresses import check_output_address, is_remote, shown

_Fields: TypeAlias = Mapping[str, Any]
_Broken: TypeAlias = tuple[str, str, str]
"""Where in the object, what is wrong there, what to do."""

SUBMISSION_MODES = ("HTTPMode", "K8sJobMode", "SidecarMode", "InteractiveMode")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SAFE = re.compile(r"[A-Za-z0-9_./= -]+")
_COUNTS = ("num-cpus", "num-gpus", "memory", "resources")
_MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MOST_QUEUED_GROUPS = 7
_TOKENS_SINCE = (2, 52)


def broken_rules(manifest: Mapping[str, Any]) -> list[Problem]:
    """The rules that a RayJob or RayCluster breaks; none for objects of other kinds."""
    kind, spec = manifest.get("kind"), manifest.get("spec", {})
    name = manifest.get("metadata", {}).get("name", "")
    broken: list[_Broken] = []
    if kind == "RayJob":
        broken += _of_name(name)
        broken += _of_job(spec)
        broken += _of_cluster(spec.get("rayClusterSpec"), "spec.rayClusterSpec", is_job=True)
    elif kind == "RayCluster":
        broken += _of_name(name)
        broken += _of_cluster(spec, "spec", is_job=False)
    if kind in ("RayJob", "RayCluster"):
        broken += _of_queue(manifest)
    return [Problem(f"{kind} {name}: {where}", what, remedy) for where, what, remedy in broken]


def _of_name(name: str) -> Iterator[_Broken]:
    if _NAME.fullmatch(name) is None:
        what = f"'{name}' cannot be the name of a service (DNS-1035)."
        yield "metadata.name", what, "Write small letters, digits and dashes, with a letter first."
    if len(name) > MOST_NAME:
        what = f"'{name}' has {len(name)} characters, and the operator takes {MOST_NAME}."
        yield "metadata.name", what, "Shorten it."


def _of_job(spec: _Fields) -> Iterator[_Broken]:
    mode = spec.get("submissionMode", "K8sJobMode")
    is_shut_down = spec.get("shutdownAfterJobFinishes", False)
    if mode not in SUBMISSION_MODES:
        what = f"'{mode}' is no submission mode."
        yield "spec.submissionMode", what, f"Write one of: {', '.join(SUBMISSION_MODES)}."
    if spec.get("suspend") and not is_shut_down:
        what = "a suspended run must give its cluster back when it ends."
        yield "spec.suspend", what, "Write shutdownAfterJobFinishes: true."
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not is_shut_down:
        what = "it counts only where the cluster is shut down."
        yield "spec.ttlSecondsAfterFinished", what, "Write shutdownAfterJobFinishes: true."
    for key in ("backoffLimit", "ttlSecondsAfterFinished"):
        if spec.get(key, 0) < 0:
            yield f"spec.{key}", f"{spec[key]} is below 0.", "Write 0 or more."
    if spec.get("activeDeadlineSeconds") is not None and spec["activeDeadlineSeconds"] <= 0:
        what = f"{spec['activeDeadlineSeconds']} is not above 0."
        yield "spec.activeDeadlineSeconds", what, "Write 1 or more."
    if _SAFE.fullmatch(spec.get("entrypoint", "")) is None and mode != "InteractiveMode":
        what = "a shell would read other characters than it was given, or there is none."
        yield "spec.entrypoint", what, "Keep to letters, digits, spaces and _ . / = -."
    yield from _of_modes(spec, mode)
    yield from _of_manager(spec, "spec")
    yield from _of_deletion(spec.get("deletionStrategy"))


def _of_modes(spec: _Fields, mode: str) -> Iterator[_Broken]:
    retries = spec.get("backoffLimit", 0)
    has_selector = bool(spec.get("clusterSelector"))
    if not has_selector and not spec.get("rayClusterSpec"):
        yield "spec", "there is neither rayClusterSpec nor clusterSelector.", "Add rayClusterSpec."
    if has_selector and (spec.get("suspend") or retries or mode == "SidecarMode"):
        what = "a run on a cluster that stands cannot be suspended, begun again or be a sidecar."
        yield "spec.clusterSelector", what, "Remove it, or suspend, backoffLimit and SidecarMode."
    if mode == "InteractiveMode" and retries:
        yield "spec.backoffLimit", "what a person starts is not begun again.", "Write 0, or HTTPMode."
    if mode == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if spec.get(key) is not None:
                yield f"spec.{key}", "SidecarMode has no submitter's pod.", "Remove it."
        head = _pod(spec.get("rayClusterSpec", {}).get("headGroupSpec", {}))
        if spec.get("rayClusterSpec") and head.get("restartPolicy") != "Never":
            where = "spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy"
            yield where, "SidecarMode needs a head that is not restarted.", "Write Never."


def _of_manager(spec: _Fields, where: str) -> Iterator[_Broken]:
    if spec.get("managedBy", _MANAGERS[0]) not in _MANAGERS:
        yield f"{where}.managedBy", f"'{spec['managedBy']}' is unknown.", f"Write {' or '.join(_MANAGERS)}."


def _of_deletion(strategy: _Fields | None) -> Iterator[_Broken]:
    if strategy is None:
        return
    where = "spec.deletionStrategy"
    both = "onSuccess" in strategy and "onFailure" in strategy
    has_rules = "deletionRules" in strategy
    if has_rules and ("onSuccess" in strategy or "onFailure" in strategy):
        yield where, "deletionRules stand beside onSuccess or onFailure.", "Keep deletionRules."
    elif not has_rules and not both:
        yield where, "it says neither rules nor both ends.", "Write deletionRules."
    for index, rule in enumerate(strategy.get("deletionRules", ())):
        condition = rule.get("condition", {})
        if ("jobStatus" in condition) == ("jobDeploymentStatus" in condition):
            place = f"{where}.deletionRules[{index}].condition"
            yield (place, "it has not exactly one state.", "Write jobStatus or jobDeploymentStatus.")


def _of_cluster(spec: _Fields | None, where: str, *, is_job: bool) -> Iterator[_Broken]:
    if not spec:
        return
    yield from _of_manager(spec, where)
    yield from _of_tokens(spec, where, is_job=is_job)
    is_scaled = bool(spec.get("enableInTreeAutoscaling"))
    version = spec.get("autoscalerOptions", {}).get("version")
    names: set[str] = set()
    groups = [(f"{where}.headGroupSpec", spec.get("headGroupSpec", {}))]
    for index, group in enumerate(spec.get("workerGroupSpecs", ())):
        place = f"{where}.workerGroupSpecs[{index}]"
        groups.append((place, group))
        yield from _of_bounds(group, place, is_v2=is_scaled and version == "v2")
        if group.get("groupName") in names:
            yield f"{place}.groupName", f"a second group is '{group['groupName']}'.", "Rename it."
        names.add(group.get("groupName", ""))
    for place, group in groups:
        yield from _of_start(group, place)
        if not _pod(group).get("containers"):
            yield f"{place}.template.spec.containers", "there is no container.", "Add one."
        if is_scaled and version == "v2" and _pod(group).get("restartPolicy") != "Never":
            what = "the autoscaler v2 replaces pods; they may not restart."
            yield f"{place}.template.spec.restartPolicy", what, "Write Never."


def _of_tokens(spec: _Fields, where: str, *, is_job: bool) -> Iterator[_Broken]:
    options = spec.get("authOptions", {})
    if options.get("mode") == "token":
        numbers = re.findall(r"[0-9]+", spec.get("rayVersion", ""))[:2]
        if tuple(map(int, numbers)) < _TOKENS_SINCE:
            what = f"Ray '{spec.get('rayVersion', '')}' knows no tokens; they came with 2.52."
            yield f"{where}.rayVersion", what, "Take a newer Ray, or mode: disabled."
    if options.get("enableK8sTokenAuth") and is_job:
        what = "tokens of Kubernetes do not work for a RayJob."
        yield f"{where}.authOptions.enableK8sTokenAuth", what, "Remove it."


def _of_bounds(group: _Fields, where: str, *, is_v2: bool) -> Iterator[_Broken]:
    low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    if low < 0 or low > high:
        what = f"minReplicas {low} and maxReplicas {high} leave no number between them."
        yield f"{where}.minReplicas", what, "Write 0 <= minReplicas <= maxReplicas."
    elif not low <= group.get("replicas", low) <= high:
        what = f"{group['replicas']} is not from {low} (minReplicas) to {high} (maxReplicas)."
        yield f"{where}.replicas", what, "Write a number between them."
    if group.get("idleTimeoutSeconds") is not None and not is_v2:
        what = "only the autoscaler v2 has an idle time for each group."
        yield f"{where}.idleTimeoutSeconds", what, "Remove it, or write autoscalerOptions: {version: v2}."


def _of_start(group: _Fields, where: str) -> Iterator[_Broken]:
    parameters, resources = group.get("rayStartParams", {}), group.get("resources", {})
    counted = [parameter for parameter in _COUNTS if parameter in parameters]
    if resources and counted:
        what = f"it gives {' and '.join(counted)}, and 'resources' is there too."
        yield f"{where}.rayStartParams", what, "Keep 'resources'."
    if "labels" in parameters:
        yield f"{where}.rayStartParams", "labels have a field of their own.", "Write them in 'labels'."


def _of_queue(manifest: Mapping[str, Any]) -> Iterator[_Broken]:
    if _QUEUE_LABEL not in manifest.get("metadata", {}).get("labels", {}):
        return
    spec = manifest.get("spec", {})
    cluster = spec.get("rayClusterSpec", {}) if manifest["kind"] == "RayJob" else spec
    if not spec.get("suspend"):
        yield "spec.suspend", "what waits in a queue of Kueue begins suspended.", "Write true."
    if cluster.get("enableInTreeAutoscaling"):
        yield "enableInTreeAutoscaling", "Kueue reserves a fixed number of pods.", "Write false."
    if len(cluster.get("workerGroupSpecs", ())) > _MOST_QUEUED_GROUPS:
        what = f"Kueue takes at most {_MOST_QUEUED_GROUPS} groups of workers."
        yield "workerGroupSpecs", what, "Join groups."


def _pod(group: _Fields) -> _Fields:
    spec: _Fields = group.get("template", {}).get("spec", {})
    return spec


MOST_CONFIG_BYTES = 2**20 - 2**14
"""Of recipe and profile together: a config map holds a mebibyte, its own fields included."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check(
    profile: Profile,
    recipe_text: str,
    output: str,
    name: str,
    recipe_name: str = "recipe",
    *,
    flags: Sequence[str] = (),
    exists: Exists = os.path.isdir,
) -> None:
    """Refuse what could not run in pods, before anything is sent.

    Args:
        recipe_name: what messages call the recipe.
        exists: whether a text is a local directory, which pods do not have.

    Raises:
        RecipeError: the recipe says no merge.
        ProfileError: no section ``kubernetes``.
        OptionError: all else, every reason at once.
    """
    check_output_address(output)
    config, job = rayjob(profile, recipe_text, output, name, flags=flags)
    # The rule of a profile: with a section of Kubernetes, else the line above has raised.
    kubernetes = profile.kubernetes
    assert kubernetes is not None
    recipes = parse_recipes(recipe_text, recipe_name, exists=exists)
    problems = list(_infeasible(profile, kubernetes, output, len(recipes)))
    problems += unreachable(kubernetes, recipes, exists=exists)
    num_bytes = sum(len(text.encode()) for text in config["data"].values())
    if num_bytes > MOST_CONFIG_BYTES:
        what = f"it has {num_bytes} bytes with its profile; a config map holds {MOST_CONFIG_BYTES}."
        problems.append(Problem(recipe_name, what, "Shorten it, or split it into several files."))
    problems += broken_rules(job)
    if problems:
        raise OptionError(problems)


def _infeasible(profile: Profile, kubernetes: Kubernetes, output: str, num_merges: int) -> Iterator[Problem]:
    """What the profile could not do, also where it is for another target and a flag chooses this one."""
    faults = [*faults_between(kubernetes, profile.run, output, "kubernetes")]
    for fault in dict.fromkeys((*faults, *steps_faults(profile.run, output, num_merges))):
        where = "-o" if fault.path == ("output",) else profile.where(*fault.path)
        yield Problem(where, fault.what, fault.remedy)


def unreachable(kubernetes: Kubernetes, recipes: Sequence[AnyRecipe], *, exists: Exists) -> Iterator[Problem]:
    """What recipes read and pods do not see: paths of this machine."""
    for where, place in dict.fromkeys(places_read(recipes)):
        if lack := _lack(kubernetes, place, exists):
            yield Problem(where, *lack)


def _lack(kubernetes: Kubernetes, place: str, exists: Exists) -> tuple[str, str] | None:
    """Why pods do not see a place and what to do; None where they do."""
    if is_remote(place):
        return None
    if place.startswith("/"):
        if is_mounted(kubernetes, place):
            return None
        what = f"{shown(place)} is on no volume that every pod mounts."
        return what, "Add it to 'volumes' of the profile, or write an address like s3://bucket/dir."
    if _HUB_NAME.fullmatch(place) and not exists(place):
        return None
    what = f"'{place}' is relative to a directory of this machine, which pods do not have."
    return what, "Write s3://bucket/dir, hf://org/name, or an absolute path on a volume."
