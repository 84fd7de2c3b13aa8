"""A search from its first round to its best candidate; the same call goes on where it was stopped."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from raymerge.errors import OptionError, Problem, SearchError
from raymerge.events import OnEvent, SearchStarted, TrialEvaluated
from raymerge.options import RunOptions
from raymerge.recipe_search.evaluation import (
    Evaluations,
    EvaluatorSpec,
    InlineEvaluations,
    RayEvaluations,
    Task,
)
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluationError
from raymerge.recipe_search.evaluators.table import KINDS
from raymerge.recipe_search.settings import SearchSettings
from raymerge.recipe_search.strategies import Strategy, make_strategy
from raymerge.recipe_search.trials import Evaluation, Trial, TrialStore, best_first
from raymerge.recipes.load import MARK
from raymerge.recipes.search import MarkedRecipe, Values
from raymerge.runtime.workers.actor_calls import ActorNeeds
from raymerge.runtime.workers.sizing import check_free, cores_here, free_memory

_SCRATCH = "candidates"
_MOST_THREADS = 4
_CHANGE_NO_TRIAL = ("evaluations",)
"""Keys of the block by which a search only ends sooner or later."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search is carried out; none of it changes what a trial tries."""

    evaluators: int = 1
    """That evaluate at the same time, as actors of Ray if there are several."""
    evaluator_gpus: float = 0.0
    """Of each."""
    seconds: float | None = None
    """After which no evaluation is begun."""

    def __post_init__(self) -> None:
        if self.evaluators < 1:
            what = f"{self.evaluators} evaluators evaluate nothing."
            raise OptionError(Problem("--evaluators", what, "Give 1 or more."))
        if self.evaluator_gpus < 0:
            what = f"{self.evaluator_gpus:g} GPUs cannot be had."
            raise OptionError(Problem("--evaluator-gpus", what, "Give 0 or more."))


@dataclass(frozen=True, slots=True)
class Search:
    marked: MarkedRecipe
    settings: SearchSettings
    sources: str
    """A digest of the models."""

    @property
    def block(self) -> Mapping[str, Any]:
        """Of the recipe, without what no result depends on, such as addresses."""
        kind, block = KINDS[self.settings.kind], dict(self.marked.documents[-1][MARK])
        if kind.changes_nothing:
            block[kind.key] = _without(block[kind.key], kind.changes_nothing)
        return block

    @property
    def identity(self) -> Mapping[str, str]:
        *before, last = self.marked.documents
        block = _without(self.block, _CHANGE_NO_TRIAL)
        evaluation = KINDS[self.settings.kind].fingerprint(self.settings.evaluator)
        return {
            "recipe": _digest([*before, {**last, MARK: block}]),
            "models": self.sources,
            "evaluation": _digest(evaluation),
        }


def _without(block: Mapping[str, object], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def finish_search(search: Search, text: str, directory: Path, options: RunOptions) -> None:
    """What is to be done with the best candidate once it is published; ``text``: its recipe.

    Raises SearchError: that failed; what a merge raises."""
    kind, settings = KINDS[search.settings.kind], search.settings.evaluator
    if kind.finish is None:
        return
    scratch = directory / _SCRATCH
    try:
        kind.finish(settings, CandidateMerges(options), scratch, text)
    except EvaluationError as error:
        what = f"the best candidate is published, and did not get to the servers: {error}."
        where = search.marked.places.at((MARK, kind.key))
        raise SearchError(Problem(where, what, "The same command tries again.")) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _TimeUpError(Exception):
    """No more evaluations are begun."""


class SearchJob:
    def __init__(
        self,
        search: Search,
        directory: Path,
        options: RunOptions,
        search_options: SearchOptions,
        *,
        on_event: OnEvent,
        before_first: Callable[[], None],
    ) -> None:
        """``directory``: of the trials. ``before_first`` is called before the first evaluation of this call,
        if there is one, and raises where it is in vain."""
        self._search, self._settings = search, search.settings
        self._directory, self._options, self._search_options = directory, options, search_options
        self._on_event, self._before_first = on_event, before_first
        self._evaluations: Evaluations | None = None
        seconds = search_options.seconds
        self._ends_at = None if seconds is None else time.monotonic() + seconds

    def carry_out(self) -> tuple[Trial, ...]:
        """All trials by number. Raises SearchError if no candidate could be evaluated; TargetError as
        ``TrialStore``; what an evaluation ends with that is no fault of the candidate."""
        settings = self._settings
        strategy = make_strategy(
            settings.strategy, self._search.marked.parameters, settings.round, settings.seed
        )
        with TrialStore(self._directory, self._search.identity, replace=self._options.replace) as store:
            shutil.rmtree(self._directory / _SCRATCH, ignore_errors=True)
            done = len(store.trials())
            self._on_event(SearchStarted(settings.strategy, settings.evaluations, done))
            try:
                self._rounds(store, strategy)
            except _TimeUpError:
                pass
            finally:
                if self._evaluations is not None:
                    self._evaluations.close()
                shutil.rmtree(self._directory / _SCRATCH, ignore_errors=True)
            trials = store.trials()
            if not best_first(trials):
                raise SearchError(self._none_done(trials))
            return trials

    def _rounds(self, store: TrialStore, strategy: Strategy) -> None:
        first, most = 0, self._settings.evaluations
        while first < most and (candidates := strategy.ask()):
            cut = candidates[: most - first]
            scores = self._round(store, first, cut)
            if first == 0 and all(score is None for score in scores):
                # What all of them lack lies elsewhere, and is mended there: they are evaluated again then.
                trials = store.trials()
                store.forget(range(len(cut)))
                raise SearchError(self._none_done(trials))
            first += len(candidates)
            if first <= most:
                strategy.tell(scores)

    def _round(self, store: TrialStore, first: int, candidates: Sequence[Values]) -> list[float | None]:
        """The scores of a round, in its order."""
        for number, values in enumerate(candidates, start=first):
            store.ask(number, values)
        numbers = range(first, first + len(candidates))
        early = self._settings.stop_early
        if early is None:
            whole = self._evaluated(store, dict(zip(numbers, candidates, strict=True)), 1.0)
            return [whole[number].score for number in numbers]
        part = self._evaluated(store, dict(zip(numbers, candidates, strict=True)), early.share)
        ranked = sorted((n for n in numbers if part[n].score is not None), key=lambda n: (-_of(part[n]), n))
        better = ranked[: early.num_better(len(numbers))]
        whole = self._evaluated(store, {n: candidates[n - first] for n in sorted(better)}, 1.0)
        return _estimated(numbers, part, whole)

    def _evaluated(
        self, store: TrialStore, candidates: Mapping[int, Values], share: float
    ) -> dict[int, Evaluation]:
        for number in candidates:
            if (recorded := store.evaluation(number, share)) is not None:
                self._tell(number, candidates[number], share, recorded, is_recorded=True)
        lacking = {n: values for n, values in candidates.items() if store.evaluation(n, share) is None}
        first_of: dict[str, int] = {}
        for number, values in lacking.items():
            first_of.setdefault(json.dumps(values), number)
        fresh = [n for n in first_of.values() if store.twin(n, share) is None]
        for task, evaluation in self._made([self._task(n, candidates[n], share) for n in fresh]):
            store.record(task.number, share, evaluation)
            self._tell(task.number, candidates[task.number], share, evaluation)
        for number in (n for n in lacking if n not in fresh):
            # The same candidate is not evaluated twice.
            twin = store.twin(number, share)
            same = None if twin is None else store.evaluation(twin, share)
            assert same is not None
            copied = Evaluation(same.metrics, same.score, same.error, 0.0)
            store.record(number, share, copied)
            self._tell(number, candidates[number], share, copied)
        return {n: each for n in candidates if (each := store.evaluation(n, share)) is not None}

    def _made(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Evaluation]]:
        """Raises _TimeUpError where not all could be begun in time."""
        if not tasks:
            return
        self._check_time()
        if self._evaluations is None:
            self._before_first()
            self._evaluations = self._opened()
        with closing(self._evaluations.evaluate(tasks)) as each:
            for number, made in enumerate(each, start=1):
                yield made
                if number < len(tasks):
                    self._check_time()

    def _check_time(self) -> None:
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            raise _TimeUpError

    def _opened(self) -> Evaluations:
        settings, how = self._settings, self._search_options
        places = KINDS[settings.kind].places(settings.evaluator)
        count = places or how.evaluators
        if places is not None and how.evaluators not in (1, places):
            what = f"{how.evaluators} evaluators, where the recipe names {places} servers."
            raise OptionError(Problem("--evaluators", what, "Leave it out: each server is one."))
        # As many however many evaluators there are: sums of floats depend on them.
        threads = self._options.threads or min(cores_here(), _MOST_THREADS)
        options = replace(self._options, threads=threads)
        check_free(options, evaluators=count)
        if options.memory is None and options.address is None and count > 1:
            options = replace(options, memory=free_memory() // 2 // count)
        scratch, here = str(self._directory / _SCRATCH), os.getcwd()
        spec = EvaluatorSpec(settings.kind, settings.evaluator, settings.metrics, options, scratch, here)
        if count == 1 and not how.evaluator_gpus and options.address is None:
            return InlineEvaluations(spec)
        needs = ActorNeeds(count, threads, how.evaluator_gpus)
        return RayEvaluations(spec, needs, options.address, on_event=self._on_event)

    def _task(self, number: int, values: Values, share: float) -> Task:
        return Task(number, self._search.marked.candidate(values).text, share)

    def _tell(
        self, number: int, values: Values, share: float, made: Evaluation, *, is_recorded: bool = False
    ) -> None:
        self._on_event(
            TrialEvaluated(
                number,
                dict(values),
                share,
                dict(made.metrics),
                made.score,
                made.error,
                made.seconds,
                is_recorded,
            )
        )

    def _none_done(self, trials: Sequence[Trial]) -> list[Problem]:
        where = self._search.marked.places.at((MARK,))
        reasons = dict.fromkeys(trial.error for trial in trials if trial.error)
        if not reasons:
            what = "no candidate was evaluated in time."
            return [Problem(where, what, "Give more --time.")]
        remedy = "Mend that: the same command evaluates them again."
        return [Problem(where, f"no candidate could be evaluated: {reason}.", remedy) for reason in reasons]


def _of(evaluation: Evaluation) -> float:
    assert evaluation.score is not None
    return evaluation.score


def _estimated(
    numbers: Sequence[int], part: Mapping[int, Evaluation], whole: Mapping[int, Evaluation]
) -> list[float | None]:
    """Scores on the whole; of those that were stopped as if they were as much behind the last of the better
    ones there as they are on the share."""
    done = [number for number in whole if whole[number].score is not None]
    last = min(done, key=lambda number: _of(whole[number]), default=None)
    scores: list[float | None] = []
    for number in numbers:
        if number in whole:
            scores.append(whole[number].score)
        elif part[number].score is None or last is None:
            scores.append(None)
        else:
            behind = max(0.0, _of(part[last]) - _of(part[number]))
            scores.append(_of(whole[last]) - behind)
    return scores
