"""Why the pods of a run do not run: said aloud, where Kubernetes only keeps on trying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Json = dict[str, Any]

_REMEDIES = {
    "ErrImagePull": "See that the image exists and that image_pull_secrets let the nodes pull it.",
    "ImagePullBackOff": "See that the image exists and that image_pull_secrets let the nodes pull it.",
    "InvalidImageName": "Correct the image of the profile.",
    "CreateContainerConfigError": "See that every secret and config map that the profile names exists.",
    "CrashLoopBackOff": "See `kubectl logs` of the pod; the image needs bash, python, ray and raymerge.",
    "OOMKilled": "Give the group more memory, or lower run.memory or run.workers.",
    "Unschedulable": "Ask for less, or let the cluster have more nodes; it is tried again by itself.",
}
"""What helps, by the word that Kubernetes has for it."""
_HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})
_LONGEST = 300
"""Characters of what Kubernetes says itself."""


def pod_troubles(pods: Iterable[Json]) -> Iterator[str]:
    """A sentence for each pod that cannot be scheduled, pull its image, or stay alive."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for reason, message in _reasons(pod.get("status", {})):
            said = f"{reason}: {_short(message)}" if message else reason
            yield f"pod {name}: {said.rstrip('.')}. {_REMEDIES.get(reason, '')}".rstrip()


def warnings(events: Iterable[Json]) -> Iterator[str]:
    """A sentence for each warning of the operator or of Kubernetes, once each."""
    told = set()
    for event in sorted(events, key=lambda each: str(each.get("lastTimestamp") or "")):
        said = f"{event.get('reason', '')}: {_short(event.get('message', ''))}"
        if event.get("type") == "Warning" and said not in told:
            told.add(said)
            yield said


def _reasons(status: Json) -> Iterator[tuple[str, str]]:
    for condition in status.get("conditions", ()):
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            yield condition.get("reason", "Unschedulable"), condition.get("message", "")
    if status.get("phase") == "Failed" and status.get("reason"):
        yield status["reason"], status.get("message", "")
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting and waiting.get("reason", "") not in _HARMLESS:
            yield waiting.get("reason", "Waiting"), waiting.get("message", "")
        for moment in ("state", "lastState"):
            ended = container.get(moment, {}).get("terminated", {})
            if ended.get("reason") == "OOMKilled":
                yield "OOMKilled", ended.get("message", "it used more memory than its limit")


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _LONGEST else one[: _LONGEST - 1] + "…"
