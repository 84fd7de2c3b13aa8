"""Evaluations of candidates in one process, and in several at once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from raymerge.errors import NonFiniteError, PlanError, RecipeError
from raymerge.events import OnEvent
from raymerge.options import RunOptions
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluationError
from raymerge.recipe_search.evaluators.table import KINDS
from raymerge.recipe_search.trials import Evaluation
from raymerge.runtime.workers.actor_calls import ActorCalls, ActorNeeds, LostCall


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    """Of the trial."""
    text: str
    """Of the plain recipe."""
    share: float


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """All that a process needs to evaluate; it travels pickled."""

    kind: str
    settings: Any
    metrics: Mapping[str, float]
    """Weights."""
    options: RunOptions
    scratch: str
    directory: str
    """Paths of recipe and settings are relative to it."""


Made: TypeAlias = Generator[tuple[Task, Evaluation], None, None]


class EvaluatorProcess:
    """One evaluator, which keeps its opened models between candidates."""

    def __init__(self, spec: EvaluatorSpec, name: str) -> None:
        with suppress(OSError):
            os.chdir(spec.directory)
        scratch = Path(spec.scratch) / name
        scratch.mkdir(parents=True, exist_ok=True)
        self._metrics = spec.metrics
        self._evaluator = KINDS[spec.kind].open(spec.settings, CandidateMerges(spec.options), scratch)

    def ready(self) -> bool:
        return True

    def call(self, task: Task) -> Evaluation:
        began = time.monotonic()
        metrics: Mapping[str, float] = {}
        score, error = None, ""
        try:
            metrics = self._evaluator.evaluate(task.text, task.share)
            score = self._score(metrics)
        except (EvaluationError, RecipeError, PlanError, NonFiniteError) as failure:
            error = str(failure)
        return Evaluation(dict(metrics), score, error, time.monotonic() - began)

    def close(self) -> None:
        self._evaluator.close()

    def _score(self, metrics: Mapping[str, float]) -> float:
        absent = [name for name in self._metrics if name not in metrics]
        if absent:
            raise EvaluationError(f"there is no metric '{absent[0]}'; there are {', '.join(metrics)}")
        score = math.fsum(weight * metrics[name] for name, weight in self._metrics.items())
        if not math.isfinite(score):
            raise EvaluationError(f"the score is not finite: {dict(metrics)}")
        return score


class Evaluations(Protocol):
    def evaluate(self, tasks: Sequence[Task]) -> Made:
        """In the order in which they are done; tasks that nobody has begun are left when it is closed."""

    def close(self) -> None: ...


class InlineEvaluations:
    """One after the other, in this process."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._process = EvaluatorProcess(spec, "evaluator-0")

    def evaluate(self, tasks: Sequence[Task]) -> Made:
        for task in tasks:
            yield task, self._process.call(task)

    def close(self) -> None:
        self._process.close()


class RayEvaluations:
    """Several at once, each in an actor."""

    def __init__(
        self, spec: EvaluatorSpec, needs: ActorNeeds, address: str | None, *, on_event: OnEvent
    ) -> None:
        self._calls = ActorCalls[Task](EvaluatorProcess, spec, needs, address, on_event=on_event)
        try:
            self._calls.start()
        except BaseException:
            self._calls.close()
            raise

    def evaluate(self, tasks: Sequence[Task]) -> Made:
        with closing(self._calls.run(tasks)) as done:
            for number, made in done:
                if isinstance(made, LostCall):
                    made = Evaluation({}, None, f"the evaluator ended: {made.reason}", 0.0)
                yield tasks[number], made

    def close(self) -> None:
        self._calls.close()
