"""``raymerge cluster``: what a profile makes on Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raymerge.cli import completion
from raymerge.cli.messages import command
from raymerge.cli.render.screen import own_stdout
from raymerge.cli.runs import sent_place
from raymerge.errors import OptionError, Problem
from raymerge.storage.addresses import check_output_address

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile

Kind = Literal["rayjob", "raycluster"]

_KIND_HELP = "A run, or a cluster that stands; by default a run where a recipe is given."


def make_cluster_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Show what a profile makes on Kubernetes.")
    # One command alone would take the place of the group.
    app.callback()(_cluster)
    app.command()(render)
    return app


@command
def render(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE", help="Where and how to run, as YAML.", autocompletion=completion.recipes
        ),
    ],
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="What the run merges.", autocompletion=completion.recipes
        ),
    ] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help=_KIND_HELP)] = None,
    directory: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Write a file for each object there.")
    ] = None,
) -> int:
    """Print the objects that a submission would make, for kubectl apply; ask no server."""
    from raymerge.deploy.manifests import as_yaml
    from raymerge.deploy.profiles import load_profile

    manifest_kind: Kind = kind or ("raycluster" if recipe is None else "rayjob")
    manifests = _manifests(load_profile(profile), manifest_kind, recipe)
    if directory is None:
        with own_stdout() as out:
            out.stream.write(as_yaml(manifests))
        return 0
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for manifest in manifests:
            path = Path(directory, f"{manifest['kind'].lower()}.yaml")
            path.write_text(as_yaml([manifest]), encoding="utf-8")
    except OSError as error:
        what, remedy = f"nothing can be written there ({error.strerror}).", "Give a writable directory."
        raise OptionError(Problem(f"-o {directory}", what, remedy)) from error
    return 0


def _cluster() -> None:
    """Show what a profile makes on Kubernetes."""


def _manifests(profile: Profile, kind: Kind, recipe: str | None) -> Sequence[dict[str, Any]]:
    from raymerge.deploy.manifests import check, raycluster, render_name
    from raymerge.documents.positions import read_file
    from raymerge.recipes.entry import RECIPE

    if kind == "raycluster":
        return raycluster(profile, "raymerge")
    if recipe is None:
        raise OptionError(Problem("--kind rayjob", "a run needs a recipe.", "Give it by --recipe."))
    if profile.output is None:
        what = "the profile does not say where the new checkpoint goes."
        raise OptionError(Problem(profile.where("output"), what, "Add output: s3://bucket/dir, or a path."))
    check_output_address(profile.output)
    text, output = read_file(recipe, RECIPE), sent_place(profile.output)
    name = render_name(text, profile.as_yaml())
    return check(profile, text, output, name, recipe)
