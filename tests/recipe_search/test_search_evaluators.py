"""Evaluators: a command that gets the candidate's files, and the loss of texts without any files."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kits.checkpoint_maker import tiny_llama
from kits.command_line import run_command

import raymerge
from raymerge.documents.fields import FaultError
from raymerge.errors import PlanError, RecipeError, SearchError, TargetError
from raymerge.events import Event, OutputKept, Published, TrialEvaluated
from raymerge.recipe_search.evaluators import command
from raymerge.recipe_search.evaluators.command import CommandSettings, metrics_in
from raymerge.recipe_search.evaluators.evaluator import EvaluationError
from raymerge.recipe_search.evaluators.texts import TextsSettings, read_texts
from raymerge.recipe_search.trials import best_first

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
INLINE = raymerge.RunOptions(inline=True, threads=1)
SCRIPT = """
import json, os, re, sys
card = open(sys.argv[1] + "/README.md").read()
weight = float(re.search(r"weight: ([0-9.e-]+)", card)[1])
if weight > 0.8:
    print("it is too heavy", file=sys.stderr)
    sys.exit(7)
print("some talk", os.environ["FOR_THE_COMMAND"])
print(json.dumps({"loss": (weight - 0.3) ** 2, "size": 1}))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    base = tiny_llama(tmp_path / "a", 1)
    tiny_llama(tmp_path / "b", 2, base=base)
    (tmp_path / "evaluate.py").write_text(SCRIPT)
    weight = {"search": {"low": 0.1, "high": 0.9, "step": 0.2}}
    return {
        "search": {
            "strategy": "grid",
            "command": {
                "run": f"{sys.executable} {tmp_path}/evaluate.py {{model}}",
                "timeout": 60,
                "environment": {"FOR_THE_COMMAND": "alone"},
            },
            "metrics": {"loss": -1},
        },
        "merge_method": "linear",
        "models": [
            {"model": str(tmp_path / "a"), "parameters": {"weight": weight}},
            {"model": str(tmp_path / "b"), "parameters": {"weight": 0.5}},
        ],
        "dtype": "bfloat16",
    }


def test_the_best_candidate_is_published_with_the_trials_in_its_card(
    recipe: Mapping[str, Any], tmp_path: Path
) -> None:
    seen: list[Event] = []
    result = raymerge.search(recipe, tmp_path / "out", INLINE, on_event=seen.append)
    assert (result.best.values, result.best.metrics) == (
        {"models[0].weight": 0.3},
        {"loss": 0.0, "size": 1.0},
    )
    assert [each.state for each in result.trials] == ["done"] * 4 + ["failed"]
    assert result.trials[4].error == "the command ended with 7\nit is too heavy"
    assert isinstance(seen[-1], Published)
    assert raymerge.verify(tmp_path / "out").problems == ()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# The best of 5 trials (1 failed):" in card
    assert "FOR_THE_COMMAND" not in card
    rows = [line.split()[1:] for line in card.splitlines() if line.startswith("#     ")]
    assert rows[:4] == [[number, score, score.strip("-"), weight] for number, score, weight in ROWS]
    # What it was made of makes the same without a search.
    plain = tmp_path / "plain.yml"
    plain.write_text((tmp_path / "out" / "raymerge" / "recipe.yml").read_text())
    assert raymerge.plan(plain).digest == result.run.digest
    assert not list(tmp_path.glob(".out.raymerge.search/candidates*"))
    # The same call again evaluates nothing, and leaves what is there.
    seen.clear()
    assert raymerge.search(recipe, tmp_path / "out", INLINE, on_event=seen.append).best == result.best
    assert all(each.is_recorded for each in seen if isinstance(each, TrialEvaluated))
    assert isinstance(seen[-1], OutputKept)


ROWS = [("1", "0", "0.3"), ("0", "-0.04", "0.1"), ("2", "-0.04", "0.5"), ("3", "-0.16", "0.7")]
"""Trial, score and weight, best first: the score is minus the square of the weight's distance from 0.3."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("changed", ["a/model.safetensors", "b/model.safetensors", "c/model.safetensors"])
def test_trials_of_models_with_other_weights_are_refused(
    recipe: dict[str, Any], tmp_path: Path, changed: str
) -> None:
    tiny_llama(tmp_path / "c", 3, base=tmp_path / "a")
    recipe["models"][1]["model"] = {"search": {"choices": [str(tmp_path / "b"), str(tmp_path / "c")]}}
    before = raymerge.plan_search(recipe).search.identity
    assert raymerge.plan_search(recipe).search.identity == before
    weights = bytearray((tmp_path / changed).read_bytes())
    weights[-1] ^= 1
    (tmp_path / changed).write_bytes(weights)
    after = raymerge.plan_search(recipe).search.identity
    assert [key for key in before if before[key] != after[key]] == ["models"]


def test_the_place_is_looked_at_before_the_first_evaluation(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(TargetError, match="this directory is not empty"):
        raymerge.search(recipe, tmp_path / "out", INLINE)
    recipe["merge_method"] = {"search": {"choices": ["linear", "tsi"]}}
    with pytest.raises(PlanError, match="with merge_method = tsi: there is no merge_method 'tsi'"):
        raymerge.search(recipe, tmp_path / "other", INLINE)


def test_ingredients_of_a_mean_may_all_be_left_out_but_not_together(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    for model in recipe["models"]:
        model["parameters"]["weight"] = {"search": [0, 1]}
    recipe["search"]["strategy"] = "soup"
    planned = raymerge.plan_search(recipe, tmp_path / "out")
    assert planned.search.settings.evaluations == 3
    recipe["search"]["texts"] = [str(tmp_path / "gone.txt")]
    del recipe["search"]["command"], recipe["search"]["metrics"]
    with pytest.raises(PlanError, match=r"gone\.txt: cannot be read: No such file or directory"):
        raymerge.plan_search(recipe, tmp_path / "out")


def test_a_command_that_is_not_there_is_told_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["search"]["command"] = "/nowhere/evaluate {model}"
    with pytest.raises(SearchError) as failed:
        raymerge.search(recipe, tmp_path / "out", INLINE)
    (problem,) = failed.value.problems
    assert problem.what.startswith("no candidate could be evaluated: the command ended with 127\n")
    assert not (tmp_path / "out").exists()


def test_the_command_line_plans_searches_and_refuses(recipe: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "marked.yml").write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    planned = run_command("plan", "marked.yml", cwd=tmp_path)
    assert planned.code == 0
    assert "grid, at most 5 evaluations by command, 4 at once" in planned.text
    run_command("submit", "marked.yml", cwd=tmp_path).check_refusal("Use 'raymerge search'")
    run_command("search", "marked.yml", "--time", "soon", cwd=tmp_path).check_refusal("Write it like 90s")
    searched = run_command(
        "search", "marked.yml", "-o", "out", "--evaluations", "2", "--threads", "1", "--json", cwd=tmp_path
    )
    events = [json.loads(line) for line in searched.text.splitlines() if line.startswith("{")]
    assert [each["event"] for each in events if each["event"].startswith(("search", "trial"))] == [
        "search_started", "trial_evaluated", "trial_evaluated", "search_ended",
    ]  # fmt: skip
    assert events[-1]["event"] == "published"


@pytest.mark.ray
@pytest.mark.slow
def test_two_evaluators_end_with_the_same_trials(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["search"] |= {"strategy": "cmaes", "evaluations": 12}
    recipe["models"][0]["parameters"]["weight"] = {"search": [0.0, 0.9]}
    how = raymerge.SearchOptions(evaluators=2)
    options = raymerge.RunOptions(threads=1)
    one = raymerge.search(recipe, tmp_path / "one", options)
    two = raymerge.search(recipe, tmp_path / "two", options, how)
    tables = [[(*each.values.items(), each.score, each.error) for each in own.trials] for own in (one, two)]
    assert tables[0] == tables[1]
    assert one.run.digest == two.run.digest


def test_the_loss_of_texts_is_that_of_the_written_model(tmp_path: Path) -> None:
    text = tmp_path / "held-out.txt"
    text.write_text((QUICKSTART / "texts" / "valid-english.txt").read_text()[:3000])
    models = [
        {"model": str(QUICKSTART / "models" / name), "parameters": {"weight": {"search": [0, 1]}}}
        for name in ("english", "french")
    ]
    recipe = {
        "search": {"strategy": "soup", "texts": {"files": [str(text)], "length": 256}},
        "merge_method": "task_arithmetic",
        "base_model": str(QUICKSTART / "models" / "base"),
        "models": models,
        "dtype": "bfloat16",
    }
    result = raymerge.search(recipe, tmp_path / "out", INLINE)
    assert len(result.trials) == 3
    assert best_first(result.trials)[0] is result.best
    (loss,) = raymerge.evaluate(tmp_path / "out", [text], length=256, threads=1).texts
    assert result.best.metrics == pytest.approx({"mean": loss.loss, "held-out": loss.loss}, abs=1e-6)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.slow
def test_a_search_of_the_quickstart_is_as_good_as_a_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(QUICKSTART.parents[1])
    example = "configs/recipes/searches/weights.yml"
    result = raymerge.search(example, tmp_path / "out", INLINE, evaluations=10)
    assert result.best.metrics["mean"] < GRID + 0.001


GRID = 3.01581
"""The lowest mean loss on the 9 x 9 x 9 grid of the weights, by tests/benchmarks/search.py."""


@pytest.mark.parametrize(
    ("printed", "metrics"),
    [("talk\n0.5\n", {"score": 0.5}), ('{"a": 1, "b": "x", "c": true, "d": NaN}', {"a": 1.0})],
)
def test_the_last_line_of_a_command_is_its_metrics(printed: str, metrics: Mapping[str, float]) -> None:
    assert metrics_in(printed) == metrics


def test_what_a_command_leaves_running_is_ended_and_not_waited_for() -> None:
    settings = CommandSettings("sleep 600 & echo $! {model}; echo $!", timeout=20)
    left = int(command.run_command(settings, "{model}", "m")["score"])
    with pytest.raises(EvaluationError, match="ended with 3\nwhy"):
        command.run_command(CommandSettings("echo why >&2; exit 3"), "{model}", "m")
    assert is_gone(left)


def is_gone(process: int) -> bool:
    """Whether it has ended by the end of a while."""
    for _ in range(3000):
        try:
            if Path(f"/proc/{process}/stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("last", ["all done", "[" * 100_000, "1" * 400])
def test_a_command_that_prints_no_number_is_told_so(last: str) -> None:
    with pytest.raises(EvaluationError) as failed:
        metrics_in(f"1.5\n{last}\n")
    assert str(failed.value) == (
        f"the last line that the command printed is {last[:100]!r}, "
        "and neither a number nor a JSON object of numbers"
    )


def test_texts_are_named_by_their_files() -> None:
    assert read_texts(["a/x.txt", "b/y.txt"]) == TextsSettings({"x": "a/x.txt", "y": "b/y.txt"})
    with pytest.raises(FaultError, match="files of different names"):
        read_texts(["a/x.txt", "b/x.txt"])


def test_a_recipe_without_a_search_is_submitted(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no 'search' in this recipe"):
        raymerge.plan_search({"merge_method": "linear", "models": []}, tmp_path / "out")
