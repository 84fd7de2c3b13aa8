"""Commands about a recipe of several outputs: what they show, and how they end."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from kits.adapter_merges import adapter
from kits.command_line import Outcome, run_command
from kits.golden import check_golden
from kits.merges import MEAN, make_models, write_recipe

pytestmark = pytest.mark.usefixtures("without_ray")

SWEEP = """\
sweep:
  w: [0.25, 0.5, 2.0]
  to: [bfloat16, float32]
  exclude: [{w: 2.0, to: float32}]
outputs: "w{w}-{to}"
merge_method: task_arithmetic
base_model: one
models:
  - model: two
    parameters: {weight: $w}
dtype: float32
out_dtype: $to
"""
NAMES = ["w0.25-bfloat16", "w0.25-float32", "w0.5-bfloat16", "w0.5-float32", "w2.0-bfloat16"]


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are some a merge runs elsewhere, and its plan says so."""
    monkeypatch.setattr("raymerge.devices.list_gpus", tuple)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_models(tmp_path)
    write_recipe(tmp_path, SWEEP)
    return tmp_path


def _run(folder: Path, *args: str) -> Outcome:
    return run_command(*args, cwd=folder, env={"COLUMNS": "100"})


def test_the_plan_shows_outputs_and_reads(folder: Path) -> None:
    shown = _run(folder, "plan", "recipe.yml", "--memory", "1GiB")
    assert shown.code == 0
    check_golden("plan_sweep", shown.text)


def test_the_plan_as_json_has_the_same(folder: Path) -> None:
    told = json.loads(_run(folder, "plan", "recipe.yml", "--json", "-o", "outs").text)
    assert [each["name"] for each in told["outputs"]] == NAMES
    assert sorted(len(each["outputs"]) for each in told["reads"]) == [2, 3]
    first = told["outputs"][0]
    assert first["values"] == {"w": "0.25", "to": "bfloat16"}
    assert "weight: 0.25" in first["recipe_text"]
    assert told["read_bytes"] == 2 * first["read_bytes"]
    assert told["written_bytes"] == sum(each["written_bytes"] for each in told["outputs"])


@pytest.mark.slow
def test_results_between_are_told_and_kept_once_for_all_outputs(folder: Path) -> None:
    write_recipe(folder, f"name: mean\n{MEAN}---\n{SWEEP.replace('model: two', 'model: mean')}")
    plan = ("plan", "recipe.yml", "-o", "outs")
    assert re.search(r"before +mean: 1 for 5 outputs *\nreads +2 reads", _run(folder, *plan).text)
    (before,) = json.loads(_run(folder, *plan, "--json").text)["before"]
    assert (before["title"], before["outputs"]) == ("mean", NAMES)
    made = _run(folder, "submit", "recipe.yml", "-o", "outs", "--inline", "--keep-intermediates")
    assert made.code == 0
    assert [each.name for each in (folder / "outs" / ".raymerge.steps").iterdir()] == ["mean"]
    audit = _run(folder, "verify", f"outs/{NAMES[0]}", "--level", "audit", "--inline")
    assert audit.code == 0
    assert "not kept" not in audit.text


@pytest.mark.slow
def test_a_simulated_sweep_reads_once_for_what_is_made_together(folder: Path) -> None:
    simulate = ("--simulate", "workers=2 storage=1GB/s startup=1s")
    told = json.loads(_run(folder, "plan", "recipe.yml", "--json", *simulate).text)
    runs = told["simulations"]
    assert [each["made"] for each in runs] == [each["outputs"] for each in told["reads"]]
    assert (
        sum(each["read_bytes"] for each in runs)
        == told["read_bytes"]
        < 2.5 * told["outputs"][0]["read_bytes"]
    )
    # Headers are written beside.
    written = sum(each["written_bytes"] for each in runs)
    assert 0.9 * told["written_bytes"] < written < told["written_bytes"]
    assert [each["startup_seconds"] for each in runs] == [1.0, 0.0]
    shown = _run(folder, "plan", "recipe.yml", *simulate).text
    assert "Simulated on 2 workers: w0.25-bfloat16, w0.5-bfloat16" in shown
    assert "Simulated, all runs together" in shown
    short = _run(folder, "plan", "recipe.yml", "--simulate", "storage=1GB/s memory=1MiB")
    short.check_refusal("--simulate memory")


@pytest.mark.slow
def test_outputs_are_made_below_the_place_and_kept_there(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert _run(folder, "submit", "recipe.yml", "-o", "my outs", "--dry-run").code == 0
    assert sorted(folder.rglob("*")) == before
    made = _run(folder, "submit", "recipe.yml", "-o", "my outs", "--json")
    assert made.code == 0
    assert sorted(each.name for each in (folder / "my outs").iterdir()) == NAMES
    told = [json.loads(line) for line in made.text.splitlines()]
    assert told[-1]["event"] == "outputs_published"
    assert told[-1]["names"] == NAMES
    steps = [shlex.split(step["command"])[1:] for step in told[-1]["next"]]
    first, last = f"my outs/{NAMES[0]}", f"my outs/{NAMES[-1]}"
    assert steps == [["report", first], ["verify", first, "--level", "load"], ["diff", first, last]]
    again = _run(folder, "submit", "recipe.yml", "-o", "my outs")
    assert again.code == 0
    assert again.text.count("made already") == len(NAMES)
    assert _run(folder, "plan", "recipe.yml", "-o", "my outs").text.count("there already") == len(NAMES)
    status = _run(folder, "status", f"my outs/{NAMES[1]}")
    assert "succeeded" in status.text
    status = _run(folder, "status", "my outs")
    assert "my outs: succeeded" in status.text
    assert "5 of 5 outputs are published.\n" in status.text


def test_one_that_fails_is_named_and_the_others_are_made(folder: Path) -> None:
    text = SWEEP.replace("0.25, 0.5, 2.0", "0.25, 1000000.0").replace("float32]", "float16]")
    write_recipe(folder, text.replace("{w: 2.0, to: float32}", "{w: 0.25, to: float16}"))
    failed = _run(folder, "submit", "recipe.yml", "-o", "outs")
    assert failed.code == 2
    assert "warning: w1000000.0-float16 is given up, and others go on: " in failed.text
    assert failed.text.count("do not fit F16") == 2
    status = _run(folder, "status", "outs").text
    assert "outs: failed" in status
    assert "2 of 3 outputs are published. The same command goes on" in status
    assert re.search(r"\nw0.25-bfloat16 +published *\n", status)
    assert re.search(r"\nw1000000.0-float16 +failed +\S", status)
    made = sorted(each.name for each in (folder / "outs").glob("w*"))
    assert made == ["w0.25-bfloat16", "w1000000.0-bfloat16"]


def test_what_stands_in_the_way_of_some_is_told_before(folder: Path) -> None:
    shutil.copytree(folder / "one", folder / "outs" / "w0.5-float32")
    refused = _run(folder, "submit", "recipe.yml", "-o", "outs")
    refused.check_refusal("w0.5-float32: this", "--replace")
    assert [each.name for each in (folder / "outs").iterdir()] == ["w0.5-float32"]
    page = _run(folder, "submit", "recipe.yml", "-o", "others", "--report", "page.html")
    page.check_refusal("this recipe makes several outputs")


def test_the_plan_of_one_output_compares_it_with_no_other(folder: Path) -> None:
    text = SWEEP.replace("[0.25, 0.5, 2.0]", "[0.25]").replace("[bfloat16, float32]", "[float32]")
    write_recipe(folder, text.replace("  exclude: [{w: 2.0, to: float32}]\n", ""))
    shown = _run(folder, "plan", "recipe.yml").text
    assert "1 read of the models" in shown
    assert not re.search("outputs at a time|in all outputs", shown)


def test_a_sweep_of_adapters_is_refused_for_what_it_is(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        adapter(tmp_path / name, seed)
    write_recipe(tmp_path, "sweep: {w: [0.2, 0.9]}\n" + MEAN + "parameters: {weight: $w}\n")
    refused = _run(tmp_path, "submit", "recipe.yml", "-o", "outs")
    refused.check_refusal("one adapter, of which there is no sweep", "without 'sweep' for each adapter")
