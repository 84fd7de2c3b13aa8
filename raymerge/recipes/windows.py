"""The ``checkpoints`` block of a recipe: nested averages of the last checkpoints of a training run.

Merging with decaying weights stands in for the decay of the learning rate (WSM, arXiv 2507.17634; Nemotron 3
Super, arXiv 2604.12374)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    attempt_key,
    between,
    did_you_mean,
    number_within,
    read_list,
    read_switch,
    read_text,
    refusal,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import SWITCH, TEXT, Grammar, any_of, declared, map_of, one_or_list
from raymerge.documents.positions import read_document, split_documents
from raymerge.errors import UserError
from raymerge.recipes.entry import AVERAGE, RECIPE, ModelReference, plain_reference, read_reference
from raymerge.recipes.training_run import NUMBER, Checkpoints, RunFiles, Selection, reasons

_FORM = "Write it as checkpoints: {root: runs/a, windows: [5, 10], schedule: minus-sqrt}."

_EMA = re.compile(r"ema:\s*(\S+)")
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
_ITERATION, _COUNT = declared(between(0)), declared(between(1))
_PARTS: Grammar = {
    "root": TEXT,
    "from": _ITERATION,
    "to": _ITERATION,
    "every": _COUNT,
    "windows": one_or_list(_COUNT),
    "schedule": any_of(
        {"enum": [*_DECAYS]},
        {**TEXT, "pattern": f"^{_EMA.pattern}$"},
        map_of({"ema": declared(_read_rate)}, "ema"),
    ),
    "reverse": SWITCH,
    "pattern": {**TEXT, "pattern": r"\{iteration\}"},
    "continue": TEXT,
}
WINDOWS_GRAMMAR = map_of(_PARTS, "root", "schedule")

_SCHEDULES = f"Write one of {', '.join(_DECAYS)}, or {{ema: 0.9}}."
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

    @property
    def keeps_ratios(self) -> bool:
        """Whether the older coefficients keep their ratios when there is one more checkpoint."""
        return self.name in ("linear", "ema") and not self.is_reversed

    @property
    def plain(self) -> object:
        return self.name if self.rate is None else {self.name: self.rate}


@dataclass(frozen=True, slots=True)
class Average:
    """How many checkpoints are in an average, the last of which iteration."""

    schedule: Schedule
    num_checkpoints: int
    last: int

    def coefficients(self, num_models: int) -> list[float]:
        """Of models of which the first stands for all checkpoints that the others are not."""
        each = self.schedule.coefficients(self.num_checkpoints)
        older = self.num_checkpoints - num_models + 1
        return [math.fsum(each[:older]), *each[older:]]


@dataclass(frozen=True, slots=True)
class Window:
    average: Average
    coefficients: Mapping[str, float]
    """By the place of the checkpoint, oldest first; of an average that is continued, by its place before."""
    checkpoints: Checkpoints
    """Those that are read."""

    def recipe(self, rest: Any) -> dict[str, Any]:
        """The plain recipe, with the other keys of the document. Raises FaultError: they contradict it."""
        if faults := list(_contradictions(rest)):
            raise FaultError(faults)
        models = [
            {"model": plain_reference(ModelReference(place)), "parameters": {"weight": coefficient}}
            for place, coefficient in self.coefficients.items()
        ]
        recipe = {"merge_method": "linear", "models": models, **rest}
        parameters = rest.get("parameters")
        if parameters is None or isinstance(parameters, Mapping):
            recipe["parameters"] = {**(parameters or {}), "normalize": False}
        own = self.average
        if own.schedule.keeps_ratios and _is_float32(rest):
            number, last = own.num_checkpoints, own.last
            recipe[AVERAGE] = {"schedule": own.schedule.plain, "checkpoints": number, "last": last}
        return recipe


UNKNOWN_WINDOW = Window(Average(Schedule("linear"), 1, 0), {"window": 1.0}, Checkpoints({0: "window"}))
"""Stands for one that is refused."""


def _is_float32(rest: Mapping[str, Any]) -> bool:
    """Whether the average is written as it is: rounded each time, it would not stay an average."""
    return rest.get("out_format") is None and rest.get("out_dtype", rest.get("dtype")) in ("float32", "fp32")


def _contradictions(rest: Mapping[str, Any]) -> Iterator[Fault]:
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


def read_windows(block: object, files: RunFiles) -> tuple[Window, ...]:
    """In the order of ``windows``. Raises FaultError with paths from the block on."""
    if not isinstance(block, Mapping):
        raise unexpected(block, "a map", _FORM)
    faults = [unknown_key(key, _PARTS) for key in block if key not in _PARTS]
    for key in ("root", "schedule"):
        if block.get(key) is None:
            faults.append(Fault((), f"the key '{key}' is missing or empty.", _FORM))
    schedule = _schedule(block, faults)
    sizes = attempt_key(_read_sizes, block, "windows", faults)
    before = None
    if schedule is not None and block.get("continue") is not None:
        before = _continued(block, schedule, files, faults)
    checkpoints = _checkpoints(block, before, max(sizes) if sizes else None, files, faults)
    faults += () if checkpoints is None else _too_large(block.get("windows"), sizes or (), checkpoints)
    if faults or schedule is None or checkpoints is None:
        raise FaultError(faults)
    if before is not None:
        return (_grown(str(block["continue"]), before, checkpoints),)
    return tuple(_window(schedule, checkpoints.newest(size)) for size in sizes or (len(checkpoints.places),))


def _too_large(given: object, sizes: Sequence[int], checkpoints: Checkpoints) -> Iterator[Fault]:
    places = [*checkpoints.places.values()]
    for index, size in enumerate(sizes):
        if size > len(places):
            what = f"a window of {size} checkpoints is larger than the {len(places)} that are there."
            unfinished = f"; unfinished: {reasons(checkpoints.unfinished)}" if checkpoints.unfinished else ""
            at = ("windows", index) if isinstance(given, list | tuple) else ("windows",)
            yield Fault(at, what, f"They are {_ends(places)}{unfinished}. Write a smaller window.")


def _window(schedule: Schedule, checkpoints: Checkpoints) -> Window:
    places = checkpoints.places
    coefficients = dict(zip(places.values(), schedule.coefficients(len(places)), strict=True))
    return Window(Average(schedule, len(places), max(places)), coefficients, checkpoints)


def _grown(place: str, before: Average, checkpoints: Checkpoints) -> Window:
    """The average of all checkpoints, of which the older ones are in ``place``."""
    places = checkpoints.places
    grown = Average(before.schedule, before.num_checkpoints + len(places), max(places))
    models = [place, *places.values()]
    coefficients = dict(zip(models, grown.coefficients(len(models)), strict=True))
    return Window(grown, coefficients, checkpoints)


def _continued(
    block: Mapping[str, object], schedule: Schedule, files: RunFiles, faults: list[Fault]
) -> Average | None:
    for key in (key for key in ("windows", "from") if block.get(key) is not None):
        what = f"'{key}' does not go with 'continue': all that is newer than the average is added to it."
        faults.append(Fault((key,), what, "Remove one of the two."))
    if not schedule.keeps_ratios:
        what = (
            "with this schedule every new checkpoint changes the shares of the others, which are read again."
        )
        faults.append(Fault(("continue",), what, "Remove it, or take 'linear' or 'ema'."))
        return None
    before = attempt_key(lambda place: _read_average(_read_root(place), files), block, "continue", faults)
    if before is not None and before.schedule != schedule:
        what = f"the average was made with the schedule {show(before.schedule.plain)}."
        faults.append(Fault(("continue",), what, "Write that one, or remove 'continue'."))
    return before


def _read_average(place: str, files: RunFiles) -> Average:
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
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", "")
    number, last = between(1)(value.get("checkpoints")), between(0)(value.get("last"))
    return Average(_read_schedule(value.get("schedule")), number, last)


def _is_made_by(recipe: Mapping[str, Any], average: Average) -> bool:
    """Whether a recipe, which may have been edited, still makes this average."""
    rest = {key: value for key, value in recipe.items() if key not in ("models", "parameters", AVERAGE)}
    models = recipe.get("models")
    if not isinstance(models, list) or not 1 <= len(models) <= average.num_checkpoints:
        return False
    return (
        recipe.get("parameters") == {"normalize": False}
        and _is_float32(rest)
        and not any(_contradictions(rest))
        and all(map(_has_weight, models, average.coefficients(len(models))))
    )


def _has_weight(entry: object, expected: float) -> bool:
    match entry:
        case {"parameters": {"weight": float(weight)}}:
            return math.isclose(weight, expected)
    return False


def _schedule(block: Mapping[str, object], faults: list[Fault]) -> Schedule | None:
    schedule = attempt_key(_read_schedule, block, "schedule", faults)
    is_reversed = attempt_key(read_switch, block, "reverse", faults)
    return None if schedule is None else replace(schedule, is_reversed=bool(is_reversed))


def _checkpoints(
    block: Mapping[str, object],
    average: Average | None,
    most: int | None,
    files: RunFiles,
    faults: list[Fault],
) -> Checkpoints | None:
    """The newest of the range; None where the block does not say which."""
    before = len(faults)
    root = attempt_key(_read_root, block, "root", faults)
    first = attempt_key(between(0), block, "from", faults)
    last = attempt_key(between(0), block, "to", faults)
    every = attempt_key(between(1), block, "every", faults)
    pattern = attempt_key(_read_pattern, block, "pattern", faults)
    if first is not None and last is not None and first > last:
        what = f"the range from {first} to {last} holds nothing."
        faults.append(Fault(("to",), what, "Write the smaller one first: both ends are in the range."))
    if root is None or len(faults) > before:
        return None
    if average is not None:
        first = average.last + (every or 1)
    chosen = Selection(first, last, every, pattern, None if average is None else average.last)
    return attempt(lambda place: chosen.select(str(place), files, most), root, ("root",), faults)


def _read_root(value: object) -> str:
    return read_reference({"model": {"path": read_text(value)}}).path


def _ends(places: Sequence[str]) -> str:
    names = [os.path.basename(place) for place in places]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]


def _read_pattern(value: object) -> str:
    pattern = read_text(value)
    name, *below = pattern.split("/")
    if name.count(NUMBER) != 1 or any(NUMBER in each for each in below):
        remedy = f"Write it like 'iter_{NUMBER}' or 'iter_{NUMBER}/model'."
        raise refusal(f"{show(pattern)} does not say where the number is.", remedy)
    if {"", ".", ".."}.intersection(below):
        raise refusal(f"{show(pattern)} is no path below 'root'.", f"Write it like 'iter_{NUMBER}/model'.")
    return pattern


def _read_sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return (between(1)(value),)
    sizes = read_list(between(1), value, "Write windows: [5, 10], or remove it for one of all.")
    for index, size in enumerate(sizes):
        if size in sizes[:index]:
            raise FaultError(Fault((index,), f"{size} stands twice.", "Remove one of the two."))
    return sizes


def _read_schedule(value: object) -> Schedule:
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
