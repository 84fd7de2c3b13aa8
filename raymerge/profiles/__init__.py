"""Where and how to run: profiles, read and checked, with the place of every value."""

from raymerge.profiles.kubernetes import Autoscaling, Kubernetes, SecurityContext
from raymerge.profiles.load import load_profile, parse_profile, profile_from_mapping
from raymerge.profiles.pods import EmptyDir, Head, Toleration, Volume, WorkerGroup
from raymerge.profiles.run import ClusterSection, JobSection, RunSettings
from raymerge.profiles.schema import Profile, TargetName

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
