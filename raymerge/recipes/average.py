"""An average of checkpoints: its schedule, the record of what it is made of, and whether newer ones can be
added to it.

Merging with decaying weights stands in for the decay of the learning rate (WSM, arXiv 2507.17634; Nemotron 3
Super, arXiv 2604.12374)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt_key,
    between,
    did_you_mean,
    number_within,
    read_text,
    refusal,
    show,
    unexpected,
)
from raymerge.documents.grammar import TEXT, any_of, declared, map_of
from raymerge.documents.positions import read_document, split_documents
from raymerge.errors import UserError
from raymerge.recipes.entry import AVERAGE, RECIPE, ModelReference, plain_reference
from raymerge.recipes.training_run import RunFiles, Selection, looked_up

_DECAYS: Mapping[str, Callable[[Fraction], Fraction | float]] = {
    "minus-sqrt": lambda x: 1 - math.sqrt(x),
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}
"""What is left of the learning rate at ``x`` of the decay that an average stands for; 1 at 0, 0 at 1."""

_read_rate = number_within(
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "is not between 0 and 1.",
    "Write a number like 0.9, the weight of the older one.",
)
_SCHEDULES = f"Write one of {', '.join(_DECAYS)}, or {{ema: 0.9}}."
_EMA = re.compile(r"ema:\s*(\S+)")
SCHEDULE_GRAMMAR = any_of(
    {"enum": [*_DECAYS]},
    {**TEXT, "pattern": f"^{_EMA.pattern}$"},
    map_of({"ema": declared(_read_rate)}, "ema"),
)

GIVEN_ELSEWHERE = ("models", "slices", "modules", "experts", "gate_mode")
_UNEVEN = ("methods", "router", "align")
"""Keys by which some tensors of a merge are not the mean of the same tensors of its sources."""


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    rate: float | None = None
    """Of ``ema``: each checkpoint has this part of the weight of the next one."""
    is_reversed: bool = False

    def coefficients(self, number: int) -> tuple[float, ...]:
        """Of so many checkpoints, the oldest first; they add up to 1."""
        if self.rate is None:
            left = [*(_DECAYS[self.name](Fraction(i, number)) for i in range(number)), 0]
            values = [float(left[i] - left[i + 1]) for i in range(number)]
        else:
            powers = [self.rate ** (number - 1 - i) for i in range(number)]
            values = [power / math.fsum(powers) for power in powers]
        return tuple(reversed(values) if self.is_reversed else values)

    def shares(self, number: int, num_models: int) -> list[float]:
        """Of models of which the first stands for all of so many checkpoints that the others are not."""
        each = self.coefficients(number)
        older = number - num_models + 1
        return [math.fsum(each[:older]), *each[older:]]

    @property
    def keeps_ratios(self) -> bool:
        """Whether the older coefficients keep their ratios when there is one more checkpoint."""
        return self.name in ("linear", "ema") and not self.is_reversed

    @property
    def plain(self) -> object:
        return self.name if self.rate is None else {self.name: self.rate}


@dataclass(frozen=True, slots=True)
class Averaged:
    iteration: int
    path: str
    """Below the root of its run."""
    digest: str
    """Of samples of its weights; "" where it had none."""


@dataclass(frozen=True, slots=True)
class Average:
    """What an average is made of, as its recipe records it."""

    schedule: Schedule
    root: str
    checkpoints: tuple[Averaged, ...]
    """The oldest first."""

    @property
    def last(self) -> int:
        return self.checkpoints[-1].iteration

    @property
    def plain(self) -> dict[str, object]:
        checkpoints = [
            {"iteration": each.iteration, "path": each.path, "digest": each.digest}
            for each in self.checkpoints
        ]
        return {"schedule": self.schedule.plain, "root": self.root, "checkpoints": checkpoints}

    def check(self, place: str, root: str, selection: Selection, files: RunFiles) -> None:
        """Raises FaultError: checkpoints of ``root`` cannot be added to the average at ``place``, for it is
        not that of its older ones."""
        anew = "or remove 'continue' to average all of them anew."
        names = looked_up(files.directories, root)
        compared = 0
        for each in self.checkpoints:
            path = os.path.join(root, each.path)
            digest = looked_up(files.digest, path) if each.path.split("/")[0] in names else ""
            if digest not in ("", each.digest):
                what = f"'{path}' is not what '{place}' is an average of: samples of its weights have the "
                what += f"digest {digest}; those of '{os.path.join(self.root, each.path)}' had {each.digest}."
                raise refusal(what, f"Put that checkpoint back, name the run that it is of, {anew}")
            compared += bool(digest)
        if self.root != root and not compared:
            what = f"'{place}' is an average of checkpoints of '{self.root}', and '{root}' has none of them."
            raise refusal(what, f"Write root: {self.root}, {anew}")
        for name in (name for name in names if self._lacks(selection.iteration(name), selection.every or 1)):
            path, lack = selection.located(root, name, files)
            if not lack:
                what = f"'{path}' lies between the checkpoints of '{place}' and is none of them."
                raise refusal(what, f"Write 'every' and 'pattern' as they were for that one, {anew}")

    def _lacks(self, number: int | None, every: int) -> bool:
        """Whether a checkpoint of this iteration would be in the average if it had been there."""
        iterations = [each.iteration for each in self.checkpoints]
        if number is None or not iterations[0] < number < iterations[-1]:
            return False
        return all(abs(number - each) >= every for each in iterations)


def is_float32(rest: Mapping[str, Any]) -> bool:
    """Whether the average is written as it is: rounded each time, it would not stay an average."""
    return rest.get("out_format") is None and rest.get("out_dtype", rest.get("dtype")) in ("float32", "fp32")


def contradictions(rest: Mapping[str, Any]) -> Iterator[Fault]:
    if rest.get("merge_method", "linear") != "linear":
        yield Fault(("merge_method",), "an average of checkpoints is a linear merge.", "Remove it.")
    for key in (key for key in GIVEN_ELSEWHERE if key in rest):
        what = f"'{key}' and 'checkpoints' both say what is merged."
        yield Fault((key,), what, "Remove one of the two.")
    for key in (key for key in _UNEVEN if rest.get(key) and rest[key] not in ("merge", "none")):
        what = f"an average takes every tensor from all checkpoints alike, which '{key}' changes."
        yield Fault((key,), what, "Remove it, or list the checkpoints below 'models'.")
    if AVERAGE in rest:
        yield Fault((AVERAGE,), f"'{AVERAGE}' follows from 'checkpoints'.", "Remove it.")
    parameters = rest.get("parameters")
    for key in ("weight", "normalize"):
        if isinstance(parameters, Mapping) and key in parameters:
            yield Fault(("parameters", key), f"'{key}' follows from the schedule.", "Remove it.")


def read_average(place: str, files: RunFiles) -> Average:
    remedy = (
        "Name an average of schedule linear or ema that a recipe with 'checkpoints' and dtype float32 made, "
        "or remove it to read all checkpoints."
    )
    try:
        part = split_documents(files.recipe(place), place, RECIPE)[-1]
        data = read_document(part, place, RECIPE).data
        average = _read_record(data.get(AVERAGE))
    except (OSError, UserError, FaultError) as error:
        raise refusal(f"'{place}' is no average that can be continued.", remedy) from error
    if _is_made_by(data, average):
        return average
    raise refusal(f"the recipe of '{place}' is not that of the average in its '{AVERAGE}'.", remedy)


def _read_record(value: object) -> Average:
    if not isinstance(value, Mapping) or not isinstance(value.get("checkpoints"), list):
        raise unexpected(value, "a record of an average", "")
    checkpoints = tuple(map(_read_averaged, value["checkpoints"]))
    iterations = [each.iteration for each in checkpoints]
    if not checkpoints or any(after <= before for before, after in pairwise(iterations)):
        raise unexpected(iterations, "iterations, each larger than the one before", "")
    return Average(read_schedule(value.get("schedule")), read_text(value.get("root")), checkpoints)


def _read_averaged(value: object) -> Averaged:
    match value:
        case {"iteration": number, "path": str(path), "digest": str(digest)}:
            return Averaged(between(0)(number), path, digest)
    raise unexpected(value, "a checkpoint of an average", "")


def _is_made_by(recipe: Mapping[str, Any], average: Average) -> bool:
    """Whether a recipe, which may have been edited, still makes this average."""
    rest = {key: value for key, value in recipe.items() if key not in ("models", "parameters", AVERAGE)}
    models, number = recipe.get("models"), len(average.checkpoints)
    if not isinstance(models, list) or not 1 <= len(models) <= number:
        return False
    return (
        recipe.get("parameters") == {"normalize": False}
        and is_float32(rest)
        and not any(contradictions(rest))
        and all(map(_has_weight, models, average.schedule.shares(number, len(models))))
        and [each["model"] for each in models[1:]] == _models(average)[number - len(models) + 1 :]
    )


def _has_weight(entry: object, expected: float) -> bool:
    match entry:
        case {"model": _, "parameters": {"weight": float(weight)}}:
            return math.isclose(weight, expected)
    return False


def _models(average: Average) -> list[object]:
    places = (os.path.join(average.root, each.path) for each in average.checkpoints)
    return [plain_reference(ModelReference(place)) for place in places]


def read_schedule(value: object) -> Schedule:
    if isinstance(value, str) and value in _DECAYS:
        return Schedule(value)
    if isinstance(value, str) and (match := _EMA.fullmatch(value)) is not None:
        return Schedule("ema", _read_rate(match[1]))
    if isinstance(value, Mapping) and [*value] == ["ema"]:
        faults: list[Fault] = []
        rate = attempt_key(_read_rate, value, "ema", faults)
        if not faults and rate is not None:
            return Schedule("ema", rate)
        if faults:
            raise FaultError(faults)
    names = (*_DECAYS, "ema")
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise refusal(f"{show(value)} is no schedule.", f"{hint} {_SCHEDULES}".lstrip())
