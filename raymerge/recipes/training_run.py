"""The checkpoints of a training run: which of its directories are meant, and which are passed over."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from raymerge.documents.fields import Fault, FaultError, refusal
from raymerge.errors import UserError, shortlist

_Result = TypeVar("_Result")

NUMBER = "{iteration}"
_WORDS = "(?:checkpoint|ckpt|iter|iteration|step)[-_=]?([0-9]+)"
_STEP = re.compile(rf"(?:^|[^a-z]){_WORDS}(?![0-9.a-z])", re.IGNORECASE)
"""``checkpoint-500`` (transformers), ``iter_0000500`` (Megatron), ``step-500`` (torchtitan), ``step500``
(OLMo), ``global_step500`` (DeepSpeed), ``model--loss=2.5-step=500-last`` (NeMo)."""
_UNFINISHED = re.compile(r"^\.|(?:^|[^a-z])(?:tmp|incomplete|temp(?![-_=]?[0-9]))(?![a-z])", re.IGNORECASE)
"""As ``tmp-checkpoint-500``, or hidden until whole; the ``temp`` of ``step-500-temp0.7`` is a temperature."""
_UNFINISHED_STEP = re.compile(_WORDS, re.IGNORECASE)


def local_directories(root: str) -> Sequence[str]:
    with os.scandir(os.path.expanduser(root)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _whole(_place: str) -> tuple[tuple[str, ...], str]:
    return ("",), ""


def _no_digest(_place: str) -> str:
    return ""


def _nothing_there(place: str) -> str:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What is looked up of a training run. All raise OSError or UserError."""

    directories: Callable[[str], Sequence[str]] = local_directories
    """The names of the directories in a place."""
    contents: Callable[[str], tuple[tuple[str, ...], str]] = _whole
    """The paths of the checkpoints in the directory of an iteration, "" for itself, and what the only one
    lacks because it is unfinished."""
    digest: Callable[[str], str] = _no_digest
    """A digest of samples of a checkpoint's weights; "" where it has none."""
    recipe: Callable[[str], str] = _nothing_there
    """The text of the recipe that a checkpoint was made from."""


USUAL_FILES = RunFiles()


@dataclass(frozen=True, slots=True)
class Unfinished:
    iteration: int
    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    places: Mapping[int, str]
    """By iteration, the oldest first."""
    unfinished: tuple[Unfinished, ...] = ()
    """Directories that are passed over, the oldest first."""
    missing: tuple[range, ...] = ()
    """Iterations of which there is no checkpoint, though the distance between the others lets expect one."""

    def newest(self, number: int) -> Checkpoints:
        """The last so many, with what is passed over and missing from the first of them on."""
        first = [*self.places][-number]
        return Checkpoints(
            {each: place for each, place in self.places.items() if each >= first},
            tuple(each for each in self.unfinished if each.iteration > first),
            tuple(each for each in self.missing if each.start > first),
        )


NO_CHECKPOINTS = Checkpoints({})


@dataclass(frozen=True, slots=True)
class Selection:
    first: int | None
    last: int | None
    every: int | None
    pattern: str | None
    before: int | None = None
    """The last iteration of an average that is gone on from."""

    def select(self, root: str, files: RunFiles, most: int | None) -> Checkpoints:
        """The last checkpoints, ``most`` of them or all. Raises FaultError: there are none, or several that
        could be meant."""
        names = looked_up(files.directories, root)
        numbered = self._numbered(names)
        unfinished = list(self._named_unfinished(root, names, numbered))
        places: dict[int, str] = {}
        following = None
        for number in sorted(numbered, reverse=True):
            if len(places) == most:
                break
            if following is not None and following - number < (self.every or 1):
                continue
            place, lack = self.located(root, numbered[number], files)
            if lack:
                unfinished.append(Unfinished(number, place, lack))
            else:
                places[number], following = place, number
        unfinished.sort(key=lambda each: (each.iteration, each.place))
        if not places:
            raise refusal(*self._nothing(root, names, unfinished if numbered else ()))
        oldest_first = dict(reversed(places.items()))
        return Checkpoints(oldest_first, tuple(unfinished), tuple(self._missing([*oldest_first])))

    def _numbered(self, names: Sequence[str]) -> dict[int, str]:
        numbered: dict[int, str] = {}
        for name in names:
            number = self.iteration(name)
            if number is None or not self._is_in_range(number):
                continue
            if number in numbered:
                what = f"'{numbered[number]}' and '{name}' are both of iteration {number}."
                raise refusal(what, f"Say which are meant: pattern: '{self._pattern_of(name)}'.")
            numbered[number] = name
        return numbered

    def _is_in_range(self, number: int) -> bool:
        return (self.first or 0) <= number and (self.last is None or number <= self.last)

    def _named_unfinished(
        self, root: str, names: Sequence[str], numbered: Mapping[int, str]
    ) -> Iterator[Unfinished]:
        for name in names:
            match = _UNFINISHED_STEP.search(name) if _UNFINISHED.search(name) else None
            if match is not None and self._is_in_range(int(match[1])) and int(match[1]) not in numbered:
                yield Unfinished(int(match[1]), os.path.join(root, name), "its name says so")

    def iteration(self, name: str) -> int | None:
        if self.pattern is not None:
            before, after = map(re.escape, self.pattern.split("/")[0].split(NUMBER))
            match = re.fullmatch(f"{before}([0-9]+){after}", name)
        else:
            match = None if _UNFINISHED.search(name) else _step_in(name)
        return None if match is None else int(match[1])

    def _pattern_of(self, name: str) -> str:
        match = _step_in(name)
        if self.pattern is not None or match is None:
            return str(self.pattern)
        return f"{name[: match.start(1)]}{NUMBER}{name[match.end(1) :]}"

    def located(self, root: str, name: str, files: RunFiles) -> tuple[str, str]:
        """The checkpoint in the directory of an iteration, and what it lacks. Raises FaultError: there are
        several."""
        below = "" if self.pattern is None else self.pattern.partition("/")[2]
        place = os.path.join(root, name, below) if below else os.path.join(root, name)
        paths, lack = looked_up(files.contents, place)
        if len(paths) > 1:
            pattern = f"{self._pattern_of(name)}/{paths[0]}"
            what = f"'{place}' holds several checkpoints ({shortlist(paths)})."
            raise refusal(what, f"Say which is meant: pattern: '{pattern}'.")
        return os.path.join(place, paths[0]) if paths[0] else place, lack

    def _missing(self, numbers: Sequence[int]) -> Iterator[range]:
        """What ``every`` expects, if it is the distance of any two."""
        chosen = numbers if self.before is None else [self.before, *numbers]
        every = self.every
        if every is None or all(after - before >= 2 * every for before, after in pairwise(chosen)):
            return
        for before, after in pairwise(chosen):
            start = before + every + (after - before) % every
            if start < after:
                yield range(start, after, every)
        if self.last is not None and self.last - chosen[-1] >= every:
            yield range(chosen[-1] + every, self.last + 1, every)

    def _nothing(self, root: str, names: Sequence[str], unfinished: Sequence[Unfinished]) -> tuple[str, str]:
        if unfinished:
            what = f"no checkpoint of '{root}' in the range is finished: {reasons(unfinished)}."
            return what, "Run this again when one is, or change 'from' or 'to'."
        iterations = sorted(number for name in names if (number := self.iteration(name)) is not None)
        if iterations:
            there = f"the iterations there are {iterations[0]} to {iterations[-1]}"
            if self.before is not None:
                return self._nothing_newer(root, there)
            return f"no checkpoint of '{root}' is in the range: {there}.", "Change 'from' or 'to'."
        if not names:
            return f"there are no directories in '{root}'.", "Name the directory that holds the checkpoints."
        what = f"no directory of '{root}' is named by its iteration: there are {shortlist(names)}."
        return what, f"Name the directory that holds the checkpoints, or add pattern: 'iter_{NUMBER}'."

    def _nothing_newer(self, root: str, there: str) -> tuple[str, str]:
        until = "on" if self.last is None else f"to {self.last}"
        what = f"no checkpoint of '{root}' is newer than the average, from {self.first} {until}: {there}."
        keys = [key for key, value in (("'to'", self.last), ("'every'", self.every)) if value is not None]
        change = f"Change {' or '.join(keys)}, or run" if keys else "Run"
        return what, f"{change} this again when there is one."


def _step_in(name: str) -> re.Match[str] | None:
    return re.fullmatch("([0-9]+)", name) or _STEP.search(name)


def reasons(unfinished: Sequence[Unfinished]) -> str:
    return shortlist([f"{os.path.basename(each.place)}: {each.reason}" for each in unfinished])


def looked_up(look: Callable[[str], _Result], place: str) -> _Result:
    """Raises FaultError: the place cannot be read."""
    try:
        return look(place)
    except OSError as error:
        what = f"'{place}' cannot be read ({error.strerror})."
        raise refusal(what, "Name a directory of checkpoints that can be read.") from error
    except UserError as error:
        raise FaultError(Fault((), each.what, each.remedy) for each in error.problems) from error
