"""Checkpoints pushed to the Hub: one commit of what loaders read, resumed, and refused by name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _http
from kits.command_line import Outcome, run_command
from kits.hub_server import HubServer, hub_server

import raymerge
from raymerge.errors import VerificationError
from raymerge.publish.finish import plan_in

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "configs" / "quickstart" / "models"
REPOSITORY = "org/merged"
# The client's own, of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path / "cache") as server:
        monkeypatch.setenv("HF_TOKEN", server.token)
        # What fails is tried again, after seconds.
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
        yield server


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of models at absolute places, in several shards."""
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(linear(str(MODELS / "code"), str(MODELS / "english"))))
    return path


def linear(*models: str) -> dict[str, Any]:
    entries = [{"model": each, "parameters": {"weight": 0.5}} for each in models]
    return {"merge_method": "linear", "models": entries, "shard_size": "200KB"}


def submit(recipe: Path, *options: str) -> Outcome:
    return run_command("submit", "recipe.yml", "-o", "out", "--inline", *options, cwd=recipe.parent)


def pushed_files(out: Path) -> dict[str, bytes]:
    """What a repository should hold."""
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    return {key: path.read_bytes() for key, path in files.items() if not key.startswith("raymerge/")}


def held(hub: HubServer) -> dict[str, bytes]:
    files = hub.repositories[REPOSITORY].files
    return {key: data for key, data in files.items() if key != ".gitattributes"}


def test_a_merge_is_pushed_as_one_private_commit(hub: HubServer, recipe: Path) -> None:
    done = submit(recipe, "--push", REPOSITORY)
    assert done.code == 0, done.text
    assert f"pushed to {hub.endpoint}/{REPOSITORY}" in done.text
    repository, out = hub.repositories[REPOSITORY], recipe.parent / "out"
    assert held(hub) == pushed_files(out)
    assert repository.is_private
    plan = plan_in((out / "README.md").read_text())
    assert [*repository.messages.values()] == ["initial commit", f"Merge by raymerge, plan {plan}"]


def test_what_is_pushed_names_parents_and_no_place_of_this_machine(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.push("org/code", MODELS / "code")
    hub.push("org/english", MODELS / "english")
    local = str(MODELS / "french"), os.path.relpath(MODELS / "base", tmp_path)
    parents = linear("hf://org/code", "hf://org/english", *local)
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(parents))
    done = run_command("submit", "recipe.yml", "-o", "out", "--inline", "--push", REPOSITORY, cwd=tmp_path)
    assert done.code == 0, done.text
    card = held(hub)["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1]) == {
        "base_model": ["org/code", "org/english"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "tags": ["merge", "raymerge"],
    }
    assert f"`org/code`, revision `{commit}`" in card
    assert "models/french" in card
    places = (str(ROOT.parent), str(tmp_path), "..")
    texts = {key: data.decode() for key, data in held(hub).items() if key.endswith((".md", "config.json"))}
    assert not [(key, place) for key, text in texts.items() for place in places if place in text]


def test_the_same_push_changes_nothing_and_keeps_what_was_edited_there(hub: HubServer, recipe: Path) -> None:
    assert submit(recipe, "--push", REPOSITORY).code == 0
    edited = {**held(hub), "README.md": held(hub)["README.md"] + b"\nMine.\n", "picture.png": b"x"}
    before = hub.commit(REPOSITORY, edited)
    again = run_command("push", "out", REPOSITORY, "--json", cwd=recipe.parent)
    assert again.code == 0, again.text
    told = json.loads(again.text)
    assert (told["event"], told["commit"], told["is_new"]) == ("pushed", before, False)
    assert hub.repositories[REPOSITORY].refs["main"] == before


@pytest.mark.parametrize(
    ("end", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGTERM, 3, marks=pytest.mark.slow)],
)
def test_a_push_that_ends_early_uploads_nothing_twice_and_shows_nothing_before_its_end(
    hub: HubServer, recipe: Path, end: signal.Signals, code: int
) -> None:
    assert submit(recipe).code == 0
    hub.most_uploads = 2
    # The client reads its settings from the environment once, so this is a process of its own.
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    env = {**os.environ, **own, "HF_HOME": str(recipe.parent / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raymerge.cli", "push", "out", REPOSITORY]
    process = subprocess.Popen(command, cwd=recipe.parent, env=env, stderr=subprocess.DEVNULL)
    try:
        while len(hub.objects) < 2:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(end)
        assert process.wait() == code
    assert not held(hub)
    uploaded, hub.most_uploads = set(hub.uploads()), None
    hub.forget()
    done = run_command("push", "out", REPOSITORY, cwd=recipe.parent)
    assert done.code == 0, done.text
    assert held(hub) == pushed_files(recipe.parent / "out")
    assert len(uploaded) == 2
    assert uploaded.isdisjoint(hub.uploads())


def test_where_the_network_fails_the_checkpoint_is_there_and_the_same_command_pushes(
    hub: HubServer, recipe: Path
) -> None:
    hub.fail("PUT /upload", *["reset"] * 60)
    failed = submit(recipe, "--push", REPOSITORY)
    assert failed.code == 3, failed.text
    assert "what is left is the push. The same command goes on." in failed.text
    assert re.search(rf"raymerge push out {REPOSITORY} +# goes on with the push", failed.text)
    assert not held(hub)
    record = recipe.parent / "out" / "raymerge" / "run.json"
    before = record.read_bytes()
    hub._faults.clear()
    done = submit(recipe, "--push", REPOSITORY)
    assert (done.code, "out is published already" in done.text) == (0, True), done.text
    assert record.read_bytes() == before
    assert held(hub) == pushed_files(recipe.parent / "out")


def test_other_content_is_refused_before_the_merge_and_replaced_when_asked(
    hub: HubServer, recipe: Path
) -> None:
    hub.commit(REPOSITORY, {"config.json": b"{}", "old.safetensors": b"old"})
    hub.repositories[REPOSITORY].is_private = True
    refused = submit(recipe, "--push", REPOSITORY)
    refused.check_refusal(REPOSITORY, "what raymerge did not push, such as config.json", "--replace")
    assert not (recipe.parent / "out").exists()
    assert submit(recipe, "--push", REPOSITORY, "--replace").code == 0
    assert held(hub) == pushed_files(recipe.parent / "out")
    assert len(hub.repositories[REPOSITORY].commits) == 2
    # A merge of another plan is other content, too.
    recipe.write_text(recipe.read_text().replace("0.5", "0.25") + "seed: 1\n")
    another = run_command(
        "submit", "recipe.yml", "-o", "another", "--inline", "--push", REPOSITORY, cwd=recipe.parent
    )
    another.check_refusal("a merge of another plan", "--replace")
    assert len(hub.repositories[REPOSITORY].commits) == 2


def test_a_public_repository_is_made_when_asked_and_never_taken_for_a_private_one(
    hub: HubServer, recipe: Path
) -> None:
    assert submit(recipe, "--push", REPOSITORY, "--public").code == 0
    assert not hub.repositories[REPOSITORY].is_private
    again = run_command("push", "out", REPOSITORY, cwd=recipe.parent)
    again.check_refusal("the repository is public, and what is pushed is to be private", "Give --public")


def test_what_is_not_sound_is_not_pushed(hub: HubServer, recipe: Path) -> None:
    assert submit(recipe).code == 0
    (recipe.parent / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(VerificationError):
        raymerge.push(recipe.parent / "out", REPOSITORY)
    run_command("push", str(MODELS / "code"), REPOSITORY, cwd=recipe.parent).check_refusal("is missing")
    run_command("push", "nothing", REPOSITORY, cwd=recipe.parent).check_refusal("no such directory")
    assert not hub.repositories


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--push", "merged"), ("--push merged", "ORG/NAME")),
        (("--push", "org/a/b"), ("--push org/a/b", "ORG/NAME")),
        (("--public",), ("--public", "--push")),
        (("--push", REPOSITORY, "-o", "s3://bucket/out"), ("object store", "raymerge push")),
        (
            ("--push", REPOSITORY, "--target", "job", "--address", "http://head:8265"),
            ("target job is elsewhere",),
        ),
    ],
)
def test_a_push_that_cannot_be_is_refused_by_name(
    hub: HubServer, recipe: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    outputs = () if "-o" in options else ("-o", "out")
    run_command("submit", "recipe.yml", *outputs, *options, cwd=recipe.parent).check_refusal(*words)
    assert not (recipe.parent / "out").exists()
    assert not hub.asked


def test_without_leave_of_the_hub_nothing_is_merged(
    hub: HubServer, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        submit(recipe, "--push", REPOSITORY).check_refusal("HF_HUB_OFFLINE is set")
    with monkeypatch.context() as patch:
        patch.delenv("HF_TOKEN")
        submit(recipe, "--push", REPOSITORY).check_refusal("no token", "hf auth login")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_wrong")
        submit(recipe, "--push", REPOSITORY).check_refusal("does not accept the token (401)")
    assert not (recipe.parent / "out").exists()
    hub.may_write = False
    submit(recipe, "--push", REPOSITORY).check_refusal("the token may not write there (403)")


def test_what_the_repository_ignores_is_missed(hub: HubServer, recipe: Path) -> None:
    hub.ignored = re.compile("tokenizer.json")
    assert submit(recipe).code == 0
    run_command("push", "out", REPOSITORY, cwd=recipe.parent).check_refusal("tokenizer.json", ".gitignore")


def test_several_outputs_are_not_pushed_by_one_name(hub: HubServer, recipe: Path) -> None:
    sweep = {"sweep": {"w": [0.4, 0.6]}, **linear(str(MODELS / "code"), str(MODELS / "english"))}
    sweep["models"][0]["parameters"]["weight"] = "$w"
    recipe.write_text(yaml.safe_dump(sweep))
    submit(recipe, "--push", REPOSITORY).check_refusal("several outputs", "raymerge push OUT/NAME")
    assert not (recipe.parent / "out").exists()
