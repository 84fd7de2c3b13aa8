"""Runs as objects of Kubernetes for KubeRay: plain maps, the same for the same profile and recipe."""

from raymerge.manifests.checks import check
from raymerge.manifests.names import (
    OUTPUT_ANNOTATION,
    OUTPUT_LABEL,
    SENT_ANNOTATION,
    output_digest,
    render_name,
)
from raymerge.manifests.objects import raycluster, rayjob
from raymerge.manifests.rules import broken_rules
from raymerge.manifests.text import as_yaml

__all__ = [
    "OUTPUT_ANNOTATION",
    "OUTPUT_LABEL",
    "SENT_ANNOTATION",
    "as_yaml",
    "broken_rules",
    "check",
    "output_digest",
    "raycluster",
    "rayjob",
    "render_name",
]
