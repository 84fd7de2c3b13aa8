"""Which candidates are tried next: each strategy is asked for a round, and told how good it was.

What a strategy asks for depends on its seed and on what it was told, in this order, and on nothing else."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Protocol

from raymerge.documents.fields import Fault
from raymerge.errors import OptionError, Problem
from raymerge.recipes.axes import Plain
from raymerge.recipes.search import Choices, Parameter, Range, Values

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

Round = Sequence[Values]


class Strategy(Protocol):
    def ask(self) -> Round:
        """The candidates of the next round; none at the end."""

    def tell(self, scores: Sequence[float | None]) -> None:
        """Of the round that was asked for, in its order, higher is better; None for one that failed."""


class RandomStrategy:
    def __init__(self, parameters: Sequence[Parameter], size: int, seed: int) -> None:
        self._parameters, self._size, self._seed = parameters, size, seed
        self._round = 0

    def ask(self) -> Round:
        chance = random.Random(f"{self._seed} {self._round}")
        self._round += 1
        return [
            {each.name: _at(each.space, chance.random()) for each in self._parameters}
            for _ in range(self._size)
        ]

    def tell(self, scores: Sequence[float | None]) -> None: ...


def _at(space: Range | Choices, unit: float) -> Plain:
    if isinstance(space, Range):
        return space.at(unit)
    return space.values[min(int(unit * len(space.values)), len(space.values) - 1)].value


class GridStrategy:
    """The last parameter changes fastest."""

    def __init__(self, parameters: Sequence[Parameter], size: int, seed: int) -> None:
        del seed
        names = [each.name for each in parameters]
        rows = product(*(_points(each.space) for each in parameters))
        self._left = (dict(zip(names, row, strict=True)) for row in rows)
        self._size = size

    def ask(self) -> Round:
        return list(islice(self._left, self._size))

    def tell(self, scores: Sequence[float | None]) -> None: ...


def _points(space: Range | Choices) -> Sequence[Plain]:
    if isinstance(space, Choices):
        return [each.value for each in space.values]
    return [space.number(index) for index in range(space.count or 0)]


def num_grid(parameters: Sequence[Parameter]) -> int:
    return math.prod(len(_points(each.space)) for each in parameters)


class SoupStrategy:
    """A greedy soup (arXiv 2203.05482): each ingredient alone, then from the best one on each that does not
    make the soup worse. An ingredient that is in has the high end of its range, one that is out the low."""

    def __init__(self, parameters: Sequence[Parameter], size: int, seed: int) -> None:
        del size, seed
        self._ends = {each.name: each.extremes for each in parameters}
        self._alone: dict[str, float] = {}
        self._soup: list[str] = []
        self._score = -math.inf
        self._left: list[str] | None = None

    def ask(self) -> Round:
        if self._left is None:
            return [self._values([name]) for name in self._ends]
        return [self._values([*self._soup, self._left[0]])] if self._left else []

    def tell(self, scores: Sequence[float | None]) -> None:
        if self._left is None:
            worst = -math.inf
            alone = {
                name: worst if score is None else score
                for name, score in zip(self._ends, scores, strict=True)
            }
            order = sorted(alone, key=lambda name: -alone[name])
            self._soup, self._left = order[:1], [name for name in order[1:] if alone[name] > worst]
            self._score = alone[order[0]]
            return
        added, *self._left = self._left
        (score,) = scores
        if score is not None and score >= self._score:
            self._soup.append(added)
            self._score = score

    def _values(self, names: Sequence[str]) -> Values:
        return {name: ends[-1] if name in names else ends[0] for name, ends in self._ends.items()}


def num_soup(parameters: Sequence[Parameter]) -> int:
    return 2 * len(parameters) - 1


class CmaStrategy:
    """CMA-ES, whose generations are the rounds."""

    def __init__(self, parameters: Sequence[Parameter], size: int, seed: int) -> None:
        import numpy as np

        cmaes = _required("cmaes", "cmaes")
        count = len(parameters)
        self._parameters, self._size = parameters, size
        self._units: list[Any] = []
        self._search = cmaes.CMA(
            mean=np.full(count, 0.5),
            sigma=0.25,
            bounds=np.array([[0.0, 1.0]] * count),
            population_size=size,
            seed=seed,
        )

    def ask(self) -> Round:
        self._units = [self._search.ask() for _ in range(self._size)]
        return [
            {
                each.name: _at(each.space, float(unit))
                for each, unit in zip(self._parameters, units, strict=True)
            }
            for units in self._units
        ]

    def tell(self, scores: Sequence[float | None]) -> None:
        # One that failed is worse than all others; the search looks at their order alone.
        costs = [math.inf if score is None else -score for score in scores]
        self._search.tell(list(zip(self._units, costs, strict=True)))


class OptunaStrategy:
    """A sampler of Optuna, made anew for each round with a seed of its own: so the state of its generator is
    nothing to keep."""

    def __init__(self, name: str, parameters: Sequence[Parameter], size: int, seed: int) -> None:
        self._optuna = _required("optuna", name)
        # It tells of each new study, and of what would be faster.
        logging.getLogger("optuna").setLevel(logging.ERROR)
        self._name, self._parameters, self._size, self._seed = name, parameters, size, seed
        self._study = self._optuna.create_study(direction="maximize")
        self._round = 0
        self._trials: list[Trial] = []

    def ask(self) -> Round:
        self._study.sampler = self._sampler((self._seed * 1_000_003 + self._round) % 2**32)
        self._round += 1
        self._trials = [self._study.ask() for _ in range(self._size)]
        return [self._values(trial) for trial in self._trials]

    def tell(self, scores: Sequence[float | None]) -> None:
        failed = self._optuna.trial.TrialState.FAIL
        for trial, score in zip(self._trials, scores, strict=True):
            if score is None:
                self._study.tell(trial, state=failed)
            else:
                self._study.tell(trial, score)

    def _sampler(self, seed: int) -> BaseSampler:
        samplers = self._optuna.samplers
        sampler: BaseSampler
        with warnings.catch_warnings():
            # It may change with Optuna; a search goes on with the version that it began with.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            if self._name == "gp":
                sampler = samplers.GPSampler(seed=seed, deterministic_objective=True)
            else:
                sampler = samplers.TPESampler(seed=seed, multivariate=True)
        return sampler

    def _values(self, trial: Trial) -> Values:
        values: dict[str, Plain] = {}
        for each in self._parameters:
            if isinstance(each.space, Range):
                values[each.name] = each.space.at(trial.suggest_float(each.name, 0.0, 1.0))
            else:
                numbers = list(range(len(each.space.values)))
                chosen = trial.suggest_categorical(each.name, numbers)
                values[each.name] = each.space.values[int(chosen)].value
        return values


def _required(module: str, strategy: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        what = f"the strategy '{strategy}' needs {module}, which is not installed."
        remedy = (
            "Give: pip install 'raymerge[search]'. The strategies random, grid and soup need nothing more."
        )
        raise OptionError(Problem("search", what, remedy)) from error


_PLAIN: Mapping[str, type[RandomStrategy | GridStrategy | SoupStrategy | CmaStrategy]] = {
    "cmaes": CmaStrategy,
    "random": RandomStrategy,
    "grid": GridStrategy,
    "soup": SoupStrategy,
}
STRATEGIES = ("tpe", "gp", *_PLAIN)
BOUNDED: Mapping[str, Callable[[Sequence[Parameter]], int]] = {"grid": num_grid, "soup": num_soup}
"""Those that come to an end, and after how many candidates at most."""


def make_strategy(name: str, parameters: Sequence[Parameter], size: int, seed: int) -> Strategy:
    """Raises OptionError without the library that it needs."""
    if name in _PLAIN:
        return _PLAIN[name](parameters, size, seed)
    return OptunaStrategy(name, parameters, size, seed)


def strategy_faults(name: str, parameters: Sequence[Parameter], size: int) -> Iterator[Fault]:
    """What of these parameters the strategy cannot search in; with paths from the block on."""
    at = ("strategy",)
    ranges = {each.name: each.space for each in parameters if isinstance(each.space, Range)}
    choices = [each.name for each in parameters if each.name not in ranges]
    if name == "grid":
        for each in (each for each, space in ranges.items() if space.step is None):
            yield Fault(at, f"a grid needs the step of '{each}'.", "Write {low: 0, high: 1, step: 0.125}.")
    if name in ("cmaes", "soup") and choices:
        what = f"'{choices[0]}' is a choice, and '{name}' takes ranges of numbers."
        yield Fault(at, what, "Take tpe, gp, random or grid.")
    if name == "soup" and len(parameters) < 2:
        yield Fault(at, "a soup needs two ingredients.", "Mark the weight of each model: {search: [0, 1]}.")
    if name == "cmaes" and size < 3:
        yield Fault(("round",), f"a generation of {size} tells CMA-ES too little.", "Write 4 or more.")
