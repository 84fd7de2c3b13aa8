"""Names and labels of what is made on Kubernetes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from raymerge.storage.addresses import shown

MOST_NAME = 47
"""Characters of a RayJob's name: the operator makes longer ones of it, for services."""
OUTPUT_LABEL = "raymerge.io/output"
"""Label with the digest of a run's output place, by which runs are found."""
OUTPUT_ANNOTATION = "raymerge.io/output"
"""Annotation with that place as people know it."""
SENT_ANNOTATION = "raymerge.io/sent"
"""Annotation with the moment at which a run was sent, in UTC: the server's own has whole seconds."""

_DIGITS = 12


def output_digest(output: str) -> str:
    """What ``OUTPUT_LABEL`` has for an output place; options of its store do not count."""
    return hashlib.sha256(shown(output).rstrip("/").encode()).hexdigest()[:32]


def render_name(*texts: str) -> str:
    """A run's name that follows from texts alone, for manifests that are shown and not sent."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"raymerge-{digest[:_DIGITS]}"


def labels_of(name: str, component: str, more: Mapping[str, str]) -> dict[str, str]:
    """Labels that Kubernetes recommends, over those of the profile."""
    return {**more, "app.kubernetes.io/name": "raymerge", **pod_labels(name, component, {})}


def pod_labels(name: str, component: str, more: Mapping[str, str]) -> dict[str, str]:
    """As ``labels_of``, for pods: the operator finds them by an ``app.kubernetes.io/name`` of its own."""
    return {
        **more,
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "raymerge",
        "app.kubernetes.io/managed-by": "raymerge",
    }
