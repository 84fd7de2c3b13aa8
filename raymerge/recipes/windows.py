"""The ``checkpoints`` block of a recipe: nested averages of the last checkpoints of a training run.

Merging with decaying weights stands in for the decay of the learning rate (WSM, arXiv 2507.17634; Nemotron 3
Super, arXiv 2604.12374)."""

from __future__ import annotations

import errno
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
    number_if,
    read_list,
    read_switch,
    read_text,
    refusal,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.positions import read_document, split_documents
from raymerge.errors import UserError, shortlist
from raymerge.recipes.entry import AVERAGE, RECIPE, ModelReference, plain_reference, read_reference

_KEYS = ("root", "from", "to", "every", "windows", "schedule", "reverse", "pattern", "continue")
_FORM = "Write it as checkpoints: {root: runs/a, windows: [5, 10], schedule: minus-sqrt}."

_DECAYS: Mapping[str, Callable[[Fraction], Fraction | float]] = {
    "minus-sqrt": lambda x: 1 - math.sqrt(x),
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}
"""What is left of the learning rate at ``x`` of the decay that an average stands for; 1 at 0, 0 at 1."""

_SCHEDULES = f"Write one of {', '.join(_DECAYS)}, or {{ema: 0.9}}."
_EMA = re.compile(r"ema:\s*(\S+)")

_STEP = re.compile(
    r"(?:^|[^a-z])(?:checkpoint|ckpt|iter|iteration|step)[-_=]?([0-9]+)(?![0-9.a-z])", re.IGNORECASE
)
"""``checkpoint-500`` (transformers), ``iter_0000500`` (Megatron), ``step-500`` (torchtitan), ``step500``
(OLMo), ``global_step500`` (DeepSpeed), ``model--loss=2.5-step=500-last`` (NeMo)."""
_UNFINISHED = re.compile(r"(?:^|[^a-z])(?:tmp|incomplete|temp(?![-_=]?[0-9]))(?![a-z])", re.IGNORECASE)
"""As ``tmp-checkpoint-500``; the ``temp`` of ``step-500-temp0.7`` is a temperature."""
_NUMBER = "{iteration}"
_GIVEN_ELSEWHERE = ("models", "slices", "modules", "experts", "gate_mode")
_UNEVEN = ("methods", "router", "align")
"""Keys by which some tensors of a merge are not the mean of the same tensors of its sources."""


def local_directories(root: str) -> Sequence[str]:
    with os.scandir(os.path.expanduser(root)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _no_recipe(place: str) -> str:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What is looked up of a training run. Both raise OSError or UserError."""

    directories: Callable[[str], Sequence[str]] = local_directories
    """The names of the directories in a place."""
    recipe: Callable[[str], str] = _no_recipe
    """The text of the recipe that a checkpoint was made from."""


USUAL_FILES = RunFiles()


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


UNKNOWN_WINDOW = Window(Average(Schedule("linear"), 1, 0), {"window": 1.0})
"""Stands for one that is refused."""


def _is_float32(rest: Mapping[str, Any]) -> bool:
    """Whether the average is written as it is: rounded each time, it would not stay an average."""
    return rest.get("out_format") is None and rest.get("out_dtype", rest.get("dtype")) in ("float32", "fp32")


def _contradictions(rest: Mapping[str, Any]) -> Iterator[Fault]:
    if rest.get("merge_method", "linear") != "linear":
        yield Fault(("merge_method",), "an average of checkpoints is a linear merge.", "Remove it.")
    for key in (key for key in _GIVEN_ELSEWHERE if key in rest):
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
    faults = [unknown_key(key, _KEYS) for key in block if key not in _KEYS]
    for key in ("root", "schedule"):
        if block.get(key) is None:
            faults.append(Fault((), f"the key '{key}' is missing or empty.", _FORM))
    schedule = _schedule(block, faults)
    sizes = attempt_key(_read_sizes, block, "windows", faults)
    before = None
    if schedule is not None and block.get("continue") is not None:
        before = _continued(block, schedule, files, faults)
    places = _places(block, before, files, faults)
    for index, size in enumerate(sizes or ()):
        if places and size > len(places):
            what = f"a window of {size} checkpoints is larger than the {len(places)} that are there."
            at = ("windows", index) if isinstance(block["windows"], list | tuple) else ("windows",)
            faults.append(Fault(at, what, f"They are {_ends([*places.values()])}. Write a smaller window."))
    if faults or schedule is None:
        raise FaultError(faults)
    if before is not None:
        return (_grown(str(block["continue"]), before, places),)
    return tuple(_window(schedule, size, places) for size in sizes or (len(places),))


def _window(schedule: Schedule, size: int, places: Mapping[int, str]) -> Window:
    coefficients = dict(zip([*places.values()][-size:], schedule.coefficients(size), strict=True))
    return Window(Average(schedule, size, max(places)), coefficients)


def _grown(place: str, before: Average, places: Mapping[int, str]) -> Window:
    """The average of all checkpoints, of which the older ones are in ``place``."""
    grown = Average(before.schedule, before.num_checkpoints + len(places), max(places))
    models = [place, *places.values()]
    return Window(grown, dict(zip(models, grown.coefficients(len(models)), strict=True)))


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


def _places(
    block: Mapping[str, object], average: Average | None, files: RunFiles, faults: list[Fault]
) -> dict[int, str]:
    """The checkpoints of the range by iteration, oldest first; empty where the block does not say which."""
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
        return {}
    if average is not None:
        first = average.last + (every or 1)
    chosen = _Selection(first, last, every, pattern, goes_on=average is not None)
    return attempt(lambda place: chosen.places(str(place), files), root, ("root",), faults) or {}


@dataclass(frozen=True, slots=True)
class _Selection:
    first: int | None
    last: int | None
    every: int | None
    pattern: str | None
    goes_on: bool
    """Whether ``first`` is the next one after an average."""

    def places(self, root: str, files: RunFiles) -> dict[int, str]:
        """The checkpoints, oldest first. Raises FaultError: there are none, or two of one iteration."""
        names = _listed(root, files)
        numbered: dict[int, str] = {}
        for name in names:
            number = self._iteration(name)
            if number is None or number < (self.first or 0) or (self.last is not None and number > self.last):
                continue
            if number in numbered:
                what = f"'{numbered[number]}' and '{name}' are both of iteration {number}."
                raise refusal(what, f"Say which are meant: pattern: '{name.replace(str(number), _NUMBER)}'.")
            numbered[number] = name
        if not numbered:
            raise refusal(*self._nothing(root, names))
        return {number: os.path.join(root, numbered[number]) for number in self._spaced(sorted(numbered))}

    def _spaced(self, numbers: Sequence[int]) -> list[int]:
        """The last one, and before it those that are far enough from the next one."""
        chosen = [numbers[-1]]
        for number in reversed(numbers[:-1]):
            if chosen[-1] - number >= (self.every or 1):
                chosen.append(number)
        return chosen[::-1]

    def _iteration(self, name: str) -> int | None:
        if self.pattern is not None:
            before, after = map(re.escape, self.pattern.split(_NUMBER))
            match = re.fullmatch(f"{before}([0-9]+){after}", name)
        elif _UNFINISHED.search(name):
            return None
        else:
            match = re.fullmatch("([0-9]+)", name) or _STEP.search(name)
        return None if match is None else int(match[1])

    def _nothing(self, root: str, names: Sequence[str]) -> tuple[str, str]:
        iterations = sorted(number for name in names if (number := self._iteration(name)) is not None)
        if iterations:
            there = f"the iterations there are {iterations[0]} to {iterations[-1]}"
            if self.goes_on:
                return self._nothing_newer(root, there)
            return f"no checkpoint of '{root}' is in the range: {there}.", "Change 'from' or 'to'."
        if not names:
            return f"there are no directories in '{root}'.", "Name the directory that holds the checkpoints."
        what = f"no directory of '{root}' is named by its iteration: there are {shortlist(names)}."
        return what, f"Name the directory that holds the checkpoints, or add pattern: 'iter_{_NUMBER}'."

    def _nothing_newer(self, root: str, there: str) -> tuple[str, str]:
        until = "on" if self.last is None else f"to {self.last}"
        what = f"no checkpoint of '{root}' is newer than the average, from {self.first} {until}: {there}."
        keys = [key for key, value in (("'to'", self.last), ("'every'", self.every)) if value is not None]
        change = f"Change {' or '.join(keys)}, or run" if keys else "Run"
        return what, f"{change} this again when there is one."


def _read_root(value: object) -> str:
    return read_reference({"model": {"path": read_text(value)}}).path


def _listed(root: str, files: RunFiles) -> Sequence[str]:
    try:
        return files.directories(root)
    except OSError as error:
        what = f"'{root}' cannot be listed ({error.strerror})."
        raise refusal(what, "Name the directory that holds the checkpoints.") from error
    except UserError as error:
        raise FaultError(Fault((), each.what, each.remedy) for each in error.problems) from error


def _ends(places: Sequence[str]) -> str:
    names = [os.path.basename(place) for place in places]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]


def _read_pattern(value: object) -> str:
    pattern = read_text(value)
    if pattern.count(_NUMBER) == 1:
        return pattern
    raise refusal(f"{show(pattern)} does not say where the number is.", f"Write it like 'iter_{_NUMBER}'.")


def _read_sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return (between(1)(value),)
    sizes = read_list(between(1), value, "Write windows: [5, 10], or remove it for one of all.")
    for index, size in enumerate(sizes):
        if size in sizes[:index]:
            raise FaultError(Fault((index,), f"{size} stands twice.", "Remove one of the two."))
    return sizes


_read_rate = number_if(
    lambda rate: 0 < rate < 1,
    "is not between 0 and 1.",
    "Write a number like 0.9, the weight of the older one.",
)


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
