"""What all kinds of evaluators have: a declaration, and what it opens in the process that evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from raymerge.checkpoints.source import Checkpoint
from raymerge.options import RunOptions
from raymerge.planner.merges import PlannedMerge, plan_merges
from raymerge.publish.output_place import steps_directory
from raymerge.recipes.load import parse_recipes
from raymerge.recipes.order import AnyRecipe, merge_order
from raymerge.runtime.driver.chained_merges import MergeJob
from raymerge.runtime.workers.pool import InlinePool
from raymerge.storage.open import Lookup


class EvaluationError(Exception):
    """A candidate could not be evaluated: that is a result, and the search goes on with others."""


class Evaluator(Protocol):
    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        """The metrics of the candidate of this recipe text, by name.

        Args:
            share: of what it is evaluated on, from the beginning; 1 where the kind has no parts.

        Raises:
            EvaluationError: as it says. PlanError, RecipeError and NonFiniteError count as the candidate's
                own, too.
            RaymergeError: what else hinders a merge would hinder others: the search ends, to go on later."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EvaluatorKind:
    key: str
    """Of the ``search`` block, below which its settings stand."""
    read: Callable[[object], Any]
    """Settings, which travel pickled; raises FaultError with paths from the key on."""
    metrics: Callable[[Any], Mapping[str, float]]
    """Weights of the metrics where the recipe has none; empty where it must have them."""
    has_parts: bool
    """Whether a candidate may be evaluated on a share."""
    fingerprint: Callable[[Any], object]
    """Plain values that are others where the same settings evaluate otherwise."""
    open: Callable[[Any, CandidateMerges, Path], Evaluator]
    """With settings, what plans and merges, and a directory of its own for what it writes."""
    places: Callable[[Any], int | None] = lambda _: None
    """How many evaluators there are, where the settings say it."""
    changes_nothing: tuple[str, ...] = ()
    """Keys of its settings that no result depends on."""
    finish: Callable[[Any, CandidateMerges, Path, str], None] | None = None
    """Called with the best candidate's recipe text once it is published; raises EvaluationError."""


class CandidateMerges:
    """Plans candidates, whose models are opened once, and writes those that must be files."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self._opened: dict[tuple[object, ...], Checkpoint] = {}

    def plan(self, recipes: Sequence[AnyRecipe], output: Path | str) -> tuple[PlannedMerge, ...]:
        """Raises PlanError, also for problems of the last merge."""
        lookup = Lookup(options=self.options.storage)
        merges = plan_merges(
            merge_order(recipes),
            steps_directory(output, self.options.steps),
            version=version("raymerge"),
            lookup=lookup,
            opened=self._opened,
        )
        merges[-1].plan.require()
        return merges

    def write(self, text: str, output: Path) -> None:
        """Merge into a directory, in this process; raises as a merge does."""
        options = replace(self.options, inline=True, workers=None, address=None, run="", replace=True)
        job = MergeJob(self.plan(parse_recipes(text), output), output, options, on_event=lambda _: None)
        job.check()
        pool = InlinePool(options.device, options.threads)
        try:
            pool.start()
            job.carry_out(pool)
        finally:
            pool.close()
