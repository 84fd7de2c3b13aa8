"""Commands that look at checkpoints which lie in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.command_line import Outcome, run_command
from kits.s3_server import S3Server, s3_server

from raymerge.api import submit
from raymerge.runtime.options import RunOptions
from raymerge.storage import patience

OUT = "s3://models/out"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with a merged model."""
    model = tiny_llama(tmp_path_factory.mktemp("model") / "a", 0)
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


@pytest.mark.parametrize("how", [("--level", "load"), ("--replay",)])
def test_what_wants_a_directory_says_so(
    s3: S3Server, profile: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    done = run_command("verify", OUT, *how, "--profile", profile, cwd=tmp_path)
    assert done.code == 2
    assert f"{OUT}: is not a directory of this machine" in done.text


@pytest.mark.parametrize("verb", ["verify", "inspect", "submit"])
def test_a_server_without_tls_is_refused_at_once(
    s3: S3Server, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    noted = patience.Patience._note

    def note(self: patience.Patience, path: str, fault: OSError) -> None:
        waits.append(path)
        noted(self, path, fault)

    monkeypatch.setattr(patience.Patience, "_note", note)
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
