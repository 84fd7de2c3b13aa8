"""The page on remote storage, followed: its commands run, and its three messages are those that are said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.command_line import Outcome, run_command
from kits.hub_server import hub_server
from kits.s3_server import S3Server, s3_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "remote-storage.md").read_text(encoding="utf-8")
MISTAKES = (("@main", "@mian"), ("s3://models/base", "s3://modles/base"), ("", ""))
"""What is written for what, for each of the messages; nothing for the last, where credentials are lacking."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def folder(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the page's recipe and profile, and the models where the recipe has them."""
    root = tmp_path_factory.mktemp("page")
    models = [tiny_llama(root / name, seed) for seed, name in enumerate(("base", "tune1", "tune2"))]
    s3.upload(models[0], "base")
    recipe, profile = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[:2]
    (root / "recipe.yml").write_text(recipe.replace("/data/tune2", str(models[2])))
    profile = profile.replace("https://minio.example:9000", s3.endpoint).replace("# allow_http", "allow_http")
    (root / "profile.yml").write_text(profile)
    with hub_server(root / "cache") as hub:
        hub.push("org/tune1", models[1])
        yield root


def _run(command: str, folder: Path) -> Outcome:
    return run_command(*command.split()[1:], cwd=folder, env={"XDG_STATE_HOME": str(folder / "state")})


@pytest.mark.slow
def test_its_commands_merge_from_three_places_into_a_fourth(s3: S3Server, folder: Path) -> None:
    commands = re.findall(r"^raymerge .*", PAGE, re.MULTILINE)
    verbs = ("plan", "submit", "status")
    plan, submit, status = (next(each for each in commands if verb in each) for verb in verbs)
    assert _run(plan, folder).code == 0
    rehearsed = _run(f"{submit} --inline --dry-run", folder)
    assert (rehearsed.code, s3.objects("merged")) == (0, {}), rehearsed.text
    done = _run(f"{submit} --inline", folder)
    assert done.code == 0, done.text
    assert "merged/config.json" in s3.objects("merged")
    assert "s3://models/merged: succeeded" in _run(status, folder).text


@pytest.mark.parametrize("number", range(3))
def test_its_messages_are_those_that_are_said(
    number: int, s3: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, told = PAGE.partition("## Three messages")
    message = " ".join(re.findall(r"```\n(.*?)```", told, re.DOTALL)[number].split())
    recipe = folder / "recipe.yml"
    right, wrong = MISTAKES[number]
    text = recipe.read_text()
    if number == 2:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    try:
        recipe.write_text(text.replace(right, wrong))
        outcome = _run("raymerge plan recipe.yml --profile profile.yml", folder)
    finally:
        recipe.write_text(text)
    assert outcome.code == 2
    said = " ".join(outcome.text.replace(s3.endpoint, "https://minio.example:9000").split())
    assert message in said
