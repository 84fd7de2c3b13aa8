"""What messages call a profile."""

from __future__ import annotations

from raymerge.documents.genre import Genre
from raymerge.errors import ProfileError

PROFILE = Genre(
    noun="profile",
    opening="target: ...",
    error=ProfileError,
    about_secrets=(
        "A profile is sent to the cluster, for all there to read: take it out and make it invalid where it "
        "came from. Credentials come from the environment of each machine, its role, or a Kubernetes secret."
    ),
)
"""The sort of text that says where and how to run."""
