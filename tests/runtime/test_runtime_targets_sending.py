"""What is asked of places in a recipe, and of the output, before they go to another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.deploy.targets.sending import AwayError, look_patiently, sending_problems
from raymerge.errors import Problem


def _recipe(model: str) -> str:
    return f"merge_method: linear\nmodels: [{{model: {model}, parameters: {{weight: 1}}}}]\ndtype: float32\n"


@pytest.mark.parametrize(
    "place", ["/mnt/a", "file:///mnt/a", "FILE:///mnt/a", "file://localhost/mnt/a", "s3://bucket/a"]
)
def test_a_place_that_means_the_same_there_is_sent(place: str) -> None:
    assert sending_problems(_recipe(place), "r.yml", place) == ()


def test_names_on_the_hub_are_sources_there() -> None:
    assert sending_problems(_recipe("org/name"), "r.yml", "/mnt/out") == ()
    assert sending_problems(_recipe("hf://org/name@main"), "r.yml", "/mnt/out") == ()


@pytest.mark.parametrize("place", ["a", "./a", "../a", "~/a", "a/b/c"])
def test_what_is_relative_to_this_machine_is_refused_with_both_places(place: str) -> None:
    source, output = sorted(map(str, sending_problems(_recipe(place), "r.yml", place)), reverse=True)
    assert source.startswith(
        f"r.yml:2:11: '{place}' is a path of this machine, which the cluster does not have."
    )
    assert output.startswith(f"-o: the output place '{place}' is relative to a directory of this machine.")
    assert "absolute path as the cluster sees it" in source


def test_what_is_sent_along_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert sending_problems(_recipe("./a"), "r.yml", "/mnt/out", along=tmp_path) == ()
    # Of what is absolute nothing is asked here, where it could not even be looked at.
    assert sending_problems(_recipe(f"/{'a' * 300}"), "r.yml", "/mnt/out", along=tmp_path) == ()
    (problem,) = sending_problems(_recipe("./b"), "r.yml", "/mnt/out", along=tmp_path)
    assert "./b" in problem.what


def test_after_an_absence_the_next_look_does_not_wait_for_longer() -> None:
    answers = iter([AwayError(Problem("server", "no answer.", "")), "seen"])

    def look() -> str:
        answer = next(answers)
        if isinstance(answer, AwayError):
            raise answer
        return answer

    seen = look_patiently(look, "raymerge-0123456789ab", (AwayError,), pause=0.2, away_seconds=60)
    assert seen == ("seen", 0.2)
