"""A real API server of Kubernetes over a real etcd; gone when the block is left. No node, and no operator."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kits.crd import kept
from kits.ray_head import free_ports

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "openssl")
ADMIN, USER, NOBODY = "admin", "user", "nobody"
_GROUPS = {ADMIN: "system:masters", USER: "people", NOBODY: "people"}
_SECONDS = 90.0
_INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KubeCluster:
    root: Path
    url: str

    def kubeconfig(self, user: str, namespace: str = "default") -> Path:
        return self.kubeconfig_of(f"{user}-token", namespace)

    def kubeconfig_of(self, token: str, namespace: str) -> Path:
        named = {"cluster": "real", "user": "me", "namespace": namespace}
        cluster = {"server": self.url, "certificate-authority": str(self.root / "apiserver.crt")}
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "real", "context": named}],
        }
        path = self.root / f"config-{abs(hash((token, namespace)))}"
        path.write_text(json.dumps(body))
        return path

    def kubectl(self, *arguments: str, user: str = ADMIN, given: str | None = None) -> str:
        command = ["kubectl", f"--kubeconfig={self.kubeconfig(user)}", *arguments]
        settings = {**os.environ, "HOME": str(self.root)}
        done = subprocess.run(command, input=given, env=settings, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def ask(self, method: str, path: str, body: Json | None = None, **headers: str) -> Json:
        """An answer of the server, asked by its administrator."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {ADMIN}-token", "Content-Type": "application/json", **headers},
        )
        context = ssl.create_default_context(cafile=str(self.root / "apiserver.crt"))
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                found: Json = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:2000]}") from error

    def set_status(self, namespace: str, job: str, status: Mapping[str, Any]) -> None:
        """What the operator writes into a RayJob."""
        path = f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs/{job}/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        self.ask("PATCH", path, {"status": dict(status)}, **headers)


@contextmanager
def kube_cluster() -> Iterator[KubeCluster]:
    """With KubeRay's definitions, and the controllers of owners, namespaces, quotas and service accounts."""
    root = Path(tempfile.mkdtemp(prefix="rmkube-", dir="/tmp"))
    store, peers, port, own = free_ports(4)
    cluster = KubeCluster(root, f"https://127.0.0.1:{port}")
    key, tokens = root / "accounts.key", root / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens.write_text("".join(f'{name}-token,{name},{name},"{group}"\n' for name, group in _GROUPS.items()))
    etcd = {
        "data-dir": root / "etcd",
        "listen-client-urls": f"http://127.0.0.1:{store}",
        "advertise-client-urls": f"http://127.0.0.1:{store}",
        "listen-peer-urls": f"http://127.0.0.1:{peers}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peers}",
        "initial-cluster": f"default=http://127.0.0.1:{peers}",
    }
    apiserver = {
        "etcd-servers": f"http://127.0.0.1:{store}",
        "bind-address": "127.0.0.1",
        "secure-port": port,
        "cert-dir": root,
        "service-cluster-ip-range": "10.96.0.0/24",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": key,
        "service-account-signing-key-file": key,
        "token-auth-file": tokens,
        "authorization-mode": "RBAC",
        "endpoint-reconciler-type": "none",
    }
    controllers = {
        "kubeconfig": cluster.kubeconfig(ADMIN),
        "controllers": "garbagecollector,namespace,serviceaccount,serviceaccount-token,resourcequota",
        "service-account-private-key-file": key,
        "use-service-account-credentials": "false",
        "leader-elect": "false",
        "secure-port": own,
        "bind-address": "127.0.0.1",
        "cert-dir": root / "controllers",
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.enter_context(_running(root, "etcd", etcd))
        stack.enter_context(_running(root, "kube-apiserver", apiserver))
        # Ready, and with the roles that it makes itself.
        await_answer(cluster, "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:discovery")
        stack.enter_context(_running(root, "kube-controller-manager", controllers))
        for kind in kept():
            cluster.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition(kind))
        for kind in kept():
            await_answer(cluster, f"/apis/ray.io/v1/{kind.lower()}s")
        yield cluster


def definition(kind: str) -> Json:
    """KubeRay's definition of a kind of its objects, as far as ``kits.crd`` has it."""
    plural = f"{kind.lower()}s"
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": _structural(kept()[kind])},
    }
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {"group": "ray.io", "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _structural(node: Any) -> Any:
    """With the word that a server wants at what may be a number or a text, which the copy has not, and
    without defaults that are empty texts, which a server as old as Debian's takes for none."""
    if isinstance(node, list):
        return [_structural(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {word: _structural(each) for word, each in node.items() if (word, each) != ("default", "")}
    return {**found, "x-kubernetes-int-or-string": True} if node.get("anyOf") == _INT_OR_STRING else found


@contextmanager
def _running(root: Path, program: str, options: Mapping[str, object]) -> Iterator[None]:
    flags = [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    with (root / f"{program}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *flags],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def await_answer(cluster: KubeCluster, path: str) -> None:
    end_at = time.monotonic() + _SECONDS
    while time.monotonic() < end_at:
        with suppress(OSError, AssertionError):
            cluster.ask("GET", path)
            return
        time.sleep(0.2)
    raise AssertionError((cluster.root / "kube-apiserver.log").read_text()[-3000:])
