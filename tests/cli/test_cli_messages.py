"""Errors on a terminal and as events: every kind of them, and text that must not be taken for markup."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymerge.cli.messages import failure_of, guarded, show_problems
from raymerge.cli.render.screen import make_console, make_table, printable
from raymerge.errors import (
    AskedError,
    CheckpointError,
    HeldError,
    IncompleteError,
    OptionError,
    PlanError,
    Problem,
    ProfileError,
    RecipeError,
    TargetError,
    UnreadableError,
)

PROBLEM = Problem("recipe.yml:3:5", "the weight is missing.", "Add it.")


def _raising(error: BaseException) -> int:
    raise error


def _because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _shown(problems: list[Problem], width: int = 80, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding, errors="replace")
    console = make_console(stream)
    console.width = width
    show_problems(console, problems)
    stream.flush()
    return buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionError(PROBLEM), 2),
        (IncompleteError("stopped with 3 of 4 segments done."), 3),
        (KeyboardInterrupt(), 3),
        (PermissionError(13, "Permission denied", "some/place"), 2),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: _raising(error)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip()
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        *((kind(PROBLEM), True) for kind in (RecipeError, ProfileError, PlanError, TargetError)),
        (_because(PlanError(PROBLEM), PlanError(PROBLEM)), True),
        (AskedError("stopped with 3 of 4 segments done."), True),
        # All of these may go well when they are tried again, or elsewhere.
        (HeldError(PROBLEM), False),
        (OptionError(PROBLEM), False),
        (_because(TargetError(PROBLEM), UnreadableError(PROBLEM)), False),
        (_because(PlanError(PROBLEM), _because(PlanError(PROBLEM), CheckpointError(PROBLEM))), False),
        # A kind that nobody has thought of here.
        (IncompleteError("stopped with 3 of 4 segments done."), False),
    ],
)
def test_what_another_attempt_would_meet_again_is_told_apart(
    error: BaseException, is_final: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    guarded(lambda: _raising(error), as_json=True, when_final=lambda: shown.append(capsys.readouterr().out))
    # Whoever ends the process then has nothing left to say.
    assert [json.loads(text)["event"] for text in shown] == ["error"] * is_final


def test_a_bug_asks_to_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(lambda: _raising(KeyError("lost")))
    said = " ".join(capsys.readouterr().err.split())
    assert "bug in raymerge (KeyError: 'lost')" in said
    assert "RAYMERGE_TRACEBACK=1" in said


def test_an_error_as_json_is_one_event_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: _raising(PlanError([PROBLEM])), as_json=True) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    event = json.loads(shown.out)
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert event["problems"] == [
        {"where": "recipe.yml:3:5", "what": "the weight is missing.", "remedy": "Add it."}
    ]


def test_an_output_that_takes_nothing_for_the_moment_is_no_limit_on_processes() -> None:
    unwritten = failure_of(BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0))
    assert unwritten.message.startswith("what is printed here cannot be written")
    unforked = failure_of(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    assert unforked.message.startswith("no further thread or process may be started")


def test_a_problem_is_a_paragraph_with_the_remedy_behind_an_arrow() -> None:
    other = Problem("model/config.json", "it is not JSON.", "Mend it.")
    assert _shown([PROBLEM, other]).splitlines() == [
        "recipe.yml:3:5: the weight is missing.",
        "  → Add it.",
        "",
        "model/config.json: it is not JSON.",
        "  → Mend it.",
    ]


def test_yaml_in_a_remedy_keeps_its_lines_and_is_never_wrapped() -> None:
    long = "  - model: " + "x" * 100
    problem = Problem("recipe.yml", "it is wrong.", f"Write:\nslices:\n{long}\n")
    lines = _shown([problem], width=40).splitlines()
    assert lines[-2:] == ["    slices:", f"    {long}"]


def test_what_users_say_is_no_markup() -> None:
    text = "[bold]not bold[/bold] [link=x] :smile: [/]"
    shown = _shown([Problem(text, text, text)], width=200)
    assert shown.count(text) == 3


@given(st.text())
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in printable(text))


def test_escape_sequences_are_spelled_out() -> None:
    shown = _shown([Problem("model", "a tensor is called \x1b[2Jevil\x07.", "")])
    assert "\\x1b[2Jevil\\x07" in shown
    stream = io.StringIO()
    make_console(stream).print(make_table(("", ""), [("name", "\x1b[31mred")]))
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert guarded(lambda: _raising(BrokenPipeError())) == 3
        stream.write("lost")
    assert (tmp_path / "out").read_text(encoding="utf-8") == ""
