"""Where and how to run: profiles, read and checked, with the place of every value."""

from raymerge.deploy.profiles.profile import Profile, load_profile, parse_profile, profile_from_mapping
from raymerge.deploy.profiles.sections import (
    Autoscaling,
    ClusterSection,
    EmptyDir,
    Head,
    JobSection,
    Kubernetes,
    RunSettings,
    SecurityContext,
    Toleration,
    Volume,
    WorkerGroup,
)

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
    "Toleration",
    "Volume",
    "WorkerGroup",
    "load_profile",
    "parse_profile",
    "profile_from_mapping",
]
