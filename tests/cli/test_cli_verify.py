"""``raymerge verify``: the verdict in words, as JSON and as exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kits.checkpoint_maker import llama_config, tiny_llama, write_json
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.cli.running import Ending
from raymerge.cli.verify import _progress
from raymerge.events import Stopping


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A checkpoint that raymerge made."""
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)
    assert run_command("submit", recipe, "-o", "out", "--inline", cwd=tmp_path).code == 0
    return tmp_path / "out"


def test_a_merged_checkpoint_is_sound_as_its_plan_says(merged: Path) -> None:
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors, ")
    assert "as its plan says" in outcome.text


def test_another_checkpoint_is_verified_without_a_plan(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, files=2)
    outcome = run_command("verify", "model", cwd=tmp_path)
    assert outcome.code == 0
    assert "in 2 files; it keeps no plan" in outcome.text


def test_a_truncated_checkpoint_is_not_sound(merged: Path) -> None:
    weights = merged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 2
    assert "out is NOT SOUND: 1 problem." in outcome.text
    assert "model.safetensors" in outcome.text
    assert "→" in outcome.text


def test_a_changed_config_is_not_sound(merged: Path) -> None:
    write_json(merged / "config.json", llama_config() | {"vocab_size": 65})
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 2
    assert "problems." in outcome.text
    assert "vocab_size is 65" in outcome.text


def test_the_verdict_as_json(merged: Path) -> None:
    outcome = run_command("verify", "out", "--json", cwd=merged.parent)
    verdict = json.loads(outcome.text)
    assert outcome.code == 0
    assert verdict["sound"] is True
    assert (verdict["tensors"], verdict["files"], verdict["problems"]) == (30, 1, [])


def test_a_bad_verdict_as_json(tmp_path: Path) -> None:
    outcome = run_command("verify", "nowhere", "--json", cwd=tmp_path)
    verdict = json.loads(outcome.text)
    assert outcome.code == 2
    assert verdict["sound"] is False
    assert verdict["problems"][0]["where"] == "nowhere"


# The audit


def test_an_audit_tells_what_it_looked_at(merged: Path) -> None:
    outcome = run_command("verify", "out", "--level", "audit", "--seed", "7", "--inline", cwd=merged.parent)
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors.")
    assert "compared with the digests of the ledger" in outcome.text
    assert "30 tensors recomputed from the sources (0.01 of each, seed 7)" in outcome.text
    assert "not audited" not in outcome.text


def test_an_audit_chooses_a_seed_and_says_which(merged: Path) -> None:
    asked = ("verify", "out", "--level", "audit", "--inline", "--json")
    one, other = (json.loads(run_command(*asked, cwd=merged.parent).text) for _ in range(2))
    assert one["seed"] != other["seed"]
    assert one["sound"] is other["sound"] is True
    assert (one["recomputed"], one["skipped"], one["problems"]) == (30, [], [])


def test_an_audit_of_damage_ends_with_2(merged: Path) -> None:
    weights = merged / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in range(1, 20):
        content[-place * 2000] ^= 0x80
    weights.write_bytes(content)
    asked = ("verify", "out", "--level", "audit", "--sample", "1", "--inline")
    outcome = run_command(*asked, "--show", "2", cwd=merged.parent)
    assert outcome.code == 2
    assert "out is NOT SOUND: " in outcome.text
    assert outcome.text.count("→") == 2
    assert "more are not shown; --show " in outcome.text
    assert run_command("verify", "out", cwd=merged.parent).code == 0


def test_an_audit_says_what_it_could_not_look_at(merged: Path) -> None:
    (merged.parent / "two").rename(merged.parent / "away")
    asked = ("verify", "out", "--level", "audit", "--inline")
    outcome = run_command(*asked, cwd=merged.parent)
    assert outcome.code == 2
    assert "not audited: 30 tensors (such as lm_head.weight): two is not there" in outcome.text
    assert run_command(*asked, "--source", "two=away", cwd=merged.parent).code == 0


def test_an_audit_that_could_compare_nothing_does_not_say_sound(merged: Path) -> None:
    """The mean of a model and its negative: all of it is left open."""
    recipe = yaml.safe_load((merged.parent / "recipe.yml").read_text())
    name = recipe["models"][0]["model"]
    shutil.copytree(merged.parent / name, merged.parent / "same")
    entries = [{"model": each, "parameters": {"weight": w}} for each, w in ((name, 1.0), ("same", -1.0))]
    cancelled = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}}
    write_recipe(merged.parent, yaml.safe_dump(cancelled | {"dtype": "bfloat16"}))
    again = run_command("submit", "recipe.yml", "-o", "out", "--inline", "--replace", cwd=merged.parent)
    assert again.code == 0, again.text
    outcome = run_command("verify", "out", "--level", "audit", "--inline", cwd=merged.parent)
    assert outcome.text.startswith("out is as it was written: 30 tensors. Whether they are right was not")
    assert "not audited: 30 tensors" in outcome.text


def test_an_audit_ends_in_time_once_it_is_told_to() -> None:
    ending = Ending()
    with _progress(ending) as show:
        show(Stopping(None))
        assert not ending._timers
        show(Stopping(1.0))
    assert len(ending._timers) == 1
    ending.cancel()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_whose_ray_dies_says_so(as_json: bool) -> None:
    """In a process of its own, which ends."""
    code = (
        "import sys\n"
        "from raymerge.cli.running import Ending\n"
        "from raymerge.cli.verify import _progress\n"
        "from raymerge.events import RayEnded\n"
        f"with _progress(Ending(json_to=sys.stdout if {as_json} else None)) as show:\n"
        "    show(RayEnded('raylet'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    said = "the embedded Ray of this command has ended (raylet died)."
    if not as_json:
        assert said in done.stderr
        return
    event = json.loads(done.stdout)
    assert (event["event"], event["exit_code"]) == ("error", 3)
    assert event["message"].startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--sample", "0"), "0 is no share of the elements"),
        (("--source", "two"), "'two' does not say which source is where"),
        (("--memory", "1MiB"), "an audit takes 16.78 MB"),
    ],
)
def test_what_an_audit_cannot_be_asked(wrong: tuple[str, ...], said: str, merged: Path) -> None:
    outcome = run_command("verify", "out", "--level", "audit", "--inline", *wrong, cwd=merged.parent)
    assert said in outcome.text
    assert outcome.code == 2
