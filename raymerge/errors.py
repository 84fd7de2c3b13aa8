"""The error tree, and problems: where, what, what was expected and what to do.

Exit codes: 0 done, 1 a bug in raymerge, 2 the user must change something, 3 incomplete but resumable.
Those that correspond to a builtin error inherit it, so that callers may catch either."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

_WORD_CHARACTERS = 200
"""Shown characters of a name or path."""
_TEXT_CHARACTERS = 4000
"""Shown characters of a sentence."""
_ALIKE = 20
"""Shown problems with the same words about different names."""
_LONG_WORD = re.compile(rf"\S{{{_WORD_CHARACTERS + 1},}}")
_NAME = re.compile(r"'[^']*'|\S*[0-9./]\S*")


@dataclass(frozen=True, slots=True)
class Problem:
    """One obstacle, with all that is needed to remove it."""

    where: str
    """``recipe.yml:7:9``, a file, or a tensor of a model."""
    what: str
    remedy: str

    def __str__(self) -> str:
        short = self.shortened()
        return f"{short.where}: {short.what} {short.remedy}".rstrip()

    def shortened(self) -> Problem:
        where, what = (
            _ends(_LONG_WORD.sub(lambda word: _ends(word[0], _WORD_CHARACTERS), text), _TEXT_CHARACTERS)
            for text in (self.where, self.what)
        )
        remedy = _LONG_WORD.sub(lambda word: _ends(word[0], _WORD_CHARACTERS), self.remedy)
        return Problem(where, what, remedy)


def shortlist(names: Collection[object], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    shown = ", ".join(map(str, islice(names, most)))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def shown_problems(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    listed: list[tuple[tuple[str, str], Problem]] = []
    for problem in problems:
        short = problem.shortened()
        key = (_NAME.sub("", short.what), _NAME.sub("", short.remedy))
        counts[key] += 1
        if counts[key] <= _ALIKE:
            listed.append((key, short))
    more = {key: count - _ALIKE for key, count in counts.items() if count > _ALIKE}
    last = {key: number for number, (key, _) in enumerate(listed)}
    return tuple(
        replace(short, what=f"{short.what} And {more[key]} more like this.")
        if key in more and last[key] == number
        else short
        for number, (key, short) in enumerate(listed)
    )


def _ends(text: str, limit: int) -> str:
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


class RaymergeError(Exception):
    """Base of every error that raymerge raises on purpose."""

    exit_code = 1


class UserError(RaymergeError):
    """The user must change something; ``problems`` lists every reason at once."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in shown_problems(self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        return (type(self), (self.problems,))


class RecipeError(UserError, ValueError):
    """The recipe's text does not say a valid merge."""


class ProfileError(UserError, ValueError):
    """A profile's text does not say where and how to run, or says what cannot be."""


class CheckpointError(UserError, ValueError):
    """A checkpoint's files are broken, hostile, ambiguous or of an unsupported kind."""


class PlanError(UserError, ValueError):
    """Recipe and headers do not fit together; nothing was written."""


class OptionError(UserError, ValueError):
    """A run option cannot be honoured."""


class TargetError(UserError, FileExistsError):
    """The output place is taken, or holds an unfinished run of something else."""


class HeldError(TargetError):
    """Another run makes the output place now; afterwards the same command may work."""


class UnreadableError(CheckpointError):
    """A file of a checkpoint is not there, or may not be read."""


class NotCachedError(CheckpointError):
    """A model of the Hub is not in its local cache, and the Hub was not asked for it."""


class NonFiniteError(UserError, ValueError):
    """NaN, infinity or a scale that is not positive in a source or a result; nothing was published."""


class SearchError(UserError, ValueError):
    """No candidate of a search could be evaluated."""


class VerificationError(UserError, ValueError):
    """A checkpoint on disk is not what it should be."""


class IncompleteError(RaymergeError, RuntimeError):
    """The run stopped before the end; the same command goes on where it stopped."""

    exit_code = 3


class AskedError(IncompleteError):
    """A stop was requested at the output place."""


class TransientError(IncompleteError):
    """Storage kept failing; it may work elsewhere or later."""


class DiskSpaceError(IncompleteError):
    """A file system is full or a quota used up; finished work is kept."""


def first_line(error: BaseException) -> str:
    """The first 300 characters of the first line of an error's text, without advice and code positions of
    libraries; the rest of a page of HTML, which a proxy sends, tells nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")


_EXAMPLES = 5


@dataclass(slots=True)
class _Group:
    where: str
    what: str
    remedy: str
    examples: dict[str, None] = field(default_factory=dict)


class Findings:
    """Problems in order of first appearance; tensors with the same problem are counted and sampled."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}

    def add(self, where: str, what: str, remedy: str) -> None:
        """A repetition is dropped."""
        self._groups.setdefault((where, what), _Group(where, what, remedy))

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.add(problem.where, problem.what, problem.remedy)

    def tensor(self, where: str, what: str, remedy: str, *, example: str, key: str = "") -> None:
        """Add one tensor with a problem at ``where``; ``what`` may hold ``{count}``, the number of different
        examples.

        With a ``key``, problems of several texts are one, which has the text of the first."""
        self._groups.setdefault((where, key or what), _Group(where, what, remedy)).examples[example] = None

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def problems(self) -> tuple[Problem, ...]:
        return tuple(_problem(group) for group in self._groups.values())


def _problem(group: _Group) -> Problem:
    count = len(group.examples)
    if not count:
        return Problem(group.where, group.what, group.remedy)
    more = f"; and {count - _EXAMPLES} more" if count > _EXAMPLES else ""
    listed = "; ".join(islice(group.examples, _EXAMPLES)) + more
    return Problem(group.where, f"{group.what.replace('{count}', str(count))}: {listed}.", group.remedy)


_SAYINGS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What torch says of the memory of a processor: it has no error of its own for that."""

_NO_THREAD = "can't start new thread"
PROCESS_LIMIT = (
    "no further thread or process may be started here: a limit of the user (ulimit -u) or of the container "
    "(pids.max) is reached. Raise it, or end others."
)


def is_memory_error(error: BaseException) -> bool:
    """Whether an error means that there is no more memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


def is_process_limit(error: BaseException) -> bool:
    """Whether an error means that no more threads or processes may be started."""
    if isinstance(error, OSError):
        # As fork has it. What is not ready to be read is named; where a pipe of standard output takes nothing
        # for the moment, Python puts a text of its own in the place of the system's.
        is_fork = error.errno == errno.EAGAIN and error.filename is None
        return is_fork and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)
