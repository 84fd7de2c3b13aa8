"""The ``search`` block of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    attempt_key,
    between,
    choice_of,
    number_within,
    read_number,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import NUMBER, Grammar, declared, given, map_of
from raymerge.recipe_search.evaluators.table import KINDS
from raymerge.recipe_search.strategies import BOUNDED, STRATEGIES, strategy_faults
from raymerge.recipes.search import Parameter

_KEYS = ("strategy", "evaluations", "round", "seed", "metrics", "stop_early")
_FORM = "Write it as search: {strategy: tpe, evaluations: 40, command: python evaluate.py {model}}."
_STOP_FORM = "Write it as stop_early: {share: 0.25, keep: 0.5}."
_USUAL_ROUND = 4
MAX_EVALUATIONS = 100_000

_METRICS: Grammar = {"type": "object", "additionalProperties": NUMBER, "minProperties": 1}
_PART = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
_read_part = number_within(_PART, "is not between 0 and 1.", _STOP_FORM)
_read_strategy, _read_count = choice_of(*STRATEGIES), between(1, MAX_EVALUATIONS)
_read_round, _read_seed = between(1, 1000), between(0, 2**31 - 1)

SEARCH_GRAMMAR: Grammar = {
    **map_of(
        {
            "strategy": declared(_read_strategy),
            "evaluations": declared(_read_count),
            "round": declared(_read_round),
            "seed": declared(_read_seed),
            "metrics": _METRICS,
            "stop_early": map_of({"share": declared(_read_part), "keep": declared(_read_part)}, "share"),
            **{key: declared(kind.read) for key, kind in KINDS.items()},
        }
    ),
    "oneOf": [given(key) for key in KINDS],
}


@dataclass(frozen=True, slots=True)
class EarlyStop:
    share: float
    """Of what candidates are evaluated on: all of a round on this, the better ones on the whole."""
    keep: float
    """Which part of a round is better."""

    def num_better(self, candidates: int) -> int:
        return max(1, math.ceil(self.keep * candidates - 1e-9))


@dataclass(frozen=True, slots=True)
class SearchSettings:
    strategy: str
    evaluations: int
    """Of candidates, at most."""
    round: int
    """Candidates that a strategy is asked for at once."""
    seed: int
    metrics: Mapping[str, float]
    """The score is the sum of each metric times its weight; higher is better."""
    kind: str
    evaluator: Any
    stop_early: EarlyStop | None = None


def read_settings(
    block: object, parameters: Sequence[Parameter], *, evaluations: int | None = None
) -> SearchSettings:
    """``evaluations`` stand in for those of the block. Raises FaultError with paths from the block on."""
    if not isinstance(block, Mapping):
        raise unexpected(block, "a map", _FORM)
    known = (*_KEYS, *KINDS)
    faults = [unknown_key(key, known) for key in block if key not in known]
    strategy = attempt_key(_read_strategy, block, "strategy", faults) or "tpe"
    number = attempt_key(_read_count, block, "evaluations", faults)
    size = attempt_key(_read_round, block, "round", faults) or _USUAL_ROUND
    seed = attempt_key(_read_seed, block, "seed", faults) or 0
    metrics = attempt_key(_read_metrics, block, "metrics", faults)
    kind = _kind(block, faults)
    settings = attempt(KINDS[kind].read, block[kind], (kind,), faults) if kind else None
    early = attempt_key(_read_early, block, "stop_early", faults)
    if early is not None and kind and not KINDS[kind].has_parts:
        what = f"an evaluation by '{kind}' has no parts to stop after."
        faults.append(Fault(("stop_early",), what, "Remove it."))
    if block.get("evaluations") is None and evaluations is None and strategy not in BOUNDED:
        what = "nothing says how many candidates are evaluated."
        faults.append(Fault((), what, "Add evaluations: 40, or more for more parameters."))
    if kind and settings is not None and not (block.get("metrics") or KINDS[kind].metrics(settings)):
        what = "nothing says which metrics the score is made of."
        faults.append(Fault((), what, "Add metrics: {TASK/acc: 1}, with a task's name and its metric."))
    faults = faults or [*strategy_faults(strategy, parameters, size)]
    if faults:
        raise FaultError(faults)
    bound = BOUNDED[strategy](parameters) if strategy in BOUNDED else MAX_EVALUATIONS
    most = min(evaluations or number or MAX_EVALUATIONS, bound)
    weights = metrics or KINDS[kind].metrics(settings)
    return SearchSettings(strategy, most, size, seed, weights, kind, settings, early)


def _kind(block: Mapping[str, object], faults: list[Fault]) -> str:
    kinds = [key for key in KINDS if block.get(key) is not None]
    listed = ", ".join(KINDS)
    if not kinds:
        what = "nothing says how a candidate is evaluated."
        faults.append(Fault((), what, f"Add one of: {listed}."))
        return ""
    for other in kinds[1:]:
        what = f"'{kinds[0]}' and '{other}' both say how a candidate is evaluated."
        faults.append(Fault((other,), what, "Remove one of the two."))
    return kinds[0]


def _read_metrics(value: object) -> Mapping[str, float]:
    form = "Write it as metrics: {loss: -1, accuracy: 2}; what is better when lower has a negative weight."
    if not isinstance(value, Mapping) or not value:
        raise unexpected(value, "a map", form)
    faults = [Fault((), f"{show(key)} is no name.", form) for key in value if not isinstance(key, str)]
    if faults:
        raise FaultError(faults)
    weights = {key: attempt_key(read_number, value, key, faults) or 0.0 for key in value}
    if not any(weights.values()) and not faults:
        faults.append(Fault((), "all weights are 0, so that no candidate is better than another.", form))
    if faults:
        raise FaultError(faults)
    return weights


def _read_early(value: object) -> EarlyStop:
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", _STOP_FORM)
    faults = [unknown_key(key, ("share", "keep")) for key in value if key not in ("share", "keep")]
    share, keep = (attempt_key(_read_part, value, key, faults) for key in ("share", "keep"))
    if share is None and not faults:
        faults.append(Fault((), "the key 'share' is missing or empty.", _STOP_FORM))
    if faults or share is None:
        raise FaultError(faults)
    return EarlyStop(share, 0.5 if keep is None else keep)
