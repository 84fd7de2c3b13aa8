"""Options of commands, and what a profile says in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from raymerge.errors import OptionError, Problem
from raymerge.options import USUAL_PATIENCE, Device, RunOptions
from raymerge.units import parse_size

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile


def read_memory(memory: str | None) -> int | None:
    """The bytes meant by ``--memory``.

    Raises:
        OptionError: it is no size.
    """
    if memory is None:
        return None
    try:
        return parse_size(memory)
    except ValueError as error:
        raise OptionError(
            Problem("--memory", f"{error}.", "The memory of one worker is a number with a unit.")
        ) from error


ProfileFile: TypeAlias = Annotated[
    str | None, typer.Option("--profile", metavar="FILE", help="Where and how to run, as YAML.")
]


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None for what it does not."""

    workers: int | None = None
    threads: int | None = None
    memory: int | None = None
    device: Device | None = None
    patience: float | None = None
    inline: bool = False
    replace: bool = False
    keep_intermediates: bool = False
    scratch: str | None = None
    steps: str | None = None
    run: str | None = None

    def settings(self) -> dict[str, Any]:
        """Those that a profile may have too, as far as they are given."""
        said = {
            "workers": self.workers,
            "threads": self.threads,
            "memory": self.memory,
            "device": self.device,
            "patience": self.patience,
            "scratch": self.scratch,
            "steps": self.steps,
        }
        return {name: value for name, value in said.items() if value is not None}

    def forwarded(self) -> tuple[str, ...]:
        """Those that no profile has, as a command line has them."""
        replace = ("--replace",) if self.replace else ()
        return replace + (("--keep-intermediates",) if self.keep_intermediates else ())


def options_from(profile: Profile, flags: Flags, *, address: str | None) -> RunOptions:
    """How to run.

    Raises:
        OptionError: an option cannot be honoured.
    """
    said = {**profile.run.model_dump(exclude_none=True), **flags.settings()}
    return RunOptions(
        workers=said.get("workers"),
        memory=said.get("memory"),
        device=said.get("device", "auto"),
        address=address,
        inline=flags.inline,
        replace=flags.replace,
        keep_intermediates=flags.keep_intermediates,
        threads=said.get("threads"),
        patience=said.get("patience", USUAL_PATIENCE),
        storage=profile.storage,
        scratch=said.get("scratch"),
        steps=said.get("steps"),
        growing=address is not None and profile.cluster.autoscaling,
        run=flags.run or "",
    )


def planned_options(
    path: str | None, memory: int | None, steps: str | None = None
) -> tuple[RunOptions, str | None]:
    """How a merge would run, and the output place that the profile names, for a plan that is looked at only.

    Raises:
        OptionError: an option cannot be honoured.
        ProfileError: the profile is not valid.
    """
    from raymerge.deploy.profiles import Profile, load_profile

    profile = Profile() if path is None else load_profile(path)
    # Whatever the target, workers elsewhere are those of a cluster that the driver is in.
    address = None if profile.target == "local" else "auto"
    return options_from(profile, Flags(memory=memory, steps=steps), address=address), profile.output


def reached(place: str, path: str | None) -> str:
    """A place as the storage options of a profile reach it.

    Raises:
        OptionError: the address says no place, or more than one.
        ProfileError: the profile is not valid.
    """
    from raymerge.storage.addresses import check_alone, with_options

    check_alone(place)
    if path is None:
        return place
    from raymerge.deploy.profiles import load_profile

    return with_options(place, load_profile(path).storage)


def with_flags(profile: Profile, flags: Flags) -> Profile:
    """A profile that says what the flags say.

    Raises:
        ProfileError: they do not go together.
    """
    from raymerge.deploy.profiles import profile_from_mapping
    from raymerge.errors import ProfileError

    given = flags.settings()
    if not given:
        return profile
    plain = profile.model_dump(mode="json", exclude_defaults=True)
    try:
        return profile_from_mapping({**plain, "run": {**plain.get("run", {}), **given}})
    except ProfileError as error:
        said = {f"profile: run.{name}": f"--{name.replace('_', '-')}" for name in given}
        problems = (replace(each, where=said.get(each.where, each.where)) for each in error.problems)
        raise ProfileError(problems) from error
