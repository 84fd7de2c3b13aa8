"""A store and a target are a file and a line of a table: one of each is registered from here, and used."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.deploy.targets import TARGETS
from raymerge.deploy.targets.target import RunReport, RunState, Submission, Where
from raymerge.errors import OptionError, Problem
from raymerge.storage.addresses import STORES
from raymerge.storage.local.store import LocalStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_models(tmp_path)


def register(monkeypatch: pytest.MonkeyPatch, table: dict[str, str], opener: Any) -> None:
    monkeypatch.setitem(sys.modules, "toys", SimpleNamespace(open=opener))  # type: ignore[arg-type]
    monkeypatch.setitem(table, "toy", "toys:open")


def test_a_merge_reads_from_a_store_that_is_a_line_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_toy(place: str, **keywords: Any) -> LocalStore:
        opened.append(place)
        return LocalStore(folder / place.removeprefix("toy://shelf/"), **keywords)

    register(monkeypatch, STORES, open_toy)
    assert run_command("submit", write_recipe(folder, MEAN), "-o", "near", "--inline", cwd=folder).code == 0
    far = write_recipe(folder, MEAN.replace("model: ", "model: toy://shelf/"), "far.yml")
    outcome = run_command("submit", far, "-o", "far", "--inline", cwd=folder)
    assert outcome.code == 0, outcome.text
    assert {"toy://shelf/one", "toy://shelf/two"} <= set(opened)
    near, merged = ((folder / name / "model.safetensors").read_bytes() for name in ("near", "far"))
    assert near == merged


def test_an_unknown_scheme_is_refused_with_those_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(folder, MEAN.replace("model: one", "model: toy://shelf/one"))
    refused = run_command("plan", recipe, cwd=folder)
    assert refused.code == 2
    assert "addresses of the kind toy:// are not supported" in refused.text
    assert all(scheme in refused.text for scheme in STORES)


@dataclass
class ToyTarget:
    """Takes what is sent, and says that it is done."""

    where: Where
    sent: list[Submission] = field(default_factory=list)

    def check(self, submission: Submission) -> None:
        if "bad" in submission.output:
            raise OptionError(Problem("-o", "is bad.", "Choose a good one."))

    def submit(self, submission: Submission) -> str:
        self.sent.append(submission)
        return submission.run

    def report(self, run: str) -> RunReport:
        return RunReport(run, RunState.SUCCEEDED, self.sent[0].output, "it is done.", {"target": "toy"})

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        yield json.dumps({"event": "note", "run": run})

    def stop(self, run: str) -> RunReport:
        return self.report(run)

    def find(self, output: str) -> str | None:
        return next((each.run for each in self.sent if each.output == output), None)


def test_a_run_is_sent_to_a_target_that_is_a_line_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ToyTarget] = []

    def open_toy(where: Where, environment: Mapping[str, str]) -> ToyTarget:
        assert environment["XDG_STATE_HOME"] == str(folder)
        made[:] = made or [ToyTarget(where)]
        return made[0]

    register(monkeypatch, TARGETS, open_toy)
    state = {"XDG_STATE_HOME": str(folder)}
    recipe = write_recipe(folder, MEAN)
    (folder / "toy.yml").write_text("target: toy\nrun: {threads: 3}\n")
    sending = ("submit", recipe, "--profile", "toy.yml", "--detach", "-o")
    refused = run_command(*sending, "/shared/bad", cwd=folder, env=state)
    assert (refused.code, "-o: is bad." in refused.text) == (2, True), refused.text
    outcome = run_command(*sending, "/shared/out", cwd=folder, env=state)
    assert outcome.code == 0, outcome.text
    (sent,) = made[0].sent
    assert (sent.recipe_text, sent.output, sent.profile.run.threads) == (MEAN, "/shared/out", 3)
    # The note on the run says where it is, so that its name is enough.
    told = run_command("status", sent.run, "--json", cwd=folder, env=state)
    assert json.loads(told.text)["details"]["target"] == "toy", told.text
    unknown = run_command("submit", recipe, "--target", "toi", "-o", "/shared/out", cwd=folder, env=state)
    assert "Give one of local, cluster, job, kubernetes, toy." in unknown.text
