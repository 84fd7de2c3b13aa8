"""An evaluator that is a command: it gets the candidate as a directory, and prints numbers."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from raymerge.documents.fields import (
    Fault,
    FaultError,
    attempt_key,
    read_positive,
    read_text,
    refusal,
    unexpected,
    unknown_key,
)
from raymerge.documents.grammar import NUMBER, TEXT, Grammar, accepts, any_of, map_of
from raymerge.recipe_search.evaluators.evaluator import CandidateMerges, EvaluationError, EvaluatorKind

_MODEL = "{model}"
_KEYS = ("run", "timeout", "environment")
_SCORE = "score"
"""The metric of a command that prints a number alone."""
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True)
class CommandSettings:
    run: str
    timeout: float | None = None
    """Seconds."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of raymerge."""


_ENVIRONMENT: Grammar = {"type": "object", "additionalProperties": TEXT}


@accepts(any_of(TEXT, map_of({"run": TEXT, "timeout": NUMBER, "environment": _ENVIRONMENT}, "run")))
def read_command(value: object, subject: str = _MODEL) -> CommandSettings:
    """``subject``: what the command must contain."""
    form = f"Write it as command: python evaluate.py {subject}."

    def read_run(value: object) -> str:
        text = read_text(value)
        if subject not in text:
            raise refusal(f"the command does not use {subject}, which is what it evaluates.", form)
        return text

    if isinstance(value, str):
        return CommandSettings(read_run(value))
    if not isinstance(value, Mapping):
        raise unexpected(value, "a text or a map", form)
    faults = [unknown_key(key, _KEYS) for key in value if key not in _KEYS]
    run = attempt_key(read_run, value, "run", faults)
    if value.get("run") is None:
        faults.append(Fault((), "the key 'run' is missing or empty.", form))
    timeout = attempt_key(read_positive, value, "timeout", faults)
    environment = attempt_key(_read_environment, value, "environment", faults)
    if faults or run is None:
        raise FaultError(faults)
    return CommandSettings(run, timeout, environment or {})


def _read_environment(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise unexpected(value, "a map", "Write it as environment: {NAME: value}.")
    faults: list[Fault] = []
    read = {key: attempt_key(read_text, value, key, faults) or "" for key in value}
    if faults:
        raise FaultError(faults)
    return read


class CommandEvaluator:
    def __init__(self, settings: CommandSettings, merges: CandidateMerges, scratch: Path) -> None:
        self._settings, self._merges, self._scratch = settings, merges, scratch

    def evaluate(self, text: str, share: float) -> Mapping[str, float]:
        assert share == 1.0
        directory = self._scratch / "candidate"
        try:
            self._merges.write(text, directory)
            return run_command(self._settings, _MODEL, str(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None: ...


def run_command(settings: CommandSettings, subject: str, value: str) -> Mapping[str, float]:
    """The metrics that a command prints, with ``value`` in place of its subject; raises EvaluationError."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        # Files, as a pipe has no end before everything that the command leaves running has ended. In a
        # session of its own: Ctrl-C is for us, and what the command started ends with it.
        with subprocess.Popen(
            settings.run.replace(subject, shlex.quote(value)),
            shell=True,
            env={**os.environ, **settings.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        ) as process:
            try:
                process.wait(settings.timeout)
            except subprocess.TimeoutExpired as error:
                raise EvaluationError(f"the command took longer than {settings.timeout:g} s") from error
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise EvaluationError(f"the command ended with {process.returncode}{_last_lines(_read(errors))}")
        return metrics_in(_read(output).decode("utf-8", "replace"))


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _last_lines(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n{line[:300]}" for line in lines)


def metrics_in(output: str) -> dict[str, float]:
    """The last line as numbers by name; raises EvaluationError."""
    last = (output.strip().splitlines() or [""])[-1]
    try:
        value: Any = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    given = value if isinstance(value, dict) else {_SCORE: value}
    metrics = {str(name): float(each) for name, each in given.items() if _is_number(each)}
    if not metrics:
        what = f"the last line that the command printed is {last[:100]!r}"
        raise EvaluationError(f"{what}, and neither a number nor a JSON object of numbers")
    return metrics


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        # A whole number beyond all floats.
        return False


COMMAND = EvaluatorKind(
    key="command",
    read=read_command,
    metrics=lambda _: {_SCORE: 1.0},
    has_parts=False,
    fingerprint=lambda settings: settings.run,
    open=CommandEvaluator,
)
