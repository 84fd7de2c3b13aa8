"""One thing that was looked at, and looking with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from raymerge.errors import Problem, RaymergeError, UserError, first_line


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Something to know, which hinders no merge."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    topic: str
    verdict: Verdict
    fact: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(topic: str, fact: str) -> Check:
    return Check(topic, Verdict.OK, fact)


def note(topic: str, fact: str, remedy: str = "") -> Check:
    return Check(topic, Verdict.NOTE, fact, remedy)


def problem(topic: str, fact: str, remedy: str) -> Check:
    return Check(topic, Verdict.PROBLEM, fact, remedy)


@dataclass(frozen=True, slots=True)
class Question:
    """Something to look at: what it yields, and how long it may take."""

    topic: str
    ask: Callable[[], Iterable[Check]]
    seconds: float
    remedy: str
    """What to do where no answer comes in time."""
    subject: str = ""
    """What is asked, where the topic does not say it: a place, an address."""
    is_far: bool = False
    """Whether it waits for others, so that it is asked beside everything else."""


def examine(questions: Sequence[Question]) -> Iterator[Check]:
    """The answers in the order of the questions. No question is waited for longer than it may take: its
    thread is left behind."""
    begun = {id(each): _Answer(each) for each in questions if each.is_far}
    for question in questions:
        yield from begun.get(id(question)) or _Answer(question)


class _Answer:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._checks: tuple[Check, ...] | None = None
        self._thread = threading.Thread(target=self._ask, name=f"check {question.topic}", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Check]:
        self._thread.join(self._question.seconds)
        if self._checks is not None:
            return iter(self._checks)
        subject = f"{self._question.subject}: " if self._question.subject else ""
        late = f"{subject}no answer within {self._question.seconds:.0f} seconds."
        return iter((problem(self._question.topic, late, self._question.remedy),))

    def _ask(self) -> None:
        topic = self._question.topic
        try:
            self._checks = tuple(self._question.ask())
        except UserError as error:
            self._checks = tuple(problem(topic, _fact(each, topic), each.remedy) for each in error.problems)
        except RaymergeError as error:
            self._checks = (problem(topic, str(error), self._question.remedy),)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._checks = (problem(topic, f"{where}{error.strerror or error}.", self._question.remedy),)
        except Exception as error:  # a diagnosis says what fails, whatever it is
            fact = f"looking at it failed: {type(error).__name__}: {first_line(error)}"
            self._checks = (problem(topic, fact, self._question.remedy),)


def _fact(fault: Problem, topic: str) -> str:
    """The problem; an option or the topic as its place says nothing."""
    is_said = fault.where.startswith("-") or fault.where.lower() == topic.lower()
    return fault.what if is_said else f"{fault.where}: {fault.what}"
