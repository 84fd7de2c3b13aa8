"""The Kubernetes API server in plain JSON.

lightkube gives configuration, TLS and credentials, with plugins and rotating tokens. Requests are made here:
lightkube's own do not ask for strict validation, without which a server drops unknown fields, and do not
reach a service through the server's proxy."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from raymerge.deploy.targets.sending import AwayError
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


class AnswerError(OptionError):
    def __init__(self, url: str, code: int, message: str) -> None:
        super().__init__(_problem(url, code, message))
        self.code = code
        self.message = message
        """The server's own words."""


class BusyError(AnswerError):
    """The same request may succeed later."""


def _problem(url: str, code: int, message: str) -> Problem:
    match code:
        case 401:
            what = f"the cluster at {url} does not accept your credentials."
            remedy = "Log in to it again; `kubectl get rayjobs` has to work from here."
        case 403:
            what = f"the cluster at {url} does not allow it: {message}."
            remedy = "Ask an administrator for a role that allows it."
        case 404:
            what = f"the cluster at {url} has no such thing: {message}."
            remedy = "See that KubeRay is installed and the namespace exists."
        case _ if code in _PASSING:
            what = f"the cluster at {url} fails: {message}."
            remedy = "Try again later."
        case _:
            what = f"the cluster at {url} refuses it: {message}."
            remedy = "Change the profile; `raymerge cluster render` shows what was sent."
    return Problem(WHERE, what, remedy)


@dataclass(frozen=True, slots=True)
class Server:
    """Every method raises ``AnswerError`` for a refusal, and ``AwayError`` if the server does not answer."""

    client: Any
    """lightkube's HTTP client, with the server's address, TLS and credentials."""
    namespace: str
    url: str
    """For messages."""

    def read(self, kind: Kind, name: str) -> Json | None:
        return self._asked_if_there("GET", self._path(kind, name))

    def select(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Json]:
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in selectors.items() if value}
        items: list[Json] = self._asked("GET", self._path(kind), query=query)["items"]
        return items

    def create(self, kind: Kind, body: Json, *, dry_run: bool = False) -> Json:
        """Create an object; with ``dry_run`` only validate it. Unknown fields are refused, not dropped."""
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._asked("POST", self._path(kind), query=query, body=body)

    def replace(self, kind: Kind, body: Json) -> Json:
        query = {"fieldValidation": "Strict"}
        return self._asked("PUT", self._path(kind, body["metadata"]["name"]), query=query, body=body)

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object, if there is one, after its dependents."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        self._asked_if_there("DELETE", self._path(kind, name), body=options)

    def has(self, kind: Kind) -> bool:
        group = self._asked_if_there("GET", kind.base) or {"resources": []}
        return any(each["name"] == kind.plural for each in group["resources"])

    def permits(self, verb: str, kind: Kind) -> bool:
        asked = {"namespace": self.namespace, "verb": verb, "group": kind.group, "resource": kind.plural}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self._asked("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def service(self, name: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """What a service of the namespace answers through the server: status and text. ``name``:
        ``SERVICE:PORT``. ``headers``: the server takes ``Authorization`` for itself, and forwards the others.
        """
        address = f"/api/v1/namespaces/{self.namespace}/services/{name}/proxy/{path}"
        try:
            answer = self.client.request("GET", address, headers=dict(headers), timeout=_SECONDS)
        except _lost() as error:
            raise self._unreachable(error) from None
        return answer.status_code, answer.text

    def _path(self, kind: Kind, name: str = "") -> str:
        place = f"/namespaces/{self.namespace}" if kind.namespaced else ""
        return f"{kind.base}{place}/{kind.plural}{'/' if name else ''}{name}"

    def _asked_if_there(self, method: str, path: str, *, body: Json | None = None) -> Json | None:
        """None if there is no such thing."""
        try:
            return self._asked(method, path, body=body)
        except AnswerError as error:
            if error.code == 404:
                return None
            raise

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
                    raise self._refusal(answer)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _refusal(self, answer: Any) -> AnswerError:
        try:
            message = answer.json()["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.text.strip()[:500] or f"status {answer.status_code}"
        error = BusyError if answer.status_code in _PASSING else AnswerError
        return error(self.url, answer.status_code, message)

    def _unreachable(self, error: Exception) -> AwayError:
        what = f"the API server at {self.url} does not answer: {error or type(error).__name__}."
        remedy = "See that `kubectl get namespaces` works from here with the same configuration."
        return AwayError(Problem(WHERE, what, remedy))


def open_server(namespace: str | None) -> Server:
    """The server of the standard chain: ``KUBECONFIG``, ``~/.kube/config``, or this pod's. Raises
    OptionError: lightkube is not installed, or there is no usable configuration."""
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


def _lost() -> tuple[type[Exception], ...]:
    """Exceptions for no answer, or half of one."""
    import httpx2 as httpx
    from lightkube.core.exceptions import ConfigError

    # A plugin that gives no credentials is told of by the request that needs them.
    return (httpx.HTTPError, httpx.StreamError, ConfigError, OSError)
