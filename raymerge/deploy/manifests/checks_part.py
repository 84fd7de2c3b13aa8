"""All that stands in the way of a run on Kubernetes and can be known without asking the cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from raymerge.deploy.manifests.checks import broken_rules
from raymerge.deploy.manifests.objects import rayjob
from raymerge.deploy.profiles.feasible import faults_between, is_mounted, steps_faults
from raymerge.deploy.profiles.kubernetes_part import Kubernetes
from raymerge.deploy.profiles.schema import Profile
from raymerge.errors import OptionError, Problem
from raymerge.recipes import AnyRecipe, parse_recipes
from raymerge.recipes.paths import places_read
from raymerge.recipes.reference import Exists
from raymerge.storage.addresses import check_output_address, is_remote, shown

MOST_CONFIG_BYTES = 2**20 - 2**14
"""Of recipe and profile together: a config map holds a mebibyte, its own fields included."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check(
    profile: Profile,
    recipe_text: str,
    output: str,
    name: str,
    recipe_name: str = "recipe",
    *,
    flags: Sequence[str] = (),
    exists: Exists = os.path.isdir,
) -> None:
    """Refuse what could not run in pods, before anything is sent.

    Args:
        profile: one with a section ``kubernetes``.
        recipe_text: the recipe, as its file has it.
        output: place of the new checkpoint.
        name: the run's.
        recipe_name: what messages call the recipe.
        flags: as ``rayjob`` has them.
        exists: whether a text is a local directory, which pods do not have.

    Raises:
        RecipeError: the recipe says no merge.
        ProfileError: no section ``kubernetes``.
        OptionError: all else, every reason at once.
    """
    check_output_address(output)
    config, job = rayjob(profile, recipe_text, output, name, flags=flags)
    # The rule of a profile: with a section of Kubernetes, else the line above has raised.
    kubernetes = profile.kubernetes
    assert kubernetes is not None
    recipes = parse_recipes(recipe_text, recipe_name, exists=exists)
    problems = list(_infeasible(profile, kubernetes, output, len(recipes)))
    problems += unreachable(kubernetes, recipes, exists=exists)
    num_bytes = sum(len(text.encode()) for text in config["data"].values())
    if num_bytes > MOST_CONFIG_BYTES:
        what = f"it has {num_bytes} bytes with its profile; a config map holds {MOST_CONFIG_BYTES}."
        problems.append(Problem(recipe_name, what, "Shorten it, or split it into several files."))
    problems += broken_rules(job)
    if problems:
        raise OptionError(problems)


def _infeasible(profile: Profile, kubernetes: Kubernetes, output: str, num_merges: int) -> Iterator[Problem]:
    """What the profile could not do, also where it is for another target and a flag chooses this one."""
    faults = [*faults_between(kubernetes, profile.run, output, "kubernetes")]
    for fault in dict.fromkeys((*faults, *steps_faults(profile.run, output, num_merges))):
        where = "-o" if fault.path == ("output",) else profile.where(*fault.path)
        yield Problem(where, fault.what, fault.remedy)


def unreachable(kubernetes: Kubernetes, recipes: Sequence[AnyRecipe], *, exists: Exists) -> Iterator[Problem]:
    """What recipes read and pods do not see: paths of this machine."""
    for where, place in dict.fromkeys(places_read(recipes)):
        if lack := _lack(kubernetes, place, exists):
            yield Problem(where, *lack)


def _lack(kubernetes: Kubernetes, place: str, exists: Exists) -> tuple[str, str] | None:
    """Why pods do not see a place and what to do; None where they do."""
    if is_remote(place):
        return None
    if place.startswith("/"):
        if is_mounted(kubernetes, place):
            return None
        what = f"{shown(place)} is on no volume that every pod mounts."
        return what, "Add it to 'volumes' of the profile, or write an address like s3://bucket/dir."
    if _HUB_NAME.fullmatch(place) and not exists(place):
        return None
    what = f"'{place}' is relative to a directory of this machine, which pods do not have."
    return what, "Write s3://bucket/dir, hf://org/name, or an absolute path on a volume."
