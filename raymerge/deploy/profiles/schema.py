"""A profile as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import PrivateAttr, model_validator

from raymerge.deploy.profiles.feasible import faults_between
from raymerge.deploy.profiles.kubernetes import Kubernetes
from raymerge.deploy.profiles.run import ClusterSection, JobSection, RunSettings, Storage
from raymerge.deploy.profiles.values import Place
from raymerge.documents.fields import Fault, FaultError, MapEntry, by, choice_of
from raymerge.documents.yaml_text import Places
from raymerge.storage.addresses import NO_OPTIONS

TargetName: TypeAlias = Literal["local", "cluster", "job", "kubernetes"]
_TARGETS = ("local", "cluster", "job", "kubernetes")


class Profile(MapEntry):
    """Where and how to run. Nothing in it changes a byte of a result."""

    target: Annotated[TargetName, by(choice_of(*_TARGETS))] = "local"
    output: Place | None = None
    """Where the new checkpoint goes, unless the command line says."""
    run: RunSettings = RunSettings()
    storage: Storage = NO_OPTIONS
    cluster: ClusterSection = ClusterSection()
    job: JobSection = JobSection()
    kubernetes: Kubernetes | None = None

    _places: Places = PrivateAttr(default_factory=lambda: Places("profile"))

    def model_post_init(self, context: Any, /) -> None:
        """Keep where the profile came from; it takes no part in comparisons."""
        if isinstance(context, Places):
            self._places = context

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        """A target whose section cannot be guessed needs it."""
        if data.get("target") == "kubernetes" and data.get("kubernetes") is None:
            what = "the target kubernetes needs the section 'kubernetes', which is missing."
            yield Fault(("target",), what, "Add it: at least image, ray_version and workers.")

    @model_validator(mode="after")
    def _between(self) -> Self:
        if faults := list(faults_between(self.kubernetes, self.run, self.output, self.target)):
            raise FaultError(faults)
        return self

    def where(self, *path: str | int) -> str:
        """The place of ``where("kubernetes", "image")``: ``profile.yml:7:18``."""
        return self._places.at(path)

    def for_inside(self, output: str, *, autoscaling: bool | None = None) -> Profile:
        """What runs inside the cluster: the same run, on the cluster that it is in.

        Args:
            autoscaling: whether that cluster adds nodes for workers that wait; None: as ``cluster`` says.
        """
        grows = self.cluster.autoscaling if autoscaling is None else autoscaling
        cluster = ClusterSection(address="auto", autoscaling=grows)
        return Profile(target="cluster", output=output, run=self.run, storage=self.storage, cluster=cluster)

    def as_yaml(self) -> str:
        """A text that says the same, without what is as usual."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
