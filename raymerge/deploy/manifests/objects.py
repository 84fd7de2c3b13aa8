"""The objects of a run: a RayJob with its config map, or a standing RayCluster."""

from __future__ import annotations

from collections.abc import Sequence

from raymerge.deploy.manifests.names import OUTPUT_ANNOTATION, OUTPUT_LABEL, labels_of, output_digest
from raymerge.deploy.manifests.pods import Manifest, container_security, head_template, worker_template
from raymerge.deploy.profiles.feasible import CONFIG_PATH, fewest, most
from raymerge.deploy.profiles.kubernetes import Kubernetes, WorkerGroup
from raymerge.deploy.profiles.schema import Profile
from raymerge.errors import Problem, ProfileError
from raymerge.storage.addresses import shown

RECIPE_FILE = "recipe.yml"
PROFILE_FILE = "profile.yml"
ENTRYPOINT = f"raymerge submit {CONFIG_PATH}/{RECIPE_FILE} --profile {CONFIG_PATH}/{PROFILE_FILE} --json"
"""What the driver is; a shell reads it, so that no text of a user's is in it."""

_API = "ray.io/v1"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_STORE_BYTES = 200 * 2**20
"""Of Ray's object store: tensors never go through it."""


def rayjob(
    profile: Profile, recipe_text: str, output: str, name: str, *, flags: Sequence[str] = ()
) -> tuple[Manifest, Manifest]:
    """What makes a run: the config map with its recipe and profile, and the RayJob that uses it.

    Args:
        output: place of the new checkpoint, as pods see it.
        flags: of ``raymerge submit``, those that no profile has.

    Raises:
        ProfileError: no section ``kubernetes``.
    """
    kubernetes = _section(profile)
    metadata = _metadata(kubernetes, name, "run")
    metadata["labels"][OUTPUT_LABEL] = output_digest(output)
    metadata["annotations"] = {**metadata.get("annotations", {}), OUTPUT_ANNOTATION: shown(output)}
    inside = profile.for_inside(output, autoscaling=kubernetes.autoscaling.enabled)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(kubernetes, name, "config"),
        "data": {PROFILE_FILE: inside.as_yaml(), RECIPE_FILE: recipe_text},
    }
    job = {
        "apiVersion": _API,
        "kind": "RayJob",
        "metadata": _queued(metadata, kubernetes),
        "spec": _job_spec(kubernetes, name, flags),
    }
    return config, job


def raycluster(profile: Profile, name: str) -> tuple[Manifest]:
    """A cluster that stands until it is deleted, for target ``job``.

    Raises:
        ProfileError: no section ``kubernetes``.
    """
    kubernetes = _section(profile)
    spec = _cluster_spec(kubernetes, name, config=None)
    if kubernetes.queue is not None:
        spec["suspend"] = True
    metadata = _queued(_metadata(kubernetes, name, "cluster"), kubernetes)
    return ({"apiVersion": _API, "kind": "RayCluster", "metadata": metadata, "spec": spec},)


def _section(profile: Profile) -> Kubernetes:
    if profile.kubernetes is None:
        what = "the profile has no section 'kubernetes'."
        raise ProfileError(Problem(profile.where(), what, "Add it: at least image, ray_version and workers."))
    return profile.kubernetes


def _job_spec(kubernetes: Kubernetes, name: str, flags: Sequence[str]) -> Manifest:
    spec: Manifest = {
        # Another attempt finds by the name that this run has published already, and is none of its own.
        "entrypoint": " ".join((ENTRYPOINT, "--run", name, *flags)),
        "submissionMode": kubernetes.submission_mode,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": kubernetes.ttl_seconds,
        "backoffLimit": kubernetes.backoff_limit,
    }
    if kubernetes.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = kubernetes.active_deadline_seconds
    if kubernetes.queue is not None:
        # Kueue lets it go when there is room.
        spec["suspend"] = True
    return {**spec, "rayClusterSpec": _cluster_spec(kubernetes, name, config=name)}


def _cluster_spec(kubernetes: Kubernetes, name: str, *, config: str | None) -> Manifest:
    spec: Manifest = {"rayVersion": kubernetes.ray_version, "authOptions": _authentication(kubernetes)}
    scaling = kubernetes.autoscaling
    if scaling.enabled:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": scaling.idle_timeout_seconds,
            "upscalingMode": scaling.upscaling_mode,
            "securityContext": container_security(),
        }
    spec["headGroupSpec"] = {
        # No worker is placed beside the driver. Operators before 1.5 know no field 'resources'.
        "rayStartParams": {"num-cpus": "0", "object-store-memory": str(_STORE_BYTES)},
        "template": head_template(kubernetes, name, config),
    }
    spec["workerGroupSpecs"] = [_group(kubernetes, name, group) for group in kubernetes.workers]
    return spec


def _authentication(kubernetes: Kubernetes) -> Manifest:
    if not kubernetes.token_auth:
        return {"mode": "disabled"}
    secret = kubernetes.token_secret
    return {"mode": "token"} if secret is None else {"mode": "token", "secretName": secret}


def _group(kubernetes: Kubernetes, name: str, group: WorkerGroup) -> Manifest:
    is_scaled = kubernetes.autoscaling.enabled
    spec: Manifest = {
        "groupName": group.name,
        "replicas": group.replicas,
        "minReplicas": fewest(group) if is_scaled else group.replicas,
        "maxReplicas": most(group, is_scaled=is_scaled),
    }
    if group.idle_timeout_seconds is not None:
        spec["idleTimeoutSeconds"] = group.idle_timeout_seconds
    if group.labels:
        spec["labels"] = dict(group.labels)
    spec["rayStartParams"] = {"object-store-memory": str(_STORE_BYTES)}
    if group.gpus and not group.gpu_resource.endswith("gpu"):
        # The operator knows GPUs by that ending only, such as not nvidia.com/mig-1g.5gb.
        spec["rayStartParams"]["num-gpus"] = str(group.gpus)
    spec["template"] = worker_template(kubernetes, name, group)
    return spec


def _metadata(kubernetes: Kubernetes, name: str, component: str) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": kubernetes.namespace,
        "labels": labels_of(name, component, kubernetes.labels),
    }
    if kubernetes.annotations:
        metadata["annotations"] = dict(kubernetes.annotations)
    return metadata


def _queued(metadata: Manifest, kubernetes: Kubernetes) -> Manifest:
    if kubernetes.queue is None:
        return metadata
    return {**metadata, "labels": {**metadata["labels"], _QUEUE_LABEL: kubernetes.queue}}
