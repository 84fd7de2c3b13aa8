"""A search ends with the same table however often it is stopped, and says what goes wrong."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.searches import bowl, bowl_judge, job, judging, marked_recipe, table

from raymerge.documents.fields import FaultError
from raymerge.errors import HeldError, OptionError, Problem, SearchError, TargetError, UnreadableError
from raymerge.events import TrialEvaluated
from raymerge.recipe_search import job as search_job
from raymerge.recipe_search.evaluation import EvaluatorSpec, InlineEvaluations
from raymerge.recipe_search.evaluators.evaluator import (
    CandidateMerges,
    EvaluationError,
    Evaluator,
    EvaluatorKind,
)
from raymerge.recipe_search.evaluators.table import KINDS
from raymerge.recipe_search.job import SearchOptions
from raymerge.recipe_search.settings import read_settings
from raymerge.recipe_search.trials import TrialStore, best_first
from raymerge.recipes.search import read_marked_mapping
from raymerge.runtime.workers import sizing

KITS = Path(__file__).parents[1] / "kits"
EARLY = {"share": 0.25, "keep": 0.5}


class _StoppedError(Exception):
    pass


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> EvaluatorKind:
    judged = judging(bowl_judge)
    monkeypatch.setitem(KINDS, "command", judged)
    return judged


def _block(strategy: str, **more: Any) -> dict[str, Any]:
    return {"strategy": strategy, "evaluations": 24, "command": "", **more}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("strategy", ["tpe", "cmaes", "soup"])
def test_a_search_that_is_stopped_anywhere_ends_with_the_same_table(tmp_path: Path, strategy: str) -> None:
    recipe = marked_recipe(_block(strategy, stop_early=EARLY))
    whole = job(recipe, tmp_path / "whole").carry_out()
    assert {"done", "failed"} <= {each.state for each in whole}
    assert bowl_of(best_first(whole)[0].values) == max(bowl_of(each.values) for each in best_first(whole))
    chance = random.Random(1)
    for _ in range(5):
        left = chance.randrange(1, 8)

        def stop(event: object) -> None:
            nonlocal left
            left -= isinstance(event, TrialEvaluated) and not event.is_recorded
            if not left:
                raise _StoppedError

        try:
            job(recipe, tmp_path / "stopped", on_event=stop).carry_out()
        except _StoppedError:
            continue
        break
    assert table(job(recipe, tmp_path / "stopped").carry_out()) == table(whole)


def bowl_of(values: Mapping[str, Any]) -> float:
    return bowl([*values.values()])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tpe", "cmaes"])
def test_a_search_that_is_killed_ends_with_the_same_table(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "command", judging(bowl_judge))
    command = [sys.executable, str(KITS / "searches.py"), str(tmp_path / "killed"), strategy]
    chance = random.Random(strategy)
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(60, 100)):
                process.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.03))
            assert process.poll() is None
            process.kill()
    recipe = marked_recipe(_block(strategy, stop_early=EARLY) | {"evaluations": 200})
    killed = job(recipe, tmp_path / "killed").carry_out()
    assert table(killed) == table(job(recipe, tmp_path / "whole").carry_out())


@pytest.mark.usefixtures("kind")
def test_more_evaluations_go_on_with_those_that_are_there(tmp_path: Path) -> None:
    made: list[object] = []
    recipe = marked_recipe(_block("tpe"))
    job(recipe, tmp_path / "twice", evaluations=6).carry_out()
    twice = job(recipe, tmp_path / "twice", evaluations=12, on_event=made.append).carry_out()
    assert sum(isinstance(each, TrialEvaluated) and not each.is_recorded for each in made) == 6
    assert table(twice) == table(job(recipe, tmp_path / "once", evaluations=12).carry_out())


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("strategy", ["tpe", "cmaes", "random", "soup"])
def test_a_search_ends_within_a_round(tmp_path: Path, strategy: str) -> None:
    assert len(job(marked_recipe(_block(strategy, evaluations=2)), tmp_path).carry_out()) == 2


@pytest.mark.usefixtures("kind")
def test_the_better_part_of_a_round_is_evaluated_on_the_whole(tmp_path: Path) -> None:
    seen: list[object] = []
    recipe = marked_recipe(_block("random", evaluations=8, round=8, stop_early=EARLY, seed=5))
    trials = job(recipe, tmp_path, on_event=seen.append).carry_out()
    evaluated = [each for each in seen if isinstance(each, TrialEvaluated)]
    shares = {share: {each.number for each in evaluated if each.share == share} for share in (0.25, 1.0)}
    assert shares[0.25] == set(range(8))
    by_bowl = sorted((each for each in trials if not each.error), key=lambda each: -bowl_of(each.values))
    assert shares[1.0] == {each.number for each in by_bowl[:4]}


def test_evaluators_share_the_memory_of_a_machine(
    tmp_path: Path, kind: EvaluatorKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def opened(settings: Any, merges: CandidateMerges, scratch: Path) -> Evaluator:
        seen.append(merges.options.memory)
        return kind.open(settings, merges, scratch)

    def evaluations(spec: EvaluatorSpec, *_: object, **__: object) -> InlineEvaluations:
        return InlineEvaluations(spec)

    monkeypatch.setitem(KINDS, "command", replace(kind, open=opened))
    monkeypatch.setattr(search_job, "RayEvaluations", evaluations)
    monkeypatch.setattr(search_job, "free_memory", lambda: 24 << 30)
    job(marked_recipe(_block("random")), tmp_path, how=SearchOptions(4)).carry_out()
    assert seen == [3 << 30]
    monkeypatch.setattr(sizing, "free_memory", lambda: 24 << 30)
    with pytest.raises(OptionError, match=r"4 evaluators with 8\.59 GB each would use 34\.36 GB"):
        job(marked_recipe(_block("random")), tmp_path / "b", how=SearchOptions(4), memory=8 << 30).carry_out()


def test_the_same_candidate_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def judge(weights: Sequence[float], share: float) -> Mapping[str, float]:
        calls.append(share)
        return {"score": weights[0]}

    monkeypatch.setitem(KINDS, "command", judging(judge))
    recipe = marked_recipe(_block("random"), [{"choices": [1, 2, 3]}])
    assert len(job(recipe, tmp_path).carry_out()) == 24
    assert len(calls) == 3


def test_where_no_candidate_can_be_evaluated_the_first_round_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True

    def judge(weights: Sequence[float], share: float) -> Mapping[str, float]:
        if broken:
            raise EvaluationError("the command ended with 1")
        return {"score": weights[0]}

    monkeypatch.setitem(KINDS, "command", judging(judge))
    recipe = marked_recipe(_block("tpe"))
    with pytest.raises(SearchError) as failed:
        job(recipe, tmp_path).carry_out()
    assert str(failed.value) == (
        "recipe: search: no candidate could be evaluated: the command ended with 1. "
        "Mend that: the same command evaluates them again."
    )
    broken = False
    assert {each.state for each in job(recipe, tmp_path).carry_out()} == {"done"}


def test_what_is_no_fault_of_a_candidate_ends_the_search_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def judge(weights: Sequence[float], share: float) -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise UnreadableError(Problem("base", "cannot be read.", "Mount it."))
        return bowl_judge(weights, share)

    monkeypatch.setitem(KINDS, "command", judging(judge))
    recipe = marked_recipe(_block("tpe", evaluations=12))
    with pytest.raises(UnreadableError):
        job(recipe, tmp_path / "out").carry_out()
    mended = job(recipe, tmp_path / "out").carry_out()
    assert table(mended) == table(job(recipe, tmp_path / "whole").carry_out())


@pytest.mark.usefixtures("kind")
def test_no_evaluation_is_begun_when_the_time_is_up(tmp_path: Path) -> None:
    recipe = marked_recipe(_block("tpe"))
    with pytest.raises(SearchError, match="no candidate was evaluated in time"):
        job(recipe, tmp_path, how=SearchOptions(seconds=0.0)).carry_out()
    job(recipe, tmp_path, evaluations=5).carry_out()
    assert len(job(recipe, tmp_path, how=SearchOptions(seconds=0.0)).carry_out()) == 5


@pytest.mark.usefixtures("kind")
def test_trials_of_another_search_are_left_alone(tmp_path: Path) -> None:
    job(marked_recipe(_block("tpe")), tmp_path, evaluations=4).carry_out()
    other = marked_recipe(_block("tpe", seed=1))
    with pytest.raises(TargetError) as refused:
        job(other, tmp_path).carry_out()
    assert str(refused.value) == (
        f"{tmp_path}: the trials here are of another search; what differs: recipe. "
        "Choose another -o, or give --replace to begin anew."
    )
    assert len(job(other, tmp_path, evaluations=4, replace_others=True).carry_out()) == 4
    with TrialStore(tmp_path, {}), pytest.raises(HeldError, match="another process goes on with this search"):
        TrialStore(tmp_path, {})


@pytest.mark.usefixtures("kind")
def test_trials_that_would_be_others_now_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    recipe = marked_recipe(_block("random"))
    job(recipe, tmp_path, evaluations=4).carry_out()
    with closing(sqlite3.connect(tmp_path / "trials.sqlite")) as database, database:
        database.execute("UPDATE trials SET parameters = '{\"models[0].weight\": 0.5}' WHERE number = 2")
    with pytest.raises(TargetError) as refused:
        job(recipe, tmp_path).carry_out()
    assert 'trial 2 tried {"models[0].weight": 0.5}, and now it would try' in str(refused.value)


@pytest.mark.parametrize(
    ("block", "messages"),
    [
        (
            {"strategy": "grid", "evaluations": 5, "command": "./e {model}"},
            [
                f"a grid needs the step of 'models[{number}].weight'. Write {{low: 0, high: 1, step: 0.125}}."
                for number in range(3)
            ],
        ),
        (
            {"strategy": "tpa", "command": "./e {model}", "round": 0, "metric": {}},
            [
                "unknown key 'metric'. Did you mean 'metrics'?",
                "'tpa' is not known here. Did you mean 'tpe'? Write one of: "
                "tpe, gp, cmaes, random, grid, soup.",
                "0 is out of range. Write a whole number from 1 to 1000.",
                "nothing says how many candidates are evaluated. "
                "Add evaluations: 40, or more for more parameters.",
            ],
        ),
        (
            {"evaluations": 5, "command": "./e", "stop_early": {"share": 0.5}},
            [
                "the command does not use {model}, which is what it evaluates. "
                "Write it as command: python evaluate.py {model}.",
                "an evaluation by 'command' has no parts to stop after. Remove it.",
            ],
        ),
        (
            {"evaluations": 5, "command": "./e {model}", "metrics": {"loss": -1, 1: 2}},
            [
                "1 is no name. Write it as metrics: {loss: -1, accuracy: 2}; what is better when lower has a "
                "negative weight."
            ],
        ),
        (
            {"evaluations": 5},
            ["nothing says how a candidate is evaluated. Add one of: texts, command, server, lm_eval."],
        ),
        (
            {"evaluations": 5, "lm_eval": {"tasks": ["arc_easy"]}},
            [
                "nothing says which metrics the score is made of. "
                "Add metrics: {TASK/acc: 1}, with a task's name and its metric."
            ],
        ),
    ],
)
def test_wrong_settings_are_refused(block: Mapping[str, Any], messages: Sequence[str]) -> None:
    marked = read_marked_mapping(marked_recipe(block))
    with pytest.raises(FaultError) as refused:
        read_settings(marked.block, marked.parameters)
    assert [f"{each.what} {each.remedy}" for each in refused.value.faults] == messages
