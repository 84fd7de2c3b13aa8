"""From a file, a text or a mapping to a checked profile; everything that is wrong is told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from raymerge.deploy.profiles.schema import Profile
from raymerge.documents.fields import DocumentKind, Fault, faults_of
from raymerge.documents.yaml_text import (
    Places,
    check_length,
    check_text,
    read_document,
    read_file,
    secrets_in,
    split_documents,
    spot,
)
from raymerge.errors import Problem, ProfileError

PROFILE = DocumentKind(
    noun="profile",
    opening="target: ...",
    error=ProfileError,
    about_secrets=(
        "A profile is sent to the cluster, for all there to read: take it out and make it invalid where it "
        "came from. Credentials come from the environment of each machine, its role, or a Kubernetes secret."
    ),
)
"""The sort of text that says where and how to run."""


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a YAML file.

    Raises:
        ProfileError: all that is wrong with it, each with ``file:line:column`` and what to write instead.
    """
    name = os.fspath(path)
    return parse_profile(read_file(name, PROFILE), name)


def parse_profile(text: str, name: str = "profile") -> Profile:
    """The profile in a YAML text; ``name`` stands before line and column in messages.

    Raises:
        ProfileError: all that is wrong with it.
    """
    check_length(text, name, PROFILE)
    check_text(text, name, PROFILE)
    first, *others = split_documents(text, name, PROFILE)
    if others:
        what = f"a second profile starts here, the file has {len(others) + 1}; one is expected."
        raise ProfileError(Problem(spot(name, others[0].mark), what, "Keep one profile in it."))
    document = read_document(first, name, PROFILE)
    return _validate(document.data, document.places, list(document.faults))


def profile_from_mapping(data: Mapping[str, Any], name: str = "profile") -> Profile:
    """The profile that a mapping of plain values means; it has the keys of the YAML form.

    Raises:
        ProfileError: all that is wrong with it, by path: ``profile: kubernetes.image``.
    """
    return _validate(data, Places(name), [])


def _validate(data: Mapping[str, Any], places: Places, faults: list[Fault]) -> Profile:
    if secret := list(secrets_in(data, PROFILE)):
        # Alone, for messages on the same values would repeat them.
        raise ProfileError(places.problems(secret))
    try:
        profile = Profile.model_validate(data, context=places)
    except ValidationError as error:
        # What YAML could not give is missing below: one fault for one cause.
        broken = {fault.path for fault in faults}
        faults = [*faults, *(fault for fault in faults_of(error) if fault.path not in broken)]
    if faults:
        raise ProfileError(places.problems(faults))
    return profile
