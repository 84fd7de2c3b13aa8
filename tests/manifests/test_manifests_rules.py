"""What could not run in pods is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from kits.kubernetes_profiles import OUTPUT, RECIPE, SHARED, kubernetes_data, kubernetes_profile

from raymerge.deploy.manifests import check, rayjob
from raymerge.deploy.profiles import Profile, profile_from_mapping
from raymerge.errors import OptionError, ProfileError, RecipeError

RUN = "raymerge-0123456789ab"


def reasons(recipe: str, output: str = OUTPUT, name: str = RUN, **change: Any) -> list[str]:
    """Why a run is refused."""
    with pytest.raises(OptionError) as caught:
        check(
            kubernetes_profile(change), recipe, output, name, "r.yml", exists=lambda path: path == "org/here"
        )
    return str(caught.value).splitlines()


def _recipe(path: str) -> str:
    return RECIPE.replace("s3://models/a", path)


@pytest.mark.parametrize(
    "path", ["./a", "a", "a/b/c", "~/a", "../a", "org/here", "s3://x/y+./adapter", "s3://x/y+/mnt/adapter"]
)
def test_models_of_this_machine_are_refused_at_their_place(path: str) -> None:
    (reason,) = reasons(_recipe(path))
    assert reason.startswith("r.yml:3:5: ")


@pytest.mark.parametrize(
    "path", ["org/name", "hf://org/name@main", "gs://b/x", "/mnt/models/a", "org/name@main+/mnt/models/b"]
)
def test_models_that_pods_see_are_taken(path: str) -> None:
    check(kubernetes_profile({"volumes": [SHARED]}), _recipe(path), OUTPUT, RUN, exists=lambda _: False)


def test_results_of_the_same_file_are_no_paths() -> None:
    chain = f"name: first\n{RECIPE}---\n{_recipe('first')}"
    output = "/mnt/models/out"
    check(kubernetes_profile({"volumes": [SHARED]}), chain, output, RUN, exists=lambda _: False)


def test_all_reasons_are_told_at_once() -> None:
    lines = reasons(_recipe("./a"), "merged")
    assert [line.partition(": ")[0] for line in lines] == ["-o", "r.yml:3:5"]


def test_a_profile_for_another_target_is_held_to_the_same_rules() -> None:
    """``--target kubernetes`` chooses it then."""
    data = kubernetes_data(run={"device": "cuda"})
    profile = profile_from_mapping({**data, "target": "local"})
    with pytest.raises(OptionError, match=r"profile: run\.device: cuda is asked for, but no group"):
        check(profile, RECIPE, OUTPUT, RUN)


def test_flags_are_part_of_the_entrypoint_where_a_shell_reads_them_as_they_are() -> None:
    profile = kubernetes_profile()
    job = rayjob(profile, RECIPE, OUTPUT, RUN, flags=("--replace", "--keep-intermediates"))[1]
    assert job["spec"]["entrypoint"].endswith(f"--json --run {RUN} --replace --keep-intermediates")
    check(profile, RECIPE, OUTPUT, RUN, flags=("--replace",))
    with pytest.raises(OptionError, match=r"spec\.entrypoint: a shell would read"):
        check(profile, RECIPE, OUTPUT, RUN, flags=("$(reboot)",))


def test_a_recipe_that_no_config_map_holds_is_refused() -> None:
    (reason,) = reasons(RECIPE + "# and so on\n" * 90_000)
    assert "a config map holds" in reason


def test_other_errors_keep_their_kind() -> None:
    with pytest.raises(RecipeError):
        check(kubernetes_profile(), "merge_method: nothing\n", OUTPUT, RUN)
    with pytest.raises(ProfileError):
        check(Profile(), RECIPE, OUTPUT, RUN)


def test_secrets_reach_no_manifest() -> None:
    """There is no way for one into a profile or recipe; what names a secret is all that is sent."""
    data = kubernetes_data({"env": {"X": "hf_" + "a" * 34}})
    with pytest.raises(ProfileError):
        profile_from_mapping(data)
    with pytest.raises(RecipeError):
        check(kubernetes_profile(), _recipe("s3://me:pass@b/x"), OUTPUT, RUN)
