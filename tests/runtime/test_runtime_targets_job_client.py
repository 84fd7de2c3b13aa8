"""The target job and a server that is slow, away, or answers badly; and how a followed run is shown."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from raymerge import events
from raymerge.cli.render.screen import Output
from raymerge.cli.runs import event_from_json, follow
from raymerge.deploy.profiles import Profile, parse_profile
from raymerge.deploy.targets.job_server import JobServer
from raymerge.deploy.targets.target import RunReport, RunState, Submission, choose, target_of
from raymerge.errors import IncompleteError, OptionError
from raymerge.events import Event
from raymerge.merge_plan.report import ConversionProof, DuplicateGroup, ErrorsAbove, RoleError, TensorError

RUN = "raymerge-0123456789ab"
ADDRESS = "http://head:8265"
RECIPE = {"merge_method": "linear", "models": [{"model": "/mnt/a", "parameters": {"weight": 1}}]}
PLANNED = {"event": "planned", "digest": "d" * 40, "tensors": 4, "output_bytes": 9, "total_bytes": 9,
           "segments": 2, "projected_peak": 9}  # fmt: skip


class _Server:
    """A client whose answers are given beforehand: a state with a log, or an error."""

    def __init__(self, *answers: tuple[str, str] | Exception) -> None:
        self.answers = list(answers)
        self.log = ""

    def get_job_info(self, run: str) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, self.log = answer
        return SimpleNamespace(status=status, message="", metadata={}, driver_exit_code=None)

    def get_job_logs(self, run: str) -> str:
        return self.log


def _target(*answers: tuple[str, str] | Exception, away: float = 60.0) -> JobServer:
    server = _Server(*answers)
    return JobServer(ADDRESS, {}, connect=lambda *_: server, poll_seconds=0.001, away_seconds=away)


def test_a_log_is_told_once_and_by_whole_lines() -> None:
    target = _target(
        ("PENDING", ""), ("RUNNING", "one\ntw"), ConnectionError("reset"), ("RUNNING", "one\ntwo\nthr"),
        RuntimeError("Request failed with status code 503: busy."), ("SUCCEEDED", "one\ntwo\nthree\nfour"),
    )  # fmt: skip
    assert list(target.logs(RUN, follow=True)) == ["one", "two", "three", "four"]
    assert list(_target(("RUNNING", "one\ntw")).logs(RUN, follow=False)) == ["one"]


def test_a_server_that_stays_away_is_given_up_and_the_run_is_not() -> None:
    target = _target(("RUNNING", "one\n"), ConnectionError("refused"), away=0.01)
    lines = target.logs(RUN, follow=True)
    assert next(lines) == "one"
    with pytest.raises(IncompleteError, match=f"The run may go on: 'raymerge status {RUN}' tells"):
        next(lines)


def test_a_server_that_does_not_answer_before_anything_is_sent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it was waited for"))
    asked: list[str] = []

    def refuse(address: str, _: Mapping[str, str]) -> Any:
        asked.append(address)
        raise ConnectionError("refused")

    target = JobServer(ADDRESS, {}, connect=refuse)
    sent = Submission(json.dumps(RECIPE), "recipe.yml", "/mnt/out", Profile(target="job"), RUN)
    for ask in (target.check, target.submit):
        with pytest.raises(OptionError, match="no Jobs API of Ray answers at http://head:8265"):
            ask(sent)
    assert asked == [ADDRESS] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Request failed with status code 404: no such job."), "knows no run"),
        (RuntimeError("Request failed with status code 403: Forbidden."), "does not accept the token"),
        (RuntimeError("Request failed with status code 400: bad."), "failed: Request failed"),
        (RuntimeError("something else"), "failed: something else"),
    ],
)
def test_refusals_are_told_in_words(error: Exception, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        list(_target(error).logs(RUN, follow=True))


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(OptionError, match=r"raymerge\[jobs\]"):
        JobServer(ADDRESS, {}).report(RUN)


def test_the_token_goes_with_every_request_and_a_header_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(JobServer, "__init__", lambda _, __, headers: seen.append(headers))
    plain = choose(None, None, ADDRESS)
    text = "job: {headers_from_env: {Authorization: MINE, X-Team: TEAM}}"
    named = choose(parse_profile(text), None, ADDRESS)
    environment = {"RAY_AUTH_TOKEN": "t0ken", "MINE": "Basic x", "TEAM": "a"}
    for where in (plain, named):
        target_of(where, environment)
    assert seen == [{"Authorization": "Bearer t0ken"}, {"Authorization": "Basic x", "X-Team": "a"}]
    with pytest.raises(OptionError, match="MINE is not set"):
        target_of(named, {"TEAM": "a"})


def test_an_address_alone_says_the_target_and_flags_win() -> None:
    profile = parse_profile("{target: job, job: {address: 'http://there:8265'}}")
    assert choose(None, None, None) == choose(Profile(), "local", None)
    assert (choose(None, None, "h:6379").target, choose(None, None, ADDRESS).target) == ("cluster", "job")
    assert (choose(profile, None, None).target, choose(profile, None, None).address) == (
        "job",
        "http://there:8265",
    )
    assert choose(profile, None, ADDRESS).address == ADDRESS
    assert choose(profile, None, "auto").target == "cluster"
    assert choose(profile, "local", None).target == "local"


class _Runs:
    """A run that tells some lines, and is then as it is."""

    def __init__(self, report: RunReport, *lines: str, error: BaseException | None = None) -> None:
        self._report = report
        self._lines = lines
        self._error = error

    def report(self, run: str) -> RunReport:
        return self._report

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        yield from self._lines
        if self._error is not None:
            raise self._error

    def stop(self, run: str) -> RunReport:
        return self._report


def _followed(runs: _Runs, *, as_json: bool = False) -> tuple[int, str]:
    stdout = io.StringIO()
    return follow(runs, RUN, Output(stdout, as_json=as_json), "/out"), stdout.getvalue()


def _ended(state: RunState, code: str = "") -> RunReport:
    return RunReport(RUN, state, "/out", "what was said.", {"exit_code": code} if code else {})


@pytest.mark.parametrize(
    ("state", "code", "wanted"),
    [
        (RunState.SUCCEEDED, "0", 0),
        (RunState.FAILED, "2", 2),
        (RunState.FAILED, "1", 1),
        (RunState.FAILED, "3", 3),
        (RunState.FAILED, "-9", 3),
        (RunState.FAILED, "", 3),
        (RunState.STOPPED, "1", 3),
    ],
)
def test_the_exit_code_is_the_drivers(state: RunState, code: str, wanted: int) -> None:
    assert _followed(_Runs(_ended(state, code)))[0] == wanted


def test_events_are_shown_as_events_and_all_else_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"where": "recipe.yml:1", "what": "it is wrong.", "remedy": "Mend it."}
    error = {"event": "error", "exit_code": 2, "message": "", "problems": [problem]}
    lines = (
        "Running entrypoint",
        json.dumps(PLANNED),
        '{"event": "of tomorrow"}',
        "{broken",
        json.dumps(error),
    )
    code, shown = _followed(_Runs(_ended(RunState.FAILED, "2"), *lines))
    assert (code, shown.splitlines()[0].startswith("planned: 4 tensors")) == (2, True)
    said = capsys.readouterr().err
    assert "Running entrypoint" in said
    assert "{broken" in said
    assert "it is wrong." in said
    assert "Mend it." in said
    code, shown = _followed(_Runs(_ended(RunState.FAILED, "2"), *lines), as_json=True)
    assert [json.loads(line)["event"] for line in shown.splitlines()] == ["planned", "of tomorrow", "error"]
    # A driver that was killed says nothing; whoever reads the events is told all the same.
    code, shown = _followed(_Runs(_ended(RunState.FAILED, "-9")), as_json=True)
    assert (code, json.loads(shown)["message"]) == (3, "what was said.")


def test_interrupting_ends_the_showing_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runs = _Runs(_ended(RunState.RUNNING), json.dumps(PLANNED), error=KeyboardInterrupt())
    code, shown = _followed(runs)
    assert (code, "planned" in shown) == (3, True)
    assert f"{RUN} goes on without this command" in capsys.readouterr().err


def _value(kind: Any, name: str) -> Any:
    """Something that a field may hold."""
    worst = TensorError("w", "mlp", 0.1)
    special: dict[str, Any] = {
        "groups": (DuplicateGroup("a.*", 2, 9),), "unforeseen": (),
        "roles": (RoleError("mlp", 2, 0.1, worst),),
        "above": ErrorsAbove(0.05, 1, worst), "proof": ConversionProof(2, 9, 1, 1, worst),
        "report": {"a": [1, 2]}, "faults": {"reset": 2},
        "workers": ("worker-0",), "segments": (1, 2) if kind is events.WorkerLost else 2,
    }  # fmt: skip
    return special.get(name, 3)


def test_every_event_survives_its_json() -> None:
    kinds = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    for kind in kinds:
        if kind is not Event:
            made = kind(**{each.name: _value(kind, each.name) for each in dataclasses.fields(kind)})
            assert event_from_json(json.loads(json.dumps(made.to_json()))) == made
    assert event_from_json({"event": "event"}) is None
    assert event_from_json({"event": "planned", "segments": 1}) is None
    assert event_from_json({**PLANNED, "more": 1}) is not None
