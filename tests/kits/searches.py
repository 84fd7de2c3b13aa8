"""Searches whose candidates are judged by their recipe's numbers, without a merge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from raymerge.options import RunOptions
from raymerge.recipe_search.evaluators.evaluator import EvaluationError, EvaluatorKind
from raymerge.recipe_search.job import Search, SearchJob, SearchOptions
from raymerge.recipe_search.settings import read_settings
from raymerge.recipe_search.trials import Trial
from raymerge.recipes.search import read_marked_mapping

BEST = (0.3, 0.7, 0.45)


def marked_recipe(
    block: Mapping[str, Any], spaces: Sequence[Any] = ([0, 1], [0, 1], [0, 1])
) -> dict[str, Any]:
    models = [
        {"model": f"m{number}", "parameters": {"weight": {"search": space}}}
        for number, space in enumerate(spaces)
    ]
    return {"search": dict(block), "merge_method": "task_arithmetic", "base_model": "base", "models": models}


def bowl(weights: Sequence[float]) -> float:
    """0 at ``BEST``, and less elsewhere, with a cross term."""
    gaps = [weight - best for weight, best in zip(weights, BEST, strict=False)]
    return -sum(gap * gap for gap in gaps) - 0.5 * math.prod(gaps[:2])


class Judge:
    def __init__(
        self, judge: Callable[[Sequence[float], float], Mapping[str, float]], seconds: float
    ) -> None:
        self._judge, self._seconds = judge, seconds

    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        time.sleep(self._seconds)
        models = yaml.safe_load(text)["models"]
        return self._judge([each["parameters"]["weight"] for each in models], share)

    def close(self) -> None: ...


def judging(
    judge: Callable[[Sequence[float], float], Mapping[str, float]], *, seconds: float = 0.0
) -> EvaluatorKind:
    return EvaluatorKind(
        key="command",
        read=lambda value: value,
        metrics=lambda _: {"score": 1.0},
        has_parts=True,
        fingerprint=str,
        open=lambda settings, merges, scratch: Judge(judge, seconds),  # noqa: ARG005
    )


def bowl_judge(weights: Sequence[float], share: float) -> Mapping[str, float]:
    """On a share everything is worse by the same, and one corner cannot be evaluated."""
    if weights[1] > 0.75:
        raise EvaluationError("too heavy")
    return {"score": bowl(weights) - (1 - share)}


def job(
    recipe: Mapping[str, Any],
    directory: Path,
    *,
    evaluations: int | None = None,
    how: SearchOptions | None = None,
    replace_others: bool = False,
    memory: int | None = None,
    on_event: Callable[[Any], None] = lambda _: None,
) -> SearchJob:
    marked = read_marked_mapping(recipe, exists=lambda _: False)
    settings = read_settings(marked.block, marked.parameters, evaluations=evaluations)
    return SearchJob(
        Search(marked, settings, "models"),
        directory,
        RunOptions(replace=replace_others, memory=memory),
        how or SearchOptions(),
        on_event=on_event,
        before_first=lambda: None,
    )


def table(trials: Sequence[Trial]) -> list[Trial]:
    """Without what depends on time."""
    return [replace(each, seconds=0.0) for each in trials]


if __name__ == "__main__":
    import sys

    from raymerge.recipe_search.evaluators import table as kinds

    kinds.KINDS["command"] = judging(bowl_judge, seconds=0.01)
    block = {
        "strategy": sys.argv[2],
        "evaluations": 200,
        "command": "",
        "stop_early": {"share": 0.25, "keep": 0.5},
    }
    job(marked_recipe(block), Path(sys.argv[1]), on_event=lambda event: print(event, flush=True)).carry_out()
