"""What KubeRay's operator does, against the fake API server.

It walks RayJobs through their states, and has their entry points really run, by the Jobs API of one Ray head
that plays all their clusters.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from kits.kube_api import KubeApi
from kits.kube_store import CONFIGMAP, EVENT, POD, RAYCLUSTER, RAYJOB, SECRET, SERVICE, Json, RefusalError
from kits.ray_head import RayHead

FINALIZER = "ray.io/rayjob-finalizer"
_PORT = 8265
_STEP_SECONDS = 0.05
_ASK_SECONDS = 0.4
_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
_OVER = ("Complete", "Failed", "ValidationFailed")
_CONFIG_PATH = "/etc/raymerge"


@dataclass
class Operator:
    api: KubeApi
    head: RayHead | None
    root: Path
    unpullable: set[str] = field(default_factory=set)
    unschedulable: str = ""
    """Why no node takes a pod; "" if one does."""
    admitted: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[BaseException] = field(default_factory=list)
    _asked: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ended.wait(_STEP_SECONDS):
            for job in self.api.store.list(RAYJOB):
                try:
                    self._reconcile(job)
                except RefusalError as refused:
                    # Somebody else changed it meanwhile; it is looked at again.
                    if refused.code not in (404, 409):
                        self.trouble.append(refused)
                except Exception as error:
                    self.trouble.append(error)

    def end(self) -> None:
        self._ended.set()

    def driver(self, run: str) -> psutil.Process:
        mounted = str(self.root / run)
        found = [each for each in psutil.process_iter(["cmdline"]) if _is_driver(each, mounted)]
        return found[-1]

    def _reconcile(self, job: Json) -> None:
        status = job.get("status", {})
        state = status.get("jobDeploymentStatus", "")
        if "deletionTimestamp" in job["metadata"]:
            self._stop(job)
        elif state == "":
            self._begin(job)
        elif job["spec"].get("suspend") and state in ("Initializing", "Running"):
            self._set(job, jobDeploymentStatus="Suspending")
        elif state == "Suspending":
            self._drop_cluster(job)
            self._set(job, jobDeploymentStatus="Suspended", rayClusterName=None, jobId=None)
        elif state == "Suspended" and self.admitted.is_set():
            # What Kueue does.
            self.api.store.update(RAYJOB, _place(job), {**job, "spec": {**job["spec"], "suspend": False}})
            self._set(job, jobDeploymentStatus=None)
        elif state == "Initializing":
            self._start(job)
        elif state == "Running":
            self._follow(job)
        elif state == "Retrying":
            self._drop_cluster(job)
            gone = {"rayClusterName": None, "dashboardURL": None, "jobId": None, "jobStatus": None}
            self._set(job, jobDeploymentStatus=None, message=None, reason=None, **gone)

    def _begin(self, job: Json) -> None:
        if wrong := ", ".join(broken_rules(job)):
            self._set(job, jobDeploymentStatus="ValidationFailed", reason="ValidationFailed", message=wrong)
            self._warn(job, "InvalidRayJobSpec", wrong)
            return
        if FINALIZER not in job["metadata"].get("finalizers", ()):
            job["metadata"].setdefault("finalizers", []).append(FINALIZER)
            job = self.api.store.update(RAYJOB, _place(job), job)
        name = job["metadata"]["name"]
        self._set(
            job,
            jobDeploymentStatus="Initializing",
            jobId=f"{name}-{secrets.token_hex(2)}",
            rayClusterName=f"{name}-{secrets.token_hex(3)[:5]}",
            startTime=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def _start(self, job: Json) -> None:
        store, place = self.api.store, _place(job)
        cluster, spec = job["status"]["rayClusterName"], job["spec"]["rayClusterSpec"]
        with suppress(RefusalError):
            made = store.create(RAYCLUSTER, place, RAYCLUSTER.body(cluster, owner=job, spec=spec))
            token = base64.b64encode((self.head.token if self.head else "none").encode()).decode()
            data = {"auth_token": token}
            store.create(SECRET, place, SECRET.body(cluster, owner=made, data=data))
            store.create(SERVICE, place, SERVICE.body(f"{cluster}-head-svc", owner=made, spec={}))
            self._make_pods(made)
        if self.unschedulable or self.unpullable & _images(spec) or self.head is None:
            return
        self.api.proxied[f"{cluster}-head-svc:{_PORT}"] = self.head.jobs
        url = f"{cluster}-head-svc.{place}.svc.cluster.local:{_PORT}"
        self._set(job, jobDeploymentStatus="Running", dashboardURL=url)

    def _make_pods(self, cluster: Json) -> None:
        store, place, name = self.api.store, _place(cluster), cluster["metadata"]["name"]
        spec = cluster["spec"]
        templates = [("head", spec["headGroupSpec"]["template"])]
        for group in spec.get("workerGroupSpecs", ()):
            templates += [(group["groupName"], group["template"])] * group.get("replicas", 0)
        for number, (group, template) in enumerate(templates):
            pod = f"{name}-{group}-{number}"
            labels = {"ray.io/cluster": name, "ray.io/group": group}
            body = POD.body(pod, owner=cluster, labels=labels, spec=template["spec"])
            store.create(POD, place, body)
            store.set_status(POD, place, pod, self._pod_status(template["spec"]))

    def _pod_status(self, spec: Json) -> Json:
        if self.unschedulable:
            told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            return {"phase": "Pending", "conditions": [{**told, "message": self.unschedulable}]}
        container = spec["containers"][0]
        if container["image"] in self.unpullable:
            message = f'Back-off pulling image "{container["image"]}"'
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
            return {"phase": "Pending", "containerStatuses": [{"name": container["name"], "state": waiting}]}
        return {"phase": "Running", "containerStatuses": [{"name": container["name"], "state": {}}]}

    def _follow(self, job: Json) -> None:
        if time.monotonic() < self._asked + _ASK_SECONDS:
            return
        self._asked = time.monotonic()
        number = job["status"]["jobId"]
        info = self._jobs("GET", f"api/jobs/{number}")
        if info is None:
            self._jobs("POST", "api/jobs/", {"entrypoint": self._entrypoint(job), "submission_id": number})
            return
        found, message = info["status"], info.get("message") or ""
        if (found, message) == (job["status"].get("jobStatus"), job["status"].get("message")):
            return
        if found in ("SUCCEEDED", "STOPPED"):
            self._set(job, jobDeploymentStatus="Complete", jobStatus=found, message=message, succeeded=1)
        elif found == "FAILED":
            self._failed(job, message)
        else:
            self._set(job, jobStatus=found, message=message)

    def _failed(self, job: Json, message: str) -> None:
        failed = job["status"].get("failed", 0) + 1
        again = failed <= job["spec"].get("backoffLimit", 0)
        state = "Retrying" if again else "Failed"
        told = {"jobStatus": "FAILED", "reason": "AppFailed", "message": message, "failed": failed}
        self._set(job, jobDeploymentStatus=state, **told)

    def _stop(self, job: Json) -> None:
        number = job.get("status", {}).get("jobId")
        if number and job["status"].get("jobDeploymentStatus") not in _OVER and self.head is not None:
            with suppress(urllib.error.URLError):
                self._jobs("POST", f"api/jobs/{number}/stop")
        job["metadata"]["finalizers"] = [
            each for each in job["metadata"].get("finalizers", ()) if each != FINALIZER
        ]
        self.api.store.update(RAYJOB, _place(job), job)
        self.seen.append((job["metadata"]["name"], "deleted"))

    def _entrypoint(self, job: Json) -> str:
        """As it is, but for where the config map is: what a node would mount is a folder here."""
        spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        (name,) = (each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each)
        mounts = spec["containers"][0]["volumeMounts"]
        (path,) = (each["mountPath"] for each in mounts if each["mountPath"] == _CONFIG_PATH)
        folder = self.root / job["metadata"]["name"]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for key, text in self.api.store.get(CONFIGMAP, _place(job), name)["data"].items():
            (folder / key).write_text(text)
        entrypoint: str = job["spec"]["entrypoint"]
        assert re.fullmatch(r"[A-Za-z0-9 _./=-]+", entrypoint), entrypoint
        return entrypoint.replace(path, str(folder))

    def _jobs(self, method: str, path: str, body: Json | None = None) -> Json | None:
        assert self.head is not None
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        # As the operator sends it.
        headers = {"x-ray-authorization": f"Bearer {self.head.token}", "Content-Type": "application/json"}
        ask = urllib.request.Request(f"{self.head.jobs}/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(ask, timeout=20) as answer:
                found: Json = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise

    def _drop_cluster(self, job: Json) -> None:
        with suppress(RefusalError):
            self.api.store.delete(RAYCLUSTER, _place(job), job["status"]["rayClusterName"])

    def _set(self, job: Json, **status: object) -> None:
        name = job["metadata"]["name"]
        made = self.api.store.set_status(RAYJOB, _place(job), name, status)
        state = made["status"].get("jobDeploymentStatus", "")
        if (name, state) not in self.seen[-1:]:
            self.seen.append((name, state))

    def _warn(self, job: Json, reason: str, message: str) -> None:
        name = job["metadata"]["name"]
        told = {"type": "Warning", "reason": reason, "message": message}
        involved = {"kind": "RayJob", "name": name}
        event = EVENT.body(f"{name}.{secrets.token_hex(4)}", involvedObject=involved, **told)
        self.api.store.create(EVENT, _place(job), event)


@contextmanager
def operator(api: KubeApi, root: Path, head: RayHead | None = None) -> Iterator[Operator]:
    made = Operator(api, head, root)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.end()
        thread.join()
    assert made.trouble == []


def broken_rules(manifest: Json) -> list[str]:
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    cluster = spec.get("rayClusterSpec", {}) if manifest["kind"] == "RayJob" else spec
    groups, pods = cluster.get("workerGroupSpecs", ()), []
    for group in (cluster.get("headGroupSpec", {}), *groups):
        pods.append(group.get("template", {}).get("spec", {}))
    never = [pod.get("restartPolicy") == "Never" for pod in pods]
    ray = tuple(int(part) for part in cluster.get("rayVersion", "0.0").split(".")[:2])
    is_scaled, mode = cluster.get("enableInTreeAutoscaling"), spec.get("submissionMode", "K8sJobMode")
    has_idle_times = any("idleTimeoutSeconds" in each for each in groups)
    is_queued = "kueue.x-k8s.io/queue-name" in manifest["metadata"].get("labels", {})
    rules = {
        "its name is no short DNS-1035 name": re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", name),
        f"the submission mode {mode} is not known": mode in _MODES,
        "shutdownAfterJobFinishes is false": spec.get("shutdownAfterJobFinishes")
        or not (spec.get("suspend") or spec.get("ttlSecondsAfterFinished"))
        or manifest["kind"] == "RayCluster",
        "neither rayClusterSpec nor clusterSelector is set": cluster or "clusterSelector" in spec,
        "SidecarMode needs a head that never restarts": mode != "SidecarMode" or never[0],
        "autoscaling needs pods that never restart": not is_scaled or all(never),
        "tokens came with Ray 2.52": cluster.get("authOptions", {}).get("mode") != "token" or ray >= (2, 52),
        "two groups have one name": len({each["groupName"] for each in groups}) == len(groups),
        "replicas are out of bounds": all(
            0 <= each["minReplicas"] <= each["replicas"] <= each["maxReplicas"] for each in groups
        ),
        "an idle time needs autoscaling": is_scaled or not has_idle_times,
        "a pod has no container": all(pod.get("containers") for pod in pods),
        "what waits in a queue is of fixed size, of at most 7 groups": not is_queued
        or (not is_scaled and len(groups) <= 7),
    }
    return [rule for rule, is_kept in rules.items() if not is_kept]


def _place(job: Json) -> str:
    return str(job["metadata"]["namespace"])


def _images(spec: Json) -> set[str]:
    templates = [spec["headGroupSpec"]["template"]]
    templates += [group["template"] for group in spec.get("workerGroupSpecs", ())]
    return {each["spec"]["containers"][0]["image"] for each in templates}


def _is_driver(process: psutil.Process, mounted: str) -> bool:
    line = process.info["cmdline"] or []
    return any(each.endswith("raymerge") for each in line[:2]) and any(mounted in each for each in line)
