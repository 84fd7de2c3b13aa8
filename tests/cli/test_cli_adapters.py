"""``raymerge submit`` of a recipe whose models are adapters: the adapter, the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.adapter_merges import DOWN, Q0, adapter, with_heads
from kits.checkpoint_maker import tiny_llama
from kits.command_line import Outcome, run_command
from kits.merges import write_recipe

LINEAR = """\
merge_method: linear
models:
  - model: one
    parameters: {weight: 0.25}
  - model: two
    parameters: {weight: 0.75}
"""
EXACT = f"{LINEAR}adapter: {{combine: concatenate}}\n"
ONE_SHOT = "this recipe merges adapters into one adapter, which is done at once and has no plan."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two adapters of rank 4 and the recipe of their mean."""
    for seed, name in enumerate(("one", "two")):
        adapter(tmp_path / name, seed)
    write_recipe(tmp_path, LINEAR)
    return tmp_path


def _submit(folder: Path, *args: str, text: str = LINEAR) -> Outcome:
    return run_command("submit", write_recipe(folder, text), *args, cwd=folder)


def _lines(outcome: Outcome) -> dict[str, str]:
    """The report's facts by their titles."""
    pairs = (line.split(maxsplit=1) for line in outcome.text.splitlines() if line.strip())
    return {title: rest.strip() for title, rest in pairs}


def test_the_report_says_what_is_in_it(folder: Path) -> None:
    report = _lines(_submit(folder, "-o", "out", text=f"{LINEAR}adapter: {{rank: 2}}\n"))
    assert report["Adapter"] == "in out"
    assert report["factors"] == "3 modules, rank 2"
    assert report["energy"].startswith("at least 0.")
    assert 0 < float(report["error"].split()[0]) < 1
    assert "saved" not in report
    assert report["size"].endswith("B")


def test_what_only_some_adapters_change_is_noted(folder: Path) -> None:
    adapter(folder / "one", 0, [Q0])
    adapter(folder / "two", 1, [Q0, DOWN])
    outcome = _submit(folder, "-o", "out")
    assert f"one does not change {DOWN}: it counts there as a change of zero." in outcome.text
    assert _lines(outcome)["factors"] == "2 modules, rank 4"


def test_tensors_that_are_saved_whole_are_listed(folder: Path) -> None:
    for root in with_heads(folder / "heads"):
        root.rename(folder / ("h" + root.name))
    text = LINEAR.replace("one", "h0").replace("two", "h1")
    report = _lines(_submit(folder, "-o", "out", text=text))
    assert report["saved"] == "whole  1: lm_head.weight"


def test_the_json_is_one_event(folder: Path) -> None:
    outcome = _submit(folder, "-o", "out", "--json")
    event = json.loads(outcome.text)
    assert (outcome.code, event["event"], event["output"]) == (0, "adapter_merged", "out")
    assert [module["rank"] for module in event["modules"]] == [4, 4, 4]
    assert all(0 < module["energy"] <= 1 for module in event["modules"])
    assert {"nbytes", "saved", "relative_error", "notes"} <= set(event)


def test_options_that_cannot_be_honoured_are_refused_at_once(folder: Path) -> None:
    args = ("--workers", "2", "--device", "cuda", "--address", "auto")
    args = (*args, "--patience", "5", "--scratch", "x", "--steps", "y")
    outcome = _submit(folder, "-o", "out", *args, "--keep-intermediates", "--replace")
    assert outcome.code == 2
    options = (
        "--workers",
        "--device",
        "--address",
        "--patience",
        "--scratch",
        "--steps",
        "--keep-intermediates",
        "--replace",
    )
    assert all(f"{option}: a merge of adapters " in outcome.text for option in options)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("args", [(), ("--replace",)])
def test_a_taken_place_stays_as_it_is(args: tuple[str, ...], folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    outcome = _submit(folder, "-o", "out", *args)
    assert outcome.code == 2
    assert "empty" in outcome.text
    assert [each.name for each in (folder / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", [LINEAR, EXACT])
@pytest.mark.parametrize("args", [("plan",), ("submit", "--dry-run")])
def test_it_has_no_plan(args: tuple[str, str], text: str, folder: Path) -> None:
    write_recipe(folder, text)
    before = sorted(folder.rglob("*"))
    outcome = run_command(args[0], "recipe.yml", *args[1:], cwd=folder)
    assert outcome.code == 2
    assert ONE_SHOT in outcome.text
    assert "Use 'raymerge submit' without --dry-run" in outcome.text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LINEAR.replace("linear", "multislerp"), "multislerp does not merge adapters"),
        (f"base_model: base\n{LINEAR}", "'base_model' has no meaning in a merge of adapters"),
        (LINEAR.replace("model: two", "model: base"), "Name it behind the model that it was trained on"),
        (
            f"name: mean\n{EXACT}---\n{LINEAR.replace('model: two', 'model: mean')}",
            "merges of adapters are carried out one by one",
        ),
    ],
)
def test_recipes_that_cannot_be_carried_out(text: str, said: str, folder: Path) -> None:
    tiny_llama(folder / "base", 0)
    outcome = _submit(folder, "-o", "out", "--inline", text=text)
    assert outcome.code == 2
    assert said in outcome.text
    assert "Traceback" not in outcome.text
    assert not (folder / "out").exists()
