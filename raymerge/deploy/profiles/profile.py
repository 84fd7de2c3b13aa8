"""Profiles as a whole: read, and all faults reported at once; what no cluster could satisfy is one."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import PrivateAttr, ValidationError, model_validator

from raymerge.deploy.profiles import sections
from raymerge.deploy.targets import TARGETS
from raymerge.documents import positions
from raymerge.documents.fields import (
    DocumentKind,
    Fault,
    FaultError,
    FieldPath,
    MapEntry,
    by,
    choice_of,
    faults_of,
)
from raymerge.documents.grammar import Grammar, accepts, given
from raymerge.documents.json_schema import DIALECT, definitions
from raymerge.errors import Problem, ProfileError
from raymerge.options import STEPS_WANTED
from raymerge.storage.addresses import NO_OPTIONS, as_path, is_object_place, is_remote, shown


@accepts({"enum": [*TARGETS]})
def _read_target(value: object) -> str:
    # The table as it is now: others may add theirs.
    return choice_of(*TARGETS)(value)


class Profile(MapEntry):
    """Where and how to run. Nothing in it changes a byte of a result."""

    target: Annotated[str, by(_read_target)] = "local"
    output: sections.Place | None = None
    run: sections.RunSettings = sections.RunSettings()
    storage: sections.Storage = NO_OPTIONS
    cluster: sections.ClusterSection = sections.ClusterSection()
    job: sections.JobSection = sections.JobSection()
    kubernetes: sections.Kubernetes | None = None

    grammar: ClassVar[Grammar] = {
        "if": {"required": ["target"], "properties": {"target": {"const": "kubernetes"}}},
        "then": given("kubernetes"),
    }

    _places: positions.Places = PrivateAttr(default_factory=lambda: positions.Places("profile"))

    def model_post_init(self, context: Any, /) -> None:
        """Keep the positions in the file; equality ignores them."""
        if isinstance(context, positions.Places):
            self._places = context

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        if data.get("target") == "kubernetes" and data.get("kubernetes") is None:
            what = "the target kubernetes needs the section 'kubernetes', which is missing."
            yield Fault(("target",), what, "Add it: at least image, ray_version and workers.")

    @model_validator(mode="after")
    def _between(self) -> Self:
        if faults := list(faults_between(self.kubernetes, self.run, self.output, self.target)):
            raise FaultError(faults)
        return self

    def where(self, *path: str | int) -> str:
        """The position of a value: ``where("kubernetes", "image")`` is ``profile.yml:7:18``."""
        return self._places.at(path)

    def for_inside(self, output: str, *, autoscaling: bool | None = None) -> Profile:
        """The profile for the driver inside the cluster. ``autoscaling``: whether the cluster adds nodes;
        None: as ``cluster`` says."""
        grows = self.cluster.autoscaling if autoscaling is None else autoscaling
        cluster = sections.ClusterSection(address="auto", autoscaling=grows)
        return Profile(target="cluster", output=output, run=self.run, storage=self.storage, cluster=cluster)

    def as_yaml(self) -> str:
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return positions.yaml_text(plain)


PROFILE = DocumentKind(
    noun="profile",
    opening="target: ...",
    error=ProfileError,
    about_secrets=(
        "A profile is sent to the cluster, for all there to read: take it out and make it invalid where it "
        "came from. Credentials come from the environment of each machine, its role, or a Kubernetes secret."
    ),
)


def profile_schema() -> dict[str, Any]:
    """JSON Schema of profiles."""
    defs = definitions(Profile)
    return {"$schema": DIALECT, "title": "raymerge profile", **defs.pop(Profile.__name__), "$defs": defs}


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Raises ProfileError: all faults, each with ``file:line:column`` and a remedy."""
    name = os.fspath(path)
    return parse_profile(positions.read_file(name, PROFILE), name)


def parse_profile(text: str, name: str = "profile") -> Profile:
    """Raises ProfileError: all faults; ``name`` stands before line and column."""
    first, *others = positions.split_documents(text, name, PROFILE)
    if others:
        what = f"a second profile starts here, the file has {len(others) + 1}; one is expected."
        raise ProfileError(Problem(positions.spot(name, others[0].mark), what, "Keep one profile in it."))
    document = positions.read_document(first, name, PROFILE)
    return _validate(document.data, document.places, list(document.faults))


def profile_from_mapping(data: Mapping[str, Any]) -> Profile:
    """Raises ProfileError: all faults, by path: ``profile: kubernetes.image``."""
    return _validate(data, positions.Places("profile"), [])


def _validate(data: Mapping[str, Any], places: positions.Places, faults: list[Fault]) -> Profile:
    if secret := list(positions.secrets_in(data, PROFILE)):
        # Alone, for messages on the same values would repeat them.
        raise ProfileError(places.problems(secret))
    try:
        profile = Profile.model_validate(data, context=places)
    except ValidationError as error:
        # What YAML could not give is missing below: one fault for one cause.
        broken = {fault.path for fault in faults}
        faults = [*faults, *(fault for fault in faults_of(error) if fault.path not in broken)]
    if faults:
        raise ProfileError(places.problems(faults))
    return profile


CONFIG_PATH = "/etc/raymerge"

_RESERVED_PATHS = (CONFIG_PATH, "/dev/shm", "/tmp/ray")
_RESERVED_VOLUMES = ("raymerge-config", "shared-mem", "ray-logs")
_RESERVED_ENV = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_CLUSTER_NAME", "RAY_IP", "FQ_RAY_IP", "RAY_PORT")
_RESERVED_LABELS = ("ray.io/", "raymerge.io/", "app.kubernetes.io/", "kueue.x-k8s.io/queue-name")
_MOST_QUEUED_GROUPS = 7
_TOKENS_SINCE = (2, 52)


def faults_between(
    kubernetes: sections.Kubernetes | None, run: sections.RunSettings, output: str | None, target: str
) -> Iterator[Fault]:
    if target == "job":
        yield from steps_faults(run, output or "", 1)
    if kubernetes is None:
        return
    yield from _named_twice(kubernetes)
    yield from _versions(kubernetes)
    yield from _queued(kubernetes)
    yield from _names_taken(kubernetes)
    for index, group in enumerate(kubernetes.workers):
        yield from _bounds(group, ("kubernetes", "workers", index), kubernetes.autoscaling.enabled)
    for path, volumes in _mounted(kubernetes):
        yield from _mounts(volumes, path)
    if target == "kubernetes":
        yield from _holdable(kubernetes, run)
        if output is not None:
            yield from _out_of_reach(kubernetes, as_path(output))
        yield from _steps_out_of_reach(kubernetes, run)


def _out_of_reach(kubernetes: sections.Kubernetes, output: str) -> Iterator[Fault]:
    """An output place of pods has to be an address, or on a volume that all share."""
    if is_object_place(output):
        return
    remedy = "Write s3://bucket/dir, or an absolute path on a volume."
    if is_remote(output):
        what = f"{shown(output)} can be read from, and not written to."
    elif not output.startswith("/"):
        what = f"'{output}' is relative to a directory of this machine, which pods do not have."
    elif not _is_shared(kubernetes, output):
        what = f"{output} is on no volume that every pod mounts, shared and writable."
        remedy = "Add one (pvc, or host_path of a shared file system), or write s3://bucket/dir."
    else:
        return
    yield Fault(("output",), what, remedy)


def steps_faults(run: sections.RunSettings, output: str, num_merges: int) -> Iterator[Fault]:
    """Intermediate results of a remote run need a shared place; recipes do not tell of stages."""
    if run.steps is None:
        if num_merges > 1 and is_object_place(output):
            yield Fault(("output",), *STEPS_WANTED)
    elif not run.steps.startswith("/"):
        what = f"'{run.steps}' is relative to a directory of this machine, which the cluster does not have."
        remedy = "Write its absolute path as the cluster sees it, on a disk that all of its machines share."
        yield Fault(("run", "steps"), what, remedy)


def _steps_out_of_reach(kubernetes: sections.Kubernetes, run: sections.RunSettings) -> Iterator[Fault]:
    yield from steps_faults(run, "", 1)
    is_absolute = run.steps is not None and run.steps.startswith("/")
    if is_absolute and not _is_shared(kubernetes, f"{run.steps}/x"):
        what = f"{run.steps} is on no volume that every pod mounts, shared and writable."
        yield Fault(("run", "steps"), what, "Add one: pvc, or host_path of a shared file system.")


def _is_shared(kubernetes: sections.Kubernetes, place: str) -> bool:
    holders = [_volume_of(volumes, place) for _, volumes in _mounted(kubernetes)]
    return all(each is not None and each.is_shared and each.is_writable for each in holders)


def is_mounted(kubernetes: sections.Kubernetes, place: str) -> bool:
    return all(_volume_of(volumes, place) is not None for _, volumes in _mounted(kubernetes))


def _volume_of(volumes: tuple[sections.Volume, ...], place: str) -> sections.Volume | None:
    """The innermost volume that contains a path, mount points themselves excluded."""
    holders = [each for each in volumes if place.startswith(each.mount_path + "/")]
    return max(holders, key=lambda each: len(each.mount_path), default=None)


def _mounted(kubernetes: sections.Kubernetes) -> Iterator[tuple[FieldPath, tuple[sections.Volume, ...]]]:
    yield ("kubernetes", "volumes"), kubernetes.volumes
    for index, group in enumerate(kubernetes.workers):
        if group.volumes is not None:
            yield ("kubernetes", "workers", index, "volumes"), group.volumes


def _named_twice(kubernetes: sections.Kubernetes) -> Iterator[Fault]:
    if not kubernetes.workers:
        yield Fault(("kubernetes", "workers"), "there is no group of workers.", "Add one.")
    names = [group.name for group in kubernetes.workers]
    for name, count in Counter(names).items():
        if count > 1:
            path = ("kubernetes", "workers", names.index(name), "name")
            yield Fault(path, f"two groups are named '{name}'.", "Name one of them otherwise.")


def _versions(kubernetes: sections.Kubernetes) -> Iterator[Fault]:
    major, minor = (int(part) for part in kubernetes.ray_version.split(".")[:2])
    if kubernetes.token_auth and (major, minor) < _TOKENS_SINCE:
        what = f"Ray {kubernetes.ray_version} knows no tokens; they came with 2.52."
        yield Fault(("kubernetes", "ray_version"), what, "Take a newer image, or write token_auth: false.")
    if kubernetes.token_secret is not None and not kubernetes.token_auth:
        what = "a secret for the token is named, but token_auth is false."
        yield Fault(("kubernetes", "token_secret"), what, "Remove one of the two.")


def _queued(kubernetes: sections.Kubernetes) -> Iterator[Fault]:
    if kubernetes.queue is None:
        return
    path: FieldPath = ("kubernetes", "queue")
    if kubernetes.autoscaling.enabled:
        what = "Kueue reserves what a run needs before it begins, and autoscaling changes that."
        yield Fault(path, what, "Write autoscaling: {enabled: false} and each group's replicas.")
    if len(kubernetes.workers) > _MOST_QUEUED_GROUPS:
        groups = len(kubernetes.workers)
        what = f"Kueue takes at most {_MOST_QUEUED_GROUPS} groups of workers; there are {groups}."
        yield Fault(path, what, "Join groups, or write no queue.")


def _names_taken(kubernetes: sections.Kubernetes) -> Iterator[Fault]:
    for name in kubernetes.env:
        if name in _RESERVED_ENV:
            yield Fault(("kubernetes", "env", name), f"'{name}' is set by the operator.", "Remove it.")
    labels: list[FieldPath] = [("kubernetes", "labels", key) for key in kubernetes.labels]
    for index, group in enumerate(kubernetes.workers):
        labels += [("kubernetes", "workers", index, "labels", key) for key in group.labels]
    for path in labels:
        if str(path[-1]).startswith(_RESERVED_LABELS):
            yield Fault(path, f"'{path[-1]}' is set by raymerge or the operator.", "Remove it.")


def _bounds(group: sections.WorkerGroup, path: FieldPath, is_scaled: bool) -> Iterator[Fault]:
    if not is_scaled:
        for key in ("min_replicas", "max_replicas", "idle_timeout_seconds"):
            if getattr(group, key) is not None:
                what = f"{key} has no meaning without autoscaling."
                yield Fault((*path, key), what, "Write autoscaling: {enabled: true}, or remove it.")
        if group.replicas == 0:
            what = "the group has no pods, and without autoscaling none will come."
            yield Fault((*path, "replicas"), what, "Write 1 or more, or remove the group.")
        return
    low, high = group.min_replicas or 0, most_replicas(group, is_scaled=True)
    if not low <= group.replicas <= high:
        what = f"{group.replicas} replicas are not from {low} (min_replicas) to {high} (max_replicas)."
        yield Fault((*path, "replicas"), what, "Write min_replicas <= replicas <= max_replicas.")
    if high == 0:
        what = "the group may never have a pod: max_replicas is not given, and replicas is 0."
        yield Fault((*path, "replicas"), what, "Write max_replicas.")


def most_replicas(group: sections.WorkerGroup, *, is_scaled: bool) -> int:
    return group.max_replicas if is_scaled and group.max_replicas is not None else group.replicas


def _mounts(volumes: tuple[sections.Volume, ...], path: FieldPath) -> Iterator[Fault]:
    for index, volume in enumerate(volumes):
        before, at_mount, at_name = volumes[:index], (*path, index, "mount_path"), (*path, index, "name")
        if any(volume.mount_path == each.mount_path for each in before):
            what = f"two volumes are mounted at {volume.mount_path}."
            yield Fault(at_mount, what, "Mount one of them elsewhere.")
        if any(volume.name == each.name for each in before):
            yield Fault(at_name, f"two volumes are named '{volume.name}'.", "Rename one.")
        if volume.name in _RESERVED_VOLUMES:
            what = f"'{volume.name}' is the name of a volume that every pod has."
            yield Fault(at_name, what, "Name it otherwise.")
        for reserved in _RESERVED_PATHS:
            if _is_below(reserved, volume.mount_path) or _is_below(volume.mount_path, reserved):
                what = f"a volume at {volume.mount_path} would hide {reserved}, which every pod needs."
                yield Fault(at_mount, what, "Mount it elsewhere, like /mnt/models.")


def _is_below(path: str, above: str) -> bool:
    return f"{path}/".startswith(f"{above}/")


def _holdable(kubernetes: sections.Kubernetes, run: sections.RunSettings) -> Iterator[Fault]:
    is_scaled = kubernetes.autoscaling.enabled
    threads = run.threads or 1
    if run.device == "cuda" and not any(group.gpus for group in kubernetes.workers):
        what = "cuda is asked for, but no group of workers has GPUs."
        yield Fault(("run", "device"), what, "Write gpus: 1 or more in a group, or device: auto.")
        return
    # The operator gives Ray whole processors, rounded up.
    capacities = [math.ceil(sections.amount(group.cpu)) // threads for group in kubernetes.workers]
    if run.device == "cuda":
        capacities = [
            min(group.gpus, each) for group, each in zip(kubernetes.workers, capacities, strict=True)
        ]
    counts = [most_replicas(group, is_scaled=is_scaled) for group in kubernetes.workers]
    held = sum(capacity * count for capacity, count in zip(capacities, counts, strict=True))
    if capacities and not any(capacities):
        what = f"no pod has processors for a worker of {threads} thread{'' if threads == 1 else 's'}."
        yield Fault(("kubernetes", "workers"), what, "Give the groups more cpu, or write fewer threads.")
    elif run.workers is not None and run.workers > held:
        of = f" of {threads} threads" if threads > 1 else ""
        what = f"{run.workers} workers{of} are asked for, but the pods hold at most {held}."
        yield Fault(("run", "workers"), what, "Ask for fewer, or give the groups more replicas, cpu or gpus.")
    sizes = [sections.amount(group.memory) for group in kubernetes.workers]
    if run.memory is not None and sizes and run.memory >= max(sizes):
        what = f"a worker may use {run.memory} bytes, but no pod has more than {max(sizes)}."
        yield Fault(("run", "memory"), what, "Write less, or give the groups more memory.")
