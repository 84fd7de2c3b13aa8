"""doctor: what it prints, its exit code, what it looks at for a profile, and one run on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import run_command
from kits.golden import check_golden

from raymerge.deploy.targets.target import Where
from raymerge.diagnosis.check import Check, note, ok, problem

CHECKS = [
    ok("Python", "3.11.7 on Linux x86_64, /usr/bin/python3"),
    note("Hub", "no token: models that anybody may read.", "For others: hf auth login, or set HF_TOKEN."),
    ok("shared blocks", "none: tensors that are copied are written in full"),
    problem(
        "node worker-17",
        "torch 2.8.0 where this machine has 2.13.0, which is a sentence that takes more than a line.",
        "Install torch 2.13.0 there, or start the command where all agree, whichever is less work.",
    ),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Where, Sequence[str]]]:
    """What was asked for; the answers are given beforehand."""
    found: list[tuple[Where, Sequence[str]]] = []

    def diagnose(where: Where, places: Sequence[str], environment: Mapping[str, str]) -> Iterator[Check]:
        found.append((where, places))
        return iter(CHECKS)

    monkeypatch.setattr("raymerge.diagnosis.diagnosis.diagnose", diagnose)
    return found


def test_the_table_reads_as_it_was_looked_at(asked: Any, tmp_path: Path) -> None:
    outcome = run_command("doctor", cwd=tmp_path, env={"COLUMNS": "80"})
    assert outcome.code == 2
    assert max(map(len, outcome.text.splitlines())) <= 80
    check_golden("doctor", outcome.text)


def test_the_json_holds_every_check(asked: Any, tmp_path: Path) -> None:
    outcome = run_command("doctor", "--json", cwd=tmp_path)
    assert outcome.code == 2
    assert json.loads(outcome.text) == {"checks": [each.to_json() for each in CHECKS]}


def test_notes_alone_hinder_nothing(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.diagnosis.diagnosis.diagnose", lambda *_: iter(CHECKS[:3]))
    outcome = run_command("doctor", cwd=tmp_path)
    assert outcome.code == 0
    assert outcome.text.endswith("nothing is in the way of a merge; 1 note\n")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("args", "profile", "expected"),
    [
        ([], "", ("local", None, ["."])),
        (["/mnt"], "", ("local", None, ["/mnt"])),
        (["--address", "auto"], "", ("cluster", "auto", ["."])),
        (["--address", "http://h:8265"], "", ("job", "http://h:8265", [])),
        ([], "target: job\njob: {address: 'http://h:8265'}\noutput: s3://b/x", ("job", "http://h:8265", [])),
        ([], "output: s3://b/x", ("local", None, [".", "s3://b/x"])),
        (["here"], "output: s3://b/x", ("local", None, ["here"])),
    ],
)
def test_it_looks_where_the_merge_will_be(
    args: list[str], profile: str, expected: tuple[Any, ...], asked: Any, tmp_path: Path
) -> None:
    (tmp_path / "profile.yml").write_text(profile)
    run_command("doctor", *args, *(["--profile", "profile.yml"] if profile else []), cwd=tmp_path)
    ((where, places),) = asked
    assert (where.target, where.address, list(places)) == expected


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    run_command("doctor", "s3://b/x?endpoint=http://e", cwd=tmp_path).check_refusal("options behind it")
    run_command("doctor", "--profile", "none.yml", cwd=tmp_path).check_refusal("none.yml", "no such file")


@pytest.mark.ray
@pytest.mark.slow
def test_this_machine_can_merge(tmp_path: Path) -> None:
    """All of it for real: an embedded Ray starts, and the disk is measured."""
    outcome = run_command("doctor", "--json", cwd=tmp_path)
    checks = {each["topic"]: each for each in json.loads(outcome.text)["checks"]}
    assert {each["topic"]: each["fact"] for each in checks.values() if each["verdict"] == "problem"} == {}
    assert checks["Ray"]["fact"].startswith("an embedded Ray starts and runs a task")
    assert checks.keys() >= {
        "Python",
        "packages",
        "GPU",
        "compiled loops",
        "memory",
        "cores",
        "disk",
        "disk speed",
        "shared blocks",
    }
    assert list(tmp_path.iterdir()) == []
