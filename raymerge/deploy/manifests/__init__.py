"""Runs as objects of Kubernetes for KubeRay: plain maps, the same for the same profile and recipe."""

from raymerge.deploy.manifests.checks import broken_rules, check
from raymerge.deploy.manifests.names import (
    OUTPUT_ANNOTATION,
    OUTPUT_LABEL,
    SENT_ANNOTATION,
    output_digest,
    render_name,
)
from raymerge.deploy.manifests.objects import raycluster, rayjob
from raymerge.deploy.manifests.pods import as_yaml

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
