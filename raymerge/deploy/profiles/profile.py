"""Profiles as a whole: read, and all faults reported at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from raymerge.deploy.profiles.feasible import faults_between
from raymerge.deploy.profiles.sections import (
    ClusterSection,
    JobSection,
    Kubernetes,
    Place,
    RunSettings,
    Storage,
)
from raymerge.deploy.targets import TARGETS
from raymerge.documents.fields import DocumentKind, Fault, FaultError, MapEntry, by, choice_of, faults_of
from raymerge.documents.positions import (
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
from raymerge.storage.addresses import NO_OPTIONS


def _target(value: object) -> object:
    return choice_of(*TARGETS)(value)


class Profile(MapEntry):
    """Where and how to run. Nothing in it changes a byte of a result."""

    target: Annotated[str, by(_target)] = "local"
    output: Place | None = None
    run: RunSettings = RunSettings()
    storage: Storage = NO_OPTIONS
    cluster: ClusterSection = ClusterSection()
    job: JobSection = JobSection()
    kubernetes: Kubernetes | None = None

    _places: Places = PrivateAttr(default_factory=lambda: Places("profile"))

    def model_post_init(self, context: Any, /) -> None:
        """Keep the positions in the file; equality ignores them."""
        if isinstance(context, Places):
            self._places = context

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        """The target's section is required if it has no defaults."""
        if data.get("target") == "kubernetes" and data.get("kubernetes") is None:
            what = "the target kubernetes needs the section 'kubernetes', which is missing."
            yield Fault(("target",), what, "Add it: at least image, ray_version and workers.")

    @model_validator(mode="after")
    def _between(self) -> Self:
        if faults := list(faults_between(self.kubernetes, self.run, self.output, self.target)):
            raise FaultError(faults)
        return self

    def where(self, *path: str | int) -> str:
        """The position of a value: ``where("kubernetes", "image")`` is ``profile.yml:7:18``."""
        return self._places.at(path)

    def for_inside(self, output: str, *, autoscaling: bool | None = None) -> Profile:
        """The profile for the driver inside the cluster.

        Args:
            autoscaling: whether the cluster adds nodes; None: as ``cluster`` says.
        """
        grows = self.cluster.autoscaling if autoscaling is None else autoscaling
        cluster = ClusterSection(address="auto", autoscaling=grows)
        return Profile(target="cluster", output=output, run=self.run, storage=self.storage, cluster=cluster)

    def as_yaml(self) -> str:
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


PROFILE = DocumentKind(
    noun="profile",
    opening="target: ...",
    error=ProfileError,
    about_secrets=(
        "A profile is sent to the cluster, for all there to read: take it out and make it invalid where it "
        "came from. Credentials come from the environment of each machine, its role, or a Kubernetes secret."
    ),
)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Raises:
    ProfileError: all faults, each with ``file:line:column`` and a remedy.
    """
    name = os.fspath(path)
    return parse_profile(read_file(name, PROFILE), name)


def parse_profile(text: str, name: str = "profile") -> Profile:
    """Raises:
    ProfileError: all faults; ``name`` stands before line and column.
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
    """Raises:
    ProfileError: all faults, by path: ``profile: kubernetes.image``.
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
