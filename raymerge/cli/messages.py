"""Errors as text or events, and their exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from raymerge import errors
from raymerge.cli.render.ending import Step, show_next
from raymerge.cli.render.screen import make_console, printable, put_json
from raymerge.storage.retry import KEPT, OUT_OF_SPACE

P = ParamSpec("P")

STOPPED = 3
STOPPED_EARLY = "stopped before the end; the same command goes on."
_LATER = (
    "The same command may work later, if the place and the way to it (storage: in a --profile) are right."
)
_FINAL = frozenset({errors.RecipeError, errors.ProfileError, errors.PlanError, errors.TargetError})
"""Errors of exactly these types depend on recipe, profile and places alone. Others may not recur on another
machine or a minute later: disk space, GPUs, credentials, sources."""


@dataclass(frozen=True, slots=True)
class Failure:
    exit_code: int
    message: str
    """Sentences; empty where the problems suffice."""
    problems: tuple[errors.Problem, ...] = ()
    next: tuple[Step, ...] = ()
    """Commands that are useful now."""
    is_final: bool = False
    """Whether the same command would fail again until something is changed."""

    def to_json(self) -> dict[str, Any]:
        message = self.message or "\n".join(str(problem) for problem in errors.shown_problems(self.problems))
        return {
            "event": "error",
            "exit_code": self.exit_code,
            "message": message,
            "problems": [asdict(problem) for problem in self.problems],
            **({"next": [asdict(step) for step in self.next]} if self.next else {}),
        }


def guarded(
    verb: Callable[[], int], *, as_json: bool = False, when_final: Callable[[], None] = lambda: None
) -> int:
    """Run a verb and return its exit code; exceptions are shown without a traceback.

    With ``as_json`` errors go to standard output as one event. ``when_final`` is called after an error that
    another attempt would meet again."""
    try:
        return verb()
    except BrokenPipeError:
        _forget_stdout()
        return STOPPED
    except (Exception, KeyboardInterrupt) as error:
        failure = failure_of(error)
        if os.environ.get("RAYMERGE_TRACEBACK") == "1":
            traceback.print_exc(file=sys.stderr)
    try:
        if as_json:
            put_json(sys.stdout, failure.to_json())
    except OSError:
        _forget_stdout()
        as_json = False
    if not as_json:
        with suppress(OSError):
            show_failure(make_console(sys.stderr), failure)
    if failure.is_final:
        when_final()
    return failure.exit_code


def command(verb: Callable[P, int]) -> Callable[P, None]:
    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(guarded(lambda: verb(*args, **kwargs), as_json=bool(kwargs.get("as_json"))))

    return run


def looking(verb: Callable[P, int]) -> Callable[P, None]:
    """``command`` for a verb that only reads: where a server fails, no work was done that is kept."""

    @wraps(verb)
    def read(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return verb(*args, **kwargs)
        except errors.TransientError as error:
            raise errors.TransientError(str(error).replace(KEPT, _LATER)) from error

    return command(read)


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, errors.UserError):
        return Failure(error.exit_code, "", error.problems, is_final=_is_final(error))
    if isinstance(error, errors.RaymergeError):
        return Failure(
            error.exit_code, str(error), next=_advice(error), is_final=isinstance(error, errors.AskedError)
        )
    if isinstance(error, KeyboardInterrupt):
        return Failure(STOPPED, STOPPED_EARLY, next=_advice(error))
    if isinstance(error, OSError) and error.filename is not None:
        what, remedy = f"the system refused it: {error.strerror or error}.", "Check the path and your rights."
        return Failure(2, "", (errors.Problem(str(error.filename), what, remedy),))
    if errors.is_process_limit(error):
        return Failure(STOPPED, f"{errors.PROCESS_LIMIT} The same command goes on.")
    if isinstance(error, OSError):
        what = f"what is printed here cannot be written: {error.strerror or error}."
        if error.errno in OUT_OF_SPACE:
            return Failure(STOPPED, f"{what} Free space where it goes; the same command goes on.")
        return Failure(2, what)
    lines = str(error).strip().splitlines()
    fact = f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
    what = f"this is a bug in raymerge ({fact}). Please report it with the command and the recipe; with "
    return Failure(1, f"{what}RAYMERGE_TRACEBACK=1 in the environment the same command shows where it is.")


def _advice(error: BaseException) -> tuple[Step, ...]:
    return tuple(map(Step.of_line, getattr(error, "__notes__", ())))


def _is_final(error: BaseException) -> bool:
    cause = error.__cause__
    return type(error) in _FINAL and (cause is None or _is_final(cause))


def show_failure(console: Console, failure: Failure) -> None:
    if failure.message:
        console.print(Text.assemble(("raymerge: ", "bold red"), printable(failure.message)))
    show_problems(console, failure.problems)
    show_next(console, failure.next)


def show_problems(console: Console, problems: Sequence[errors.Problem]) -> None:
    """Prose is wrapped; further lines of a remedy are text to copy, such as corrected YAML, and stay."""
    arrow = "->" if console.options.ascii_only else "→"
    for number, problem in enumerate(errors.shown_problems(problems)):
        if number:
            console.print()
        console.print(Text.assemble((f"{printable(problem.where)}: ", "bold"), printable(problem.what)))
        if not problem.remedy.strip():
            continue
        first, *rest = printable(problem.remedy).splitlines()
        console.print(Padding(Text(f"{arrow} {first}", style="green"), (0, 0, 0, 2), expand=False))
        for each in rest:
            console.print(Text(f"    {each}".rstrip()), no_wrap=True, overflow="ignore", crop=False)


def _forget_stdout() -> None:
    """After a broken pipe: what is still buffered must not raise when the interpreter ends."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
