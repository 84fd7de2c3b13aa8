"""The Kubernetes API server in plain JSON; and the requirements of a RayJob.

lightkube gives configuration, TLS and credentials, with plugins and rotating tokens. Requests are made here:
lightkube's own do not ask for strict validation, without which a server drops unknown fields, and do not
reach a service through the server's proxy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from raymerge.deploy.manifests import QUEUE_LABEL
from raymerge.errors import OptionError, Problem

Json = dict[str, Any]

WHERE = "kubernetes"
_TRIES = 5
_FIRST_PAUSE = 0.2
"""Seconds before the first retry; doubled each time."""
_PASSING = frozenset({429, 500, 502, 503, 504})
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    """API group; "" for the core."""
    version: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


RAY_JOBS = Kind("ray.io", "v1", "rayjobs")
CONFIG_MAPS = Kind("", "v1", "configmaps")
PODS = Kind("", "v1", "pods")
EVENTS = Kind("", "v1", "events")
SECRETS = Kind("", "v1", "secrets")
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts")
CLAIMS = Kind("", "v1", "persistentvolumeclaims")
QUEUES = Kind("kueue.x-k8s.io", "v1beta1", "localqueues")
PRIORITIES = Kind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)
RUNTIME_CLASSES = Kind("node.k8s.io", "v1", "runtimeclasses", namespaced=False)


class AnswerError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.is_passing = code in _PASSING
        """Whether the same request may succeed later."""
        self.reason = reason
        """The server's reason: ``NotFound``, ``Forbidden``, ``AlreadyExists``."""


class AwayError(OptionError):
    """The server does not answer; it may later."""


@dataclass(frozen=True, slots=True)
class Server:
    client: Any
    """lightkube's HTTP client, with the server's address, TLS and credentials."""
    namespace: str
    url: str
    """For messages."""

    def read(self, kind: Kind, name: str) -> Json | None:
        try:
            return self._asked("GET", self._path(kind, name))
        except AnswerError as error:
            if error.code == 404:
                return None
            raise

    def select(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Json]:
        """The objects of a kind that selectors choose; raises AnswerError, OptionError."""
        chosen = {"labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in chosen.items() if value}
        found: list[Json] = self._asked("GET", self._path(kind), query=query)["items"]
        return found

    def create(self, kind: Kind, body: Json, *, dry_run: bool = False) -> Json:
        """Create an object; with ``dry_run`` only validate it. Unknown fields are refused, not dropped.

        Raises:
            AnswerError: it is refused.
            OptionError: the server does not answer.
        """
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._asked("POST", self._path(kind), query=query, body=body)

    def replace(self, kind: Kind, body: Json) -> Json:
        """Replace the object of this name; raises AnswerError, OptionError."""
        query = {"fieldValidation": "Strict"}
        return self._asked("PUT", self._path(kind, body["metadata"]["name"]), query=query, body=body)

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete an object after its dependents; False if there was none."""
        how = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        try:
            self._asked("DELETE", self._path(kind, name), body=how)
        except AnswerError as error:
            if error.code == 404:
                return False
            raise
        return True

    def has(self, kind: Kind) -> bool:
        try:
            listed = self._asked("GET", kind.base)
        except AnswerError as error:
            if error.code == 404:
                return False
            raise
        return any(each["name"] == kind.plural for each in listed["resources"])

    def permits(self, verb: str, kind: Kind, subresource: str = "") -> bool:
        asked = {"namespace": self.namespace, "verb": verb, "group": kind.group, "resource": kind.plural}
        if subresource:
            asked["subresource"] = subresource
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self._asked("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def service(
        self, name: str, path: str, headers: Mapping[str, str], *, method: str = "GET"
    ) -> tuple[int, str]:
        """An HTTP request to a service of the namespace through the server; status and text.

        Args:
            name: ``SERVICE:PORT``.
            headers: the server takes ``Authorization`` for itself, and forwards the others.
        """
        address = f"/api/v1/namespaces/{self.namespace}/services/{name}/proxy/{path}"
        try:
            answer = self.client.request(method, address, headers=dict(headers), timeout=_SECONDS)
        except _lost() as error:
            raise self._unreachable(error) from None
        return answer.status_code, answer.text

    def _path(self, kind: Kind, name: str = "") -> str:
        place = f"/namespaces/{self.namespace}" if kind.namespaced else ""
        return f"{kind.base}{place}/{kind.plural}{'/' if name else ''}{name}"

    def _asked(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        pause = _FIRST_PAUSE
        for left in reversed(range(_TRIES)):
            try:
                answer = self.client.request(method, path, params=query, json=body, timeout=_SECONDS)
            except _lost() as error:
                if not left:
                    raise self._unreachable(error) from None
            else:
                if answer.is_success:
                    value: Json = answer.json()
                    return value
                if not left or answer.status_code not in _PASSING:
                    raise _refusal(answer)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: Exception) -> AwayError:
        what = f"the API server at {self.url} does not answer: {error or type(error).__name__}."
        remedy = "See that `kubectl get namespaces` works from here with the same configuration."
        return AwayError(Problem(WHERE, what, remedy))


def open_server(namespace: str | None) -> Server:
    """The server of the standard chain: ``KUBECONFIG``, ``~/.kube/config``, or this pod's.

    Raises:
        OptionError: lightkube is not installed, or there is no usable configuration.
    """
    try:
        from lightkube.config.client_adapter import Client, ConnectionParams
        from lightkube.core.exceptions import ConfigError
    except ImportError:
        what = "the target kubernetes needs lightkube, which is not installed."
        raise OptionError(Problem(WHERE, what, "Run `pip install 'raymerge[kubernetes]'`.")) from None
    try:
        config = _configuration()
        client = Client(config, ConnectionParams())
    except (ConfigError, OSError, ValueError, KeyError, AssertionError, yaml.YAMLError) as error:
        what = f"no configuration of a cluster can be used: {' '.join(str(error).split())}."
        remedy = "Set KUBECONFIG to one that `kubectl` works with."
        raise OptionError(Problem(WHERE, what, remedy)) from None
    # Requests are seconds apart: a connection that is kept is one that may be dead by then.
    client.headers["Connection"] = "close"
    return Server(client, namespace or config.namespace, config.cluster.server)


def _configuration() -> Any:
    from lightkube.config.kubeconfig import KubeConfig

    # As kubectl has it: what is named comes before what the pod has of its own.
    named = os.environ.get("KUBECONFIG", "")
    if os.pathsep in named:
        raise ValueError("KUBECONFIG names several files; `kubectl config view --flatten` makes one of them")
    return (KubeConfig.from_file(named) if named else KubeConfig.from_env()).get()


def _refusal(answer: Any) -> AnswerError:
    try:
        status = answer.json()
        reason, message = status["reason"], status["message"]
    except (ValueError, KeyError, TypeError):
        reason, message = "Unknown", answer.text.strip()[:500] or f"status {answer.status_code}"
    return AnswerError(answer.status_code, reason, message)


def _lost() -> tuple[type[Exception], ...]:
    """Exceptions for no answer, or half of one."""
    import httpx2 as httpx
    from lightkube.core.exceptions import ConfigError

    # A plugin that gives no credentials is told of by the request that needs them.
    return (httpx.HTTPError, httpx.StreamError, ConfigError, OSError)


_INSTALL = (
    "Have an administrator run `helm install kuberay-operator kuberay/kuberay-operator`, after "
    "`helm repo add kuberay https://ray-project.github.io/kuberay-helm/`."
)
_NOUNS = {
    SERVICE_ACCOUNTS: ("service account", "service_account"),
    SECRETS: ("secret", "the secrets"),
    CLAIMS: ("persistent volume claim", "the volumes"),
    CONFIG_MAPS: ("config map", "the volumes"),
    QUEUES: ("Kueue queue", "queue"),
    PRIORITIES: ("priority class", "priority_class"),
    RUNTIME_CLASSES: ("runtime class", "runtime_class"),
}
_ACTS = (("create", RAY_JOBS), ("get", RAY_JOBS), ("list", RAY_JOBS), ("create", CONFIG_MAPS))


@dataclass(frozen=True, slots=True)
class Need:
    kind: Kind
    name: str


def needs(job: Json, own: str) -> list[Need]:
    """The objects that a RayJob names, each once, sorted by kind and name.

    Args:
        own: the config map that comes with it.
    """
    cluster = job["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"]]
    templates += [group["template"] for group in cluster.get("workerGroupSpecs", ())]
    found = {need for template in templates for need in _of_pod(template["spec"])}
    if secret := cluster.get("authOptions", {}).get("secretName"):
        found.add(Need(SECRETS, secret))
    if queue := job["metadata"].get("labels", {}).get(QUEUE_LABEL):
        found.add(Need(QUEUES, queue))
    found.discard(Need(CONFIG_MAPS, own))
    return sorted(found, key=lambda need: (need.kind.plural, need.name))


def missing(server: Server, job: Json, own: str) -> Iterator[Problem]:
    """Everything that a RayJob lacks in a namespace.

    Raises:
        OptionError: the server does not answer.
    """
    if not server.has(RAY_JOBS):
        what = f"the cluster at {server.url} has no KubeRay: it does not know RayJobs (ray.io/v1)."
        yield Problem(WHERE, what, _INSTALL)
    try:
        if server.read(NAMESPACES, server.namespace) is None:
            what = f"the cluster at {server.url} has no namespace {server.namespace}."
            remedy = f"Run `kubectl create namespace {server.namespace}`, or name another in the profile."
            yield Problem(WHERE, what, remedy)
            return
    except AnswerError as error:
        # Somebody who may use one namespace may often not look at namespaces as such.
        if error.code != 403:
            raise
    yield from _forbidden(server)
    for need in needs(job, own):
        yield from _absent(server, need)


def _forbidden(server: Server) -> Iterator[Problem]:
    for verb, kind in _ACTS:
        if not server.permits(verb, kind):
            what = f"your credentials may not {verb} {kind.plural} in the namespace {server.namespace}."
            yield Problem(WHERE, what, "Ask an administrator for a role that allows it.")


def _absent(server: Server, need: Need) -> Iterator[Problem]:
    noun, field = _NOUNS[need.kind]
    try:
        if server.read(need.kind, need.name) is not None:
            return
    except AnswerError as error:
        # What may not be looked at may well be there; its pods will tell.
        if error.code == 403:
            return
        raise
    what = f"the namespace {server.namespace} has no {noun} {need.name}."
    yield Problem(WHERE, what, f"Create it, or change {field} of the profile.")


def _of_pod(spec: Json) -> Iterator[Need]:
    if account := spec.get("serviceAccountName"):
        yield Need(SERVICE_ACCOUNTS, account)
    if priority := spec.get("priorityClassName"):
        yield Need(PRIORITIES, priority)
    if runtime_class := spec.get("runtimeClassName"):
        yield Need(RUNTIME_CLASSES, runtime_class)
    for secret in spec.get("imagePullSecrets", ()):
        yield Need(SECRETS, secret["name"])
    for volume in spec.get("volumes", ()):
        yield from _of_volume(volume)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        yield from _of_environment(container)


def _of_volume(volume: Json) -> Iterator[Need]:
    if "persistentVolumeClaim" in volume:
        yield Need(CLAIMS, volume["persistentVolumeClaim"]["claimName"])
    if "secret" in volume and not volume["secret"].get("optional"):
        yield Need(SECRETS, volume["secret"]["secretName"])
    if "configMap" in volume and not volume["configMap"].get("optional"):
        yield Need(CONFIG_MAPS, volume["configMap"]["name"])


def _of_environment(container: Json) -> Iterator[Need]:
    for source in container.get("envFrom", ()):
        if "secretRef" in source and not source["secretRef"].get("optional"):
            yield Need(SECRETS, source["secretRef"]["name"])
        if "configMapRef" in source and not source["configMapRef"].get("optional"):
            yield Need(CONFIG_MAPS, source["configMapRef"]["name"])
    for variable in container.get("env", ()):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield Need(SECRETS, reference["name"])
