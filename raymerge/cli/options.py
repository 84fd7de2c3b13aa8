"""Options that several commands share, and their values from a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from raymerge.cli import completion
from raymerge.errors import OptionError, Problem, ProfileError
from raymerge.options import USUAL_PATIENCE, Device, RunOptions
from raymerge.storage.addresses import check_alone, with_options
from raymerge.units import parse_size

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile

# Brackets would be taken for markup.
MODEL_HELP = "Directory of a checkpoint, or a Hub name: org/name or org/name@revision."
RecipeFile: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe in mergekit's YAML.", autocompletion=completion.recipes),
]
ProfileFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="FILE", help="Where and how to run, as YAML.", autocompletion=completion.recipes
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Workers; by default one per GPU, else one per 3 or 4 CPU cores."),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of a worker that compute; by default its cores, at most 4."),
]
Memory: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory that one worker may use, like 4GiB.")
]
DeviceFlag: TypeAlias = Annotated[
    Device | None, typer.Option(help="Where the arithmetic runs; auto where nothing says.")
]
Address: TypeAlias = Annotated[
    str | None, typer.Option(metavar="ADDR", help="A running Ray cluster, instead of an embedded Ray.")
]
_INLINE_HELP = "Run in this process, without Ray"
Inline: TypeAlias = Annotated[bool, typer.Option("--inline", help=f"{_INLINE_HELP}.")]
MergeInline: TypeAlias = Annotated[
    bool, typer.Option("--inline", help=f"{_INLINE_HELP}, as a small merge does by itself.")
]
Patience: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help=f"A worker of Ray that does not get on for so long is replaced; {USUAL_PATIENCE:g} by default.",
    ),
]
Replace: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Replace what is at OUT, once the result is verified; in an object store before it begins.",
    ),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan and check OUT; write nothing.")
]
EventsAsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Give events as JSON, one a line.")]
AllAsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Give everything as JSON.")]
TargetChoice: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="T", help="local, cluster, job or kubernetes.", autocompletion=completion.targets
    ),
]


def read_memory(memory: str | None) -> int | None:
    if memory is None:
        return None
    try:
        return parse_size(memory)
    except ValueError as error:
        remedy = "The memory of one worker is a number with a unit."
        raise OptionError(Problem("--memory", f"{error}.", remedy)) from error


def read_sources(texts: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    for text in texts or ():
        name, equals, place = text.partition("=")
        if not (name and equals and place):
            what = f"'{text}' does not say which source is where."
            raise OptionError(
                Problem("--source", what, "Write NAME=DIRECTORY, with the name from the recipe.")
            )
        yield name, place


_IN_PROFILES = ("workers", "threads", "memory", "device", "patience", "scratch", "steps")


def given(**flags: Any) -> dict[str, Any]:
    """The options that were given; ``memory`` in bytes, ``patience`` in seconds."""
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def options_from(profile: Profile, flags: Mapping[str, Any], *, address: str | None) -> RunOptions:
    # Who has written down how to run has decided that too, even where it is the default.
    inline = False if profile.model_fields_set else None
    return RunOptions(
        **{"inline": inline, **profile.run.model_dump(exclude_none=True), **flags},
        address=address,
        storage=profile.storage,
        growing=address is not None and profile.cluster.autoscaling,
    )


def planned_options(
    path: str | None, memory: int | None, steps: str | None = None
) -> tuple[RunOptions, str | None]:
    """Run options and the output place of the profile, for a plan that is only shown."""
    if path is None:
        return RunOptions(**given(memory=memory, steps=steps)), None
    from raymerge.deploy.profiles import load_profile

    profile = load_profile(path)
    # Whatever the target, workers elsewhere are those of a cluster that the driver is in.
    address = None if profile.target == "local" else "auto"
    return options_from(profile, given(memory=memory, steps=steps), address=address), profile.output


def reached(place: str, path: str | None) -> str:
    check_alone(place)
    if path is None:
        return place
    from raymerge.deploy.profiles import load_profile

    return with_options(place, load_profile(path).storage)


def with_flags(profile: Profile, flags: Mapping[str, Any]) -> Profile:
    from raymerge.deploy.profiles import profile_from_mapping

    settings = {name: flags[name] for name in _IN_PROFILES if name in flags}
    if not settings:
        return profile
    plain = profile.model_dump(mode="json", exclude_defaults=True)
    try:
        return profile_from_mapping({**plain, "run": {**plain.get("run", {}), **settings}})
    except ProfileError as error:
        names = {f"profile: run.{name}": f"--{name.replace('_', '-')}" for name in settings}
        problems = (replace(each, where=names.get(each.where, each.where)) for each in error.problems)
        raise ProfileError(problems) from error
