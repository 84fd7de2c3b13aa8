"""The objects of a fake Kubernetes: versions, finalizers, owners, and what is refused."""

from __future__ import annotations

import copy
import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
Admit = Callable[[Json, bool], tuple[Json, list[str]]]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Resource:
    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    has_status: bool = False
    """Whether its status can only be changed by itself."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def body(self, name: str, *, owner: Json | None = None, **more: object) -> Json:
        metadata: Json = {"name": name, "labels": more.pop("labels", {})}
        if owner is not None:
            facts = {key: owner["metadata"][key] for key in ("name", "uid")}
            metadata["ownerReferences"] = [
                {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **facts}
            ]
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata, **more}


RAYJOB = Resource("ray.io", "v1", "RayJob", "rayjobs", has_status=True)
RAYCLUSTER = Resource("ray.io", "v1", "RayCluster", "rayclusters", has_status=True)
CONFIGMAP = Resource("", "v1", "ConfigMap", "configmaps")
POD = Resource("", "v1", "Pod", "pods", has_status=True)
EVENT = Resource("", "v1", "Event", "events")
SECRET = Resource("", "v1", "Secret", "secrets")
SERVICE = Resource("", "v1", "Service", "services")
NAMESPACE = Resource("", "v1", "Namespace", "namespaces", namespaced=False)
ACCOUNT = Resource("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
QUEUE = Resource("kueue.x-k8s.io", "v1beta1", "LocalQueue", "localqueues")
PRIORITY = Resource("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", namespaced=False)
RUNTIME_CLASS = Resource("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", namespaced=False)
EVERY = (
    *(RAYJOB, RAYCLUSTER, CONFIGMAP, POD, EVENT, SECRET, SERVICE, NAMESPACE, ACCOUNT, CLAIM, QUEUE),
    *(PRIORITY, RUNTIME_CLASS),
)


class RefusalError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Json:
        told = {"message": str(self), "reason": self.reason, "code": self.code}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", **told}


Key = tuple[str, str, str]


@dataclass
class Store:
    admits: dict[str, Admit] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    objects: dict[Key, Json] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        with self.lock:
            found = self.objects.get((resource.plural, namespace, name))
            if found is None:
                raise RefusalError(404, "NotFound", f'{_full(resource)} "{name}" not found')
            return copy.deepcopy(found)

    def list(self, resource: Resource, namespace: str = "") -> list[Json]:
        with self.lock:
            found = [
                value
                for (plural, place, _), value in sorted(self.objects.items())
                if plural == resource.plural and namespace in ("", place)
            ]
            return copy.deepcopy(found)

    def create(
        self, resource: Resource, namespace: str, given: Json, *, strict: bool = True, dry: bool = False
    ) -> Json:
        made = copy.deepcopy(given)
        meta = made.setdefault("metadata", {})
        name = meta.get("name", "")
        if not _NAME.fullmatch(name):
            raise RefusalError(
                422, "Invalid", f'{resource.kind} "{name}" is invalid: metadata.name: Invalid value: "{name}"'
            )
        if resource.namespaced and meta.setdefault("namespace", namespace) != namespace:
            raise RefusalError(400, "BadRequest", "the namespace of the object does not match the request")
        made = self._admitted(resource, made, strict=strict)
        with self.lock:
            if resource.namespaced and (NAMESPACE.plural, "", namespace) not in self.objects:
                raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
            if (resource.plural, namespace, name) in self.objects:
                raise RefusalError(409, "AlreadyExists", f'{_full(resource)} "{name}" already exists')
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "generation": 1}
            if resource.has_status:
                # What a client says of the status of a new object is not taken.
                made.pop("status", None)
            if dry:
                return made
            return self._put(resource, namespace, made)

    def update(self, resource: Resource, namespace: str, given: Json, *, strict: bool = True) -> Json:
        with self.lock:
            old = self.get(resource, namespace, given["metadata"]["name"])
            _same_version(resource, old, given)
            made = self._admitted(resource, copy.deepcopy(given), strict=strict)
            made["metadata"] |= {key: old["metadata"][key] for key in ("uid", "creationTimestamp")}
            if "deletionTimestamp" in old["metadata"]:
                made["metadata"]["deletionTimestamp"] = old["metadata"]["deletionTimestamp"]
            changed = old.get("spec") != made.get("spec")
            made["metadata"]["generation"] = old["metadata"]["generation"] + changed
            if resource.has_status:
                made.pop("status", None)
                if "status" in old:
                    made["status"] = old["status"]
            if "deletionTimestamp" in made["metadata"] and not made["metadata"].get("finalizers"):
                return self._remove(resource, namespace, made)
            return self._put(resource, namespace, made)

    def set_status(self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any]) -> Json:
        with self.lock:
            made = self.get(resource, namespace, name)
            merged = {**made.get("status", {}), **status}
            made["status"] = {key: value for key, value in merged.items() if value is not None}
            return self._put(resource, namespace, made)

    def delete(self, resource: Resource, namespace: str, name: str, *, foreground: bool = False) -> Json:
        with self.lock:
            made = self.get(resource, namespace, name)
            if foreground:
                self._remove_owned(made)
            if made["metadata"].get("finalizers"):
                now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                made["metadata"].setdefault("deletionTimestamp", now)
                return self._put(resource, namespace, made)
            return self._remove(resource, namespace, made)

    def _admitted(self, resource: Resource, made: Json, *, strict: bool) -> Json:
        if (made.get("apiVersion"), made.get("kind")) != (resource.api_version, resource.kind):
            raise RefusalError(400, "BadRequest", f"the object is no {resource.api_version} {resource.kind}")
        admit = self.admits.get(resource.kind)
        if admit is None:
            return made
        made, wrong = admit(made, strict)
        if wrong:
            name = made["metadata"]["name"]
            raise RefusalError(422, "Invalid", f'{resource.kind} "{name}" is invalid: {"; ".join(wrong)}')
        return made

    def _put(self, resource: Resource, namespace: str, made: Json) -> Json:
        made["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[resource.plural, namespace, made["metadata"]["name"]] = made
        return copy.deepcopy(made)

    def _remove(self, resource: Resource, namespace: str, made: Json) -> Json:
        made["metadata"]["resourceVersion"] = str(next(self._versions))
        del self.objects[resource.plural, namespace, made["metadata"]["name"]]
        self._remove_owned(made)
        return copy.deepcopy(made)

    def _remove_owned(self, owner: Json) -> None:
        for (plural, namespace, name), value in list(self.objects.items()):
            owners = value["metadata"].get("ownerReferences", ())
            if any(each["uid"] == owner["metadata"]["uid"] for each in owners):
                kind = next(each for each in EVERY if each.plural == plural)
                if (plural, namespace, name) in self.objects:
                    self.delete(kind, namespace, name)


def _full(resource: Resource) -> str:
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural


def _same_version(resource: Resource, old: Json, given: Json) -> None:
    version = given["metadata"].get("resourceVersion")
    if version not in (None, old["metadata"]["resourceVersion"]):
        name = given["metadata"]["name"]
        what = "the object has been modified; please apply your changes to the latest version and try again"
        raise RefusalError(
            409, "Conflict", f'Operation cannot be fulfilled on {_full(resource)} "{name}": {what}'
        )
