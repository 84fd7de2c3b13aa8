"""Keys and tokens stay where they are: in no file of a run, no output, no log of Ray. Ray asks for one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.command_line import run_command
from kits.hostile import bounded
from kits.merges import MEAN, make_models, write_recipe

from raymerge.documents.positions import check_text, secrets_in
from raymerge.errors import RecipeError
from raymerge.recipes.entry import RECIPE
from raymerge.recipes.load import parse_recipes, recipe_from_mapping

PLANTED = {
    "HF_TOKEN": "hf_" + "Planted1" * 5,
    "AWS_ACCESS_KEY_ID": "AKIA" + "PLANTED2" * 2,
    "AWS_SECRET_ACCESS_KEY": "planted3/" * 4,
    "AWS_SESSION_TOKEN": "planted4+" * 9,
    "RAY_AUTH_TOKEN": "ab12" * 16,
    "OPENAI_API_KEY": "sk-" + "planted5" * 4,
}
"""What the environment of whoever merges may hold."""

SECRETS = {
    "hub": PLANTED["HF_TOKEN"],
    "aws": PLANTED["AWS_ACCESS_KEY_ID"],
    "github": "ghp_" + "a1B2" * 9,
    "github-fine": "github_pat_" + "a1B2" * 9,
    "user": "https://someone:planted@example.org/model",
    "token-as-user": "https://planted@example.org/model",
    "key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "aws secret": f"AWS_SECRET_ACCESS_KEY={PLANTED['AWS_SECRET_ACCESS_KEY']}",
    "aws session": f"AWS_SESSION_TOKEN={PLANTED['AWS_SESSION_TOKEN']}",
    "azure": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=" + "Ab1+/" * 17 + "==",
    "openai": "sk-proj-" + "a1B2-_" * 10,
    "openai, older": "sk-" + "planted5" * 6,
    "anthropic": "sk-ant-api03-" + "a1B2" * 20,
    "google": "GOCSPX-" + "a1B2_-c" * 4,
    "google api": "AIza" + "a1B2C" * 7,
    "gitlab": "glpat-" + "a1B2" * 5,
    "slack": "xoxb-123456789012-a1B2c3D4",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "wandb": "export WANDB_API_KEY=" + "0f1e" * 10,
    "json": '{"api_key": "a1b2c3d4e5f6a7b8"}',
    "password": "PGPASSWORD=hunter22",
}
PLACES = {
    "comment": "# {}\n" + MEAN,
    "model": MEAN.replace("model: one", "model: '{}'"),
    "name": MEAN + "name: '{}'\n",
    "key": MEAN + "'{}': 1\n",
    "unreadable": MEAN + "dtype: [{}\n",
}


@pytest.mark.parametrize(
    ("kind", "place"), [*((kind, "comment") for kind in SECRETS), *(("hub", place) for place in PLACES)]
)
def test_a_recipe_with_a_secret_is_refused_and_the_secret_not_repeated(kind: str, place: str) -> None:
    secret = SECRETS[kind]
    with pytest.raises(RecipeError) as caught:
        parse_recipes(PLACES[place].replace("{}", secret))
    assert "stands here" in str(caught.value)
    assert secret not in str(caught.value)


def test_the_place_is_told() -> None:
    with pytest.raises(RecipeError, match=r"recipe:2:10: a token of the Hugging Face Hub stands here"):
        parse_recipes(f"# models\ndtype: # {SECRETS['hub']}\n")


def test_a_secret_that_is_spelled_otherwise_is_found_in_the_values() -> None:
    spelled = MEAN.replace("model: one", f'model: "\\x68{SECRETS["hub"][1:]}"')
    with pytest.raises(RecipeError, match="a token of the Hugging Face Hub") as caught:
        parse_recipes(spelled)
    assert SECRETS["hub"] not in str(caught.value)


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_in_a_mapping_is_refused(kind: str) -> None:
    data: dict[str, Any] = {"merge_method": "linear", "models": [{"model": SECRETS[kind], "oops": 1}]}
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(data)
    assert [problem.where for problem in caught.value.problems] == ["recipe: models[0].model"]
    assert SECRETS[kind] not in str(caught.value)


@bounded(40)
@given(
    st.from_regex(
        r"(hf_)?[A-Za-z0-9]{1,12}([-_.][A-Za-z0-9]{1,12}){0,5}(/[A-Za-z0-9._-]{1,30})?(@[a-z0-9]{1,9})?"
    )
)
def test_names_of_models_are_no_secrets(name: str) -> None:
    text = MEAN.replace("model: one", f"model: {json.dumps(name.strip())}")
    with contextlib.suppress(RecipeError):
        parse_recipes(text)
    check_text(text, "recipe", RECIPE)


HARMLESS = [
    "org/sk-proj-small",
    "sk-learn/sk-merge-7b-instruct-v2",
    "org/name@0123456789abcdef0123456789abcdef01234567",
    "# needs AWS_SECRET_ACCESS_KEY=... in the environment",
    "# export HF_TOKEN=$HF_TOKEN; AWS_SESSION_TOKEN=${AWS_SESSION_TOKEN} api_key: <your key>",
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>{% endfor %}",
    "eos_token: <|endoftext|>, pad_token_id: 151643, num_tokens=32000",
    "secret: none, password: from the vault, api_key: not needed",
    "secrets/model-7b: 1, hidden_access: 12345678901234567890",
    "key_frames: 0123456789abcdef0123, tokenizer: org/tokenizer-128000-v2",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_a_secret_is_no_secret(text: str) -> None:
    check_text(text, "recipe", RECIPE)
    assert not list(secrets_in({"models": [{"model": text}], "description": text}, RECIPE))


def test_a_secret_that_only_its_key_betrays_is_found() -> None:
    data = {"merge_method": "linear", "aws_secret_access_key": "planted3/" * 4}
    with pytest.raises(RecipeError, match="a key or token with its name stands here"):
        recipe_from_mapping(data)


_DRIVE = """
import contextlib, json, os, subprocess, sys, psutil
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.cli.main import main

planted = {name: os.environ[name] for name in sys.argv.pop(1).split()}
leaks, joined, modes = [], [], []
close = RayConnection.close

JOIN = '''
import sys
from ray._raylet import GcsClient
try:
    print("joined", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
except Exception as error:
    print("refused", type(error).__name__)
'''


def looked_at(self):
    if self._directory:
        ray = self.ray
        for path in self._directory.path.rglob("*"):
            data = path.read_bytes() if path.is_file() else b""
            leaks.extend(f"{name} in {path.name}" for name, each in planted.items() if each.encode() in data)
        told = repr(ray._private.state.state.job_table()) + repr(ray._private.state.actors())
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                told += " ".join(process.cmdline())
        leaks.extend(f"{name} told by Ray" for name, each in planted.items() if each in told)
        address = ray.get_runtime_context().gcs_address
        bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        for token in (None, "cd34" * 16, planted["RAY_AUTH_TOKEN"]):
            more = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            done = subprocess.run([sys.executable, "-c", JOIN, address], env={**bare, **more}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            joined.append(done.stdout.strip() or f"ended with {done.returncode}")
        modes.append(oct(os.stat(self._directory.path).st_mode & 0o777))
    close(self)


RayConnection.close = looked_at
try:
    main()
finally:
    print(json.dumps({"event": "looked_at", "leaks": leaks, "joined": joined, "modes": modes}))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_nothing_that_a_run_leaves_or_says_holds_what_the_environment_holds(tmp_path: Path) -> None:
    """And who has not the token of the embedded Ray cannot join it, nor look into its directory."""
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _DRIVE,
            " ".join(PLANTED),
            "submit",
            recipe,
            "-o",
            "out",
            "--workers",
            "1",
            "--json",
        ],
        env={**os.environ, **PLANTED, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["leaks"] == []
    # Without a token, with another one, and with the right one.
    assert seen["joined"] == ["refused AuthenticationError"] * 2 + ["joined 1"]
    assert seen["modes"] == ["0o700"]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.name == "ledger.jsonl" for path in files)
    for name, secret in PLANTED.items():
        assert secret not in done.stdout + done.stderr, name
        assert not [path for path, data in files.items() if secret.encode() in data], name


def test_errors_do_not_hold_them_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in PLANTED.items():
        monkeypatch.setenv(name, secret)
    recipe = write_recipe(tmp_path, MEAN.replace("model: one", "model: org/does-not-exist"))
    found = run_command("plan", recipe, cwd=tmp_path)
    assert found.code == 2
    assert not [name for name, secret in PLANTED.items() if secret in found.text]
