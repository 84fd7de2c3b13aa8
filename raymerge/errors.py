"""One tree of errors, and the problem: a sentence that says where, what, what was expected and what to do.

Exit codes: 0 done, 1 a bug in raymerge, 2 the user must change something, 3 incomplete but resumable.
Errors that also are a kind of builtin error inherit it, so that callers may catch either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that stands in the way, complete enough to be mended without asking."""

    where: str
    """The place: ``recipe.yml:7:9``, a file, or a tensor of a model."""
    what: str
    """The fact found there, with its values."""
    remedy: str
    """What to change."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.remedy}".rstrip()


class RaymergeError(Exception):
    """Base of every error that raymerge raises on purpose."""

    exit_code = 1


class UserError(RaymergeError):
    """The user must change something; ``problems`` lists every reason at once."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

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
    """Another run makes the output place now; when that has ended, the same command may go on."""


class UnreadableError(CheckpointError):
    """A file of a checkpoint is not there, or may not be read."""


class NonFiniteError(UserError, ValueError):
    """NaN or infinity in a source or a result; nothing was published."""


class VerificationError(UserError, ValueError):
    """A checkpoint on disk is not what it should be."""


class IncompleteError(RaymergeError, RuntimeError):
    """The run stopped before the end; the same command goes on where it stopped."""

    exit_code = 3


class AskedError(IncompleteError):
    """The run stopped because somebody asked for it at the output place."""


class TransientError(IncompleteError):
    """Storage went on failing for a while; elsewhere or later it may not."""


class RoomError(IncompleteError):
    """A file system is full or a quota used up; what is done is kept until there is room."""
