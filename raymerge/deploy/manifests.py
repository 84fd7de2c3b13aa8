"""Runs as Kubernetes objects for KubeRay: plain mappings, equal for equal profile and recipe."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import yaml

from raymerge.deploy.profiles.profile import (
    CONFIG_PATH,
    Profile,
    faults_between,
    is_mounted,
    most_replicas,
    steps_faults,
)
from raymerge.deploy.profiles.sections import Head, Kubernetes, Volume, WorkerGroup
from raymerge.documents.positions import YamlDumper
from raymerge.errors import OptionError, Problem, ProfileError
from raymerge.recipes.load import parse_recipes
from raymerge.recipes.order import places_read
from raymerge.storage.addresses import check_output_address, is_remote, shown

OUTPUT_LABEL = "raymerge.io/output"
OUTPUT_ANNOTATION = "raymerge.io/output"
SENT_ANNOTATION = "raymerge.io/sent"
"""Annotation with the time of submission in UTC; the server's own has only whole seconds."""

_DIGITS = 12


def output_digest(output: str) -> str:
    return hashlib.sha256(shown(output).rstrip("/").encode()).hexdigest()[:32]


def render_name(*texts: str) -> str:
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"raymerge-{digest[:_DIGITS]}"


Manifest: TypeAlias = dict[str, Any]

_CONFIG_VOLUME = "raymerge-config"
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _without_empty(fields: Mapping[str, Any]) -> Manifest:
    """Without what is None or has no elements."""
    return {key: value for key, value in fields.items() if value not in (None, (), [], {})}


def _head_template(kubernetes: Kubernetes, name: str, config: str | None) -> Manifest:
    # The autoscaler beside the head asks the API server for pods.
    asks = kubernetes.autoscaling.enabled
    spec = _pod_spec(kubernetes, kubernetes.head, "ray-head", kubernetes.volumes, has_account_token=asks)
    if kubernetes.submission_mode == "SidecarMode":
        spec["restartPolicy"] = "Never"
    if config is not None:
        mounts = spec["containers"][0].setdefault("volumeMounts", [])
        mounts.append({"name": _CONFIG_VOLUME, "mountPath": CONFIG_PATH, "readOnly": True})
        volumes = spec.setdefault("volumes", [])
        volumes.append({"name": _CONFIG_VOLUME, "configMap": {"name": config}})
    return {"metadata": _pod_metadata(kubernetes, name, "head"), "spec": spec}


def _worker_template(kubernetes: Kubernetes, name: str, group: WorkerGroup) -> Manifest:
    volumes = kubernetes.volumes if group.volumes is None else group.volumes
    spec = _pod_spec(kubernetes, group, "ray-worker", volumes, has_account_token=False)
    return {"metadata": _pod_metadata(kubernetes, name, "worker"), "spec": spec}


def _pod_metadata(kubernetes: Kubernetes, name: str, component: str) -> Manifest:
    labels = {**kubernetes.labels, **_own_labels(name, component)}
    return _without_empty({"labels": labels, "annotations": dict(kubernetes.annotations)})


def _own_labels(name: str, component: str) -> Manifest:
    """Not ``app.kubernetes.io/name``: the operator finds pods by its own."""
    return {
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "raymerge",
        "app.kubernetes.io/managed-by": "raymerge",
    }


def _pod_spec(
    kubernetes: Kubernetes,
    pod: Head | WorkerGroup,
    container: str,
    volumes: Sequence[Volume],
    *,
    has_account_token: bool,
) -> Manifest:
    return _without_empty(
        {
            "restartPolicy": "Never" if kubernetes.autoscaling.enabled else None,
            "serviceAccountName": kubernetes.service_account,
            "priorityClassName": kubernetes.priority_class,
            "imagePullSecrets": [{"name": secret} for secret in kubernetes.image_pull_secrets],
            # The pod's first process then reaps what is orphaned: a dead raylet that nobody reaps keeps its
            # workers.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": kubernetes.termination_grace_seconds,
            "nodeSelector": dict(pod.node_selector),
            "tolerations": [each.model_dump(exclude_none=True) for each in pod.tolerations],
            "affinity": pod.affinity and dict(pod.affinity),
            "runtimeClassName": pod.runtime_class,
            "securityContext": _pod_security(kubernetes),
            "containers": [_container(kubernetes, pod, container, volumes)],
            "volumes": [{"name": each.name, **_source(each)} for each in volumes],
            "automountServiceAccountToken": has_account_token,
        }
    )


def _container(
    kubernetes: Kubernetes, pod: Head | WorkerGroup, name: str, volumes: Sequence[Volume]
) -> Manifest:
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **kubernetes.env}
    amounts = {"cpu": pod.cpu, "memory": pod.memory}
    if isinstance(pod, WorkerGroup) and pod.gpus:
        amounts[pod.gpu_resource] = str(pod.gpus)
    return _without_empty(
        {
            "name": name,
            "image": kubernetes.image,
            "imagePullPolicy": kubernetes.image_pull_policy,
            "env": [{"name": key, "value": value} for key, value in environment.items()],
            "envFrom": [{"secretRef": {"name": each}} for each in kubernetes.env_from_secrets],
            "resources": {"limits": amounts, "requests": amounts},
            "securityContext": _CONTAINER_SECURITY,
            "volumeMounts": [_mount(each) for each in volumes],
        }
    )


def _pod_security(kubernetes: Kubernetes) -> Manifest:
    security = kubernetes.security
    context: Manifest = {
        "runAsNonRoot": True,
        "runAsUser": security.run_as_user,
        "runAsGroup": security.run_as_group,
    }
    if security.fs_group is not None:
        # A large volume is not walked through at each start.
        context |= {"fsGroup": security.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context | {"seccompProfile": {"type": "RuntimeDefault"}}


def _mount(volume: Volume) -> Manifest:
    mount = {"name": volume.name, "mountPath": volume.mount_path, "subPath": volume.sub_path}
    return _without_empty({**mount, "readOnly": None if volume.is_writable else True})


def _source(volume: Volume) -> Manifest:
    if volume.pvc is not None:
        claim = {"claimName": volume.pvc, "readOnly": volume.read_only or None}
        return {"persistentVolumeClaim": _without_empty(claim)}
    if (directory := volume.empty_dir) is not None:
        return {"emptyDir": _without_empty({"sizeLimit": directory.size_limit, "medium": directory.medium})}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    return {"configMap": {"name": volume.config_map}}


class _Dumper(YamlDumper):
    def ignore_aliases(self, data: object) -> bool:
        del data
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        if "\n" in text:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|")
        return super().text(text)


_Dumper.add_representer(str, _Dumper.text)


def as_yaml(manifests: Iterable[Manifest]) -> str:
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=110
    )


RECIPE_FILE = "recipe.yml"
PROFILE_FILE = "profile.yml"
ENTRYPOINT = f"raymerge submit {CONFIG_PATH}/{RECIPE_FILE} --profile {CONFIG_PATH}/{PROFILE_FILE} --json"
"""The driver. A shell reads it, so it has no text of the user in it."""

_API = "ray.io/v1"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_STORE_BYTES = 200 * 2**20
"""Ray's object store; tensors never go through it."""


def rayjob(
    profile: Profile, recipe_text: str, output: str, name: str, *, flags: Sequence[str] = ()
) -> tuple[Manifest, Manifest]:
    """A run: the config map with its recipe and profile, and its RayJob. ``output``: place of the new
    checkpoint, as pods see it. ``flags``: those of ``raymerge submit`` that have no key in a profile. Raises
    ProfileError: no section ``kubernetes``."""
    kubernetes = _section(profile)
    metadata = _metadata(kubernetes, name, "run")
    metadata["labels"] |= _without_empty({OUTPUT_LABEL: output_digest(output), QUEUE_LABEL: kubernetes.queue})
    metadata["annotations"] = {**kubernetes.annotations, OUTPUT_ANNOTATION: shown(output)}
    inside = profile.for_inside(output, autoscaling=kubernetes.autoscaling.enabled)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(kubernetes, name, "config"),
        "data": {PROFILE_FILE: inside.as_yaml(), RECIPE_FILE: recipe_text},
    }
    spec = {
        # Another attempt finds by the name that this run has published already, and is none of its own.
        "entrypoint": " ".join((ENTRYPOINT, "--run", name, *flags)),
        "submissionMode": kubernetes.submission_mode,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": kubernetes.ttl_seconds,
        "backoffLimit": kubernetes.backoff_limit,
        "activeDeadlineSeconds": kubernetes.active_deadline_seconds,
        # Kueue lets it go when there is room.
        "suspend": None if kubernetes.queue is None else True,
        "rayClusterSpec": _cluster_spec(kubernetes, name, config=name),
    }
    return config, {"apiVersion": _API, "kind": "RayJob", "metadata": metadata, "spec": _without_empty(spec)}


def raycluster(profile: Profile, name: str) -> tuple[Manifest]:
    """For target ``job``; raises ProfileError without a section ``kubernetes``."""
    kubernetes = _section(profile)
    metadata = _metadata(kubernetes, name, "cluster")
    metadata["labels"] |= _without_empty({QUEUE_LABEL: kubernetes.queue})
    spec = _cluster_spec(kubernetes, name, config=None)
    if kubernetes.queue is not None:
        spec["suspend"] = True
    return ({"apiVersion": _API, "kind": "RayCluster", "metadata": metadata, "spec": spec},)


def _section(profile: Profile) -> Kubernetes:
    if profile.kubernetes is None:
        what = "the profile has no section 'kubernetes'."
        raise ProfileError(Problem(profile.where(), what, "Add it: at least image, ray_version and workers."))
    return profile.kubernetes


def _cluster_spec(kubernetes: Kubernetes, name: str, *, config: str | None) -> Manifest:
    token = {"mode": "token", "secretName": kubernetes.token_secret}
    spec: Manifest = {
        "rayVersion": kubernetes.ray_version,
        "authOptions": _without_empty(token if kubernetes.token_auth else {"mode": "disabled"}),
    }
    scaling = kubernetes.autoscaling
    if scaling.enabled:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": scaling.idle_timeout_seconds,
            "upscalingMode": scaling.upscaling_mode,
            "securityContext": _CONTAINER_SECURITY,
        }
    spec["headGroupSpec"] = {
        # No worker is placed beside the driver. Operators before 1.5 know no field 'resources'.
        "rayStartParams": {"num-cpus": "0", "object-store-memory": str(_STORE_BYTES)},
        "template": _head_template(kubernetes, name, config),
    }
    spec["workerGroupSpecs"] = [_group(kubernetes, name, group) for group in kubernetes.workers]
    return spec


def _group(kubernetes: Kubernetes, name: str, group: WorkerGroup) -> Manifest:
    is_scaled = kubernetes.autoscaling.enabled
    start = {"object-store-memory": str(_STORE_BYTES)}
    if group.gpus and not group.gpu_resource.endswith("gpu"):
        # The operator knows GPUs by that ending only, such as not nvidia.com/mig-1g.5gb.
        start["num-gpus"] = str(group.gpus)
    return _without_empty(
        {
            "groupName": group.name,
            "replicas": group.replicas,
            "minReplicas": (group.min_replicas or 0) if is_scaled else group.replicas,
            "maxReplicas": most_replicas(group, is_scaled=is_scaled),
            "idleTimeoutSeconds": group.idle_timeout_seconds,
            "labels": dict(group.labels),
            "rayStartParams": start,
            "template": _worker_template(kubernetes, name, group),
        }
    )


def _metadata(kubernetes: Kubernetes, name: str, component: str) -> Manifest:
    own = {"app.kubernetes.io/name": "raymerge", **_own_labels(name, component)}
    return _without_empty(
        {
            "name": name,
            "namespace": kubernetes.namespace,
            "labels": {**kubernetes.labels, **own},
            "annotations": dict(kubernetes.annotations),
        }
    )


_SAFE = re.compile(r"[A-Za-z0-9_./= -]+")
_MAX_CONFIG_NBYTES = 2**20 - 2**14
"""Recipe and profile together: a config map holds 1 MiB, its own fields included."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check(
    profile: Profile,
    recipe_text: str,
    output: str,
    name: str,
    recipe_name: str = "recipe",
    *,
    flags: Sequence[str] = (),
) -> tuple[Manifest, Manifest]:
    """Refuse what cannot run in pods, before anything is sent; returns the manifests of ``rayjob``.
    ``recipe_name``: the recipe's name in messages. Raises RecipeError: the recipe is not valid; ProfileError:
    no section ``kubernetes``; OptionError: all other reasons at once."""
    check_output_address(output)
    kubernetes = _section(profile)
    config, job = rayjob(profile, recipe_text, output, name, flags=flags)
    recipes = parse_recipes(recipe_text, recipe_name)
    # Also if the profile is for another target and a flag chose this one.
    faults = [*faults_between(kubernetes, profile.run, output, "kubernetes")]
    faults += steps_faults(profile.run, output, len(recipes))
    problems = []
    for fault in dict.fromkeys(faults):
        where = "-o" if fault.path == ("output",) else profile.where(*fault.path)
        problems.append(Problem(where, fault.what, fault.remedy))
    for where, place in dict.fromkeys(places_read(recipes)):
        if reason := _why_unreachable(kubernetes, place):
            problems.append(Problem(where, *reason))
    nbytes = sum(len(text.encode()) for text in config["data"].values())
    if nbytes > _MAX_CONFIG_NBYTES:
        what = f"it has {nbytes} bytes with its profile; a config map holds {_MAX_CONFIG_NBYTES}."
        problems.append(Problem(recipe_name, what, "Shorten it, or split it into several files."))
    if _SAFE.fullmatch(job["spec"]["entrypoint"]) is None:
        what = "a shell would read other characters than it was given."
        problems.append(Problem("spec.entrypoint", what, "Keep to letters, digits, spaces and _ . / = -."))
    if problems:
        raise OptionError(problems)
    return config, job


def _why_unreachable(kubernetes: Kubernetes, place: str) -> tuple[str, str] | None:
    if is_remote(place):
        return None
    if place.startswith("/"):
        if is_mounted(kubernetes, place):
            return None
        what = f"{shown(place)} is on no volume that every pod mounts."
        return what, "Add it to 'volumes' of the profile, or write an address like s3://bucket/dir."
    if _HUB_NAME.fullmatch(place) and not os.path.isdir(place):
        return None
    what = f"'{place}' is relative to a directory of this machine, which pods do not have."
    return what, "Write s3://bucket/dir, hf://org/name, or an absolute path on a volume."
