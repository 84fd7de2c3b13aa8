"""Commands that look at checkpoints which lie in an object store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.command_line import Outcome, run_command
from kits.s3_server import S3Server, s3_server

from raymerge import api
from raymerge.api import submit, verify_load
from raymerge.errors import OptionError
from raymerge.options import RunOptions
from raymerge.storage import retry
from raymerge.storage.temporary import OwnDirectory

OUT = "s3://models/out"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "a", 0, hidden=256)


@pytest.fixture(scope="module")
def s3(model: Path) -> Iterator[S3Server]:
    """A server with a merged model."""
    recipe = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 0.5}}]}
    with s3_server() as server:
        submit(recipe, server.place("out"), RunOptions(inline=True))
        yield server


@pytest.fixture
def profile(s3: S3Server, tmp_path: Path) -> str:
    (tmp_path / "run.yml").write_text(
        f"storage: {{region: us-east-1, endpoint: '{s3.endpoint}', allow_http: true}}\n"
    )
    return "run.yml"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verify", OUT), f"{OUT} is sound"),
        (("verify", OUT, "--level", "audit", "--inline"), f"{OUT} is sound"),
        (("inspect", OUT), "attention"),
        (("diff", OUT, OUT), f"A = {OUT} and B = {OUT} are equal, byte by byte"),
    ],
)
def test_a_place_is_reached_by_a_profile_or_by_the_environment(
    s3: S3Server, profile: str, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    done = run_command(*command, "--profile", profile, cwd=tmp_path)
    assert (done.code, said in done.text) == (0, True), done.text
    known = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true"}
    done = run_command(*command, cwd=tmp_path, env=known)
    assert (done.code, said in done.text) == (0, True), done.text


@pytest.mark.parametrize(
    "command",
    [
        ("submit", "recipe.yml", "-o", "PLACE"),
        ("submit", "recipe.yml", "PLACE", "--dry-run"),
        ("submit", "recipe.yml", "-o", "PLACE", "--target", "job", "--address", "http://127.0.0.1:9"),
        ("plan", "recipe.yml", "-o", "PLACE"),
        ("convert", "x", "--to", "bf16", "-o", "PLACE"),
        ("status", "PLACE"),
        ("logs", "PLACE"),
        ("stop", "PLACE"),
        ("verify", "PLACE"),
        ("verify", "out", "--replay", "--source", "a=PLACE"),
        ("inspect", "PLACE"),
        ("diff", "out", "PLACE"),
    ],
    ids=" ".join,
)
def test_how_a_store_is_reached_is_not_for_an_address_to_say(
    profile: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It would take the place of all that the profile says: the server, the key for what is written."""
    (tmp_path / "recipe.yml").write_text(
        f"merge_method: linear\nmodels: [{{model: '{OUT}', parameters: {{weight: 1.0}}}}]\n"
    )
    args = [each.replace("PLACE", f"{OUT}?region=eu") for each in command]
    reached = () if command[0] == "convert" else ("--profile", profile)
    done = run_command(*args, *reached, cwd=tmp_path)
    assert (done.code, f"{OUT}: has options behind it ('?')." in done.text) == (2, True), done.text
    assert "Its server and region belong to storage: in a profile." in done.text


def test_a_name_that_cannot_be_written_is_told_without_the_way_there(
    model: Path, profile: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yml").write_text(
        f"merge_method: linear\nmodels: [{{model: '{model}', parameters: {{weight: 1.0}}}}]\n"
    )
    args = ("submit", "recipe.yml", "--inline", "--dry-run", "--profile", profile)
    done = run_command(*args, "-o", "s3://models/new\nline", cwd=tmp_path)
    assert (done.code, "'s3://models/new\\nline': the name holds characters" in done.text) == (2, True)


def test_where_there_is_nothing_no_record_is_missed(profile: str, tmp_path: Path) -> None:
    done = run_command("verify", "s3://models/no", "--replay", "--profile", profile, cwd=tmp_path)
    assert (done.code, "s3://models/no: there is nothing at this place" in done.text) == (2, True), done.text
    assert "provenance.json" not in done.text
    done = run_command("verify", "no", "--replay", cwd=tmp_path)
    assert (done.code, "there is no such directory" in done.text) == (2, True), done.text


def test_a_record_is_derived_anew(s3: S3Server, profile: str, tmp_path: Path) -> None:
    done = run_command("verify", OUT, "--replay", "--profile", profile, cwd=tmp_path)
    assert (done.code, f"{OUT} is what its record says" in done.text) == (0, True), done.text
    key = "out/model.safetensors"
    before = s3.objects(key)[key]
    s3.put(key, before[:-2] + b"xy")
    try:
        done = run_command("verify", OUT, "--replay", "--profile", profile, cwd=tmp_path)
    finally:
        s3.put(key, before)
    assert (done.code, f"{OUT} IS NOT WHAT ITS RECORD SAYS" in done.text) == (2, True)
    assert "their digest is not the ledger's" in done.text


@pytest.mark.parametrize("how", [("--replay",), ("--level", "audit", "--inline")])
def test_a_source_in_a_store_is_reached_by_the_profile_where_it_is_named(
    s3: S3Server, model: Path, profile: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    s3.upload(model, "models/a")
    there = s3.place("models/a")
    recipe = {"merge_method": "linear", "models": [{"model": there.partition("?")[0]}]}
    recipe["models"][0]["parameters"] = {"weight": 0.5}  # type: ignore[index]
    submit(recipe, tmp_path / "local", RunOptions(inline=True, storage=s3.options))
    named = f"s3://models/models/a={there.partition('?')[0]}"
    done = run_command("verify", "local", *how, "--source", named, "--profile", profile, cwd=tmp_path)
    assert done.code == 0, done.text
    s3.calm()
    silent = run_command("verify", "local", *how, "--profile", profile, cwd=tmp_path)
    assert (silent.code, "--source 's3://models/models/a=" in silent.text) == (2, True), silent.text
    assert s3.requests == []


def test_transformers_loads_a_copy(s3: S3Server, profile: str, tmp_path: Path) -> None:
    args = ("verify", OUT, "--level", "load", "--profile", profile, "--scratch", "scratch")
    done = run_command(*args, cwd=tmp_path)
    assert (done.code, f"{OUT} loads" in done.text) == (0, True), done.text
    assert "it was loaded and run" in done.text
    s3.calm()
    done = run_command(*args, "--memory", "1MiB", cwd=tmp_path)
    assert (done.code, f"{OUT} loads" in done.text) == (0, True), done.text
    assert "it was loaded and run" not in done.text
    assert list((tmp_path / "scratch").iterdir()) == []


def test_weights_that_do_not_fit_are_not_fetched(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched() -> int:
        return sum(each.sent for each in s3.asked("GET", "model.safetensors"))

    size = len(s3.objects("out/model.safetensors")["out/model.safetensors"])
    s3.calm()
    verdict = verify_load(s3.place("out"), memory=size - 1)
    assert (verdict.path, verdict.problems, verdict.ran) == (OUT, (), False)
    assert "only names and shapes were compared: its weights have" in verdict.note
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    verdict = verify_load(s3.place("out"))
    assert (verdict.problems, verdict.ran) == ((), False)
    assert "are free for it (--scratch)" in verdict.note
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"nothing can be written there: .*Choose another --scratch"):
        verify_load(s3.place("out"), scratch=str(tmp_path / "file" / "below"))
    assert fetched() < size


def test_a_copy_that_takes_the_memory_is_not_loaded(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one stay that a killed command left."""
    left = OwnDirectory(str(tmp_path))
    os.close(left._descriptor)
    free = iter([1 << 40, 1 << 10])
    monkeypatch.setattr(api, "free_memory", lambda: next(free))
    verdict = verify_load(s3.place("out"), scratch=str(tmp_path))
    assert (verdict.problems, verdict.ran) == ((), False)
    assert "of memory and may take 1" in verdict.note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["verify", "inspect", "submit"])
def test_a_server_without_tls_is_refused_at_once(
    s3: S3Server, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    noted = retry.RetryPolicy._note

    def note(self: retry.RetryPolicy, path: str, fault: OSError) -> None:
        waits.append(path)
        noted(self, path, fault)

    monkeypatch.setattr(retry.RetryPolicy, "_note", note)
    env = {"AWS_ENDPOINT_URL": s3.endpoint}

    def run(*args: str) -> Outcome:
        return run_command(*args, cwd=tmp_path, env=env)

    if verb == "submit":
        (tmp_path / "recipe.yml").write_text(
            f"merge_method: linear\nmodels: [{{model: '{OUT}', parameters: {{weight: 1.0}}}}]\n"
        )
        done = run("submit", "recipe.yml", "-o", "s3://models/other", "--inline")
    else:
        done = run(verb, OUT)
    assert (done.code, waits) == (2, [])
    assert "one without TLS" in done.text
    assert "AWS_ALLOW_HTTP=true" in done.text
