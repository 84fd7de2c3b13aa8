"""Profiles: where and how to run, with the position of every value."""

from raymerge.deploy.profiles.profile import (
    Profile,
    load_profile,
    parse_profile,
    profile_from_mapping,
    profile_schema,
)
from raymerge.deploy.profiles.sections import Kubernetes, RunSettings

__all__ = [
    "Kubernetes",
    "Profile",
    "RunSettings",
    "load_profile",
    "parse_profile",
    "profile_from_mapping",
    "profile_schema",
]
