"""Where and how to run: profiles, read and checked, with the place of every value."""

from raymerge.deploy.profiles.kubernetes import (
    Autoscaling,
    EmptyDir,
    Head,
    Kubernetes,
    SecurityContext,
    Toleration,
    Volume,
    WorkerGroup,
)
from raymerge.deploy.profiles.load import load_profile, parse_profile, profile_from_mapping
from raymerge.deploy.profiles.run import ClusterSection, JobSection, RunSettings
from raymerge.deploy.profiles.schema import Profile, TargetName

__all__ = [
    "Autoscaling",
    "ClusterSection",
    "EmptyDir",
    "Head",
    "JobSection",
    "Kubernetes",
    "Profile",
    "RunSettings",
    "SecurityContext",
    "TargetName",
    "Toleration",
    "Volume",
    "WorkerGroup",
    "load_profile",
    "parse_profile",
    "profile_from_mapping",
]
