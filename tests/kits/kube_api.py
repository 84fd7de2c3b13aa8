"""A Kubernetes API server on 127.0.0.1: strict about what it is sent, and faulty where it is told to be."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kits.kube_store import ACCOUNT, EVERY, NAMESPACE, Admit, Json, RefusalError, Resource, Store
from kits.local_http import Handler, listening

TOKEN = "a-token-of-the-cluster-71c0"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}


@dataclass
class Fault:
    how: str
    """``500``, ``429``, or ``drop``: no answer at all."""
    method: str
    part: str
    times: int


@dataclass
class KubeApi:
    store: Store
    url: str
    namespace: str
    denied: set[tuple[str, str]] = field(default_factory=set)
    """Verb and plural (``rayjobs``, ``services/proxy``) that the token's holder may not."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str, Json]] = field(default_factory=list)
    proxied: dict[str, str] = field(default_factory=dict)
    """Where services really are, by ``NAME:PORT``."""
    proxied_headers: list[Mapping[str, str]] = field(default_factory=list)

    def fail(self, how: str, part: str, *, method: str = "GET", times: int = 1) -> None:
        self.faults.append(Fault(how, method, part, times))

    def fault_for(self, method: str, path: str) -> str | None:
        for fault in self.faults:
            if fault.times and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault.how
        return None

    def kubeconfig(self, path: Path) -> Path:
        text = f"""apiVersion: v1
kind: Config
current-context: fake
clusters: [{{name: fake, cluster: {{server: "{self.url}"}}}}]
users: [{{name: me, user: {{token: {TOKEN}}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: me, namespace: {self.namespace}}}}}]
"""
        path.write_text(text)
        return path


@contextmanager
def kube_api(*, namespace: str = "merges", admits: Mapping[str, Admit] | None = None) -> Iterator[KubeApi]:
    store = Store(dict(admits or {}))
    api = KubeApi(store, "", namespace)
    for name in ("default", namespace):
        store.create(NAMESPACE, "", NAMESPACE.body(name))
        store.create(ACCOUNT, name, ACCOUNT.body("default"))

    with listening(_Handler, server_api=api) as api.url:
        yield api


@dataclass(frozen=True, slots=True)
class _Asked:
    resource: Resource
    namespace: str
    name: str = ""
    sub: str = ""


class _Handler(Handler):
    server_api: KubeApi

    def serve(self) -> None:
        api, parts = self.server_api, urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        self.raw = self.rfile.read(length)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        with suppress(ValueError):
            api.asked.append((self.command, self.path, json.loads(self.raw or b"{}")))
        how = api.fault_for(self.command, self.path)
        if how == "drop":
            self.close_connection = True
            return
        try:
            if how is not None:
                raise RefusalError(int(how), "InternalError", "the server has a bad day")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise RefusalError(401, "Unauthorized", "Unauthorized")
            if (found := self._found(parts.path)) is not None:
                self._send(200, found)
                return
            asked = _parsed(parts.path, api.store)
            self._permitted(asked)
            result = getattr(self, f"_{_VERBS[self.command]}")(asked)
            if result is not None:
                self._send(201 if self.command == "POST" else 200, result)
        except RefusalError as refused:
            self._send(refused.code, refused.status())

    do_GET = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

    def _send(self, code: int, value: Json) -> None:
        self._send_bytes(code, json.dumps(value).encode(), "application/json")

    def _send_bytes(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _found(self, path: str) -> Json | None:
        if path.endswith("/selfsubjectaccessreviews"):
            asked = json.loads(self.raw)["spec"]["resourceAttributes"]
            plural = "/".join(filter(None, (asked["resource"], asked.get("subresource", ""))))
            allowed = (asked["verb"], plural) not in self.server_api.denied
            return {**json.loads(self.raw), "status": {"allowed": allowed}}
        group = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        absent = self.server_api.store.absent
        names = [each.plural for each in EVERY if each.api_version == group and each.group not in absent]
        resources = [{"name": name} for name in names]
        return {"kind": "APIResourceList", "groupVersion": group, "resources": resources} if names else None

    def _permitted(self, asked: _Asked) -> None:
        verb = _VERBS[self.command]
        if verb == "get" and not asked.name:
            verb = "list"
        sub = asked.sub.partition("/")[0]
        plural = "/".join(filter(None, (asked.resource.plural, sub)))
        if (verb, plural) in self.server_api.denied:
            what = f'{plural} is forbidden: User "me" cannot {verb} resource "{plural}"'
            where = f'in API group "{asked.resource.group}" in the namespace "{asked.namespace}"'
            raise RefusalError(403, "Forbidden", f"{what} {where}")

    def _get(self, asked: _Asked) -> Json | None:
        store, resource = self.server_api.store, asked.resource
        if asked.sub.startswith("proxy/"):
            return self._proxy(asked)
        if asked.name:
            return store.get(resource, asked.namespace, asked.name)
        found = [each for each in store.list(resource, asked.namespace) if self._selected(each)]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "items": found}

    def _create(self, asked: _Asked) -> Json | None:
        dry, given = self.query.get("dryRun") == "All", json.loads(self.raw)
        store = self.server_api.store
        return store.create(asked.resource, asked.namespace, given, strict=self._strict(), dry=dry)

    def _update(self, asked: _Asked) -> Json | None:
        given = json.loads(self.raw)
        return self.server_api.store.update(asked.resource, asked.namespace, given, strict=self._strict())

    def _delete(self, asked: _Asked) -> Json | None:
        how = json.loads(self.raw or b"{}").get("propagationPolicy") or self.query.get("propagationPolicy")
        return self.server_api.store.delete(
            asked.resource, asked.namespace, asked.name, foreground=how == "Foreground"
        )

    def _strict(self) -> bool:
        # Without it the real server takes the object, and leaves out the fields that it does not know.
        return self.query.get("fieldValidation") == "Strict"

    def _selected(self, value: Json) -> bool:
        """By one label, or one field."""
        label, _, wanted = self.query.get("labelSelector", "").partition("=")
        if label and value["metadata"].get("labels", {}).get(label) != wanted:
            return False
        field, _, wanted = self.query.get("fieldSelector", "").partition("=")
        found: Any = value
        for part in filter(None, field.split(".")):
            found = found.get(part, {})
        return not field or found == wanted

    def _proxy(self, asked: _Asked) -> None:
        api = self.server_api
        base = api.proxied.get(asked.name)
        if base is None:
            raise RefusalError(
                503, "ServiceUnavailable", f'no endpoints available for service "{asked.name}"'
            )
        headers = {key: value for key, value in self.headers.items() if key.lower() != "authorization"}
        api.proxied_headers.append(headers)
        for name in ("Host", "Content-Length", "Connection"):
            headers = {key: value for key, value in headers.items() if key.lower() != name.lower()}
        query = urlsplit(self.path).query
        address = f"{base}/{asked.sub.removeprefix('proxy/')}{'?' if query else ''}{query}"
        ask = urllib.request.Request(address, headers=headers)
        try:
            with urllib.request.urlopen(ask, timeout=20) as answer:
                self._send_bytes(answer.status, answer.read(), answer.headers.get_content_type())
        except urllib.error.HTTPError as error:
            with error:
                self._send_bytes(error.code, error.read(), error.headers.get_content_type())
        except OSError as error:
            raise RefusalError(503, "ServiceUnavailable", f"error trying to reach service: {error}") from None


def _parsed(path: str, store: Store) -> _Asked:
    parts = path.strip("/").split("/")
    group = "" if parts[0] == "api" else parts[1]
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
    namespace = ""
    if rest and rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    for each in EVERY:
        if rest and each.plural == rest[0] and each.api_version == version and group not in store.absent:
            name = rest[1] if len(rest) > 1 else ""
            return _Asked(each, namespace, name, "/".join(rest[2:]))
    raise RefusalError(404, "NotFound", "the server could not find the requested resource")
