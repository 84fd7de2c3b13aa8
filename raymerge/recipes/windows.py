"""The ``checkpoints`` block of a recipe: nested averages of the last checkpoints of a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt,
    attempt_key,
    between,
    read_list,
    read_switch,
    read_text,
    refusal,
    show,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import SWITCH, TEXT, Grammar, declared, map_of, one_or_list
from raymerge.recipes.average import (
    SCHEDULE_GRAMMAR,
    Average,
    Averaged,
    Schedule,
    contradictions,
    is_float32,
    read_average,
    read_schedule,
)
from raymerge.recipes.entry import AVERAGE, ModelReference, plain_reference, read_reference
from raymerge.recipes.training_run import NUMBER, Checkpoints, RunFiles, Selection, looked_up, reasons

_FORM = "Write it as checkpoints: {root: runs/a, windows: [5, 10], schedule: minus-sqrt}."
_ITERATION, _COUNT = declared(between(0)), declared(between(1))
_PARTS: Grammar = {
    "root": TEXT,
    "from": _ITERATION,
    "to": _ITERATION,
    "every": _COUNT,
    "windows": one_or_list(_COUNT),
    "schedule": SCHEDULE_GRAMMAR,
    "reverse": SWITCH,
    "pattern": {**TEXT, "pattern": r"\{iteration\}"},
    "continue": TEXT,
}
WINDOWS_GRAMMAR = map_of(_PARTS, "root", "schedule")


@dataclass(frozen=True, slots=True)
class Window:
    schedule: Schedule
    root: str
    checkpoints: Checkpoints
    """Those that are read."""
    before: Average | None = None
    """The average that they are added to."""
    place: str = ""
    """Where that is."""

    @property
    def size(self) -> int:
        older = () if self.before is None else self.before.checkpoints
        return len(older) + len(self.checkpoints.places)

    @property
    def coefficients(self) -> dict[str, float]:
        """By the place of the checkpoint, oldest first; of an average before, by its place."""
        models = [*(() if self.before is None else (self.place,)), *self.checkpoints.places.values()]
        return dict(zip(models, self.schedule.shares(self.size, len(models)), strict=True))

    def recipe(self, rest: Any, files: RunFiles) -> dict[str, Any]:
        """The plain recipe, with the other keys of the document. Raises FaultError: they contradict it, or a
        checkpoint that is recorded cannot be read."""
        if faults := list(contradictions(rest)):
            raise FaultError(faults)
        models = [
            {"model": plain_reference(ModelReference(place)), "parameters": {"weight": coefficient}}
            for place, coefficient in self.coefficients.items()
        ]
        recipe = {"merge_method": "linear", "models": models, **rest}
        parameters = rest.get("parameters")
        if parameters is None or isinstance(parameters, Mapping):
            recipe["parameters"] = {**(parameters or {}), "normalize": False}
        if self.schedule.keeps_ratios and is_float32(rest):
            recipe[AVERAGE] = self._average(files).plain
        return recipe

    def _average(self, files: RunFiles) -> Average:
        new = [
            Averaged(number, place.removeprefix(self.root).lstrip("/"), looked_up(files.digest, place))
            for number, place in self.checkpoints.places.items()
        ]
        older = () if self.before is None else self.before.checkpoints
        return Average(self.schedule, self.root, (*older, *new))


UNKNOWN_WINDOW = Window(Schedule("cosine"), "", Checkpoints({0: "window"}))
"""Stands for one that is refused."""


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
    before, place = None, str(block.get("continue"))
    if schedule is not None and block.get("continue") is not None:
        before = _continued(block, schedule, files, faults)
    root = attempt_key(_read_root, block, "root", faults)
    selection = _selection(block, before, faults)
    if root is None or selection is None:
        raise FaultError(faults)
    if before is not None:
        attempt(lambda _: before.check(place, root, selection, files), place, ("continue",), faults)
    most = max(sizes) if sizes else None
    checkpoints = attempt(lambda _: selection.select(root, files, most), root, ("root",), faults)
    faults += () if checkpoints is None else _too_large(block.get("windows"), sizes or (), checkpoints)
    if faults or schedule is None or checkpoints is None:
        raise FaultError(faults)
    if before is not None:
        return (Window(schedule, root, checkpoints, before, place),)
    sizes = sizes or (len(checkpoints.places),)
    return tuple(Window(schedule, root, checkpoints.newest(size)) for size in sizes)


def _too_large(given: object, sizes: Sequence[int], checkpoints: Checkpoints) -> Iterator[Fault]:
    places = [*checkpoints.places.values()]
    for index, size in enumerate(sizes):
        if size > len(places):
            what = f"a window of {size} checkpoints is larger than the {len(places)} that are there."
            unfinished = f"; unfinished: {reasons(checkpoints.unfinished)}" if checkpoints.unfinished else ""
            at = ("windows", index) if isinstance(given, list | tuple) else ("windows",)
            yield Fault(at, what, f"They are {_ends(places)}{unfinished}. Write a smaller window.")


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
    before = attempt_key(lambda place: read_average(_read_root(place), files), block, "continue", faults)
    if before is not None and before.schedule != schedule:
        what = f"the average was made with the schedule {show(before.schedule.plain)}."
        faults.append(Fault(("continue",), what, "Write that one, or remove 'continue'."))
    return before


def _schedule(block: Mapping[str, object], faults: list[Fault]) -> Schedule | None:
    schedule = attempt_key(read_schedule, block, "schedule", faults)
    is_reversed = attempt_key(read_switch, block, "reverse", faults)
    return None if schedule is None else replace(schedule, is_reversed=bool(is_reversed))


def _selection(block: Mapping[str, object], average: Average | None, faults: list[Fault]) -> Selection | None:
    """None where the block does not say which are meant."""
    before = len(faults)
    first = attempt_key(between(0), block, "from", faults)
    last = attempt_key(between(0), block, "to", faults)
    every = attempt_key(between(1), block, "every", faults)
    pattern = attempt_key(_read_pattern, block, "pattern", faults)
    if first is not None and last is not None and first > last:
        what = f"the range from {first} to {last} holds nothing."
        faults.append(Fault(("to",), what, "Write the smaller one first: both ends are in the range."))
    if len(faults) > before:
        return None
    if average is None:
        return Selection(first, last, every, pattern)
    return Selection(average.last + (every or 1), last, every, pattern, average.last)


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
