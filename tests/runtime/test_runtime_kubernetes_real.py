"""The target kubernetes against a real API server and a real etcd; the test plays KubeRay's operator."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from kits.kube_cases import profile_of, submission
from kits.kube_cluster import NOBODY, PROGRAMS, USER, KubeCluster, await_answer, kube_cluster
from kits.local_http import serving
from kits.ray_head import own_address

from raymerge.deploy.manifests import rayjob
from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets import kubernetes_api as kube
from raymerge.deploy.targets.kubernetes import KubernetesTarget, open_kubernetes
from raymerge.deploy.targets.target import RunState, Submission, Where
from raymerge.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "cluster" / "kuberay").glob("*.yaml"))
DATA = Path("/mnt/data")
RECIPE = {
    "merge_method": "linear",
    "models": [{"model": "/mnt/data/a", "parameters": {"weight": 1}}],
    "dtype": "float32",
}

_missing = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(
        bool(_missing),
        reason=f"there is no {', '.join(_missing)}: cluster/kuberay/README.md says what brings them",
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeCluster]:
    with kube_cluster() as cluster:
        cluster.kubectl("create", "namespace", "raymerge")
        await_answer(cluster, "/api/v1/namespaces/raymerge/serviceaccounts/default")
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        body = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": claim,
        }
        cluster.ask("POST", "/api/v1/namespaces/raymerge/persistentvolumeclaims", body)
        for command in _commands_of_the_docs():
            cluster.kubectl(*command)
        yield cluster


def _commands_of_the_docs() -> list[list[str]]:
    """Those that give USER the rights that a run needs."""
    text = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    lines = re.findall(r"^kubectl (-n raymerge create role.*)$", text, re.MULTILINE)
    assert len(lines) == 4
    return [line.replace("--user=USER", f"--user={USER}").split() for line in lines]


@pytest.fixture
def profile() -> Profile:
    return profile_of(DATA, namespace="raymerge")


@pytest.fixture
def target(cluster: KubeCluster, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> KubernetesTarget:
    return _target_of(cluster, USER, profile, monkeypatch)


def _target_of(
    cluster: KubeCluster, user: str, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> KubernetesTarget:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(user, "raymerge")))
    opened = open_kubernetes(Where("kubernetes", None, profile), {})
    return replace(opened, poll_seconds=0.2, ending_seconds=30)


@pytest.fixture
def sent(profile: Profile, tmp_path: Path) -> Submission:
    return submission(RECIPE, DATA / tmp_path.name, profile)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_server_takes_the_manifests(cluster: KubeCluster, path: Path) -> None:
    for how in ("--dry-run=server", "--server-side"):
        assert "raymerge" in cluster.kubectl("apply", how, "-f", str(path))
    cluster.kubectl("delete", "-f", str(path))


def test_the_rights_of_the_docs_are_enough(
    target: KubernetesTarget, cluster: KubeCluster, sent: Submission
) -> None:
    target.check(sent)
    assert target.submit(sent) == sent.run
    assert target.report(sent.run).state is RunState.QUEUED
    assert target.find(sent.output) == sent.run
    config = target.server.read(kube.CONFIG_MAPS, sent.run)
    job = target.server.read(kube.RAY_JOBS, sent.run)
    assert config is not None
    assert job is not None
    assert config["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert target.submit(replace(sent, run="raymerge-000000000000")) == sent.run
    for status, state in (
        ({"jobDeploymentStatus": "Initializing"}, RunState.QUEUED),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, RunState.RUNNING),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, RunState.SUCCEEDED),
    ):
        cluster.set_status("raymerge", sent.run, status)
        assert target.report(sent.run).state is state


def test_a_run_that_is_stopped_leaves_nothing(target: KubernetesTarget, sent: Submission) -> None:
    target.submit(sent)
    assert "pods" not in target.stop(sent.run).message
    assert target.server.read(kube.RAY_JOBS, sent.run) is None
    assert target.server.read(kube.CONFIG_MAPS, sent.run) is None
    assert target.report(sent.run).state is RunState.UNKNOWN


def test_a_recipe_goes_with_its_rayjob(
    target: KubernetesTarget, cluster: KubeCluster, sent: Submission
) -> None:
    target.submit(sent)
    cluster.kubectl("-n", "raymerge", "delete", "rayjob", sent.run, "--cascade=foreground", "--timeout=30s")
    assert target.server.read(kube.CONFIG_MAPS, sent.run) is None


def test_who_has_no_rights_is_told_each_that_is_lacking(
    cluster: KubeCluster, profile: Profile, sent: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError) as failed:
        _target_of(cluster, NOBODY, profile, monkeypatch).check(sent)
    lacking = [problem.what for problem in failed.value.problems]
    acts = ("create rayjobs", "get rayjobs", "list rayjobs", "create configmaps")
    assert lacking == [f"your credentials may not {act} in the namespace raymerge." for act in acts]


def test_a_token_of_a_service_account_is_as_good(
    cluster: KubeCluster, profile: Profile, sent: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kubectl("-n", "raymerge", "create", "serviceaccount", "merger")
    for role in ("raymerge-runs", "raymerge-looks"):
        bound = "--serviceaccount=raymerge:merger"
        cluster.kubectl("-n", "raymerge", "create", "rolebinding", f"merger-{role}", f"--role={role}", bound)
    asked = {"kind": "TokenRequest", "spec": {"audiences": []}}
    answer = cluster.ask("POST", "/api/v1/namespaces/raymerge/serviceaccounts/merger/token", asked)
    path = cluster.kubeconfig_of(answer["status"]["token"], "raymerge")
    monkeypatch.setenv("KUBECONFIG", str(path))
    target = replace(open_kubernetes(Where("kubernetes", None, profile), {}), poll_seconds=0.2)
    target.check(sent)
    target.submit(sent)
    assert target.stop(sent.run).state is RunState.STOPPED
    path.write_text(path.read_text().replace(answer["status"]["token"], "expired"))
    with pytest.raises(OptionError, match="does not accept your credentials"):
        open_kubernetes(Where("kubernetes", None, profile), {}).find(sent.output)


def test_what_the_server_refuses_is_told_in_its_words_and_leaves_nothing(
    target: KubernetesTarget, cluster: KubeCluster, sent: Submission
) -> None:
    _, job = rayjob(sent.profile, sent.recipe_text, sent.output, sent.run)
    job["spec"]["backoffLimit"] = "twice"
    with pytest.raises(OptionError, match=r"refuses it: .*backoffLimit.*integer"):
        target.server.create(kube.RAY_JOBS, job, dry_run=True)
    quota = {"hard": {"count/rayjobs.ray.io": "0"}}
    body = {"kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota}
    cluster.ask("POST", "/api/v1/namespaces/raymerge/resourcequotas", body)
    try:
        _quota_holds(cluster)
        with pytest.raises(OptionError, match=r"does not allow it: .*exceeded quota: none"):
            target.submit(sent)
    finally:
        cluster.kubectl("-n", "raymerge", "delete", "resourcequota", "none")
    assert target.server.read(kube.CONFIG_MAPS, sent.run) is None


def _quota_holds(cluster: KubeCluster) -> None:
    path = "/api/v1/namespaces/raymerge/resourcequotas/none/status"
    body = cluster.ask("GET", path)
    status = {"hard": body["spec"]["hard"], "used": {"count/rayjobs.ray.io": "0"}}
    cluster.ask("PUT", path, {**body, "status": status})


class _JobsApi(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, Message]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers))
        body = json.dumps({"logs": '{"event": "planned", "segments": 7}\n'}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def test_the_log_comes_through_the_server_with_the_token_of_its_cluster_alone(
    target: KubernetesTarget, cluster: KubeCluster, sent: Submission
) -> None:
    address = own_address()
    if address.startswith("127."):
        pytest.skip("the server takes no loopback address for that of a pod, and this machine has no other")
    target.submit(sent)
    with ThreadingHTTPServer((address, 0), _JobsApi) as jobs, serving(jobs):
        _make_head(cluster, address, jobs.server_port, token="of the cluster")
        url = f"head.raymerge.svc.cluster.local:{jobs.server_port}"
        named = {"rayClusterName": "head", "jobId": "job-1", "dashboardURL": url}
        running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        cluster.set_status("raymerge", sent.run, {**running, **named})
        assert target.report(sent.run).details["segments"] == "0 of 7"
    path, headers = _JobsApi.asked[-1]
    assert path.startswith("/api/jobs/job-1/logs")
    assert headers["x-ray-authorization"] == "Bearer of the cluster"
    assert headers["authorization"] is None


def _make_head(cluster: KubeCluster, address: str, port: int, token: str) -> None:
    """A service that leads to an address, as to a pod, and the secret of the Ray cluster behind it."""
    core, metadata, ports = (
        "/api/v1/namespaces/raymerge",
        {"name": "head"},
        [{"name": "dashboard", "port": port}],
    )
    alone = {"containers": [{"name": "ray-head", "image": "none"}], "automountServiceAccountToken": False}
    pod = cluster.ask("POST", f"{core}/pods", {"metadata": metadata, "spec": alone})
    pod["status"] |= {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    cluster.ask("PUT", f"{core}/pods/head/status", pod)
    reference = {"kind": "Pod", "namespace": "raymerge", "name": "head", "uid": pod["metadata"]["uid"]}
    subsets = [{"addresses": [{"ip": address, "targetRef": reference}], "ports": ports}]
    cluster.ask("POST", f"{core}/services", {"metadata": metadata, "spec": {"ports": ports}})
    cluster.ask("POST", f"{core}/endpoints", {"metadata": metadata, "subsets": subsets})
    cluster.ask("POST", f"{core}/secrets", {"metadata": metadata, "stringData": {"auth_token": token}})
