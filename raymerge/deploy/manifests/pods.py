"""Templates of pods, and manifests as YAML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import yaml

from raymerge.deploy.manifests.names import pod_labels
from raymerge.deploy.profiles.feasible import CONFIG_PATH
from raymerge.deploy.profiles.kubernetes import Head, Kubernetes, Toleration, Volume, WorkerGroup

Manifest: TypeAlias = dict[str, Any]

_CONFIG_VOLUME = "raymerge-config"


def head_template(kubernetes: Kubernetes, name: str, config: str | None) -> Manifest:
    """The pod of Ray's head, which runs the driver.

    Args:
        config: config map with recipe and profile; None: there is none.
    """
    head = kubernetes.head
    container = _container(kubernetes, "ray-head", _resources(head, {}), kubernetes.volumes)
    spec = _spec(kubernetes, head, container, kubernetes.volumes)
    # The autoscaler beside the head asks the API server for pods.
    spec["automountServiceAccountToken"] = kubernetes.autoscaling.enabled
    if kubernetes.submission_mode == "SidecarMode":
        spec["restartPolicy"] = "Never"
    if config is not None:
        mounts = container.setdefault("volumeMounts", [])
        mounts.append({"name": _CONFIG_VOLUME, "mountPath": CONFIG_PATH, "readOnly": True})
        volumes = spec.setdefault("volumes", [])
        volumes.append({"name": _CONFIG_VOLUME, "configMap": {"name": config}})
    return {"metadata": _metadata(kubernetes, name, "head"), "spec": spec}


def worker_template(kubernetes: Kubernetes, name: str, group: WorkerGroup) -> Manifest:
    """A pod of a group of workers."""
    volumes = kubernetes.volumes if group.volumes is None else group.volumes
    gpus = {group.gpu_resource: str(group.gpus)} if group.gpus else {}
    container = _container(kubernetes, "ray-worker", _resources(group, gpus), volumes)
    spec = _spec(kubernetes, group, container, volumes)
    spec["automountServiceAccountToken"] = False
    return {"metadata": _metadata(kubernetes, name, "worker"), "spec": spec}


def container_security() -> Manifest:
    """What a container may do: nothing beyond its user's rights."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _metadata(kubernetes: Kubernetes, name: str, component: str) -> Manifest:
    metadata: Manifest = {"labels": pod_labels(name, component, kubernetes.labels)}
    if kubernetes.annotations:
        metadata["annotations"] = dict(kubernetes.annotations)
    return metadata


def _spec(
    kubernetes: Kubernetes, pod: Head | WorkerGroup, container: Manifest, volumes: Sequence[Volume]
) -> Manifest:
    spec: Manifest = {}
    if kubernetes.autoscaling.enabled:
        spec["restartPolicy"] = "Never"
    if kubernetes.service_account is not None:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.priority_class is not None:
        spec["priorityClassName"] = kubernetes.priority_class
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in kubernetes.image_pull_secrets]
    # The pod's first process then reaps what is orphaned: a dead raylet that nobody reaps keeps its workers.
    spec["shareProcessNamespace"] = True
    spec["terminationGracePeriodSeconds"] = kubernetes.termination_grace_seconds
    if pod.node_selector:
        spec["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        spec["tolerations"] = [_toleration(each) for each in pod.tolerations]
    if pod.affinity:
        spec["affinity"] = dict(pod.affinity)
    if pod.runtime_class is not None:
        spec["runtimeClassName"] = pod.runtime_class
    spec["securityContext"] = _pod_security(kubernetes)
    spec["containers"] = [container]
    if volumes:
        spec["volumes"] = [{"name": each.name, **_source(each)} for each in volumes]
    return spec


def _container(kubernetes: Kubernetes, name: str, resources: Manifest, volumes: Sequence[Volume]) -> Manifest:
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **kubernetes.env}
    container: Manifest = {
        "name": name,
        "image": kubernetes.image,
        "imagePullPolicy": kubernetes.image_pull_policy,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
    }
    if kubernetes.env_from_secrets:
        container["envFrom"] = [{"secretRef": {"name": each}} for each in kubernetes.env_from_secrets]
    container["resources"] = resources
    container["securityContext"] = container_security()
    if volumes:
        container["volumeMounts"] = [_mount(each) for each in volumes]
    return container


def _resources(pod: Head | WorkerGroup, gpus: Manifest) -> Manifest:
    amounts = {"cpu": pod.cpu, "memory": pod.memory}
    return {"limits": {**amounts, **gpus}, "requests": {**amounts, **gpus}}


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


def _toleration(toleration: Toleration) -> Manifest:
    fields = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _mount(volume: Volume) -> Manifest:
    mount: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.sub_path is not None:
        mount["subPath"] = volume.sub_path
    return mount if volume.is_writable else {**mount, "readOnly": True}


def _source(volume: Volume) -> Manifest:
    if volume.pvc is not None:
        claim: Manifest = {"claimName": volume.pvc}
        return {"persistentVolumeClaim": {**claim, "readOnly": True} if volume.read_only else claim}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    directory = volume.empty_dir
    fields = {"sizeLimit": directory and directory.size_limit, "medium": directory and directory.medium}
    return {"emptyDir": {key: value for key, value in fields.items() if value is not None}}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _block(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def as_yaml(manifests: Iterable[Manifest]) -> str:
    """The documents, one after the other, with their keys in the order in which they were made."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=110
    )
