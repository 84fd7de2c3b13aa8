"""Recipes of several merges on the command line: plans in order, and what is kept between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kits.chains import CHAIN
from kits.command_line import Outcome, run_command
from kits.golden import check_golden
from kits.merges import make_models, write_recipe

STEPS = ".recipe-merged.raymerge.steps"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models and the recipes of a chain over them."""
    write_recipe(make_models(tmp_path), CHAIN)
    return tmp_path


def _submit(folder: Path, *args: str) -> Outcome:
    return run_command("submit", "recipe.yml", "--inline", *args, cwd=folder)


def _plan(folder: Path, *args: str, columns: str = "1000") -> Outcome:
    return run_command("plan", "recipe.yml", "--memory", "1GiB", *args, cwd=folder, env={"COLUMNS": columns})


# Plans


def test_plans_come_in_the_order_of_the_merges(folder: Path) -> None:
    outcome = _plan(folder, columns="80")
    assert outcome.code == 0
    check_golden("plan-several", outcome.text)


def test_the_json_is_a_list_with_names(folder: Path) -> None:
    found = json.loads(_plan(folder, "--json").text)
    assert [(each["recipe"], each["name"], each["is_made"]) for each in found] == [
        ("recipe.yml", "left", False),
        ("recipe.yml", "right", False),
        ("recipe.yml", None, False),
    ]
    assert [each["method"] for each in found] == ["linear", "task_arithmetic", "slerp"]
    assert all("tensors" not in each for each in found)


def test_what_is_made_already_is_said(folder: Path) -> None:
    assert _submit(folder, "--keep-intermediates").code == 0
    assert [each["is_made"] for each in json.loads(_plan(folder, "--json").text)] == [True, True, False]
    assert _plan(folder).text.count("made already: 'submit' takes the result that is there") == 2
    elsewhere = json.loads(_plan(folder, "--json", "-o", "elsewhere").text)
    assert [each["is_made"] for each in elsewhere] == [False, False, False]


def test_what_is_made_on_the_way_may_lie_elsewhere(folder: Path) -> None:
    done = _submit(folder, "-o", "out", "--keep-intermediates", "--steps", "steps")
    assert done.code == 0, done.text
    assert sorted(path.name for path in folder.iterdir()) == ["one", "out", "recipe.yml", "steps", "two"]
    (root,) = [path for path in (folder / "steps").iterdir() if not path.name.startswith(".")]
    outcome = _plan(folder, "-o", "out", "--steps", "steps")
    assert outcome.text.count("made already") == 2
    assert f"what is made on the way lies in {root}" in outcome.text
    found = json.loads(_plan(folder, "-o", "out", "--steps", "steps", "--json").text)
    assert [each.get("steps") for each in found] == [None, None, str(root)]
    assert [each["is_made"] for each in json.loads(_plan(folder, "-o", "out", "--json").text)] == [False] * 3
    audit = ("verify", "out", "--level", "audit", "--inline")
    kept = run_command(*audit, "--steps", "steps", cwd=folder)
    assert (kept.code, "not audited" in kept.text) == (0, False)
    assert "not audited: 30 tensors" in run_command(*audit, cwd=folder).text


@pytest.mark.parametrize("how", [("plan",), ("submit", "--dry-run"), ("submit", "--inline")])
def test_towards_a_store_it_must_be_named(folder: Path, how: tuple[str, ...]) -> None:
    outcome = run_command(how[0], "recipe.yml", "-o", "s3://b/out", *how[1:], cwd=folder)
    assert outcome.code == 2
    assert "s3://b/out: this recipe has results between" in outcome.text
    assert "Give --steps DIR" in outcome.text


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_problems_of_all_merges_have_their_lines(verb: str, folder: Path) -> None:
    wrong = CHAIN.replace("{weight: 0.25}", "{wieght: 0.25}").replace("base_model: one", "base_model: absent")
    write_recipe(folder, wrong)
    outcome = run_command(verb, "recipe.yml", cwd=folder)
    assert outcome.code == 2
    places = [line.split(" ")[0] for line in outcome.text.splitlines() if line.startswith("recipe.yml")]
    assert [place.split(":")[1] for place in places] == ["3", "7"]
    assert "The merges of this file are 'left', 'right'" in outcome.text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_too_little_memory_is_told_once_for_each_cause(folder: Path) -> None:
    outcome = run_command("plan", "recipe.yml", "--memory", "1MiB", cwd=folder)
    assert outcome.code == 2
    causes = [line for line in outcome.text.splitlines() if line.startswith("--memory: ")]
    assert causes == ["--memory: 1.05 MB a worker are too little for any merge."]


# Runs


def test_a_chain_is_submitted_as_any_recipe(folder: Path) -> None:
    outcome = _submit(folder)
    assert outcome.code == 0, outcome.text
    lines = outcome.text.splitlines()
    assert [line for line in lines if line.startswith("merge ")] == [
        "merge 1 of 3: left",
        "merge 2 of 3: right",
        "merge 3 of 3",
    ]
    assert [line.split(" in ")[0] for line in lines if line.startswith("made in ")] == ["made", "made"]
    assert [line for line in lines if line.startswith("done: ")] == ["done: recipe-merged"]
    assert not (folder / STEPS).exists()


def test_intermediates_are_kept_on_demand_and_used_again(folder: Path) -> None:
    _submit(folder, "--keep-intermediates")
    assert sorted(path.name for path in (folder / STEPS).iterdir()) == ["left", "right"]
    outcome = _submit(folder, "--replace")
    assert (
        "merge 1 of 3: left, made already\nmerge 2 of 3: right, made already\nmerge 3 of 3\n" in outcome.text
    )
    assert not (folder / STEPS).exists()


def test_a_dry_run_shows_every_merge(folder: Path) -> None:
    text = _submit(folder, "--dry-run").text
    assert all(f"merge {number} of 3" in text for number in (1, 2, 3))
    assert text.rstrip().endswith("dry run: nothing was written; recipe-merged can be made")
    event: dict[str, Any] = json.loads(_submit(folder, "--dry-run", "--json").text)
    assert (event["event"], event["place"]) == ("dry_run", "recipe-merged")
    assert [merge["name"] for merge in event["merges"]] == ["left", "right", None]
